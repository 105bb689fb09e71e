"""Command lines drawn at random: no traceback, one reason for each refusal, bounded time and memory, and nothing
written outside of the scratch folder. `python tests/support/drawn_lines.py NUMBER` repeats a line that failed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drawn_lines import KINDS, LONG, ONCE_FAILED, SOUND, drawn_line, may_take_long, pairs_drawn
from line_files import make_files
from line_runs import Scratch, run_line, shell_line
from repository import ROOT

from threefold.cli.command_line.parser import verb_parser
from threefold.cli.main import VERBS, build_parser

FEW, MANY = 24, 3000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scratch]:
    scratch = Scratch(make_files(tmp_path_factory.mktemp("lines") / "files"))
    yield scratch
    scratch.close()


def problem_of(words: list[str], files: Scratch) -> str:
    problem = run_line(words, files).problem(may_be_long=may_take_long(words))
    return f"{shell_line(words)}: {problem}" if problem else ""


def failing(numbers: range, files: Scratch) -> list[str]:
    problems = {number: problem_of(drawn_line(number), files) for number in numbers}
    return [f"line {number}: {problem}" for number, problem in problems.items() if problem]


def test_some_lines_end_well(files: Scratch) -> None:
    assert failing(range(FEW), files) == []


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, MANY, 250))
def test_many_lines_end_well(first: int, files: Scratch) -> None:
    assert failing(range(first, first + 250), files) == []


@pytest.mark.parametrize("words", ONCE_FAILED, ids=shell_line)
def test_a_line_that_once_failed_ends_well(words: list[str], files: Scratch) -> None:
    assert problem_of(words, files) == ""


def test_lines_reach_every_verb_and_pair_of_flags() -> None:
    """Verbs and flags come from the parsers; what is said here about arguments is about some that there are."""
    assert {drawn_line(number)[0] for number in range(60)} >= set(VERBS) - set(LONG) - {""}
    assert pairs_drawn(MANY) > 0.95
    assert set(LONG) < set(VERBS)
    parser = build_parser(*VERBS)
    arguments = {action.dest for verb in VERBS for action in verb_parser(parser, verb)._actions}
    assert {*SOUND, *KINDS} <= arguments


def test_the_runner_sees_what_it_looks_for(files: Scratch, tmp_path: Path) -> None:
    """Each kind of bad end, by a line that has it for certain: the judge is no check that cannot fail."""
    held = run_line(["models", "--json"], files)
    assert (held.code, held.problem(False)) == (0, "")
    refused = run_line(["check", "missing"], files)
    assert (refused.code, refused.problem(False)) == (1, "")
    outside = ROOT / "written-by-a-line.toml"
    written = run_line(["schema", "--markdown", "--no-such"], files)
    assert (written.code, written.problem(False)) == (2, "")
    assert "outside of the scratch folder" in run_line(["check", "plan.toml", "--fix", str(outside)], files).err
    assert not outside.exists()
