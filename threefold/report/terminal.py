"""Text for terminals and pipes: plain when piped, as wide as it needs to be."""

import re
from collections.abc import Sequence

from threefold.findings import Finding, as_overrides
from threefold.remedies.advise import Advice
from threefold.units import format_many

MOST_LINES = 15  # of a `summary`
_MOST_WIDTH = 400  # of its lines: a problem may quote what a user wrote


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns wide enough for their longest cell; numbers to the right, text to the left."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or re.fullmatch(r"[\d.,]+[KMBT%]?", cell) is not None


def findings_text(findings: Sequence[Finding]) -> str:
    """All findings and a last line that counts them."""
    bad = sum(finding.severity == "error" for finding in findings)
    notes = sum(finding.severity == "note" for finding in findings)
    counts = f"{format_many(bad, 'error')}, {format_many(len(findings) - bad - notes, 'warning')}"
    counts += f", {format_many(notes, 'note')}" if notes else ""
    return "\n".join([*(str(finding) for finding in findings), counts if findings else "no findings"])


def findings_summary(findings: Sequence[Finding]) -> list[str]:
    """How many of each severity, then each finding that is no note, with its fix."""
    counts = [
        format_many(sum(one.severity == severity for one in findings), severity)
        for severity in ("error", "warning", "note")
    ]
    lines = [f"{one.severity} {one.rule}: {one.problem}{cure_text(one)}" for one in findings if one.severity != "note"]
    return cut_lines([", ".join(counts), *lines])


def cure_text(finding: Finding) -> str:
    return f" ({finding.fix_kind}: {as_overrides(finding.fix)})" if finding.fix else ""


def cut_lines(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    lines = [line for line in lines if line.strip(" -")]  # without empty lines and those of tables
    left = len(lines) - (most - 1)
    shown = lines if len(lines) <= most else [*lines[: most - 1], f"and {left} more lines, which the text output has"]
    return [" ".join(line.split())[:_MOST_WIDTH] for line in shown]


def advice_text(pieces: Sequence[Advice]) -> str:
    """What could help, the first first; nothing where there is no advice."""
    lines = [f"  {number}. {piece}" for number, piece in enumerate(pieces, 1)]
    return "\n".join(["what could help, one at a time, in the recommended order", *lines]) if lines else ""
