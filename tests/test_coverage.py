"""docs/coverage.md cites rules, tests, recipes and verbs that exist, and has every row that a rule cites."""

import re
from collections import Counter
from pathlib import Path

from threefold.cli.main import VERBS
from threefold.rules.all import RULES, known_slugs

TESTS = next(folder for folder in Path(__file__).resolve().parents if folder.name == "tests")
ROOT = TESTS.parent
ID = r"[A-Z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*"
ROW = re.compile(rf"\| ({ID}) \| ([^|]+) \| ([^|]+) \|")
KINDS = ("check: ", "test_", "recipes/", "threefold ")


def read_rows(text: str) -> list[tuple[str, str]]:
    """The id of every row, and its cell that says what shows it."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| id |", "|---"))]
    matches = [(line, ROW.fullmatch(line)) for line in lines]
    assert [line for line, match in matches if match is None] == []
    return [(match[1], match[3]) for _, match in matches if match]


ROWS = read_rows((ROOT / "docs" / "coverage.md").read_text(encoding="utf-8"))


def citations(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def cited(kind: str) -> set[str]:
    """All citations of one kind in the page, without the words that mark the kind."""
    words = {word for _, cell in ROWS for word in citations(cell) if word.startswith(kind)}
    assert words, f"the page cites nothing that begins with {kind!r}"
    return {word.removeprefix(kind) for word in words}


def test_every_row_has_an_id_of_its_own() -> None:
    assert [row for row, count in Counter(row for row, _ in ROWS).items() if count > 1] == []


def test_every_row_is_shown_or_says_why_not() -> None:
    for row, cell in ROWS:
        shown = any(word.startswith(KINDS) for word in citations(cell))
        assert shown or cell.startswith(("**not covered**: ", "**upstream only**: ")), row
        for status in re.findall(r"\*\*.*?\*\*.{0,2}", cell):
            assert status in ("**in part**: ", "**not covered**: ", "**upstream only**: "), row


def test_cited_rules_exist() -> None:
    assert cited("check: ") - set(known_slugs()) == set()


def test_cited_tests_exist() -> None:
    sources = [file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def test_(\w+)", source, flags=re.MULTILINE)}
    assert cited("test_") - defined == set()


def test_cited_recipes_exist() -> None:
    assert cited("recipes/") - {file.name for file in (ROOT / "recipes").iterdir()} == set()


def test_cited_verbs_exist() -> None:
    assert {command.split()[0] for command in cited("threefold ")} - set(VERBS) == set()


def test_rows_that_rules_cite_are_on_the_page() -> None:
    """Both in `rows` and in prose, where a word with the first letters of an id is taken for one."""
    known = {row for row, _ in ROWS}
    named = {row for rule in RULES.values() for row in rule.rows}
    starts = "|".join(sorted({row.partition("-")[0] for row in known if "-" in row}))
    for file in (ROOT / "threefold" / "rules").glob("*.py"):
        named |= set(re.findall(rf"\b(?:{starts})-[A-Z0-9][A-Za-z0-9-]*", file.read_text(encoding="utf-8")))
    assert len(named) > 100
    assert named - known == set()


def test_rows_cite_the_rules_that_cite_them() -> None:
    cells = dict(ROWS)
    pairs = [(row, rule.slug) for rule in RULES.values() for row in rule.rows]
    assert [(row, slug) for row, slug in pairs if f"check: {slug}" not in citations(cells[row])] == []
