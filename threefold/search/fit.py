"""Does a model fit, and from how many GPUs on: one line for each size of a cluster, for people who have no plan yet.

`threefold fit` calls `fit_points`. A size that is too small costs no search: the layout that needs the least memory
says so, with full recompute and all optimizer states on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from threefold.fields import MAX_RANKS
from threefold.findings import FindingsError
from threefold.search.impossible import finding, leanest
from threefold.search.legal import untrained
from threefold.search.rank import resort
from threefold.search.search import Candidate, search
from threefold.search.space import MOST_RELAXED, read_draft
from threefold.spec.chips import ChipSpec

MOST_SIZES = 40
SIZES_AFTER = 2  # sizes that are shown after the first that needs neither full recompute nor offload


@dataclass(frozen=True, slots=True)
class FitPoint:
    """A number of GPUs with the plan for it, or with what the leanest layout lacks."""

    gpus: int
    candidate: Candidate | None
    need_bytes: float  # of the fullest rank at the top of the band
    have_bytes: float

    @property
    def fits(self) -> bool:
        return self.candidate is not None

    @property
    def is_mild(self) -> bool:
        """Whether the plan needs neither full recompute nor offload."""
        return self.candidate is not None and not resort(self.candidate.plan)

    def to_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "fits": self.fits,
            "is_mild": self.is_mild,
            "need_bytes": round(self.need_bytes),
            "have_bytes": round(self.have_bytes),
            "candidate": self.candidate.to_json() if self.candidate else None,
        }


def fit_points(
    draft_fields: Mapping[str, Any], sizes: Sequence[int] = (), measured: ChipSpec | None = None
) -> Iterator[FitPoint]:
    """The points of a draft whose number of GPUs is left open: at `sizes`, or doubling from one GPU until a plan needs
    neither full recompute nor offload, and twice more. Raises findings where no number of GPUs makes a plan."""
    space = read_draft({**draft_fields, "cluster.gpus": sizes[0] if sizes else 1}, measured)
    if refused := untrained(space.base):
        raise FindingsError([finding(space, refused)])
    after = 0
    for gpus in sizes or [2**i for i in range(MOST_SIZES) if 2**i <= MAX_RANKS]:
        point = _point(draft_fields, gpus, measured)
        yield point
        after += point.is_mild
        if not sizes and after > SIZES_AFTER:
            break


def _point(draft_fields: Mapping[str, Any], gpus: int, measured: ChipSpec | None) -> FitPoint:
    fields = {**draft_fields, "cluster.gpus": gpus}
    space = read_draft(fields, measured)
    least = leanest(replace(space, relaxed=MOST_RELAXED))
    have = space.base.chip.memory_bytes
    if least is None or not least.fits:
        return FitPoint(gpus, None, least.need if least else 0.0, have)
    found = search(fields, 1, measured=measured)
    best = found.candidates[0] if found.candidates else None
    return FitPoint(gpus, best, best.estimate.device_bytes_band[1] if best else least.need, have)
