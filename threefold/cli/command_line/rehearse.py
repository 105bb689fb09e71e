"""What verbs that rehearse share: progress, verdicts, candidates rehearsed. No torch before it runs."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threefold.api.rehearsals import as_the_engine_runs, rehearse
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.units import GIB

if TYPE_CHECKING:
    from threefold.search.search import Candidate


def progress() -> Callable[[str], None] | None:
    """A line that is written over, where somebody looks."""
    if not sys.stderr.isatty():
        return None
    width = shutil.get_terminal_size().columns - 1  # of a line that wraps only the last part would be written over
    return lambda text: print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def verdict_of(plan: Plan) -> list[Finding]:
    """What a rehearsal of every stage says; a warning for each thing it left out."""
    try:
        found = rehearse(plan, say=progress())
    finally:
        end_progress()
    left_out = [
        Finding(
            at=text.partition(":")[0], problem=f"left out of the rehearsal: {text}", severity="warning", rule=PARTLY
        )
        for text in found.left_out
    ]
    return [*found.findings, *left_out]


PARTLY = "rehearsal-is-whole"


@dataclass(frozen=True)
class Rehearsed:
    """A candidate's fullest stage, or why there is none."""

    place: int  # in the order of the search, from 1
    fits: bool
    device_bytes: float | None
    said: str

    def to_json(self) -> dict[str, Any]:
        size = None if self.device_bytes is None else round(self.device_bytes)
        return {"level": "rehearsed", "candidate": self.place, "fits": self.fits, "device_bytes": size, "at": self.said}


def rehearse_first(candidates: Sequence["Candidate"], count: int) -> tuple[list["Candidate"], list[Rehearsed]]:
    """The first `count`, each on the stage predicted to be the largest; those that do not fit go last of them."""
    from threefold.dryrun.rehearse_plan import rehearse as rehearse_ranks

    seen: list[tuple[Rehearsed, Candidate]] = []
    say = progress()
    for place, one in enumerate(candidates[:count], 1):
        if say:
            say(f"rehearsing candidate {place} of {min(count, len(candidates))}")
        try:
            plan, _ = as_the_engine_runs(one.plan)
            found = rehearse_ranks(plan, [one.estimate.memory.worst.stage * plan.layout.stride("pp")])
            verdict = Rehearsed(
                place, not found.findings, found.device_bytes, f"stage {found.worst.stage}: {found.worst.at}"
            )
        except FindingsError as error:
            verdict = Rehearsed(place, False, None, f"cannot be rehearsed: {error.findings[0].problem}")
        seen.append((verdict, one))
    end_progress()
    in_order = sorted(seen, key=lambda pair: not pair[0].fits)
    return [*(one for _, one in in_order), *candidates[count:]], [verdict for verdict, _ in in_order]


def rehearsed_text(seen: Sequence[Rehearsed], candidates: Sequence["Candidate"]) -> str:
    rows = []
    for place, (one, candidate) in enumerate(zip(seen, candidates, strict=False), 1):
        size = "-" if one.device_bytes is None else f"{one.device_bytes / GIB:.1f}"
        guess = f"{candidate.estimate.memory.device_bytes / GIB:.1f}"
        rows.append([str(place), str(one.place), size, guess, "fits" if one.fits else "does not fit", one.said])
    header = ["#", "was", "GiB rehearsed", "estimated", "", "where it peaks"]
    return f"rehearsed on this engine\n{table(header, rows)}"
