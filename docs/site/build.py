"""Builds the documentation as a site: the pages of `docs/`, a page for every rule, and a page for every plan field.

    python docs/site/build.py [OUT]        # `make docs`; a warning is an error

Pages are copied to a folder of their own first, because the site needs three things that pages in the tree do not: a
table of contents made from the index, links to files of the repository as plain text, and the generated pages.
"""

import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.findings import Explanation
from threefold.lookup import search
from threefold.lookup.entries import Entry, all_entries
from threefold.lookup.names import setting_entries
from threefold.lookup.synonyms import CERTAIN, GROUPS, SYNONYM
from threefold.plan.table import FIELDS
from threefold.report.plan_fields import field_page
from threefold.rules.all import RULES, explain, known_slugs, raised_by, severity_of

ROOT = Path(__file__).resolve().parents[2]
DOCS, WORK = ROOT / "docs", ROOT / "build" / "site-source"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ORPHAN = "---\norphan: true\n---\n"  # in no table of contents: 400 entries on every page would take minutes
FIND = """# Find

The search of `threefold find`: rules, fields, settings of Megatron, pages, remedies and deaths of jobs, in any words.

<input id="find" type="search" placeholder="a2a overlap" style="width: 100%" autofocus>
<ol id="found"></ol>
<script src="_static/search.js"></script>
"""
SECTION = re.compile(r"^## ([^:\n]+).*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def write_source(work: Path) -> list[Path]:
    """Write the Markdown that Sphinx reads; returns its files."""
    shutil.rmtree(work, ignore_errors=True)
    pages = {page.relative_to(DOCS): page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    written = {Path(name): text for name, text in generated_pages()}
    for name, text in pages.items():
        written[name] = without_links_out(text, DOCS / name)
    written[Path("README.md")] += contents_of(pages[Path("README.md")])
    for name, text in written.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8")
    for folder in ("images",):
        shutil.copytree(DOCS / folder, work / folder)
    for picture in DOCS.glob("*.png"):
        shutil.copy(picture, work / picture.name)
    return [work / name for name in written]


def search_data() -> dict[str, Any]:
    """What `search.js` ranks by: the entries of `threefold find`, with the page of each, its synonyms and weights."""
    entries = [
        [entry.kind, entry.name, entry.answer, entry.text, page_of(entry)]
        for entry in (*all_entries(), *setting_entries())
    ]
    return {
        "entries": entries,
        "groups": GROUPS,
        "stop": sorted(search._STOP),
        "prior": search._PRIOR,
        "behind": search._BEHIND,
        "synonym": SYNONYM,
        "certain": CERTAIN,
        "name": search._NAME,
        "answer": search._ANSWER,
        "text": search._TEXT,
        "log": search._LOG,
        "long": search._LONG,
    }


def page_of(entry: Entry) -> str:
    """The page of the site that tells more, or nothing."""
    if entry.kind in ("rule", "field"):
        return f"{entry.kind}s/{entry.name}.html"
    page = re.fullmatch(r"docs/([\w./-]+)\.md(#.*)?", entry.read_on)
    return f"{page[1]}.html{page[2] or ''}" if page else ""


def without_links_out(text: str, page: Path) -> str:
    """The text with links to files outside the pages turned into what they show: the site does not hold those."""

    def kept(link: re.Match[str]) -> str:
        picture, shown, target = link.groups()
        file = (page.parent / target.partition("#")[0]).resolve()
        is_page = file.is_relative_to(DOCS) and file.suffix in (".md", ".png", ".svg")
        return link[0] if picture or is_page or re.match(r"[a-z]+:|#", target) else shown

    return LINK.sub(kept, text)


def contents_of(index: str) -> str:
    """The index's pages as tables of contents, in its order and under its headings."""
    parts = [_toctree("Threefold", ["architecture", "glossary"])]
    listed = {"architecture", "glossary"}
    for section in SECTION.finditer(index):
        rows = re.findall(r"^\| \[[^\]]*\]\(([^)#]+)\.md\)", section[0], re.MULTILINE)
        names = [name for name in rows if name not in listed]
        parts.append(_toctree(section[1].strip(), names))
        listed.update(names)
    return "\n".join(["", *parts, _toctree("Every rule and field", ["find", "rules/README", "fields/README"])])


def _toctree(caption: str, names: list[str]) -> str:
    entries = [f"{_title(DOCS / f'{name}.md')} <{name}>" if (DOCS / f"{name}.md").exists() else name for name in names]
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def _title(page: Path) -> str:
    """A page's heading without its kind, which is the caption above it: "Guide: a first plan" is "A first plan"."""
    heading = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").replace("`", "")
    title = re.sub(r"^(Guide|Reference|Log): ", "", heading)
    return title[:1].upper() + title[1:]


def generated_pages() -> Iterator[tuple[str, str]]:
    """A page for every rule and other finding, and one for every field, with an index of each kind."""
    yield "find.md", FIND
    slugs = sorted(known_slugs())
    rows = [f"| [{slug}]({slug}.md) | {severity_of(slug)} | {_escaped(_explained(slug).what)} |" for slug in slugs]
    table = ["| slug | severity | what should hold |", "|---|---|---|", *rows]
    yield "rules/README.md", "\n".join(["# Every finding", "", *table, ""])
    for slug in slugs:
        yield f"rules/{slug}.md", ORPHAN + rule_page(slug)
    rows = [f"| [{path}]({path}.md) | {_escaped(field.doc)} |" for path, field in FIELDS.items()]
    table = ["| field | meaning |", "|---|---|", *rows]
    yield "fields/README.md", "\n".join(["# Every field of a plan", "", *table, ""])
    said = {slug: "\n".join([*_texts(slug), _code(slug)]) for slug in slugs}
    for path in FIELDS:
        word = re.compile(rf"\b{re.escape(path)}\b")
        rules = [slug for slug in slugs if word.search(said[slug])]
        links = [f"- [{slug}](../rules/{slug}.md): {_escaped(_explained(slug).what)}" for slug in rules]
        about = ["", "## Rules that speak of it", "", *links, ""] if links else []
        yield f"fields/{path}.md", ORPHAN + field_page(FIELDS[path]) + "\n".join(about)


def rule_page(slug: str) -> str:
    """What a rule holds, why, how to confirm and to fix it, with links to the fields that it names."""
    what, why, confirm, fix = (_linked(text) for text in _texts(slug))
    rule = RULES.get(slug)
    lines = [f"# {slug}", "", f"{severity_of(slug)}, raised by {raised_by(slug)}.", "", what, ""]
    for head, text in (("Why", why), ("How to confirm it", confirm), ("How to fix it", fix)):
        lines += [f"## {head}", "", text[:1].upper() + text[1:], ""]
    if rule:
        lines += [f"It judges plans for {'both targets' if rule.target == 'both' else rule.target}."]
        lines += [f"It follows {rule.follows}." if rule.follows else ""]
    lines += ["", f"    threefold check --explain {slug}", ""]
    return "\n".join(lines)


def _linked(text: str) -> str:
    """A text in which names of fields lead to their pages; code in backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", _escaped(text))
    names = "|".join(re.escape(path) for path in sorted(FIELDS, key=len, reverse=True) if "." in path)
    word = re.compile(rf"(?<![\w.])({names})(?![\w.]*\w)")
    return "".join(piece if piece.startswith("`") else word.sub(r"[\1](../fields/\1.md)", piece) for piece in pieces)


def _explained(slug: str) -> Explanation:
    said = explain(slug)
    assert said is not None, slug
    return said


def _texts(slug: str) -> tuple[str, str, str, str]:
    said = _explained(slug)
    return said.what, said.why, said.confirm, said.fix


def _code(slug: str) -> str:
    """The code of a rule, which names the fields that it judges."""
    return inspect.getsource(RULES[slug].check) if slug in RULES else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    out = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build" / "site")
    pages = write_source(WORK)
    code = sphinx(["-q", "-W", "--keep-going", "-b", "html", "-c", str(Path(__file__).parent), str(WORK), out])
    if code == 0:
        static = Path(out) / "_static"
        (static / "entries.json").write_text(json.dumps(search_data()), encoding="utf-8")
        shutil.copy(Path(__file__).parent / "search.js", static)
        print(f"{len(pages)} pages: {out}/README.html")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
