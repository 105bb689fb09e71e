"""Skills for assistants: their format, their length, and how they are copied. tests/test_doc_commands.py runs them."""

from pathlib import Path

import pytest
from command_line import run
from repository import ROOT

SKILLS = sorted(ROOT.glob("skills/*/SKILL.md"))


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_is_short_and_says_when_to_use_it_and_what_not_to_conclude(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.startswith(f"---\nname: threefold-{path.parent.name}\ndescription: ")
    assert "Use " in text.split("---")[1]
    assert "## What not to conclude" in text


def test_skills_are_copied_and_a_changed_one_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("skills", "--install", str(tmp_path / "mine"), capsys=capsys)
    assert code == 0
    assert "threefold-first-plan" in out
    assert {path.parent.name for path in (tmp_path / "mine").glob("*/SKILL.md")} == {
        path.parent.name for path in SKILLS
    }
    changed = tmp_path / "mine" / "first-plan" / "SKILL.md"
    changed.write_text("mine")
    code, _, err = run("skills", "--install", str(tmp_path / "mine"), capsys=capsys)
    assert code == 1
    assert "differs" in err
    assert changed.read_text() == "mine"
