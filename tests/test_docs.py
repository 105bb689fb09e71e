"""The documentation: links and paths that exist, wrapped lines, every field of a plan, examples that still print."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

from threefold.cli.main import VERBS, main
from threefold.plan.aliases import known_names
from threefold.plan.table import FIELDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_COLUMNS = 120
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Paths in backticks end in a suffix or a slash. They start at the repository, the package, or one of its large parts.
HOMES = (ROOT, ROOT / "threefold", ROOT / "threefold" / "engine", ROOT / "threefold" / "cost")
FOLDERS = {"threefold", "tests", "benchmarks", "recipes", "data", "docs"} | {
    path.name for home in HOMES[1:] for path in home.iterdir() if path.is_dir() and not path.name.startswith("_")
}
PATH = re.compile(rf"`((?:{'|'.join(sorted(FOLDERS))})/(?:[\w./-]*(?:/|\.\w+))?)(?: [^`]*)?`")
MODULE = re.compile(r"`(\w+\.py)(?: [^`]*)?`")
TEST = re.compile(r"`test_(\w+)`")
MODULES = {file.name for folder in ("threefold", "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")}
# Verbs without torch that answer in a second or two.
QUICK_VERBS = ("check", "show", "estimate", "sweep", "launch")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page with their numbers, without fenced and indented code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    headings = (line.lstrip("#").strip() for _, line in prose(page.read_text(encoding="utf-8")) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page's text to a file or heading that does not exist."""
    found = []
    for target in LINK.findall("\n".join(line for _, line in prose(text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def missing_paths(text: str) -> list[str]:
    """Paths in backticks that exist under none of the homes, and names of modules that exist nowhere."""
    lines = "\n".join(line for _, line in prose(text))
    paths = [path for path in PATH.findall(lines) if not any((home / path).exists() for home in HOMES)]
    return paths + [name for name in MODULE.findall(lines) if name not in MODULES]


def long_lines(text: str) -> list[int]:
    """Numbers of lines that are too long: not those of tables, nor of a link or image that stands alone."""
    return [
        number
        for number, line in prose(text)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and not re.fullmatch(r"!?\[.*\]\([^)]*\)\.?", line)
    ]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pages
def test_named_paths_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == []


@pages
def test_lines_are_wrapped(page: Path) -> None:
    assert long_lines(page.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [page for page in PAGES if page.is_relative_to(index.parent) and page not in {*linked, index}] == []


def test_every_field_and_alias_is_in_the_reference() -> None:
    """With its default, where it has one that can be written."""
    text = (ROOT / "docs" / "reference" / "plan-file.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1] for row in re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|", text, flags=re.MULTILINE)}
    assert set(rows) == set(FIELDS)
    for path, field in FIELDS.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        if isinstance(field.default, int | float | str):
            assert rows[path].strip('`" ') == default, path
    assert [name for name in known_names() if f"`{name}`" not in text] == []


def test_named_tests_exist() -> None:
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def test_(\w+)", source, flags=re.MULTILINE)}
    pages = [page for page in PAGES if page.name != "coverage.md"]  # tests/test_coverage.py looks at that one
    named = {name for page in pages for name in TEST.findall(page.read_text(encoding="utf-8"))}
    assert named - defined == set()


def missing_imports(text: str) -> list[str]:
    """Names that a script imports from a module of ours which does not define them. Torch is not needed to look."""
    found = []
    for module, names in re.findall(r"^from (threefold[\w.]*) import ([\w, ]+)$", text, flags=re.MULTILINE):
        file = ROOT / (module.replace(".", "/") + ".py")
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        found += [name for name in names.split(", ") if not re.search(rf"^(def|class) {name}\b", source, re.MULTILINE)]
    return found


def test_the_demo_imports_what_exists() -> None:
    assert missing_imports((ROOT / "docs" / "demo.sh").read_text(encoding="utf-8")) == []


def test_the_demo_stops_at_a_step_that_training_reaches() -> None:
    """A signal after some time would come too late on a fast machine, and there would be nothing to go on with."""
    text = (ROOT / "docs" / "demo.sh").read_text(encoding="utf-8")
    [steps] = re.findall(r"job\.steps=(\d+)", text)
    [stop] = re.findall(r"^threefold train .*--stop-at (\d+)", text, flags=re.MULTILINE)
    assert 0 < int(stop) < int(steps)
    assert "timeout" not in text


def examples() -> Iterator[tuple[str, str, list[str]]]:
    """Indented blocks that begin with `$ threefold`: the page, the command and the lines shown below it."""
    for page in PAGES[2:]:
        for block in re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            lines = [line[4:].rstrip() for line in block.splitlines()]
            if lines[0].startswith("$ threefold "):
                yield page.stem, lines[0].removeprefix("$ threefold "), lines[1:]


def runs_here(command: str) -> bool:
    """Whether an example is quick and needs only files of the repository."""
    verb, *words = shlex.split(command)
    return verb in QUICK_VERBS and words[0].startswith("recipes/")


QUICK = [(command, shown) for _, command, shown in examples() if runs_here(command)]


@pytest.mark.parametrize(("command", "shown"), QUICK, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_examples_print_what_is_shown(
    command: str, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines appear in order; `...` stands for any lines between."""
    monkeypatch.chdir(ROOT)
    main(shlex.split(command))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = 0
    for line in (line for line in shown if line and line != "..."):
        assert line in printed[start:], line
        start += printed[start:].index(line) + 1


def test_examples_name_verbs_that_exist() -> None:
    assert len(QUICK) >= 4
    assert {command.split()[0] for _, command, _ in examples()} - set(VERBS) == set()


def test_the_checks_can_fail() -> None:
    page = ROOT / "docs" / "README.md"
    assert broken_links(page, "[a](nowhere.md) [b](glossary.md#no-such-heading) [c](glossary.md#judging)") == [
        "nowhere.md",
        "glossary.md#no-such-heading",
    ]
    assert missing_paths(
        "`engine/nowhere.py`, `engine/step.py`, `tests/test_nowhere.py -k x`, `nowhere.py`, `step.py`"
    ) == [
        "engine/nowhere.py",
        "tests/test_nowhere.py",
        "nowhere.py",
    ]
    assert missing_imports("from threefold.cli.main import main, maim\nfrom threefold.nowhere import x\n") == [
        "maim",
        "x",
    ]
    assert long_lines("x" * 121 + "\n| " + "y" * 121 + "\n    " + "z" * 121 + "\n" + "x" * 120) == [1]
