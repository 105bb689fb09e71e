"""Prices: bytes and seconds of a choice, cached, with a cheap promise that orders the search."""

from collections import Counter
from dataclasses import dataclass, replace

from threefold.cost.estimate import estimate
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import Rates, calibration
from threefold.cost.time.layer import layer_time
from threefold.cost.time.outside_layers import loss_seconds
from threefold.cost.time.step import step_time
from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan
from threefold.search.space import Space

MANY = 2**20  # microbatches: the promise is that of a step without end effects
LEANER = 0.05  # by how much stages of another number of chunks may be evener


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

    def __init__(self, space: Space) -> None:
        self.space = space
        self.reserve = 0.0  # part of the memory that must stay free
        self.rates: Rates = calibration(space.base.target).rates
        self.num_memory = 0
        self.num_time = 0
        self._seconds: dict[object, float] = {}
        self._bytes: dict[object, float] = {}
        self._least: dict[object, float] = {}
        self._factors: dict[object, float] = {}

    def plan(self, layout: Layout, micro_batch: int, knobs: Knobs) -> Plan:
        base = self.space.base
        return replace(base, layout=layout, job=replace(base.job, micro_batch=micro_batch), knobs=knobs, written=())

    def microbatch_seconds(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """Forward and backward of the whole model, all stages after one another."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, micro_batch, knobs)
        if key not in self._seconds:
            plan = self.plan(layout, micro_batch, knobs)
            plan = replace(plan, job=replace(plan.job, global_batch=MANY * max(1, layout.dp) * micro_batch))
            layers, mtp, loss = self.parts(plan)
            counts = Counter(plan.model.layers)
            self._seconds[key] = sum(layers[kind] * count for kind, count in counts.items()) + plan.mtp * mtp + loss
        return self._seconds[key]

    def parts(self, plan: Plan) -> tuple[dict[object, float], float, float]:
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

    @property
    def limit(self) -> float:
        """Bytes that a plan may need."""
        return self.space.base.chip.memory_bytes * (1 - self.reserve)

    def fits(self, layout: Layout, micro_batch: int, knobs: Knobs) -> bool:
        if self.least_need(layout, micro_batch, knobs) > self.limit * (1 + LEANER):
            return False
        return self.need(self.plan(layout, micro_batch, knobs)) <= self.limit

    def least_need(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
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
            # Next to none of the published runs that calibrate the estimate trains experts under FSDP.
            unseen = sharded and self.space.base.model.is_moe and not self.space.base.is_vlm
            self._factors[key] = 1 + band * (2 if unseen else 1)
        return self._factors[key]
