"""Prices: bytes and seconds of a choice, cached, with a cheap promise that orders the search."""

from collections import Counter
from dataclasses import dataclass, replace

from threefold.cost.estimate import estimate
from threefold.cost.memory import memory
from threefold.cost.rates import Rates, calibration
from threefold.cost.time import layer_time, loss_seconds, step_time
from threefold.layout.degrees import Layout
from threefold.layout.stages import balance, format_stages
from threefold.plan.plan import Knobs, Plan
from threefold.search.knobs import Rung, allowed, on_rung, parts, selective_sets
from threefold.search.space import Space

MANY = 2**20  # microbatches: the promise is that of a step without end effects
LEANER = 0.05  # by how much stages of another number of chunks may be evener
TOLERANCE = 0.005  # a written stage layout has to be worth its line


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the space without its rung of the ladder."""

    layout: Layout
    micro_batch: int
    knobs: Knobs
    promise: float  # tokens/s at best
    sure_promise: float  # the same at the slow end of the error band


@dataclass(frozen=True, slots=True)
class Priced:
    """A choice on its rung: what it needs and what it reaches."""

    plan: Plan
    device_bytes: float
    tokens_per_second: float
    sure: float  # tokens/s at the slow end of the error band

    @property
    def headroom(self) -> float:
        """Part of the chip's memory that stays free; negative when the plan does not fit."""
        return 1 - self.device_bytes / self.plan.chip.memory_bytes


class Pricer:
    """Prices choices of one space; what does not depend on the whole choice is computed once."""

    def __init__(self, space: Space, reserve: float = 0.0) -> None:
        self.space = space
        self.reserve = reserve  # part of the memory that must stay free
        self.rates: Rates = calibration(space.base.target).rates
        self.rungs: tuple[list[Rung], list[Rung]] = ([], [])
        self.num_memory = 0
        self.num_time = 0
        self._seconds: dict[object, float] = {}
        self._bytes: dict[object, float] = {}
        self._least: dict[object, float] = {}
        self._factors: dict[object, float] = {}
        self._climbs: dict[Knobs, tuple[list[Knobs], list[Knobs], list[Knobs]]] = {}

    def plan(self, layout: Layout, micro_batch: int, knobs: Knobs) -> Plan:
        base = self.space.base
        return replace(base, layout=layout, job=replace(base.job, micro_batch=micro_batch), knobs=knobs, written=())

    def microbatch_seconds(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """Forward and backward of the whole model, all stages after one another."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, micro_batch, knobs)
        if key not in self._seconds:
            plan = self.plan(layout, micro_batch, knobs)
            plan = replace(plan, job=replace(plan.job, global_batch=MANY * max(1, layout.dp) * micro_batch))
            layers, mtp, loss = self._parts(plan)
            counts = Counter(plan.model.layers)
            self._seconds[key] = sum(layers[kind] * count for kind, count in counts.items()) + plan.mtp * mtp + loss
        return self._seconds[key]

    def _parts(self, plan: Plan) -> tuple[dict[object, float], float, float]:
        """Seconds of each kind of layer, of an MTP depth and of the loss, for one microbatch."""
        model = plan.model
        kinds = {*model.layers, *(model.mtp_depth if plan.mtp else ())}
        layers: dict[object, float] = {kind: layer_time(plan, kind, self.rates).total for kind in kinds}
        loss = loss_seconds(plan, self.rates)
        mtp = sum(layers[kind] for kind in model.mtp_depth) + loss if plan.mtp else 0.0
        return layers, mtp, loss

    def promise(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """Tokens/s if stages were even and nothing but layers, loss and bubble took time."""
        work, job = self.microbatch_seconds(layout, micro_batch, knobs), self.space.base.job
        count = job.global_batch // (layout.dp * micro_batch)
        bubble = work * (1 - 1 / layout.pp) / layout.vpp
        if layout.schedule in ("zero-bubble", "dualpipev"):
            bubble /= 3
        return job.global_batch * job.seq_len / (work / layout.pp * count + bubble)

    def need(self, plan: Plan) -> float:
        """Bytes of the fullest rank."""
        key = (plan.layout, plan.job.micro_batch, plan.knobs)
        if key not in self._bytes:
            self.num_memory += 1
            self._bytes[key] = memory(plan).device_bytes
        return self._bytes[key]

    def fits(self, layout: Layout, micro_batch: int, knobs: Knobs) -> bool:
        limit = self.space.base.chip.memory_bytes * (1 - self.reserve)
        if self._least_need(layout, micro_batch, knobs) > limit * (1 + LEANER):
            return False
        return self.need(self.plan(layout, micro_batch, knobs)) <= limit

    def _least_need(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """The need of these degrees and this rung without what only adds to it.

        Plans that differ in chunks, overlap, graphs and transport share it, so most misfits cost nothing.
        """
        degrees = (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.stages)
        rung = (knobs.recompute, knobs.optimizer_offload, knobs.precision, knobs.data_parallel)
        key = (degrees, micro_batch, rung)
        if key not in self._least:
            base = self.space.base.knobs
            lean = layout if layout.stages else replace(layout, vpp=1, schedule=None)
            plain = replace(knobs, ep_overlap=False, graphs=(), dispatcher=base.dispatcher, cp_comm=base.cp_comm)
            self._least[key] = self.need(self.plan(lean, micro_batch, plain))
        return self._least[key]

    def speed(self, plan: Plan) -> float:
        """Tokens/s of a plan, whether it fits or not."""
        self.num_time += 1
        return plan.tokens_per_step / step_time(plan, self.rates).step_seconds

    def priced(self, plan: Plan) -> Priced:
        speed = self.speed(plan)
        return Priced(plan, self.need(plan), speed, speed / self.slow_end(plan.layout, plan.knobs))

    def slow_end(self, layout: Layout, knobs: Knobs) -> float:
        """How many times longer a step may take than predicted."""
        sharded = knobs.data_parallel != "zero1"
        key = (knobs.precision, knobs.dispatcher, layout.cp > 1, layout.ep > 1, sharded)
        if key not in self._factors:
            one = estimate(self.plan(layout, self.space.base.job.micro_batch, knobs))
            band = one.seconds_band[1] / one.time.step_seconds - 1
            # Of the published runs that calibrate the estimate next to none trains experts under FSDP.
            unseen = sharded and self.space.base.model.is_moe and not self.space.base.is_vlm
            self._factors[key] = 1 + band * (2 if unseen else 1)
        return self._factors[key]

    def build_ladder(self, layout: Layout, micro_batch: int, knobs: Knobs) -> None:
        """Two ladders, without and with offload, modules in the order of bytes given back a second of redoing."""
        space = self.space
        base = space.base.knobs
        offloads = [0.0, 1.0] if space.free("knobs.optimizer_offload") else [base.optimizer_offload]
        if space.base.chip.architecture == "cpu":
            offloads = offloads[:1]
        if not space.free("knobs.recompute"):
            sets = [base.recompute]
        else:
            order = self._by_worth(layout, micro_batch, knobs)
            sets = [*selective_sets(order, space.base.model.is_moe), ("full",)]
        ladders = [[Rung(recompute, offload) for recompute in sets] for offload in offloads]
        self.rungs = (ladders[0], ladders[1] if len(ladders) > 1 else [])

    def _by_worth(self, layout: Layout, micro_batch: int, knobs: Knobs) -> list[str]:
        def kept(recompute: tuple[str, ...]) -> float:
            worst = memory(self.plan(layout, micro_batch, replace(knobs, recompute=recompute))).worst
            return worst.peak_bytes - worst.terms.get("recompute", 0.0)

        def seconds(recompute: tuple[str, ...]) -> float:
            return self.microbatch_seconds(layout, micro_batch, replace(knobs, recompute=recompute))

        names = parts(self.space.base.model)
        whole, once = kept(()), seconds(())
        worth = {name: (whole - kept((name,))) / max(1e-9, seconds((name,)) - once) for name in names}
        return sorted((name for name in names if worth[name] > 0), key=lambda name: -worth[name])

    def climb(self, choice: Choice, bar: float) -> tuple[Plan | None, Plan | None]:
        """The plan on the first rung that fits, if it promises more than the bar; and a faster one that does not fit.

        Selective recompute comes before full, and offload last: it is tried where no selective set fits alone.
        """
        selective, full, hosted = self._ladders(choice.knobs)
        found, short = self._first_fit(choice, selective, bar)
        if found is not None or self._mild_fits(choice):
            return found, short
        options = []
        for ladder in (full, hosted):
            plan, under = self._first_fit(choice, ladder, bar)
            short = short or under
            if plan is not None:
                options.append(plan)
        return (max(options, key=self.speed) if len(options) > 1 else options[0] if options else None), short

    def _ladders(self, knobs: Knobs) -> tuple[list[Knobs], list[Knobs], list[Knobs]]:
        """The mode on each rung: selective sets, full recompute, and the same again with offload."""
        if knobs not in self._climbs:
            free = self.space.free("knobs.graphs")
            plain, hosted = (
                [on_rung(knobs, rung, free) for rung in ladder if allowed(knobs, rung, self.space.base)]
                for ladder in self.rungs
            )
            selective = [one for one in plain if "full" not in one.recompute]
            self._climbs[knobs] = (selective, plain[len(selective) :], hosted)
        return self._climbs[knobs]

    def _mild_fits(self, choice: Choice) -> bool:
        """Whether the degrees fit with selective recompute at the smallest microbatch: then nothing more is tried."""
        modules = [rung for rung in self.rungs[0] if "full" not in rung.recompute]
        if not modules:
            return False
        size = 1 if self.space.free("job.micro_batch") else choice.micro_batch
        knobs = replace(choice.knobs, recompute=modules[-1].recompute, optimizer_offload=modules[-1].offload)
        limit = self.space.base.chip.memory_bytes * (1 - self.reserve)
        return self._least_need(choice.layout, size, knobs) <= limit

    def _first_fit(self, choice: Choice, ladder: list[Knobs], bar: float) -> tuple[Plan | None, Plan | None]:
        """Bisect the rungs that promise more than the bar; along them the need falls."""
        layout, size = choice.layout, choice.micro_batch
        last = len(ladder) - 1
        while last >= 0 and self.promise(layout, size, ladder[last]) <= bar:
            last -= 1
        if last < 0:
            return None, None
        if not self.fits(layout, size, ladder[last]):
            return None, self.plan(layout, size, ladder[last])
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self.fits(layout, size, ladder[middle]):
                high = middle
            else:
                low = middle + 1
        plans = [self.plan(layout, size, knobs) for knobs in ladder[max(0, high - 1) : high + 1]]
        return plans[-1], plans[0] if high else None

    def with_stages(self, one: Priced) -> Priced:
        """The same plan with stages weighted by predicted seconds, where that is clearly faster and fits."""
        plan, space = one.plan, self.space
        layout = plan.layout
        if layout.pp == 1 or layout.stages is not None or not space.free("layout.stages"):
            return one
        layers, mtp, loss = self._parts(plan)
        weights = [layers[kind] for kind in plan.model.layers]
        chunks = balance(len(weights), layout.chunks, plan.mtp, weights, 0.0, mtp, loss)
        if chunks == plan.chunks or any(not str(chunk) for chunk in chunks):
            return one
        other = self.priced(replace(plan, layout=replace(layout, stages=format_stages(chunks))))
        better = other.tokens_per_second > one.tokens_per_second * (1 + TOLERANCE)
        return other if better and self.fits(other.plan.layout, plan.job.micro_batch, plan.knobs) else one
