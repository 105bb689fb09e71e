"""Every verb states its bounds, and they are those of the code."""

import argparse
from collections.abc import Sequence

import pytest

from threefold import safe_files, toml_file
from threefold.api import reports
from threefold.cli import estimate, find, import_plan
from threefold.cli.command_line.bounds import BOUNDS, bounds_of
from threefold.cli.command_line.parser import verb_parser
from threefold.cli.main import VERBS, build_parser, main
from threefold.compare import sides
from threefold.compare.regress import command
from threefold.diagnose.hangs import flight_recorder
from threefold.diagnose.logs import lines
from threefold.diagnose.snapshots import snapshot_file
from threefold.dryrun import rehearse_plan
from threefold.engine import evaluate as multiple_choice
from threefold.engine.data.images import decode
from threefold.engine.data.text import read_documents, tokenizer_files
from threefold.engine.run import checkpoint_manifest
from threefold.engine.run import dcp_format as dcp_index
from threefold.engine.weights import write_hf
from threefold.explore import server
from threefold.machine import inventory
from threefold.mcp import server as mcp
from threefold.profile.readers import nsight, run_folder, run_record, text_stream
from threefold.report.html import run_pictures
from threefold.rules import fixes
from threefold.tune import cards, engine_measurer, ledger


def size(num_bytes: int) -> str:
    """In the largest unit that leaves a whole number."""
    units = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}
    return next(f"{num_bytes // unit} {name}" for unit, name in units.items() if num_bytes % unit == 0)


TOLD: dict[str, Sequence[str]] = {
    "plan": (f"chip files of {size(toml_file.MAX_FILE_BYTES)}", f"config.json of {size(safe_files.MAX_JSON_BYTES)}"),
    "check": (f"{fixes.MOST_TRIALS} plans",),
    "estimate": (f"{estimate._MOST_SIZES} sizes",),
    "dry-run": (f"{rehearse_plan.MAX_MICROBATCHES:,} microbatches", f"{rehearse_plan.MAX_PASSES:,} passes"),
    "train": (
        f"indexes of checkpoints of {size(dcp_index.MAX_INDEX_BYTES)}",
        f"manifests and indexes of checkpoints of {size(checkpoint_manifest.MAX_MANIFEST_BYTES)}",
        f"tokenizers of {size(tokenizer_files.MAX_TOKENIZER_BYTES)} and {tokenizer_files.MAX_ENTRIES:,} entries",
        f"documents of {size(read_documents.MAX_DOCUMENT_BYTES)}",
        f"JSON lists of {size(read_documents.MAX_JSON_BYTES)}",
        f"images of {size(decode.MAX_FILE_BYTES)}",
    ),
    "import": (size(import_plan.MAX_FILE_BYTES),),
    "compare": (f"profile of {size(sides.MAX_PROFILE_BYTES)}", f"{run_record.MAX_LINES:,} lines"),
    "regress": (f"the last {size(command.MAX_OUTPUT_BYTES)}",),
    "profile": (
        f"{size(text_stream.MAX_TRACE_BYTES)} unpacked",
        f"{size(text_stream.MAX_EVENT_BYTES)} an event",
        f"{text_stream.MAX_EVENTS:,} events",
        f"within {nsight.MAX_SECONDS:.0f} s",
        f"line by line, {size(safe_files.MAX_LINE_BYTES)} each",
        f"{run_folder.MAX_STEPS:,} steps",
        f"{run_folder.MAX_TRACES:,} traces",
    ),
    "diagnose": (
        f"{size(lines.MAX_LINE_BYTES)} each",
        f"snapshots of {size(snapshot_file.MAX_BYTES)}",
        f"recorder of {size(flight_recorder.MAX_DUMP_BYTES)}",
    ),
    "tune": (
        f"ledgers of {size(ledger.MAX_BYTES)} and {ledger.MAX_ROWS:,} rows",
        f"{engine_measurer.FIRST_LIMIT_SECONDS / 60:.0f} minutes",
    ),
    "report": (f"a run of {size(reports.MOST_TRACE_BYTES)}", f"{run_pictures.MOST_POINTS} points"),
    "explore": (
        f"{server.MOST_CONNECTIONS} connections",
        f"{size(server.MOST_BODY)} a request",
        f"{server.LIMIT_SECONDS:.0f} s",
    ),
    "card": (f"cards of {size(cards.MAX_CARD_BYTES)}",),
    "eval": (f"{size(multiple_choice.MAX_LINE_BYTES)} a line",),
    "export-hf": (f"{write_hf.MAX_SHARD_BYTES // 10**9} GB",),
    "find": (f"{find.MOST} entries",),
    "mcp": (f"{mcp.SECONDS:.0f} s", size(mcp.BYTES), f"{mcp.CHARACTERS:,} characters"),
    "env": (f"{inventory._IMPORT_SECONDS} s",),
}


def test_every_verb_states_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert BOUNDS.keys() == VERBS.keys()
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert bounds_of(verb) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("verb", TOLD)
def test_bounds_are_those_of_the_code(verb: str) -> None:
    for words in TOLD[verb]:
        assert words in bounds_of(verb)


def test_limits_of_time_are_those_of_the_flags() -> None:
    parser = build_parser(*VERBS)

    def default(verb: str, flag: str) -> float:
        actions: list[argparse.Action] = verb_parser(parser, verb)._actions
        return next(float(action.default) for action in actions if flag in action.option_strings)

    for verb in ("verify", "overlap-ab", "regress"):
        assert f"--limit, {default(verb, '--limit') / 60:.0f} minutes" in bounds_of(verb)
    assert f"--budget, {default('tune', '--budget') / 60:.0f} minutes" in bounds_of("tune")
    assert f"--budget, {default('calibrate', '--budget'):.0f} s" in bounds_of("calibrate")
    assert (cards.LIMIT_FACTOR, engine_measurer.LIMIT_FACTOR) == (4, 6)  # in words in the texts
