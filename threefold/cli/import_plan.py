"""`threefold import`: Megatron's settings as a plan file."""

import argparse
import sys
from pathlib import Path

from threefold.cli.command_line.out import is_written, print_json
from threefold.findings import Finding
from threefold.interop.megatron.import_text import import_text, named
from threefold.plan.file import dump_plan, parse_overrides
from threefold.report.terminal import findings_text
from threefold.safe_files import read_bounded

MAX_FILE_BYTES = 2**24  # a complete YAML of Bridge has some 100 KiB; a larger file is something else


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="overrides, YAML or a log of Bridge, arguments or a log of Megatron-LM; - reads stdin"
    )
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields of the plan that the file lacks")
    parser.add_argument("--model", help="the model, where the file names none")
    parser.add_argument("--chip", help="the chip, where the file names none")
    parser.add_argument("--gpus", type=int, help="the number of GPUs, where the file names none")
    parser.add_argument("--out", type=Path, help="write the plan here instead of printing it")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    given, findings = parse_overrides(args.overrides)
    flags = {"model": args.model, "cluster.chip": args.chip, "cluster.gpus": args.gpus}
    given |= {path: value for path, value in flags.items() if value is not None}
    text = None if findings else _read(args.source, findings)
    plan = None
    if text is not None:
        imported = named(import_text(text, given, args.source.endswith((".yaml", ".yml"))), args.source)
        plan, findings = imported.plan, imported.findings
    written = dump_plan(plan) if plan else ""
    if args.json:
        fields = {p: list(v) if isinstance(v, tuple) else v for p, v in plan.written} if plan else None
        said = [finding.to_json() for finding in findings]
        print_json({"ok": plan is not None, "plan": fields, "toml": written, "findings": said})
    elif findings:
        print(findings_text(findings), file=sys.stderr)
    if plan is None:
        return 1
    if args.out is not None:
        if not is_written("import", args.out, lambda: args.out.write_text(written, encoding="utf-8")):
            return 1
        if not args.json:
            print(f"wrote {args.out}: threefold check {args.out}")
    elif not args.json:
        print(written, end="")
    return 0


def _read(source: str, findings: list[Finding]) -> str | None:
    """The text of a file or of standard input; None, and a finding, where it cannot be read."""
    problem = ""
    try:
        data = (
            sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if source == "-" else read_bounded(Path(source), MAX_FILE_BYTES)
        )
        if len(data) <= MAX_FILE_BYTES:
            return data.decode("utf-8")
        problem = f"more than {MAX_FILE_BYTES} bytes"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    advice = "give a file with overrides, YAML or arguments, or - for standard input"
    findings.append(Finding(rule="import-readable", at=source, problem=problem, advice=advice))
    return None
