"""Cards as text, and as a table for a page."""

import os
from collections.abc import Sequence
from pathlib import Path

from threefold.report.terminal import table
from threefold.tune.cards import Card, CardResult


def cards_text(cards: Sequence[Card]) -> str:
    rows = [[card.name, str(card.date), card.machine, card.label or "-", card.text] for card in cards]
    return table(["card", "date", "machine", "label", "claim"], rows)


def cards_markdown(cards: Sequence[Card], folder: str = ".") -> str:
    """A table of claims, each with its evidence; links lead from a page in `folder`."""
    lines = ["| claim | measured on | evidence |", "|---|---|---|"]
    for card in cards:
        evidence = card.log or str(card.path)
        link = f"[{card.name}]({Path(os.path.relpath(evidence, folder)).as_posix()})"
        lines.append(f"| {card.text} | {card.machine}, {card.date} | {link} |")
    return "\n".join(lines)


def checked_text(results: Sequence[CardResult]) -> str:
    rows = [[one.card.name, one.status, one.reason or _figures(one)] for one in results]
    counts = {status: sum(one.status == status for one in results) for status in ("holds", "does not hold")}
    rest = len(results) - sum(counts.values())
    said = (
        f"{counts['holds']} of {len(results)} claims hold, {counts['does not hold']} do not, {rest} not measured here"
    )
    return "\n".join([table(["card", "claim", "why"], rows), "", said])


def _figures(one: CardResult) -> str:
    claimed = {figure.name: figure.value for figure in one.card.figures}
    return ", ".join(f"{name} {value:.4g} (claimed {claimed[name]:g})" for name, value in one.measured.items())
