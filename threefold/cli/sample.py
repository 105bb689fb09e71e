"""`threefold sample`: let the newest checkpoint of a run continue prompts or answer chats."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.cli.command_line.inputs import MODEL_FOLDER, add_json, add_newest, open_model
from threefold.cli.command_line.out import UsageError
from threefold.findings import Finding, FindingsError
from threefold.safe_files import MAX_JSON_BYTES, read_bounded

SEEDS = 2**62  # that torch takes, with room for a number a prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=MODEL_FOLDER)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may come several times")
    parser.add_argument(
        "--chat", action="append", default=[], help="a question to answer, or messages as JSON; may come several times"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a picture that every prompt is about, in the place of <image> or before the text; may come several times",
    )
    parser.add_argument("--system", help="the system message before each --chat that is a question")
    parser.add_argument("--file", type=Path, help="prompts from a file, one a line: text, or JSON with messages")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="to add at most (default 200)")
    # Its older name, and that of transformers.
    parser.add_argument("--tokens", "--max-new-tokens", dest="max_tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the K likeliest tokens only; 0: from all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens that make up this probability only"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws at a temperature (default 0)")
    parser.add_argument("--ignore-end", action="store_true", help="go on behind tokens that end a text")
    parser.add_argument("--tokenizer", help="bytes, or a Hugging Face tokenizer file (default: the run's own)")
    add_newest(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if problem := _wrong_number(args):
        raise UsageError(problem)
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        print("threefold sample: --top-k and --top-p have no effect without a --temperature above 0", file=sys.stderr)
    from threefold.engine.generate.generate import Sampling
    from threefold.engine.generate.sample import run_ends, run_tokenizer, sample_texts

    prompts = _prompts(args)
    plan, load, _ = open_model(args.run, args.newest)
    tokenizer = run_tokenizer(args.run, plan, args.tokenizer)
    ends = set() if args.ignore_end else run_ends(args.run, plan, tokenizer)
    model = load()
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    pictures = (args.image, plan.job.max_pixels)
    pieces = sample_texts(model, tokenizer, prompts, args.max_tokens, sampling, ends, *pictures)
    _print(args.json, prompts, pieces)
    return 0


def _wrong_number(args: argparse.Namespace) -> str:
    if not 0 <= args.temperature < math.inf or abs(args.seed) >= SEEDS or args.max_tokens < 0:
        return "--temperature and --max-tokens are 0 or more, --seed is of 62 bits"
    return "" if args.top_k >= 0 and 0 <= args.top_p <= 1 else "--top-k is 0 or more, --top-p between 0 and 1"


def _prompts(args: argparse.Namespace) -> list[Any]:
    """Texts and chats in the order of the options; an empty text where none is given."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    chats = [
        _messages(text) if text.lstrip().startswith("[") else [*system, {"role": "user", "content": text}]
        for text in args.chat
    ]
    lines: list[Any] = []
    if args.file:
        try:
            content = read_bounded(args.file, MAX_JSON_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise _unreadable(str(args.file), f"cannot be read: {error}") from None
        lines = [
            _messages(line, f"{args.file}:{number}") if line.startswith(("[", "{")) else line
            for number, line in enumerate(content.splitlines(), start=1)
            if line
        ]
    return [*args.prompt, *chats, *lines] or [""]


def _messages(text: str, at: str = "--chat") -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(at, f"this is no JSON: {error}") from None
    return found.get("messages", found.get("prompt")) if isinstance(found, dict) else found


def _unreadable(at: str, problem: str) -> FindingsError:
    advice = '[{"role": "user", "content": "..."}], a question, or a text'
    return FindingsError([Finding(rule="chat-readable", at=at, problem=problem, advice=advice)])


def _print(as_json: bool, prompts: list[Any], pieces: Iterator[list[str]]) -> None:
    """One prompt streams as it comes. Several are printed one below the other when all have ended."""
    heads = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    if len(prompts) == 1 and not as_json:
        first = next(pieces, [""])  # before the prompt is echoed, so that a prompt that is refused is not
        print(heads[0] + first[0], end="", flush=True)
        for (piece,) in pieces:
            print(piece, end="", flush=True)
        print()
        return
    texts = [""] * len(heads) if as_json else list(heads)
    for new in pieces:
        texts = [text + piece for text, piece in zip(texts, new, strict=True)]
    if as_json:
        said = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        print(json.dumps(said, indent=2, ensure_ascii=False))
        return
    for number, text in enumerate(texts, start=1):
        print(f"--- {number}\n{text}")
