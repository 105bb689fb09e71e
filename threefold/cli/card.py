"""`threefold card`: list the claims of this project with their evidence, or measure them again."""

import argparse
import json
import sys
from pathlib import Path

from threefold.cli.command_line.out import print_json
from threefold.findings import Finding, FindingsError
from threefold.machine.inventory import this_machine
from threefold.report.cards import cards_markdown, cards_text, checked_text
from threefold.tune.cards import Card, check_card, read_card, why_not_here

FOLDER = Path("cards")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check", "list"), help="measure claims again, or list them")
    parser.add_argument("cards", nargs="*", type=Path, metavar="CARD", help="card files (default: all of cards/)")
    parser.add_argument("--evidence", action="store_true", help="compare claims with their evidence, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="list as a table for a page")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    cards = _read(args.cards)
    if args.action == "list":
        return _list(cards, args)
    return _check(cards, args)


def _read(paths: list[Path]) -> list[Card]:
    """All cards that are asked for; the findings of all that cannot be read come at once."""
    given = paths or sorted(FOLDER.glob("*.toml"))
    if not given:
        advice = "name card files, or run this in a folder with cards/"
        raise FindingsError([Finding(rule="card-holds-evidence", at=str(FOLDER), problem="no cards", advice=advice)])
    cards, findings = [], []
    for path in given:
        try:
            cards.append(read_card(path, Path.cwd()))
        except FindingsError as error:
            findings += error.findings
    if findings:
        raise FindingsError(findings)
    return cards


def _list(cards: list[Card], args: argparse.Namespace) -> int:
    if args.json:
        told = [{"card": card.name, "claim": card.text, "date": str(card.date), "label": card.label} for card in cards]
        json.dump(told, sys.stdout)
        print()
    else:
        print(cards_markdown(cards) if args.markdown else cards_text(cards))
    return 0


def _check(cards: list[Card], args: argparse.Namespace) -> int:
    if args.evidence:
        if args.json:
            print(json.dumps({"ok": True, "cards": [card.name for card in cards]}))
        else:
            print(f"{len(cards)} cards, each with the figures of its evidence", file=sys.stderr)
        return 0
    here, results = this_machine(try_kernels=False), []
    for card in cards:
        if not why_not_here(card, here):
            print(f"{card.name}: measuring, about {card.minutes:g} min", file=sys.stderr, flush=True)
        results.append(check_card(card, here, Path.cwd()))
    if args.json:
        print_json([result.to_json() for result in results])
    else:
        print(checked_text(results))
    return 1 if any(result.status == "does not hold" for result in results) else 0
