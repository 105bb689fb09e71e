"""How results show themselves: one line in a terminal, a table in a notebook.

A result inherits from `ShownAsTable` and says what it is (`summary`) and what it holds (`table`). A dataclass turns its
own long repr off with `repr=False`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape

MOST_ROWS = 60  # of a table in a notebook; a longer one says how many rows are left out


class ShownAsTable(ABC):
    """A value with a short repr and a table for notebooks."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> str:
        """One line that says what the value is."""

    @abstractmethod
    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Header and rows of what the value holds."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return html_table(self.summary(), *self.table())


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as notebooks show it. Every cell is escaped: names come from files."""
    shown = rows[:MOST_ROWS]
    lines = [_row("th", header), *(_row("td", row) for row in shown)]
    if len(rows) > len(shown):
        lines.append(f'<tr><td colspan="{len(header)}">and {len(rows) - len(shown)} more</td></tr>')
    body = "\n".join(lines)
    return f'<table style="text-align: left">\n<caption>{escape(caption)}</caption>\n{body}\n</table>'


def _row(kind: str, cells: Sequence[str]) -> str:
    inside = "".join(f'<{kind} style="text-align: left">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{inside}</tr>"
