"""The documentation as a site: its source is complete and linked, and Sphinx builds it without a warning."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT
from scripts import load_script

from threefold.lookup.search import find
from threefold.plan.table import FIELDS
from threefold.rules.all import known_slugs

BUILD = ROOT / "docs" / "site" / "build.py"
SPHINX = ["-q", "-W", "--keep-going", "-b", "html"]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return load_script(BUILD, "site_build")


@pytest.fixture(scope="module")
def source(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    site.write_source(folder)
    return folder


def test_every_rule_and_field_has_a_page(source: Path) -> None:
    assert {page.stem for page in (source / "rules").glob("*.md")} == {*known_slugs(), "README"}
    assert {page.name.removesuffix(".md") for page in (source / "fields").glob("*.md")} == {*FIELDS, "README"}
    page = (source / "rules" / "ep-divides-experts.md").read_text(encoding="utf-8")
    assert "[layout.ep](../fields/layout.ep.md)" in page
    assert "## How to fix it" in page
    page = (source / "fields" / "layout.ep.md").read_text(encoding="utf-8")
    assert "(../rules/ep-divides-experts.md)" in page
    assert "`model.expert_model_parallel_size`" in page
    page = (source / "fields" / "knobs.ep_overlap.md").read_text(encoding="utf-8")
    assert "(../rules/ep-overlap-excludes-full-recompute.md)" in page


def test_every_page_is_in_the_contents_once(source: Path) -> None:
    index = (source / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    listed = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    assert "A first plan <guide/first-plan>" in lines
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, "rules/README", "fields/README", "find"} - {"README"})


def test_links_of_the_source_lead_to_its_files(source: Path) -> None:
    broken = []
    for page in source.rglob("*.md"):
        for target in re.findall(r"(?<!\\)\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(source)}: {target}")
    assert broken == []


def test_links_out_of_the_pages_become_text(site: ModuleType) -> None:
    page = ROOT / "docs" / "guide" / "train.md"
    text = "[a](../../README.md) [b](data.md#x) [c](https://x.org) ![d](../images/fold.svg) [e](#here)"
    shown = "a [b](data.md#x) [c](https://x.org) ![d](../images/fold.svg) [e](#here)"
    assert site.without_links_out(text, page) == shown


def test_the_search_of_the_site_is_that_of_the_command(site: ModuleType, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    phrases = list(tomllib.loads((ROOT / "tests" / "lookup" / "phrases.toml").read_text(encoding="utf-8")))[::4]
    (tmp_path / "data.json").write_text(json.dumps(site.search_data()))
    (tmp_path / "phrases.json").write_text(json.dumps(phrases))
    program = (
        f"const {{find}} = require({str(BUILD.parent / 'search.js')!r}); const data = require('./data.json');"
        "const names = (phrase) => find(phrase, data, 3).map((entry) => entry[1]);"
        "console.log(JSON.stringify(require('./phrases.json').map(names)))"
    )
    done = subprocess.run([node, "-e", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(zip(phrases, json.loads(done.stdout), strict=True))
    assert found == {phrase: [entry.name for entry in find(phrase, most=3)] for phrase in phrases}


def test_what_the_search_leads_to_is_there(site: ModuleType, source: Path) -> None:
    pages = {entry[4].partition("#")[0] for entry in site.search_data()["entries"]} - {""}
    assert [page for page in pages if not (source / page.replace(".html", ".md")).exists()] == []


@pytest.mark.slow
def test_sphinx_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="pip install 'threefold[docs]'")
    done = subprocess.run([sys.executable, str(BUILD), str(tmp_path)], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "guide" / "first-plan.html").exists()
    assert (tmp_path / "_static" / "entries.json").stat().st_size > 100_000
    assert '<script src="_static/search.js">' in (tmp_path / "find.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_sphinx_refuses_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="pip install 'threefold[docs]'")
    (tmp_path / "README.md").write_text("# A page\n\n[nowhere](nowhere.md) and [no heading](#none)\n")
    command = [sys.executable, "-m", "sphinx", *SPHINX, "-c", str(BUILD.parent), str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode != 0
    assert "nowhere" in done.stderr
