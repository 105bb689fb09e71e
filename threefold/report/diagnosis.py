"""A diagnosis as text: what each kind of file says, and the findings."""

from threefold.diagnose.diagnosis import Diagnosis
from threefold.report.terminal import MOST_LINES, cut_lines, findings_summary

HEADS = {
    "run folder": "run",
    "log": "logs",
    "flight recorder": "flight recorder dumps",
    "snapshot": "memory snapshots",
    "trace": "traces",
}


def diagnosis_text(found: Diagnosis) -> str:
    parts = ["\n".join([HEADS[part.kind], *(f"  {line}" for line in part.lines)]) for part in found.parts]
    if found.findings:
        parts.append("\n".join(map(str, found.findings)))
    return "\n\n".join(parts)


def diagnosis_summary(found: Diagnosis) -> list[str]:
    """The first lines of each kind of file, and the findings."""
    each = max(2, (MOST_LINES - 3) // max(1, len(found.parts)))
    lines = [line.strip() for part in found.parts for line in [f"{part.kind}:", *part.lines][:each]]
    return cut_lines([*lines, *(findings_summary(found.findings)[1:] if found.findings else [])])
