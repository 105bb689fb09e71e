"""What can be found: entries read from the pages, recipes, cards and published runs that come with Threefold.

A checkout has them at its root. A wheel carries copies in `threefold/shipped` (`setup.py`). Each table row of a page
that lists things (findings, fields, flags, words, coverage) is an entry of its own; of the other pages each section is,
and of guides and references each row of a table that says something by itself.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from threefold.diagnose.deaths.catalogue import entries as deaths

KINDS = ("rule", "field", "name", "command", "word", "doc", "recipe", "card", "run", "row", "death", "remedy")
_TELLING = 60  # letters of a row of a table from which on it says something by itself
_PACKAGE = Path(__file__).parents[1]
_HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Entry:
    """`answer` is one line, `text` what is searched besides, `read_on` a page or a command that tells more."""

    kind: str
    name: str
    answer: str
    text: str
    read_on: str

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "answer": self.answer, "read_on": self.read_on}


def shipped(name: str) -> Path:
    """A folder or file that comes with Threefold, in a checkout or in an installed wheel."""
    inside = _PACKAGE / "shipped" / name
    return inside if inside.exists() else _PACKAGE.parent / name


@cache
def all_entries() -> tuple[Entry, ...]:
    """Every entry but those of settings and published runs, which are large and have readers of their own."""
    return (*_pages(), *_recipes(), *_cards(), *_deaths())


def _pages() -> Iterator[Entry]:
    root = shipped("docs")
    for path in sorted(root.rglob("*.md")) if root.exists() else ():
        page = f"docs/{path.relative_to(root).as_posix()}"
        reader = _READERS.get(page, _sections)
        yield from reader(page, path.read_text(encoding="utf-8"))
    for path in sorted(shipped("skills").glob("*/SKILL.md")):
        yield from _sections(f"skills/{path.parent.name}/SKILL.md", path.read_text(encoding="utf-8"))


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Headings with the text below each."""
    marks = list(_HEADING.finditer(text))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        yield mark[1].strip("` "), text[mark.end() : following.start() if following else len(text)]


def _sections(page: str, text: str) -> Iterator[Entry]:
    title = ""
    for heading, body in _split(text):
        name = title if heading == title else f"{title}: {heading}" if title else heading
        title = title or re.sub(r"^(Reference|Guide|Log): ", "", heading)
        read_on = f"{page}#{_anchor(heading)}"
        yield Entry("doc", name, _first_sentence(body), body, read_on)
        for cells in table_rows(body) if page.startswith(("docs/guide/", "docs/reference/")) else ():
            if sum(map(len, cells[1:])) >= _TELLING:
                yield Entry("row", f"{name}: {_plain(cells[0])}", _plain("; ".join(cells[1:])), "", read_on)


def _findings(page: str, text: str) -> Iterator[Entry]:
    """One entry a finding, whose answer is what should hold."""
    for slug, body in _split(text):
        held = re.search(r"- What should hold: (.+?)(?=\n- |\Z)", body, re.DOTALL)
        if held:
            answer = " ".join(held[1].split())
            yield Entry("rule", slug, answer, body, f"threefold check --explain {slug}")


def _fields(page: str, text: str) -> Iterator[Entry]:
    for cells in table_rows(text):
        if len(cells) == 6 and cells[0].startswith("`"):
            path, kind, default, allowed, meaning, megatron = (cell.strip("`*") for cell in cells)
            facts = ", ".join([kind, f"default {default}", *([allowed] if allowed != "-" else [])])
            names = f"; Megatron: {megatron}".replace("`", "") if megatron != "-" else ""
            yield Entry("field", path, f"{meaning} ({facts}{names})".replace("`", ""), "", page)


def _commands(page: str, text: str) -> Iterator[Entry]:
    """A verb with all its flags, and each flag by itself."""
    for verb, body in _split(text):
        if " " in verb:
            continue
        name, flags = f"threefold {verb}", [cells for cells in table_rows(body) if len(cells) == 2]
        yield Entry("command", name, _first_sentence(body), body, f"{name} --help")
        for flag, meaning in flags:
            if flag.startswith("`--"):
                yield Entry("command", f"{name} {flag.strip('`')}", meaning.replace("`", ""), "", f"{name} --help")


def _glossary(page: str, text: str) -> Iterator[Entry]:
    for cells in table_rows(text):
        if len(cells) == 3 and cells[0] != "word":
            yield Entry("word", cells[0], _plain(cells[1]), cells[2], page)


def _coverage(page: str, text: str) -> Iterator[Entry]:
    for cells in table_rows(text):
        if len(cells) >= 3 and re.fullmatch(r"[A-Z0-9a-z]+(-\w+)+", cells[0]):
            yield Entry("row", cells[0], _plain(cells[1]), _plain(" ".join(cells[2:])), page)


def _remedies(page: str, text: str) -> Iterator[Entry]:
    """Changes that could help a plan, as `plan`, `check`, `profile` and `tune` offer it where they have tried it."""
    yield from (entry for entry in _sections(page, text) if entry.kind == "doc")
    for cells in table_rows(text):
        if len(cells) == 6 and cells[0].startswith("`"):
            name, answers, what, sets, needs, numbers = (cell.replace("`", "") for cell in cells)
            facts = {"sets": sets, "needs": needs, "numbers:": numbers}
            known = "; ".join(f"{key} {value}" for key, value in facts.items() if value)
            answer = f"{what} (against {answers}; {known})"
            yield Entry("remedy", name, answer, "", "threefold profile, tune and check try it on a plan")


_READERS = {
    "docs/reference/remedies.md": _remedies,
    "docs/reference/findings.md": _findings,
    "docs/reference/plan-fields.md": _fields,
    "docs/reference/commands.md": _commands,
    "docs/glossary.md": _glossary,
    "docs/coverage.md": _coverage,
}


def _recipes() -> Iterator[Entry]:
    for path in sorted(shipped("recipes").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        plan = tomllib.loads(text)
        cluster, job = plan.get("cluster", {}), plan.get("job", {})
        degrees = " ".join(f"{axis} {degree}" for axis, degree in plan.get("layout", {}).items())
        answer = (
            f"{plan['model']} for {plan.get('target', 'threefold')}, {cluster.get('gpus', 1)} x "
            f"{cluster.get('chip', 'cpu')}, {job.get('seq_len', 4096)} tokens; {degrees}"
        )
        yield Entry("recipe", path.stem, answer, f"{comment} {text}", f"recipes/{path.name}")


def _cards() -> Iterator[Entry]:
    for path in sorted(shipped("cards").glob("*.toml")):
        card: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        figures = {item["name"]: f"{item['value']}{item.get('unit', '')}" for item in card.get("figures", [])}
        claim = card.get("claim", "")
        for name, value in figures.items():
            claim = claim.replace(f"{{{name}}}", value)
        answer = f"{claim} ({card.get('machine', 'any machine')}, {card.get('date')})"
        yield Entry("card", path.stem, answer, card.get("command", ""), f"threefold card show cards/{path.name}")


def _deaths() -> Iterator[Entry]:
    """Deaths that `diagnose` knows. The patterns of logs are searched as the words that they look for."""
    for death in deaths():
        patterns = re.sub(r"\\[a-zA-Z]|[^\w\s.:-]", " ", " ".join(death["match"]))
        text = f"{patterns} {death['confirm']} {death['fix']} {death['source']}"
        answer = f"{death['cause']}; fix: {death['fix']}"
        yield Entry("death", death["slug"], answer, text, f"threefold check --explain {death['slug']}")


@cache
def published_runs() -> tuple[dict[str, Any], ...]:
    """Rows of `data/published_runs.json`, none where it does not come along."""
    path = shipped("data") / "published_runs.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ()


def table_rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith(("| ", "|`")):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _first_sentence(body: str) -> str:
    """The first sentence of the first paragraph, without links and code blocks."""
    paragraphs = (part for part in body.split("\n\n") if part.strip() and part.strip()[0] not in "|`!-#<")
    text = _plain(next(paragraphs, ""))
    match = re.match(r"(.{20,}?[.:])(\s|$)", text)
    return match[1] if match else text[:200]


def _plain(text: str) -> str:
    return " ".join(_LINK.sub(r"\1", text).replace("`", "").replace("*", "").split())


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
