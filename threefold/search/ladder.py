"""The ladder of a search: rungs that trade time for memory, and the first one on which a choice of degrees fits.

The sets of modules and their order are those of `remedies/recompute_sets.py`. Selective recompute comes before full,
and offload last; degrees are no rungs here, for the search looks at all of them.
"""

from dataclasses import dataclass, replace

from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan
from threefold.remedies.recompute_sets import (
    by_worth,
    goes_with_mode,
    recomputable_modules,
    saved_bytes,
    selective_sets,
)
from threefold.search.knobs import Rung, on_rung
from threefold.search.price import LEANER, Pricer


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the space without its rung of the ladder."""

    layout: Layout
    micro_batch: int
    knobs: Knobs
    promise: float = 0.0  # tokens/s at best
    sure_promise: float = 0.0  # the same at the slow end of the error band


class Ladder:
    """The rungs of one space, in the order in which they are tried."""

    def __init__(self, pricer: Pricer, example: Choice) -> None:
        """Modules are ordered by the bytes they give back for a second of redoing, on an example."""
        self.pricer = pricer
        space = pricer.space
        base = space.base.knobs
        offloads = [0.0, 1.0] if space.free("knobs.optimizer_offload") else [base.optimizer_offload]
        needs_adamw = space.base.target == "threefold" and space.base.job.optimizer != "adamw"
        if space.base.chip.architecture == "cpu" or needs_adamw:  # optimizer-offload-needs-adamw
            offloads = offloads[:1]
        sets = [base.recompute]
        if space.free("knobs.recompute"):
            sets = [*selective_sets(self._by_worth(example), space.base.model.is_moe), ("full",)]
        rungs = [[Rung(recompute, offload) for recompute in sets] for offload in offloads]
        self.plain, self.hosted = rungs[0], rungs[1] if len(rungs) > 1 else []
        self._known: dict[Knobs, tuple[list[Knobs], list[Knobs], list[Knobs]]] = {}

    def __len__(self) -> int:
        return len(self.plain) + len(self.hosted)

    def _by_worth(self, one: Choice) -> list[str]:
        pricer, mode = self.pricer, one.knobs
        if mode.cp_exchange is None:
            mode = replace(mode, cp_exchange="expanded")  # next to latents MLA's up projection saves nothing

        def kept(recompute: tuple[str, ...]) -> float:
            return saved_bytes(pricer.plan(one.layout, one.micro_batch, replace(mode, recompute=recompute)))

        def seconds(recompute: tuple[str, ...]) -> float:
            return pricer.microbatch_seconds(one.layout, one.micro_batch, replace(mode, recompute=recompute))

        return by_worth(recomputable_modules(pricer.space.base), kept, seconds)

    def climb(self, choice: Choice, bar: float, resorts: bool | None = None) -> tuple[Plan | None, Plan | None]:
        """The plan on the first rung that fits, if it promises more than the bar; and a faster one that does not fit.

        Full recompute and offload are tried only where no selective set fits the degrees; or always or never, where
        `resorts` says so.
        """
        selective, full, hosted = self._rungs(choice.knobs)
        found, short = self._first_fit(choice, selective, bar)
        if found is not None or (not resorts and (resorts is not None or self.mild_fits(choice))):
            return found, short
        options = []
        for ladder in (full, hosted):
            plan, under = self._first_fit(choice, ladder, bar)
            short = short or under
            if plan is not None:
                options.append(plan)
        return (max(options, key=self.pricer.speed) if len(options) > 1 else options[0] if options else None), short

    def _rungs(self, knobs: Knobs) -> tuple[list[Knobs], list[Knobs], list[Knobs]]:
        """The mode on each rung: selective sets, full recompute, and the same again with offload."""
        if knobs not in self._known:
            space = self.pricer.space
            mode = replace(space.base, knobs=knobs)
            plain, hosted = (
                [on_rung(knobs, r, space.free("knobs.graphs")) for r in rungs if goes_with_mode(mode, r.recompute)]
                for rungs in (self.plain, self.hosted)
            )
            selective = [one for one in plain if "full" not in one.recompute]
            self._known[knobs] = (selective, plain[len(selective) :], hosted)
        return self._known[knobs]

    def lightest(self, choice: Choice) -> list[Plan]:
        """The last selective rung and full recompute, with as much offload as there is."""
        selective, full, hosted = self._rungs(choice.knobs)
        last = hosted[-2:] or [*selective[-1:], *full]
        return [self.pricer.plan(choice.layout, choice.micro_batch, knobs) for knobs in last]

    def can_fit(self, choice: Choice) -> bool:
        """Whether the degrees fit at all, on the lightest rung at the smallest microbatch."""
        selective, full, hosted = self._rungs(choice.knobs)
        size = 1 if self.pricer.space.free("job.micro_batch") else choice.micro_batch
        lightest = [*selective[-1:], *full[-1:], *hosted[-2:]]
        lightest.reverse()  # the leanest first
        most = self.pricer.limit * (1 + LEANER)
        return any(self.pricer.least_need(choice.layout, size, knobs) <= most for knobs in lightest)

    def mild_fits(self, choice: Choice) -> bool:
        """Whether the degrees fit with selective recompute at the smallest microbatch: then nothing more is tried."""
        selective = [rung for rung in self.plain if "full" not in rung.recompute]
        if not selective:
            return False
        size = 1 if self.pricer.space.free("job.micro_batch") else choice.micro_batch
        knobs = replace(choice.knobs, recompute=selective[-1].recompute, optimizer_offload=selective[-1].offload)
        return self.pricer.least_need(choice.layout, size, knobs) <= self.pricer.limit

    def _promise(self, choice: Choice, rung: Knobs) -> float:
        """Tokens/s at best on a rung: what the choice promises at the foot, and what recompute and offload add."""
        layout, size, job = choice.layout, choice.micro_batch, self.pricer.space.base.job
        foot, here = (self.pricer.microbatch_seconds(layout, size, knobs) for knobs in (choice.knobs, rung))
        tokens, count = job.global_batch * job.seq_len, job.global_batch // (layout.dp * size)
        moved = 0.0
        if rung.optimizer_offload > choice.knobs.optimizer_offload:
            moved = self.pricer.host_seconds(layout, rung) - self.pricer.host_seconds(layout, choice.knobs)
        return tokens / (tokens / choice.promise + max(0.0, here - foot) * count / layout.pp + moved)

    def _first_fit(self, choice: Choice, ladder: list[Knobs], bar: float) -> tuple[Plan | None, Plan | None]:
        """Bisect the rungs that promise more than the bar; along them the need falls."""
        layout, size = choice.layout, choice.micro_batch
        last = len(ladder) - 1
        while last >= 0 and self._promise(choice, ladder[last]) <= bar:
            last -= 1
        if last < 0:
            return None, None
        if not self.pricer.fits(layout, size, ladder[last]):
            return None, self.pricer.plan(layout, size, ladder[last])
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self.pricer.fits(layout, size, ladder[middle]):
                high = middle
            else:
                low = middle + 1
        plans = [self.pricer.plan(layout, size, knobs) for knobs in ladder[max(0, high - 1) : high + 1]]
        return plans[-1], plans[0] if high else None
