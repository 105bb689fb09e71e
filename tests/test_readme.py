"""What the README shows is what the commands print."""

import re
import shlex

import pytest
from repository import ROOT

from threefold.cli.main import VERBS, main
from threefold.plan.plan import Plan

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def examples() -> list[tuple[str, list[str]]]:
    """Indented blocks that begin with `$ threefold`: the command and the lines shown below it."""
    found = []
    for block in re.findall(r"(?:^    .*\n?|^\n)+", TEXT, flags=re.MULTILINE):
        lines = [line[4:].rstrip() for line in block.strip("\n").splitlines()]
        if lines and lines[0].startswith("$ threefold "):
            found.append((lines[0].removeprefix("$ threefold "), lines[1:]))
    return found


@pytest.mark.parametrize(("command", "shown"), examples(), ids=lambda value: value if isinstance(value, str) else "")
def test_example_prints_what_is_shown(
    command: str, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines appear in order; `...` stands for any lines between."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    main(shlex.split(command))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    place = 0
    for line in (line for line in shown if line and line != "..."):
        assert line in printed[place:], line
        place += printed[place:].index(line) + 1


def shown(verb: str) -> list[list[str]]:
    """Words of the commands that the README shows without what they print, up to a redirection or a remark."""
    lines = re.findall(rf"^    threefold ({verb} [^>#\n]*)", TEXT, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_launch_as_shown_prints_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert shown("launch")
    for words in shown("launch"):
        assert main(words) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.startswith("#!/bin/bash\n")


def test_verify_as_shown_begins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the ranks, which take too long here."""
    pytest.importorskip("torch")
    from threefold.engine.verify.forked_ranks import RankError

    def start(plan: Plan, limit: float) -> None:
        raise RankError("not here")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("threefold.engine.verify.oracle.compare_with_one_rank", start)
    assert shown("verify")
    for words in shown("verify"):
        assert main(words) == 1
        assert "the ranks did not finish: not here" in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


def test_every_verb_is_in_the_readme() -> None:
    for verb in VERBS:
        assert f"`threefold {verb}" in TEXT or f"`{verb}" in TEXT, verb


def test_every_file_named_in_the_readme_exists() -> None:
    for path in re.findall(r"`((?:recipes|data|docs|benchmarks)/[\w./-]+\.\w+)`", TEXT):
        assert (ROOT / path).exists(), path
