"""What the README shows is what the commands print."""

import re
import shlex

import pytest
from repository import ROOT

from threefold.cli.main import VERBS, main

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


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


def test_every_verb_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"\n## {verb}\n" in page, verb


def test_every_file_named_in_the_readme_exists() -> None:
    for path in re.findall(r"`((?:recipes|data|docs|benchmarks)/[\w./-]+\.\w+)`", TEXT):
        assert (ROOT / path).exists(), path
