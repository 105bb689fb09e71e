"""Order: what estimates cannot tell from the fastest candidate is one group, and in it the recommended order decides.

Two candidates share the chip, the kernels and the job, so that most of an error falls on both. What is left are the
terms in which they differ: each is as sure as the band of the estimate says, and one whose rate no run measured counts
as unknown, so that an advantage that rests on it does not decide. `search.py` ranks with `grouped`; `Group` and
`why_after` are what a reader is told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from threefold.cost.estimate import time_band
from threefold.cost.rates import calibration
from threefold.plan.plan import Plan
from threefold.search.price import Priced
from threefold.search.published_layouts import PublishedLayout, nearest_published
from threefold.spec.chips import CHIPS

# Relative error of a step between two runs of one model on one chip at one length, in 220 pairs of published runs
# (data/published_runs.json, 2026-11-19). Candidates within the median are never told apart; those beyond the error of
# 90 % of the pairs always are.
PAIR_ERROR, PAIR_BAND = 0.05, 0.17
COMMUNICATION = ("tp", "cp", "ep", "dp")
NAMED_SHARE = 0.01  # of a step: an advantage in a term below this is not named
# Upstream sizes TP by active parameters, 1 or 2 for MoE models on nodes of eight; NVL72 may trade CP for TP
# (PF-TPACTIVE and LC-TPxCP of docs/coverage.md).
NODE, LARGE_TP = 8, {"node": 2, "rack": 4}
LITTLE_ROOM = 0.02  # of the chip's memory, at the top of the band


def complexity(plan: Plan) -> int:
    """Axes in use and knobs set: what there is to get wrong and to tune."""
    layout, knobs = plan.layout, plan.knobs
    axes = sum(layout.degree(axis) > 1 for axis in ("tp", "cp", "pp", "ep", "etp")) + (layout.vpp > 1)
    switches = (
        knobs.optimizer_offload > 0,
        knobs.ep_overlap,
        knobs.delay_wgrad,
        bool(knobs.graphs),
        knobs.cp_comm != "p2p",
        knobs.data_parallel != "zero1",
        knobs.dispatcher not in ("alltoall", "local"),
        layout.stages is not None,
    )
    return axes + len(knobs.recompute) + sum(switches)


def unmeasured_terms(plan: Plan) -> tuple[str, ...]:
    """Terms of time whose rates no run of this stack measured: exchanges between GPUs, where it ran on one only; CP and
    a dispatcher that are in none of the runs behind the calibration."""
    basis, knobs = calibration(plan.target), plan.knobs
    if plan.chip.measured_error is not None and plan.target == "threefold":
        return () if plan.layout.gpus <= plan.chip.measured_gpus else COMMUNICATION
    if basis.most_gpus == 1:
        return COMMUNICATION
    seen = plan.layout.ep == 1 or knobs.dispatcher in basis.seen
    return ("cp",) if seen else ("cp", "ep")


def advantages(slow: Priced, fast: Priced) -> dict[str, float]:
    """By how much each term of the slower candidate is longer, as a fraction of the faster one's step."""
    step = fast.step_seconds
    return {name: (slow.terms[name] - seconds) / step for name, seconds in fast.terms.items()}


def are_told_apart(slow: Priced, fast: Priced) -> bool:
    """Whether the estimate is sure that one candidate is slower than the other."""
    longer, band = slow.step_seconds / fast.step_seconds - 1, _term_band(fast.plan)
    unmeasured = {*unmeasured_terms(slow.plan), *unmeasured_terms(fast.plan)}
    parts = advantages(slow, fast).items()
    unsure = sum(abs(more) * (1.0 if name in unmeasured else min(1.0, band)) for name, more in parts)
    return longer > min(pair_band(fast.plan), PAIR_ERROR + unsure)


def _term_band(plan: Plan) -> float:
    """How sure a term is whose rate was measured: as the calibration, where it saw a chip of this generation."""
    basis = calibration(plan.target)
    chips = {CHIPS[name].architecture for name in (each.partition(":")[0] for each in basis.seen) if name in CHIPS}
    return basis.band if plan.chip.architecture in chips else time_band(plan)


def pair_band(plan: Plan) -> float:
    """By how much a plan may be predicted slower than another one without being told apart from it: twice as much
    where no run like it was seen, as bands of Megatron Bridge are twice as wide there."""
    return PAIR_BAND if time_band(plan) <= calibration(plan.target).band else 2 * PAIR_BAND


def is_member(one: Priced, first: Priced, anchors: Sequence[PublishedLayout]) -> bool:
    """Whether a candidate belongs to the group of the fastest: not told apart from it, or published for such a request
    and within the band."""
    if any(anchor.distance(one.plan) == 0 for anchor in anchors):
        return one.step_seconds <= first.step_seconds * (1 + pair_band(first.plan))
    return not are_told_apart(one, first)


def fastest_of(found: Iterable[Priced]) -> Priced | None:
    """The candidate that a group is formed around: the fastest; or the fastest without full recompute and offload,
    where the bands of the two overlap."""
    by_speed = sorted(found, key=lambda one: -one.sure)
    if not by_speed:
        return None
    most = by_speed[0].step_seconds * (1 + pair_band(by_speed[0].plan))
    return next((one for one in by_speed if not resort(one.plan) and one.step_seconds <= most), by_speed[0])


def resort(plan: Plan) -> int:
    """How late the recommended order takes a plan's memory settings: 0 for selective recompute or none, and for offload
    where it was published with such a layout for such a request. At long context offload comes before full recompute,
    which repeats attention (seed on long context; LC-OFFLOAD of docs/coverage.md)."""
    hosted, full = plan.knobs.optimizer_offload > 0, plan.full_recompute
    if not full and (not hosted or _was_hosted(plan)):
        return 0
    return 1 + (hosted + 2 * full if plan.is_long else full + 2 * hosted)


def _was_hosted(plan: Plan) -> bool:
    near = (each for each in nearest_published(plan) if each.optimizer_offload and each.seq_len <= plan.job.seq_len)
    return any(each.distance(plan) == 0 for each in near)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One place of the recommended order: a smaller value is better."""

    value: float
    words: str  # why a plan with a larger value is put after


def structure(plan: Plan, anchors: Sequence[PublishedLayout]) -> list[Criterion]:
    """The places of the order that the layout decides, and whether overlap hides its exchanges."""
    layout = plan.layout
    crossing = [axis for axis in ("tp", "ep") if layout.degree(axis) > 1 and plan.link(axis).link == "network"]
    hot = len(crossing) - 0.5 * ("ep" in crossing and plan.knobs.ep_overlap)  # hidden is half as bad
    model_parallel = layout.tp * layout.cp * layout.pp
    tensor = LARGE_TP["rack" if plan.cluster.domain_ranks > NODE else "node"]
    distance = min((anchor.distance(plan) for anchor in anchors), default=0.0)
    return [
        Criterion(distance, f"a distance of {distance:g} from what was published"),
        Criterion(layout.etp, f"ETP {layout.etp}"),
        Criterion(float(plan.model.is_moe and layout.ep == 1 and layout.tp > 1), "TP before EP"),
        Criterion(float(plan.knobs.data_parallel != "zero1" and not plan.is_vlm), "FSDP"),
        Criterion(max(1, layout.tp / tensor), f"TP {layout.tp}, where {tensor} is enough for most models"),
        Criterion(hot, f"{' and '.join(axis.upper() for axis in crossing)} between NVLink domains"),
        Criterion(model_parallel, f"TP x CP x PP of {model_parallel}"),
    ]


def criteria(one: Priced, anchors: Sequence[PublishedLayout]) -> list[Criterion]:
    """The recommended order, the weightiest first."""
    plan, knobs = one.plan, one.plan.knobs
    settings = ["full recompute"] if plan.full_recompute else []
    settings += [f"{knobs.optimizer_offload:.0%} of the optimizer on the host"] if knobs.optimizer_offload else []
    return [
        Criterion(resort(plan), " and ".join(settings)),
        Criterion(float(one.headroom < LITTLE_ROOM), f"{max(0.0, one.headroom):.1%} of memory left"),
        *structure(plan, anchors),
        Criterion(float(plan.layout.stages is not None), "a written stage layout"),
        Criterion(complexity(plan), "more settings"),
        Criterion(-round(one.headroom, 2), f"{one.headroom:.0%} of memory left"),
    ]


def preference(one: Priced, anchors: Sequence[PublishedLayout]) -> tuple[float, ...]:
    return (*(each.value for each in criteria(one, anchors)), one.step_seconds)


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates that the estimate cannot tell from the fastest, and what decided among them."""

    size: int
    fastest: float  # by how much the fastest is predicted to be faster than the chosen one
    anchor: PublishedLayout | None  # the published layout nearest to the chosen one, if one is near
    anchor_distance: float
    unmeasured: tuple[str, ...]  # terms in which members differ and whose rates nobody measured
    why_not: str = ""  # why the chosen one is no nearer to it

    def __str__(self) -> str:
        if self.size == 1:
            text = "No other candidate is as fast, by more than the estimates are unsure."
        else:
            text = f"{self.size} candidates cannot be told apart by their estimates: the recommended order decides."
            if self.fastest > PAIR_ERROR:
                text += f" The fastest is predicted to be {self.fastest:.0%} faster than the first."
        if self.unmeasured:
            text += f" Nobody measured the rates of {', '.join(self.unmeasured)}, in which they differ."
        return f"{text} {self.published}"

    @property
    def published(self) -> str:
        """How far the chosen one is from what somebody ran, and why."""
        if self.anchor is None:
            return "No layout of a like model was published for a request near to this one."
        if not self.anchor_distance:
            return f"The degrees are those that were published: {self.anchor} ({self.anchor.name})."
        return f"The nearest published layout is {self.anchor} ({self.anchor.name}); {self.why_not}."

    def to_json(self) -> dict[str, Any]:
        published = None
        if self.anchor:
            published = {**asdict(self.anchor), "doublings_away": self.anchor_distance}
        return {
            "size": self.size,
            "fastest_ahead": self.fastest,
            "unmeasured": list(self.unmeasured),
            "published": published,
            "text": str(self),
        }


def grouped(found: Sequence[Priced]) -> tuple[list[Priced], int]:
    """All candidates in order, and how many of them the estimate cannot tell from the fastest."""
    first = fastest_of(found)
    if first is None:
        return [], 0
    anchors = nearest_published(first.plan)
    members = [one for one in found if is_member(one, first, anchors)]
    rest = [one for one in found if not is_member(one, first, anchors)]
    members.sort(key=lambda one: preference(one, anchors))
    return [*members, *sorted(rest, key=lambda one: one.step_seconds)], len(members)


def group_of(order: Sequence[Priced], size: int, found: Iterable[Priced]) -> Group:
    """What to say of the first `size` candidates of an order; `found` are all that were looked at."""
    chosen, members = order[0], order[:size]
    anchors = nearest_published(chosen.plan)
    anchor = min(anchors, key=lambda each: each.distance(chosen.plan), default=None)
    differ: dict[str, float] = {}
    for one in members[1:]:
        for name, more in advantages(one, chosen).items():
            differ[name] = max(differ.get(name, 0.0), abs(more))
    return Group(
        size=size,
        fastest=max(chosen.step_seconds / one.step_seconds - 1 for one in members),
        anchor=anchor,
        anchor_distance=anchor.distance(chosen.plan) if anchor else inf,
        unmeasured=tuple(name for name in unmeasured_terms(chosen.plan) if differ.get(name, 0.0) > NAMED_SHARE),
        why_not=_why_no_nearer(chosen, anchor, found) if anchor else "",
    )


def _why_no_nearer(chosen: Priced, anchor: PublishedLayout, found: Iterable[Priced]) -> str:
    nearest = min(found, key=lambda one: anchor.distance(one.plan))
    if anchor.distance(nearest.plan) >= anchor.distance(chosen.plan):
        return "none of the layouts nearer to it goes with this request and fits"
    layout = nearest.plan.layout
    degrees = " ".join(f"{axis.upper()} {layout.degree(axis)}" for axis in ("tp", "cp", "pp", "ep"))
    return f"{degrees} is put after, because of {why_after(nearest, chosen)}"


def why_after(one: Priced, chosen: Priced) -> str:
    """Why a candidate stands after the chosen one: the first place of the order in which it is worse; and of a faster
    one, the terms without a measured rate on which its advantage rests."""
    anchors = nearest_published(chosen.plan)
    if not is_member(one, chosen, anchors):
        ratio = one.step_seconds / chosen.step_seconds
        longer = f"{ratio:.1f} times as long" if ratio >= 2 else f"{ratio - 1:.0%} longer"
        return f"a step {longer}, which is more than the band"
    pairs = zip(criteria(one, anchors), criteria(chosen, anchors), strict=True)
    said = next((mine.words for mine, its in pairs if mine.value > its.value), "a longer step")
    unmeasured = unmeasured_terms(chosen.plan)
    ahead = {name: more for name, more in advantages(chosen, one).items() if name in unmeasured and more > NAMED_SHARE}
    if one.step_seconds < chosen.step_seconds and ahead:
        said += f"; ahead in {', '.join(sorted(ahead, key=lambda name: -ahead[name]))}, which nobody measured"
    return said
