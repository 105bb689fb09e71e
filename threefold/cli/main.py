"""`threefold VERB ...`: 0 clean or warnings only, 1 errors in the plan, 2 a wrong command line."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import threefold
from threefold.cli.command_line.bounds import bounds_of
from threefold.cli.command_line.out import Out, UsageError, shown_at_work, standard_streams
from threefold.cli.command_line.parser import Parser, verb_parser
from threefold.findings import Finding, FindingsError, in_order, shown
from threefold.launch.stop_signals import end_at_once
from threefold.units import format_bytes

VERBS = {
    "plan": "choose layout and knobs for a model on a cluster, ranked, with reasons",
    "fit": "does a model fit, and from how many GPUs on: a line for each number of GPUs",
    "check": "judge a plan by every rule, and offer fixes",
    "show": "print a plan completely: grids, groups, links, pipeline",
    "estimate": "predict memory by stage and term, time by term, and which wall dominates",
    "dry-run": "rehearse any rank without the cluster: peak memory, when and where, and every collective",
    "sweep": "vary one field of a plan, sequence length with CP sized along, and see what gives out",
    "train": "run a plan, go on with a run, or start one from the weights of another",
    "finetune": "train a Hugging Face checkpoint on data of your own, with settings that fit this machine",
    "calibrate": "measure this machine, so that estimates of our own engine are those of this machine",
    "launch": "write the Slurm script or the torchrun commands that run a plan on a cluster",
    "export": "write a plan as the overrides, script and environment of Megatron Bridge, or as Megatron-LM's arguments",
    "import": "turn a Megatron Bridge override list or YAML, or a Megatron-LM argument line, into a plan",
    "verify": "run a layout in fp64 on this machine and compare it with one rank, gradient by gradient",
    "overlap-ab": "time a plan without EP overlap, with it, and with delayed weight gradients, in matched conditions",
    "contract": "print what must not move while a plan, run or foreign job is measured, and hold others to it",
    "validate": "judge whether a run or a foreign job can be accepted: steps, losses, memory, resumption, proof",
    "compare": "set two plans, runs or traces side by side, and say which difference explains how much",
    "regress": "find the setting behind a regression or a crash between two plans, by trying plans between them",
    "profile": "read a trace or a run, name the wall that holds it back, and list what could help",
    "diagnose": "read what a dead, slow or full job left behind: what happened, how sure that is, and what to do",
    "tune": "measure changes of a plan one variable at a time, and keep what is certainly faster",
    "load": "say how a run's router loaded its experts, by layer and rank, and what that costs",
    "report": "write a plan, a run or a tuning as one page for a browser: drawings, findings, contract",
    "explore": "serve a page on this machine that shows how a plan changes with its degrees and knobs",
    "card": "list the claims of a project with their evidence, or measure them again",
    "eval": "measure a run on data: loss, perplexity, bits per byte, accuracy of multiple choice",
    "sample": "let a run continue prompts or answer chats",
    "tokenize": "turn text files, folders and JSONL into a token shard",
    "import-hf": "begin a run with the weights of a Hugging Face checkpoint",
    "export-hf": "write a run's newest checkpoint as a Hugging Face folder",
    "find": "search rules, fields, settings of Megatron, pages, recipes and published runs",
    "mcp": "serve plans, checks, estimates and the search to assistants (Model Context Protocol)",
    "skills": "list the skills for assistants that come with Threefold, or copy them to a folder",
    "rules": "list the rules",
    "models": "list the known models, or show one",
    "chips": "list the known chips",
    "schema": "print the JSON Schema of plan files",
    "completion": "print the script that completes commands in bash, zsh or fish",
    "env": "say what this machine has: GPU, software, kernels that run, packages and what missing ones would give",
}

MODULES = {"import": "import_plan"}  # where a verb is no name of a module
# Verbs that may take longer than two seconds and have no progress of their own to show.
SHOWN_AT_WORK = (
    "fit",
    "check",
    "estimate",
    "sweep",
    "compare",
    "contract",
    "validate",
    "profile",
    "env",
    "eval",
    "import-hf",
    "export-hf",
    "load",
    "report",
)
TAKE_A_COMMAND = ("regress",)  # verbs for which the words behind `--` are the command line of another program


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    with standard_streams() as out, nullcontext() if argv else _signals(words):
        try:
            return _run(words, out)
        except OSError as error:
            if error is out.error:
                print(f"threefold: cannot write the answer: {error.strerror}", file=sys.stderr)
                return 1
            if not _is_named(error.filename, words):
                raise
            return _tell([_unusable(error)], "--json" in words)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return _tell([out_of_memory(error)], "--json" in words)
        except KeyboardInterrupt:
            return 130


def _signals(words: list[str]) -> AbstractContextManager[None]:
    """What signals do. A run may end before it is under way, without a traceback; other verbs leave them to Python."""
    return end_at_once() if _verb(words) in ("train", "finetune") else nullcontext()


def _verb(words: list[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _is_named(path: object, words: list[str]) -> bool:
    """Whether the command line names a path, or a folder above it."""
    named = [os.path.normpath(text) for word in words for text in (word, word.partition("=")[2]) if text]
    given = os.path.normpath(str(path))
    return any(given == text or given.startswith(f"{text}/") for text in named)


def _unusable(error: OSError) -> Finding:
    """A path of the command line that no file can have, or that may not be opened, is the user's to correct."""
    advice = "give the path of a file or folder that can be opened"
    return Finding(rule="file-readable", at=shown(error.filename), problem=str(error.strerror), advice=advice)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory gave out: that of Python, of torch on the host, or of a GPU. Loads no torch."""
    is_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_host or type(error).__name__ == "OutOfMemoryError"


def out_of_memory(error: Exception) -> Finding:
    asked = re.search(r"tried to allocate (?:(\d+) bytes|([\d.]+ \w+))", str(error), re.IGNORECASE)
    size = (format_bytes(int(asked[1])) if asked[1] else asked[2]) if asked else ""
    problem = f"memory gave out: {size} were asked for at once" if size else "memory gave out"
    advice = "shorter sequences, smaller microbatches or a smaller model; `threefold dry-run` says where a plan's goes"
    return Finding(rule="memory-suffices", at="memory", problem=problem, advice=advice)


def _tell(found: list[Finding], as_json: bool) -> int:
    from threefold.cli.command_line.inputs import print_findings  # which loads more than `--version` needs

    return print_findings(found, as_json)


def _run(words: list[str], out: Out) -> int:
    try:
        args = _parse(words)
        module = _module(args.verb)
        # A rehearsal shows its own progress, and forks: no thread of ours may be in the middle of a write then.
        is_shown = args.verb in SHOWN_AT_WORK and not getattr(args, "rehearse", False)
        with shown_at_work(args.verb) if is_shown else nullcontext():
            return _answered(module, args)
    finally:
        out.flush()


def _answered(module: ModuleType, args: argparse.Namespace) -> int:
    """Run a verb, and say what it refuses: what is wrong with its command line, findings, or a package that lacks."""
    try:
        code: int = module.run(args)
        return code
    except UsageError as error:
        print(f"threefold {args.verb}: {error}", file=sys.stderr)
        return 2
    except FindingsError as error:
        return _tell(in_order(error.findings), getattr(args, "json", False))
    except ModuleNotFoundError as error:
        from threefold.cli.command_line.inputs import missing_package

        return missing_package(args.verb, error)


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"threefold.cli.{MODULES.get(verb, verb.replace('-', '_'))}")


def build_parser(*wanted: str | None) -> Parser:
    """The parser of the command line. Only the verbs that are asked for are imported and know their arguments."""
    parser = Parser(
        prog="threefold",
        description="Plan, check, price and train Mixture-of-Experts models.",
        epilog="A plan is a TOML file; any field can be overridden: threefold check plan.toml layout.ep=16",
    )
    parser.add_argument("--version", action="version", version=f"threefold {threefold.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, doc in VERBS.items():
        sub = verbs.add_parser(name, help=doc, description=doc[0].upper() + doc[1:] + ".")
        if name in wanted:
            _module(name).add_arguments(sub)
            sub.epilog = " ".join(filter(None, (sub.epilog, bounds_of(name))))
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    wanted = _verb(argv)
    parser = build_parser(wanted)
    end = argv.index("--") if wanted in TAKE_A_COMMAND and "--" in argv else len(argv)
    args, rest = parser.parse_known_args(argv[:end])
    args.command = argv[end + 1 :]
    stray = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")]
    if stray:
        verb_parser(parser, args.verb).refuse_words(stray)
    if rest:  # overrides may stand behind options too, where argparse does not look for them
        args.overrides = [*args.overrides, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())
