"""Prices: bytes and seconds of a choice, cached, with a cheap promise that orders the search."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from threefold.cost.cp_exchange import cheaper_exchange, has_open_exchange
from threefold.cost.estimate import memory_band, time_band
from threefold.cost.memory.by_stack import fullest_bytes
from threefold.cost.rates import Rates, rates_of
from threefold.cost.time.layer import layer_time
from threefold.cost.time.optimizer import optimizer_seconds
from threefold.cost.time.outside_layers import loss_seconds
from threefold.cost.time.step import StepTime, step_time
from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan
from threefold.search.knobs import dispatchers
from threefold.search.space import Space

MANY = 2**20  # microbatches: the promise is that of a step without end effects
BOUND_EFFORT = 0.4  # of bounding a plan's memory, where estimating it takes 1
LEANER = 0.05  # by how much stages of another number of chunks may be evener


@dataclass(frozen=True, slots=True)
class Priced:
    """A choice on its rung: what it needs and what it reaches."""

    plan: Plan
    device_bytes: float
    tokens_per_second: float
    sure: float  # tokens/s at the slow end of the error band
    terms: Mapping[str, float] = field(default_factory=dict)  # of a step, in seconds

    @property
    def step_seconds(self) -> float:
        return self.plan.tokens_per_step / self.tokens_per_second

    @property
    def headroom(self) -> float:
        """Part of the chip's memory that stays free; negative when the plan does not fit."""
        return 1 - self.device_bytes / self.plan.chip.memory_bytes


class Pricer:
    """Prices choices of one space; what does not depend on the whole choice is computed once."""

    def __init__(self, space: Space, at_top: bool = True, room: float = 0.0) -> None:
        """`at_top`: whether memory is taken at the top of its band, or at the middle. `room`: the part of the chip's
        memory that is to be left."""
        self.space, self.at_top = space, at_top
        self.limit = (1 - room) * space.base.chip.memory_bytes  # bytes that a plan may need
        self.rates: Rates = rates_of(space.base)
        self.effort = 0.0  # estimates of memory so far; those that only bound it stop early
        self.num_time = 0
        self._seconds: dict[object, float] = {}
        self._host_seconds: dict[object, float] = {}
        self._bytes: dict[object, float] = {}
        self._misfits: set[object] = set()
        self._exchanges: dict[object, str] = {}  # of MLA's context parallelism
        self._least: dict[object, float] = {}
        self._factors: dict[object, float] = {}
        self.cp_comms: dict[object, str | tuple[str, ...]] = {}  # the best kind of CP for degrees and a precision
        self._counts = Counter(space.base.model.layers)

    def plan(self, layout: Layout, micro_batch: int, knobs: Knobs) -> Plan:
        base = self.space.base
        plan = replace(base, layout=layout, job=replace(base.job, micro_batch=micro_batch), knobs=knobs, written=())
        if not has_open_exchange(plan):
            return plan
        key = (layout.tp, layout.cp, knobs.cp_comm, knobs.precision, "mla_up_proj" in knobs.recompute)
        if key not in self._exchanges:
            self._exchanges[key] = cheaper_exchange(plan, self.rates)
        return replace(plan, knobs=replace(knobs, cp_exchange=self._exchanges[key]))

    def microbatch_seconds(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """Forward and backward of the whole model, all stages after one another."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, micro_batch, knobs)
        if key not in self._seconds:
            plan = self.plan(layout, micro_batch, knobs)
            plan = replace(plan, job=replace(plan.job, global_batch=MANY * max(1, layout.dp) * micro_batch))
            layers, mtp, loss = self.parts(plan)
            in_layers = sum(layers[kind] * count for kind, count in self._counts.items())
            self._seconds[key] = in_layers + plan.mtp * mtp + loss
        return self._seconds[key]

    def parts(self, plan: Plan) -> tuple[dict[object, float], float, float]:
        """Seconds of each kind of layer, of an MTP depth and of the loss, for one microbatch."""
        model = plan.model
        kinds = {*self._counts, *(model.mtp_depth if plan.mtp else ())}
        layers: dict[object, float] = {kind: layer_time(plan, kind, self.rates).total for kind in kinds}
        loss = loss_seconds(plan, self.rates)
        mtp = sum(layers[kind] for kind in model.mtp_depth) + loss if plan.mtp else 0.0
        return layers, mtp, loss

    def promise(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """Tokens/s if stages were even and nothing but layers, loss and bubble took time."""
        return self.promise_of(layout, micro_batch, self.microbatch_seconds(layout, micro_batch, knobs))

    def promise_of(self, layout: Layout, micro_batch: int, work: float) -> float:
        """The same where the seconds of a microbatch are known."""
        job = self.space.base.job
        count = job.global_batch // (layout.dp * micro_batch)
        bubble = work * (1 - 1 / layout.pp) / layout.vpp
        if layout.schedule in ("zero-bubble", "dualpipev"):
            bubble /= 3
        return job.global_batch * job.seq_len / (work / layout.pp * count + bubble)

    def host_seconds(self, layout: Layout, knobs: Knobs) -> float:
        """The optimizer's step, on the device and on the host, if a forward hides as much as it can."""
        key = (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, knobs.data_parallel, knobs.optimizer_offload)
        if key not in self._host_seconds:
            self._host_seconds[key] = sum(optimizer_seconds(self.plan(layout, 1, knobs), self.rates, math.inf))
        return self._host_seconds[key]

    def need(self, plan: Plan) -> float:
        """Bytes of the fullest rank, at the top of its band where the search asks for that."""
        key = (plan.layout, plan.job.micro_batch, plan.knobs)
        if key not in self._bytes:
            self.effort += 1
            self._bytes[key] = fullest_bytes(plan, self._band(plan))
        return self._bytes[key]

    def _band(self, plan: Plan) -> float:
        return memory_band(plan) if self.at_top else 0.0

    def fits(self, layout: Layout, micro_batch: int, knobs: Knobs) -> bool:
        if self.least_need(layout, micro_batch, knobs) > self.limit * (1 + LEANER):
            return False
        key = (layout, micro_batch, knobs)
        if key not in self._bytes and key not in self._misfits:
            self.effort += 1
            plan = self.plan(layout, micro_batch, knobs)
            need = fullest_bytes(plan, self._band(plan), self.limit)
            if need > self.limit:
                self._misfits.add(key)
            else:
                self._bytes[key] = need
        return key not in self._misfits and self._bytes[key] <= self.limit

    def least_need(self, layout: Layout, micro_batch: int, knobs: Knobs) -> float:
        """The need of these degrees and this rung without what only adds to it; past the limit not exact.

        Plans that differ in chunks, overlap, graphs and transport share it, so most misfits cost nothing. What misfits
        at one sequence a microbatch misfits at more.
        """
        if micro_batch > 1 and self.space.free("job.micro_batch"):
            smallest = self.least_need(layout, 1, knobs)
            if smallest > self.limit * (1 + LEANER):
                return smallest
        degrees = (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.stages)
        rung = (knobs.recompute, knobs.optimizer_offload, knobs.precision, knobs.data_parallel, knobs.expert_fusion)
        # The rule's states between ranks take more than heads that are traded: a list by layer stays as it is.
        cp_comm = self.space.base.knobs.cp_comm if isinstance(knobs.cp_comm, str) else knobs.cp_comm
        key = (degrees, micro_batch, rung, knobs.recompute_save, cp_comm)
        if key not in self._least:
            self.effort += BOUND_EFFORT
            base = self.space.base.knobs
            lean = layout if layout.stages else replace(layout, vpp=1, schedule=None)
            plain = replace(knobs, ep_overlap=False, graphs=(), dispatcher=base.dispatcher, cp_comm=cp_comm)
            plan = self.plan(lean, micro_batch, plain)
            self._least[key] = fullest_bytes(plan, self._band(plan), self.limit * (1 + LEANER))
        return self._least[key]

    def speed(self, plan: Plan) -> float:
        """Tokens/s of a plan, whether it fits or not."""
        return plan.tokens_per_step / self.time(plan).step_seconds

    def time(self, plan: Plan) -> StepTime:
        self.num_time += 1
        return step_time(plan, self.rates)

    def priced(self, plan: Plan) -> Priced:
        spent = self.time(plan)
        speed = plan.tokens_per_step / spent.step_seconds
        sure = speed / self.slow_end(plan.layout, plan.knobs)
        return Priced(plan, self.need(plan), speed, sure, spent.terms)

    def slow_end(self, layout: Layout, knobs: Knobs) -> float:
        """How many times longer a step may take than predicted.

        Formats do not count: they are ranked by throughput. A dispatcher that needs a reason has to win by more than
        its band, so that the band counts once more for it.
        """
        sharded = knobs.data_parallel != "zero1"
        needs_reason = knobs.dispatcher != dispatchers(self.space, layout)[0]
        key = (layout.cp > 1, layout.ep > 1, sharded, knobs.dispatcher if needs_reason else "")
        if key not in self._factors:
            base = self.space.base
            band = time_band(replace(base, layout=layout))
            # Next to none of the published runs that calibrate the estimate trains experts under FSDP.
            unseen = sharded and base.model.is_moe and not base.is_vlm
            reason = time_band(replace(base, layout=layout, knobs=knobs)) if needs_reason else 0.0
            self._factors[key] = (1 + band * (2 if unseen else 1)) * (1 + reason)
        return self._factors[key]
