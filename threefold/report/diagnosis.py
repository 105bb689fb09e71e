"""A diagnosis as text: what each kind of file says, and the findings."""

from threefold.diagnose.diagnosis import Diagnosis

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
