"""Command lines drawn from a number: every verb with its flags in pairs, sound values and absurd ones.

The verbs, their arguments and their flags are read from the parsers, so that a new one is drawn without a word here.
A line is drawn from its number alone: `python tests/support/drawn_lines.py NUMBER` shows it and runs it.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, count, islice

from line_files import BROKEN, FILES, RECIPES

from threefold.cli.command_line.parser import verb_parser
from threefold.cli.command_line.reference import flags_by_verb
from threefold.cli.main import TAKE_A_COMMAND, VERBS, build_parser
from threefold.plan.table import FIELDS
from threefold.rules.all import known_slugs
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS

# Verbs that train, measure or rehearse: they may take their time, and are drawn less often.
LONG = (
    "train",
    "finetune",
    "verify",
    "overlap-ab",
    "tune",
    "calibrate",
    "dry-run",
    "regress",
    "eval",
    "sample",
    "card",
    "env",
)
SOME = 5  # cycles of all verbs of which one has a given long verb

NUMBERS = ("0", "-1", "1", "2", "3", "8", "4096", str(2**31), str(2**63), str(10**40), "1e308", "-1e308", "1e-320")
ODD_NUMBERS = ("nan", "inf", "-inf", "0.5", "1_000", "0x10", "٣", "²", "1,2", "", " ", "--", "\x00", "1e999", "-0")
TEXTS = (
    "",
    " ",
    "a",
    "ä🙂",
    "\u202e",
    "x" * 5000,
    "a=b",
    "=",
    "a\nb",
    "'",
    '"',
    "$(touch X)",
    "{}",
    "[]",
    "null",
    "%s",
)
WORDS = ("true", "false", "auto", "none", "null", "synthetic", "embedded", "bytes", "[]", "['full']", "2048", "32K")
COMMANDS = (["true"], ["false"], ["echo", '{"step_seconds": 1.0}'], ["/no/such"], ["echo", "{plan}", "{run}"], [])
# Sound values of arguments, by the name of the argument or of the flag; others get a value of any kind.
SOUND: dict[str, tuple[str, ...]] = {
    "model": (*MODELS, *FILES["config"]),
    "name": tuple(MODELS),
    "chip": tuple(CHIPS),
    "gpus": ("1", "2", "8", "16", "64", "256", "auto"),
    "seq_len": ("32", "128", "4096", "32K", "131072"),
    "global_batch": ("8", "64", "256"),
    "micro_batch": ("1", "2", "4"),
    "precision": ("bf16", "fp32", "fp8-blockwise", "mxfp8", "auto"),
    "top": ("1", "3", "20"),
    "rehearse": ("0", "1"),
    "tokens": ("1e9", "1.5T", "500B"),
    "price": ("2.5", "0"),
    "sizes": ("auto", "64,128,256"),
    "skew": ("1", "1.5"),
    "rank": ("0", "1"),
    "ranks": ("0", "0,1", "stages", "all"),
    "nproc": ("1", "2"),
    "threads": ("1",),
    "stop_at": ("1", "2"),
    "steps": ("1",),
    "warmup": ("0", "1"),
    "lora": ("2", "4"),
    "limit": ("60s", "2m"),
    "budget": ("5s",),
    "trials": ("1", "2"),
    "repeats": ("1", "2"),
    "time": ("24:00:00", "90", "8m"),
    "release": ("26.06", "0.5", "0.6.2"),
    "port": ("0",),
    "line": ("threefold pl", "threefold plan --mo", "threefold train x layout.", "threefold '"),
    "explain": tuple(sorted(known_slugs())),
    "over": tuple(f"{path}=1,2,4" for path in FIELDS),
    "tries": tuple(f"{path}=2" for path in FIELDS),
    "keep": tuple(FIELDS),
    "sequences": ("1", "2"),
    "max_tokens": ("1", "4"),
    "temperature": ("0", "0.7"),
    "top_k": ("0", "2"),
    "top_p": ("0.5", "1"),
    "prompt": ("The", "a b"),
    "chat": ("Why?", '[{"role": "user", "content": "x"}]'),
    "field": ("text", "n"),
    "max_bad_records": ("0", "0.01"),
    "suffix": (".txt", ".jsonl"),
    "assume": ("gpu_mtbf_hours=20000",),
    "action": ("list",),
    "shell": ("bash", "zsh", "fish"),
}
QUESTION = {"--model", "--chip", "--gpus", "--seq-len"}  # what a search wants instead of a plan file
# The kinds of files that arguments ask for, by the same names.
KINDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "plan", "plan", "run"),
    "a": ("plan", "run", "trace"),
    "b": ("plan", "run", "trace"),
    "run": ("run",),
    "origin": ("run",),
    "subject": ("plan", "run"),
    "source": ("export", "plan"),
    "sources": ("data", "run"),
    "traces": ("trace", "run"),
    "checkpoint": ("checkpoint",),
    "folder": ("checkpoint",),
    "adapter": ("checkpoint",),
    "data": ("data",),
    "val": ("data",),
    "file": ("data",),
    "image": ("data",),
    "choices": ("questions",),
    "tokenizer": ("tokenizer",),
    "chip_file": ("chip",),
    "files": ("chip",),
    "cards": ("card",),
    "loads": ("run",),
    "show": ("run",),
}
OUTPUTS = ("out", "plot", "timeline", "fix")
NEW = ("new", "new.toml", "new.json", "new.png", "new.svg", "new/deeper/file", "plan.toml", "empty", "/dev/full")

# Lines that once ended in a traceback, without a word, or without an end. They are run like those that are drawn.
ONCE_FAILED: tuple[list[str], ...] = (
    *(
        f"plan --model {model} --chip h100 --gpus 64 --seq-len 4096 --target megatron-bridge --top 1".split()
        for model in ("glm-4.5", "phi-3.5-moe")
    ),
    ["plan", "draft.toml", "knobs.store_param_remainders=true", "knobs.precision=fp16"],
    ["train", "plan.toml", "job.steps=1", "--profile"],
    ["export", "plan.toml", "--account=--"],
    ["export", "plan.toml", "--verify"],
    ["check", "fifo"],
    ["report", "x" * 300],
    ["tokenize", "text.txt", "--out", "/dev/full"],
    ["tokenize", "run", "--out", "new", "--tokenizer", "x/" * 3000],
    ["show", f"{RECIPES[1]}.toml", "model.num_experts=1024", "--json"],
    [
        "plan",
        "--chip",
        "gb200",
        "--gpus",
        "auto",
        "--model",
        "tiny-qwen3.5",
        "--seq-len",
        "131072",
        "--global-batch",
        "256",
        "--precision",
        "fp32",
    ],
    ["train", "plan.toml", "--nproc", "65536", "job.global_batch=65536", "job.micro_batch=1"],
)


class Draw(random.Random):
    """Draws of one line, of which a part has sound values alone."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.absurd = 0.2 if self.random() < 0.5 else 0.0


def drawn_line(number: int) -> list[str]:
    """The words of a line, without the program."""
    verb, turn = next(islice(_verbs(), number, None))
    draw = Draw(f"line {number}")
    flags, positionals = _arguments(verb)
    words = [verb]
    for action in positionals:
        words += _positional(action, draw)
    if verb in LONG and draw.random() < 0.9:  # so that most of them end
        words += _short(verb, positionals)
    asked = [flags[name] for name in sorted(QUESTION)] if set(flags) >= QUESTION else []
    if asked and draw.random() < 0.6:
        words = [verb, *(word for action in asked for word in (action.option_strings[-1], _sound(action, draw)))]
    required = [action for action in flags.values() if action.required]
    for group in verb_parser(build_parser(verb), verb)._mutually_exclusive_groups:
        required += [draw.choice(group._group_actions)] * group.required
    for action in [*required, *(flags[name] for name in dict.fromkeys(_pairs(verb, turn)))]:
        words += _flag(action, draw)
    if verb == "explore":
        words += ["--no-browser"]
    if draw.random() < draw.absurd / 4:
        words.insert(draw.randrange(len(words) + 1), draw.choice((*TEXTS, "--no-such-flag", "--help", "-x")))
    if verb in TAKE_A_COMMAND:
        words += ["--", *draw.choice(COMMANDS)]
    return words


def may_take_long(words: Sequence[str]) -> bool:
    """Whether a line trains, measures or rehearses, which has bounds of its own."""
    return words[0] in LONG or any(word.startswith("--rehearse") for word in words)


def pairs_drawn(num_lines: int) -> float:
    """The part of all pairs of flags of a verb whose turn comes among the first lines."""
    seen = {
        (verb, pair)
        for verb, turn in islice(_verbs(), num_lines)
        for pair in combinations(sorted(set(_pairs(verb, turn))), 2)
    }
    return len(seen) / sum(len(list(combinations(_arguments(verb)[0], 2))) for verb in VERBS)


def _pairs(verb: str, turn: int) -> list[str]:
    """The flags of two pairs, of more where a verb has many flags: each turn of a verb takes the next ones."""
    flags = sorted(_arguments(verb)[0])
    pairs = list(combinations(flags, 2)) or [tuple(flags)]
    random.Random(verb).shuffle(pairs)
    count = max(2, len(flags) // 4)
    return [name for place in range(count * turn, count * (turn + 1)) for name in pairs[place % len(pairs)]]


def _verbs() -> Iterator[tuple[str, int]]:
    """Verbs in turn, with how often each has come before."""
    before = dict.fromkeys(VERBS, 0)
    for cycle in count():
        for place, verb in enumerate(VERBS):
            if verb not in LONG or (cycle + place) % SOME == 0:
                yield verb, before[verb]
                before[verb] += 1


@cache
def _arguments(verb: str) -> tuple[dict[str, argparse.Action], list[argparse.Action]]:
    """The flags of a verb by name, and its positional arguments."""
    actions = verb_parser(build_parser(verb), verb)._actions
    return flags_by_verb()[verb], [action for action in actions if not action.option_strings]


def _short(verb: str, positionals: list[argparse.Action]) -> list[str]:
    """Overrides that make a plan small."""
    if not any(action.dest == "overrides" for action in positionals) or verb == "dry-run":
        return []
    return ["job.steps=2"] if verb == "finetune" else ["job.steps=2", "model=tiny-qwen3-moe", "job.seq_len=64"]


def _positional(action: argparse.Action, draw: Draw) -> list[str]:
    if action.dest == "overrides":
        return [_override(draw) for _ in range(draw.choice((0, 0, 1, 1, 2, 3)))]
    if action.nargs == "?" and draw.random() < 0.2:
        return []
    times = draw.choice((1, 1, 2)) if action.nargs in ("*", "+") else 1
    return [_value(action, draw) for _ in range(times)] if draw.random() < 0.97 else []


def _flag(action: argparse.Action, draw: Draw) -> list[str]:
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [flag]
    value = _value(action, draw)
    return [f"{flag}={value}"] if value.startswith("-") or draw.random() < 0.2 else [flag, value]


def _value(action: argparse.Action, draw: Draw) -> str:
    """Mostly a value that the argument asks for."""
    if draw.random() < draw.absurd:
        return draw.choice((*NUMBERS, *ODD_NUMBERS, *TEXTS, *BROKEN))
    return _sound(action, draw)


def _sound(action: argparse.Action, draw: Draw) -> str:
    name = action.dest
    if action.choices is not None and name not in SOUND:
        return str(draw.choice(list(action.choices)))
    if name in OUTPUTS:
        return draw.choice(NEW)
    if name in KINDS:
        return draw.choice(FILES[draw.choice(KINDS[name])] if draw.random() >= draw.absurd else BROKEN)
    if name in SOUND:
        return draw.choice(SOUND[name])
    return draw.choice((*NUMBERS, *WORDS))


def _override(draw: Draw) -> str:
    if draw.random() < draw.absurd / 4:
        return draw.choice(
            ("layout.epp=8", "=", "a=b", "layout=1", "[x]=1", "layout.ep", "layout.ep=", "ep=8", ".=.", "ä=1")
        )
    path = draw.choice(list(FIELDS))
    field = FIELDS[path]
    if draw.random() < draw.absurd:
        return f"{path}={draw.choice((*NUMBERS, *ODD_NUMBERS, *TEXTS, *BROKEN))}"
    if field.choices and list in field.types:
        return f"{path}={draw.sample(list(field.choices), min(2, len(field.choices)))}"
    if field.choices:
        return f"{path}={draw.choice(list(field.choices))}"
    if path == "model":
        return f"{path}={draw.choice(list(MODELS))}"
    if path == "cluster.chip":
        return f"{path}={draw.choice(list(CHIPS))}"
    if bool in field.types:
        return f"{path}={draw.choice(('true', 'false'))}"
    if str in field.types:
        return f"{path}={draw.choice((*WORDS, *FILES['data'], *FILES['tokenizer']))}"
    return f"{path}={draw.choice(('0', '1', '2', '4', '8', '64', '1024', '0.5', str(field.default)))}"


if __name__ == "__main__":
    from line_runs import run_by_hand

    sys.exit(run_by_hand([drawn_line(int(word)) for word in sys.argv[1:]]))
