"""A rank's part of a microbatch in our own engine: how many tokens and rows, of how many bytes, and how many at once.

`t` counts the tokens a rank holds between modules, `s` those inside a module cut by tensor parallel, `r` experts' rows.
"""

import math
from dataclasses import dataclass, replace

from threefold.cost.formats import kernels_take_experts
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MlaSpec, ModelSpec
from threefold.units import GIB

FP32, INDEX = 4, 8
# Bytes of an element of a product's input, as it is kept in a narrow format, scales included.
_SQUARES = 1 + FP32 / 128**2
_NARROW = {"fp8-blockwise": _SQUARES, "fp8-rowwise": _SQUARES, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
WIDEST = 2 * GIB  # of the widest tensor of a chunk, where work is done in chunks


@dataclass(frozen=True)
class Share:
    """A rank's part of a microbatch."""

    plan: Plan
    skew: float = 1.0

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def plain(self) -> "Share":
        """Without recompute."""
        if not self.again:
            return self
        return replace(self, plan=replace(self.plan, knobs=replace(self.plan.knobs, recompute=())))

    @property
    def width(self) -> int:
        return 4 if self.plan.knobs.precision == "fp32" else 2

    @property
    def narrow(self) -> bool:
        return self.width == 2

    @property
    def low(self) -> float:
        """Bytes of an element of a product's input in a narrow format, which is kept beside what others keep of it; 0
        where products keep it as it is."""
        return _NARROW.get(self.plan.knobs.precision, 1.0) if self.plan.low_precision else 0.0

    @property
    def input(self) -> float:
        """Of an element that only a product keeps."""
        return self.low or self.width

    @property
    def fused(self) -> bool:
        """Norms, rotary embedding, router and activations are kernels of our own, which keep less."""
        return self.plan.chip.architecture != "cpu"

    def scores(self, spec: GqaSpec | MlaSpec) -> float:
        """Of attention, all of which are kept where no kernel takes its numbers: in fp32 on a GPU."""
        if self.narrow or not self.fused or self.plan.layout.cp > 1:
            return 0.0
        return FP32 * spec.num_heads / self.tp * self.s * self.plan.job.seq_len

    def beside_scores(self, spec: GqaSpec | MlaSpec) -> float:
        """Keys and values of every head, and which keys are seen."""
        if not self.scores(spec):
            return 0.0
        wide = 2 * spec.head_dim if isinstance(spec, GqaSpec) else spec.qk_dim + spec.v_dim
        return FP32 * spec.num_heads / self.tp * wide * self.s + self.plan.job.seq_len**2

    @property
    def tp(self) -> int:
        return self.plan.layout.tp

    @property
    def s(self) -> float:
        return self.plan.job.micro_batch * self.plan.job.seq_len / self.plan.layout.cp

    @property
    def t(self) -> float:
        return self.s / self.tp

    @property
    def sent(self) -> float:
        """Rows that leave for the experts."""
        return self.t * self.model.moe.top_k if self.model.moe else 0.0

    @property
    def r(self) -> float:
        """Rows at the experts of a rank; every slice of an expert sees those of all slices."""
        job = self.plan.job
        padded = job.capacity_factor is not None and job.capacity_scope == "expert"
        load = job.capacity_factor if padded and job.capacity_factor is not None else self.skew
        return self.sent * load * self.plan.layout.etp

    @property
    def all_here(self) -> bool:
        """Tokens find their experts on their own rank, and none is dropped."""
        return self.plan.layout.ep * self.plan.layout.etp == 1 and self.plan.job.capacity_factor is None

    @property
    def in_one(self) -> bool:
        """Experts read tokens where they are."""
        return self.all_here and self.fused_experts

    @property
    def fused_experts(self) -> bool:
        """All of an expert in kernels that keep its input, or that in a narrow format, and FC1's output."""
        if self.low:
            return kernels_take_experts(self.plan)
        return self.plan.knobs.expert_fusion

    @property
    def sinks(self) -> bool:
        """Gradients of fused experts are added to their sums as they are made."""
        knobs, layout = self.plan.knobs, self.plan.layout
        summed = layout.gpus > 1 or self.plan.num_microbatches > 1
        return (
            knobs.grad_accum_fusion
            and knobs.data_parallel == "zero1"
            and layout.pp == 1
            and not knobs.graphs
            and summed
        )

    @property
    def at_once(self) -> float:
        """Of the tokens that go to experts: they go in chunks where all experts are here."""
        return self._chunk(self.sent * self.model.dim) if self.all_here else 1.0

    @property
    def mlp_at_once(self) -> float:
        """Of the tokens of a dense part that is recomputed."""
        return 1.0 if self.gathers else self._chunk(self.t * self.model.dense_dim)

    @property
    def heads_at_once(self) -> float:
        """Of MLA's heads, where they are made again."""
        spec = self.model.attention
        if not isinstance(spec, MlaSpec) or self.plan.layout.cp > 1:
            return 1.0
        return self._chunk(self.s * spec.num_heads / self.tp * spec.qk_dim)

    def _chunk(self, elements: float) -> float:
        return 1 / max(1, math.ceil(elements * self.width / WIDEST))

    @property
    def unit(self) -> int:
        """Layers that full recompute takes at a time."""
        uniform = "full" in self.again and self.plan.knobs.recompute_method != "block"
        return max(1, self.plan.knobs.recompute_layers or 1) if uniform else 1

    @property
    def again(self) -> frozenset[str]:
        return frozenset(self.plan.knobs.recompute)

    @property
    def gathers(self) -> bool:
        return self.tp > 1
