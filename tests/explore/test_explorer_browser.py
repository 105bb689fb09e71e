"""The explorer in Chromium: controls change the answer, fixes apply, a plan is there to copy, nothing leaves."""

import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator

import pytest
from browser import Browser, needs_chromium

from threefold.explore.request import Started
from threefold.explore.server import ExplorerServer
from threefold.plan.parse import parse

pytestmark = needs_chromium
SMALL = {
    "model": "tiny-qwen3-moe", "cluster.chip": "cpu", "cluster.gpus": 8, "job.seq_len": 128, "job.global_batch": 32,
    "layout.ep": 4, "knobs.precision": "fp32", "target": "threefold",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ExplorerServer]:
    found = ExplorerServer(0, Started(dict(SMALL)))
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield found
    found.shutdown()
    found.close()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def browser(tab: Browser, server: ExplorerServer) -> Browser:
    tab.events.clear()
    tab.resize(1280, 900)
    tab.open("about:blank")
    tab.open(server.address)
    tab.wait("document.documentElement.dataset.answered !== undefined")
    return tab


def change(browser: Browser, field: str, value: str) -> None:
    """Type into a control and wait for the answer."""
    before = browser.run("document.documentElement.dataset.answered")
    browser.run(
        f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        f"(document.querySelector('[name=\"{field}\"]'))"
    )
    browser.wait(f"document.documentElement.dataset.answered !== '{before}'")


def test_it_answers_and_asks_nobody_else(browser: Browser, server: ExplorerServer) -> None:
    assert browser.run("document.querySelectorAll('.tile').length") == 4
    assert browser.run("document.querySelectorAll('svg').length") >= 4
    browser.wait("document.querySelector('#at-layouts table') !== null")
    assert browser.complaints == []
    assert all(address.startswith(server.address) for address in browser.requests if address != "about:blank")


def test_degrees_move_memory_and_time(browser: Browser) -> None:
    before = browser.run("document.querySelector('#tiles').textContent")
    change(browser, "layout.pp", "2")
    assert browser.run("document.querySelector('#tiles').textContent") != before
    assert "Pipeline schedule" in browser.run("document.querySelector('#pipeline').textContent")
    change(browser, "layout.pp", "")
    assert browser.run("document.querySelector('#tiles').textContent") == before
    assert browser.run("document.querySelector('#pipeline').hidden")


def test_keys_double_and_halve_a_degree(browser: Browser) -> None:
    value = "document.querySelector('[name=\"layout.ep\"]').value"
    browser.run("document.querySelector('[name=\"layout.ep\"]').focus()")
    browser.press("ArrowUp")
    assert browser.run(value) == "8"
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    assert browser.run(value) == "2"


def test_findings_come_live_and_their_fixes_apply(browser: Browser) -> None:
    change(browser, "layout.ep", "3")
    assert "ep-divides-experts" in browser.run("document.querySelector('#findings').textContent")
    assert "No estimate" in browser.run("document.querySelector('#tiles').textContent")
    browser.run("document.getElementById('try').click()")
    browser.wait("document.querySelector('#at-findings [data-fix]') !== null")
    browser.run("document.querySelector('#at-findings [data-fix]').click()")
    browser.wait("document.querySelector('.tile') !== null")
    assert browser.run("document.querySelector('[name=\"layout.ep\"]').value") != "3"


def test_a_layout_of_the_list_can_be_used(browser: Browser) -> None:
    browser.wait("document.querySelector('[data-use]') !== null")
    before = browser.run("document.documentElement.dataset.answered")
    browser.run("document.querySelectorAll('[data-use]')[1].click()")
    browser.wait(f"document.documentElement.dataset.answered !== '{before}'")
    assert browser.run("document.querySelector('.tile.good') !== null")
    assert browser.run("document.querySelector('#at-layouts table') !== null")


def test_the_plan_to_copy_is_the_plan_shown(browser: Browser) -> None:
    change(browser, "layout.ep", "2")
    text = browser.run("document.querySelector('#at-plan pre').textContent")
    plan = parse(tomllib.loads(text)).plan
    assert plan is not None
    assert (plan.layout.ep, plan.layout.gpus, plan.model_name) == (2, 8, "tiny-qwen3-moe")
    assert plan.hash in browser.run("document.querySelector('#line').textContent")


def test_the_address_keeps_the_plan(browser: Browser, server: ExplorerServer) -> None:
    change(browser, "layout.ep", "2")
    address = browser.run("location.href")
    browser.open("about:blank")
    browser.open(address)
    browser.wait("document.documentElement.dataset.answered !== undefined")
    assert browser.run("document.querySelector('[name=\"layout.ep\"]').value") == "2"


def test_it_fits_a_narrow_screen(browser: Browser) -> None:
    browser.resize(390, 800)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_it_says_when_the_server_is_gone(tab: Browser) -> None:
    words = [sys.executable, "-m", "threefold", "explore", "--no-browser", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            tab.open(process.stdout.readline().split()[0])
            tab.wait("document.documentElement.dataset.answered !== undefined")
        finally:
            process.kill()
    tab.run("document.querySelector('[name=\"layout.ep\"]').value = '2'")
    tab.run("document.querySelector('[name=\"layout.ep\"]').dispatchEvent(new Event('input', {bubbles: true}))")
    tab.wait("!document.getElementById('trouble').hidden")
