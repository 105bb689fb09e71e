"""Reports in Chromium: light and dark, wide and narrow, by keyboard, on paper, and with hostile strings."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, needs_chromium
from plans import make
from run_folders import noisy_seconds, run_plan, write_run

from threefold.profile.readers.run_record import read_run
from threefold.report.html.plan_view import view_plan
from threefold.report.html.report import Subject, report_page

pytestmark = needs_chromium
NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
HEX = re.compile(r"rgb\((\d+), (\d+), (\d+)\)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(report_page(Subject("plan", "clean.toml", view_plan(make(layout_cp=2)))), encoding="utf-8")
    return path


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(each) / 255 for each in HEX.match(color).groups()]  # type: ignore[union-attr]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(browser: Browser, selector: str) -> float:
    ink = luminance(browser.run(f"(e => getComputedStyle(e).color)(document.querySelector('{selector}'))"))
    paper = luminance(browser.run("getComputedStyle(document.body).backgroundColor"))
    high, low = max(ink, paper), min(ink, paper)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_can_be_read(browser: Browser, page: Path, scheme: str, width: int) -> None:
    """Nothing is asked of a network, no script fails, nothing sticks out sideways, and text stands out (WCAG AA)."""
    browser.events.clear()
    browser.resize(width, 900)
    browser.prefer(scheme)
    browser.open(page.as_uri())
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert (luminance(browser.run("getComputedStyle(document.body).backgroundColor")) > 0.5) == (scheme == "light")
    for selector in ("h1", ".note", "code", "nav a", ".tile dt"):
        assert contrast(browser, selector) >= 4.5, selector
    # Text of drawings stays readable: it is no smaller than 8 pixels on any screen.
    scale = browser.run(
        "(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)(document.querySelector('svg'))"
    )
    assert scale * 11 >= 8


def test_the_theme_can_be_chosen(browser: Browser, page: Path) -> None:
    browser.prefer("light")
    browser.open(page.as_uri())
    browser.run("localStorage.clear()")
    browser.open(page.as_uri())
    for name in ("light", "dark", "auto"):
        browser.run("document.getElementById('theme').click()")
        assert browser.run("document.getElementById('theme').textContent") == f"Theme: {name}"
        dark = luminance(browser.run("getComputedStyle(document.body).backgroundColor")) < 0.5
        assert dark == (name == "dark")


def test_marks_say_their_numbers_by_pointer_and_by_keys(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.run("document.querySelector('#memory .drawing').focus()")
    browser.press("ArrowRight")
    said = browser.run("document.getElementById('tip').textContent")
    assert re.match(r"weights: [\d.]+ GiB", said)
    browser.press("ArrowRight")
    assert browser.run("document.getElementById('tip').textContent") != said
    browser.press("ArrowLeft")
    assert browser.run("document.getElementById('tip').textContent") == said
    browser.press("Escape")
    assert browser.run("document.getElementById('tip').hidden")
    x, y = browser.run(
        "(e => { e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect(); "
        "return [b.left + b.width / 2, b.top + b.height / 2]; })(document.querySelector('#time .mark rect'))"
    )
    for move in range(1000):  # the event of the scrolling, which hides tips, may come after the first moves
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + move % 2, y=y)
        if not browser.run("document.getElementById('tip').hidden"):
            break
    assert "of the step" in browser.run("document.getElementById('tip').textContent")


@pytest.mark.parametrize("rank", [0, 5, 63])
def test_the_groups_of_a_rank_light_up(browser: Browser, page: Path, rank: int) -> None:
    """The lit cells of every axis are the ranks of its group, by the arithmetic of the layout."""
    layout = make(layout_cp=2).layout
    browser.open(page.as_uri())
    browser.run("document.querySelector('#layout .drawing').focus()")
    marks = browser.run("[...document.querySelectorAll('#layout .mark')].map(m => m.dataset.rank ?? '')")
    for _ in range(marks.index(str(rank)) + 1):
        browser.press("ArrowRight")
    lit = browser.run(
        "Object.fromEntries([...document.querySelectorAll('#layout .axis')].map(a => "
        "[a.dataset.axis, [...a.querySelectorAll('.on')].map(c => Number(c.dataset.r))]))"
    )
    for axis in ("dp", "cp", "tp", "edp", "ep"):
        assert lit[axis] == [other for other in layout.group(axis, rank) if other < 64], axis


def test_everything_can_be_reached_by_keys(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.className?.baseVal ?? document.activeElement.tagName"))
    assert {"A", "BUTTON", "SUMMARY", "drawing"} <= reached
    unnamed = browser.run(
        "[...document.querySelectorAll('svg, button, nav')].filter(e => "
        "!(e.getAttribute('aria-label') || e.textContent.trim())).length"
    )
    assert unnamed == 0


def test_a_page_prints(browser: Browser, page: Path) -> None:
    browser.prefer("dark", media="print")
    browser.open(page.as_uri())
    assert luminance(browser.run("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    found = browser.pdf()
    assert found.startswith(b"%PDF")
    browser.prefer("light")


def test_hostile_strings_do_nothing(browser: Browser, tmp_path: Path) -> None:
    plan = run_plan()
    folder = write_run(tmp_path / "run", plan, noisy_seconds(0.2, 40, seed=2), contract={"torch": NASTY, NASTY: NASTY})
    run = read_run(folder)
    view = view_plan(plan)
    view = replace(view, plan=replace(view.plan, model_name=NASTY))
    path = tmp_path / "page.html"
    path.write_text(report_page(Subject("run", NASTY, view, run=run, notes=[NASTY])), encoding="utf-8")
    browser.events.clear()
    browser.open(path.as_uri())
    assert browser.run("document.title").startswith("</script>")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 1
    assert browser.requests == [path.as_uri()]
    assert browser.complaints == []


def test_the_policy_stops_markup_that_gets_in(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Were something not escaped, the page's policy would still keep it from running and from asking a network."""
    path = tmp_path / "broken.html"
    bad = "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x' onerror=\"document.title='owned'\">"
    path.write_text(page.read_text(encoding="utf-8").replace("</main>", f"{bad}</main>"), encoding="utf-8")
    browser.open(path.as_uri())
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert browser.run("document.title") != "owned"
    browser.events.clear()
