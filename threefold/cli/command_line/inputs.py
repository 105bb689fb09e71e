"""Arguments that several verbs share, and reading a plan from them."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from threefold.api.plans import open_plan, with_choices
from threefold.cli.command_line.out import UsageError, print_json
from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import Parsed
from threefold.plan.plan import Plan
from threefold.report.terminal import findings_summary, findings_text
from threefold.rules.all import errors
from threefold.spec.longer_context import KINDS
from threefold.spec.stacks import TARGETS

if TYPE_CHECKING:
    from threefold.engine.models.decoder import Decoder

MOST_PERCENT = 1e6
MOST_SECONDS = 1e9  # thirty years; what torch takes as a limit ends somewhere above
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_BINARY = {"": 1, "K": 2**10, "M": 2**20}


def add_plan_arguments(
    parser: argparse.ArgumentParser, optional: bool = False, target: str = "judge the plan for this stack"
) -> None:
    parser.add_argument("plan", nargs="?" if optional else None, help="a plan file (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override, such as layout.ep=16")
    parser.add_argument("--target", choices=TARGETS, help=target)
    add_json(parser)


def add_chip_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chip-file",
        metavar="FILE",
        help="facts and rates of a machine (TOML), or 'none' (default: what `threefold calibrate` measured here)",
    )


def add_like(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--like",
        metavar="RUN",
        help="start from a measurement: the id of a published run (`find --kind run`), the folder of a run, or a log",
    )


def plan_from(args: argparse.Namespace, keep_budget: bool = False) -> tuple[Parsed, list[Finding]]:
    """The plan of the arguments and what was found on the way. `keep_budget`: the plan will still change, and with it
    what is best for it."""
    extra = [f'target="{args.target}"'] if args.target else []
    opened = open_plan(args.plan, [*args.overrides, *extra])
    return opened if keep_budget else with_choices(*opened)


def the_plan(args: argparse.Namespace) -> Plan:
    """The plan of the arguments; raises what is wrong with it."""
    parsed, findings = plan_from(args)
    if parsed.plan is None or errors(findings):
        raise FindingsError(findings)
    return parsed.plan


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_newest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--newest", action="store_true", help="the newest checkpoint, also of a run that keeps its best (run.keep_best)"
    )


def add_rope_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rope-scaling",
        choices=KINDS,
        help="how rotary positions reach sequences that are longer than the checkpoint was made for",
    )


def duration(text: str) -> float:
    """Seconds of a time or limit in an argument: 90, 90s, 8m or 1h. Not a number and none at all would never be over,
    less than nothing at once."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([smh]?)", text.strip())
    try:
        value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    except ValueError:  # several points
        value = 0.0
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is no time between 0 and {MOST_SECONDS:g} seconds, such as 90s or 8m")
    return value


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument that is a whole number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bounds = f"below {least}" if most is None else f"not between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{text} is {bounds}")
        return value

    return number


def percentage(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST_PERCENT:  # false of NaN
        raise argparse.ArgumentTypeError(f"{text} is not a percentage of 0 or more")
    return value


def share_of_one(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def step_window(text: str) -> tuple[int, int]:
    """First and last step of a window, counted from 1."""
    first, colon, last = text.partition(":")
    try:
        window = int(first), int(last)
    except ValueError:
        window = 0, 0
    if not colon or not 1 <= window[0] <= window[1]:
        raise argparse.ArgumentTypeError(f"{text} is not FIRST:LAST, two steps counted from 1")
    return window


def sequence_length(text: str) -> int:
    """Tokens of a sequence: 4096, 32K or 1M, in binary thousands as in plan files."""
    match = re.fullmatch(r"([0-9]{1,12})([KM]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens, such as 4096 or 32K")
    return int(match[1]) * _BINARY[match[2]]


def refuse_too_small(args: argparse.Namespace, least: dict[str, int]) -> None:
    """Refuse a number in the arguments that is below its least value."""
    for name, bound in least.items():
        given = getattr(args, name)
        if given is not None and given < bound:
            raise UsageError(f"--{name.replace('_', '-')} {given} is below {bound}")


def print_findings(
    findings: list[Finding], as_json: bool, out: TextIO | None = None, more: Mapping[str, Any] | None = None
) -> int:
    """Text goes to `out` where standard output is for something else. `more` is what the JSON says besides."""
    bad = any(finding.severity == "error" for finding in findings)
    if as_json:
        said: dict[str, Any] = {"ok": not bad, "summary": findings_summary(findings)}
        said |= {"findings": [finding.to_json() for finding in findings], **(more or {})}
        print_json(said)
    else:
        print(findings_text(findings), file=out)
    return 1 if bad else 0


def missing_package(verb: str, error: ModuleNotFoundError) -> int:
    """Say which package a verb lacks. A module of our own that is missing is a fault, not a missing package."""
    if (error.name or "").startswith("threefold"):
        raise error
    print(f"threefold {verb}: {error.name} is not installed: pip install 'threefold[train]'", file=sys.stderr)
    return 1


MODEL_FOLDER = "the folder of a run, or a Hugging Face checkpoint (config.json with safetensors next to it)"


def open_model(folder: Path, newest: bool = False) -> tuple[Plan, Callable[[], "Decoder"], bool]:
    """The plan of a folder, what loads its model, and whether the folder holds a run that has trained."""
    from threefold.engine.run.folder import PLAN, read_run_plan
    from threefold.engine.train_state import load_run, load_untrained
    from threefold.engine.weights.run_files import DRAFT
    from threefold.machine.finetune.checkpoint_facts import checkpoint_facts
    from threefold.machine.finetune.plan_finetune import checkpoint_plan, devices_here

    if (folder / PLAN).exists() or not folder.is_dir():
        return read_run_plan(folder), lambda: load_run(folder, say, newest), True
    if (folder / DRAFT).exists():
        parsed = read_plan(str(folder / DRAFT))
        if parsed.plan is None:
            raise FindingsError(parsed.findings)
        plan = parsed.plan
    elif (folder / "config.json").exists():
        plan = checkpoint_plan(checkpoint_facts(folder), devices_here()[0])
    else:
        problem = "no run and no checkpoint: there is neither plan.toml nor config.json"
        raise FindingsError(
            [Finding(rule="run-readable", at=str(folder), problem=problem, advice=f"give {MODEL_FOLDER}")]
        )
    return plan, lambda: load_untrained(folder, plan, say), False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
