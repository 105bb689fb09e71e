"""Cards: their fields, their evidence, and claims measured again by a command that the test plants."""

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import run
from tests.support.repository import ROOT
from threefold.cli import card as verb
from threefold.findings import FindingsError
from threefold.machine.inventory import Machine
from threefold.report.cards import cards_markdown
from threefold.tune.cards import Figure, check_card, read_card

CARD = """
claim = "ours takes {seconds}, {ratio} times less than theirs"
date = 2026-11-16
machine = "any"
command = "python measure.py {out}"
evidence = "result.json"
minutes = 0.5

[[figures]]
name = "seconds"
value = 2.0
unit = "s"
at = "/rows/*/ours"
reduce = "median"
holds = "at most"

[[figures]]
name = "ratio"
value = 1.5
at = "/rows/0/theirs"
over = "/rows/0/ours"
"""
EVIDENCE = {"rows": [{"ours": 2.0, "theirs": 3.0}, {"ours": 2.0, "theirs": 4.0}]}
MEASURE = "import sys; open(sys.argv[1], 'w').write('''{}''')"


@pytest.fixture
def card_file(tmp_path: Path) -> Path:
    (tmp_path / "result.json").write_text(json.dumps(EVIDENCE))
    (tmp_path / "card.toml").write_text(CARD)
    return tmp_path / "card.toml"


def planted(card_file: Path, result: object) -> Path:
    (card_file.parent / "measure.py").write_text(MEASURE.format(json.dumps(result)))
    return card_file


def here() -> Machine:
    """A machine without a GPU."""
    return Machine("3.11.0", "Linux")


def test_every_card_of_the_project_has_the_figures_of_its_evidence() -> None:
    cards = [read_card(path, ROOT) for path in sorted((ROOT / "cards").glob("*.toml"))]
    assert cards
    assert all(card.log is None or (ROOT / card.log).exists() for card in cards)


@pytest.mark.parametrize("page", ["README.md", "docs/reference/cards.md"])
def test_pages_print_the_claims_of_the_cards(page: str) -> None:
    """The table between two marks is what the command in the first one prints, with links from the page's folder."""
    text = (ROOT / page).read_text()
    [(named, between)] = re.findall(r"<!-- threefold card list --markdown ?(.*?) -->\n(.*?)<!-- /cards -->", text, re.S)
    paths = named.split() or [str(path.relative_to(ROOT)) for path in sorted((ROOT / "cards").glob("*.toml"))]
    cards = [read_card(Path(path), ROOT) for path in paths]
    assert between.strip() == cards_markdown(cards, str(Path(page).parent))


def test_claims_with_their_figures(card_file: Path) -> None:
    assert read_card(card_file, card_file.parent).text == "ours takes 2 s, 1.5 times less than theirs"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("value = 1.5", "value = 1.6", "figure ratio is 1.6 in the card and 1.5 in result.json"),
        ("result.json", "other.json", "cannot be read"),
        ("claim =", "clam =", "did you mean claim"),
        ("date = 2026-11-16", 'date = "today"', "date is missing, or no date"),
        ('reduce = "median"', 'reduce = "least"', "reduce is one of"),
        ("{ratio}", "{speed}", "the claim names a figure speed"),
        ("/rows/0/theirs", "/rows/7/theirs", "the measurement has no /rows/7/theirs"),
        ("[[figures]]", "[[numbers]]", "numbers is no field of a card"),
        ("minutes = 0.5", "minutes = -1", "minutes = -1 is no time"),
        ("minutes = 0.5", 'plan = { model = "no-such" }', "its plan is none"),
        ("claim", "cl\0im", "it cannot be read"),
    ],
)
def test_a_wrong_card_is_a_finding(card_file: Path, old: str, new: str, said: str) -> None:
    card_file.write_text(CARD.replace(old, new))
    with pytest.raises(FindingsError, match="card-holds-evidence") as caught:
        read_card(card_file, card_file.parent)
    assert said in str(caught.value)


def test_a_claim_that_still_holds_and_one_that_does_not(card_file: Path) -> None:
    card = read_card(planted(card_file, {"rows": [{"ours": 1.9, "theirs": 2.9}]}), card_file.parent)
    held = check_card(card, here(), card_file.parent)
    assert (held.status, held.measured["seconds"]) == ("holds", 1.9)
    planted(card_file, {"rows": [{"ours": 2.5, "theirs": 2.5}]})
    fallen = check_card(card, here(), card_file.parent)
    assert fallen.status == "does not hold"
    assert "ratio: 1, claimed at least 1.5" in fallen.reason
    assert "seconds: 2.5, claimed at most 2" in fallen.reason


EMPTY = "import sys; open(sys.argv[1], 'w').write('{}')"


@pytest.mark.parametrize(
    ("script", "said"), [("raise SystemExit(3)", "code 3"), ("pass", "left no JSON"), (EMPTY, "no /rows")]
)
def test_a_command_that_fails_is_no_proof(card_file: Path, script: str, said: str) -> None:
    (card_file.parent / "measure.py").write_text(script)
    found = check_card(read_card(card_file, card_file.parent), here(), card_file.parent)
    assert found.status == "does not hold"
    assert said in found.reason


@pytest.mark.parametrize("needs", ['{ chip = "gb300" }', '{ packages = ["no_such_package"] }'])
def test_what_this_machine_lacks_is_not_measured(card_file: Path, needs: str) -> None:
    card_file.write_text(CARD.replace("minutes", f"needs = {needs}\nminutes"))
    found = check_card(read_card(card_file, card_file.parent), here(), card_file.parent)
    assert found.status == "not measured"
    assert "gb300" in found.reason or "no_such_package" in found.reason


def test_only_python_and_threefold_are_started(card_file: Path) -> None:
    card_file.write_text(CARD.replace("python measure.py", "rm -r"))
    with pytest.raises(FindingsError, match="a card starts python or threefold"):
        check_card(read_card(card_file, card_file.parent), here(), card_file.parent)


@pytest.mark.parametrize(
    ("holds", "good", "bad"), [("at least", 9.6, 9.4), ("at most", 10.4, 10.6), ("about", 9.6, 11)]
)
def test_bounds(holds: str, good: float, bad: float) -> None:
    figure = Figure("speed", 10.0, "/speed", holds=holds)  # type: ignore[arg-type]
    assert figure.still_holds(good)
    assert not figure.still_holds(bad)


def test_the_verb(card_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(card_file.parent)
    monkeypatch.setattr(verb, "this_machine", lambda try_kernels: here())
    planted(card_file, EVIDENCE)
    code, text, _ = run("card", "check", "card.toml", capsys=capsys)
    assert code == 0
    assert "1 of 1 claims hold" in text
    planted(card_file, {"rows": [{"ours": 3.0, "theirs": 3.0}]})
    code, text, _ = run("card", "check", "card.toml", "--json", capsys=capsys)
    assert code == 1
    assert json.loads(text)[0]["status"] == "does not hold"
    code, text, _ = run("card", "check", capsys=capsys)
    assert code == 1
    assert "no cards" in text
