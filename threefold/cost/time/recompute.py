"""Seconds of recompute: what the backward of a layer recomputes, module by module.

`time/layer.py` calls `recompute_seconds` with the layer's forward; `time/host_launches.py` asks which modules are
recomputed.
"""

from dataclasses import dataclass

from threefold.cost.format_support import uses_fused_experts
from threefold.cost.layer_work import BF16, Work
from threefold.cost.rates import Rates
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.time.delta_chunks import chunks_seconds
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.spec.flops import layer_flops
from threefold.spec.model import Layer, MlaSpec


@dataclass(frozen=True, slots=True)
class ForwardSeconds:
    """Forward seconds of a layer, by part."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    quantize: float
    tp: float

    @property
    def total(self) -> float:
        return self.gemm + self.experts + self.attention + self.elementwise + self.quantize + self.tp


def recomputed_modules(plan: Plan) -> set[str]:
    """Names of the modules that are recomputed, without those that the stack recomputes as a part of another one."""
    names = set(plan.knobs.recompute)
    if not STACK_TRAITS[plan.target].recomputes_moe_as_one:
        return names
    if "full" in names:
        return {"full"}
    if "moe" in names:
        names -= INSIDE_MOE
    return names - {"moe_act"} if uses_fused_experts(plan) else names


def recompute_seconds(plan: Plan, layer: Layer, forward: ForwardSeconds, work: Work, rates: Rates) -> float:
    """Seconds of recompute in the backward of a layer."""
    names, traits = recomputed_modules(plan), STACK_TRAITS[plan.target]
    if not names:
        return 0.0
    if "full" in names:
        is_saved = "core_attn" in plan.knobs.recompute_save and plan.model.attention_of(layer) is not None
        return forward.total - (forward.attention if is_saved and plan.target == "threefold" else 0.0)
    flops = layer_flops(plan.model, layer, plan.job.seq_len)
    dense = flops.projections + flops.shared + (flops.ffn if layer.ffn == "dense" else 0.0)
    # In an MoE layer most of the quantization belongs to the experts.
    gemm = forward.gemm + forward.quantize * (0.3 if layer.ffn == "moe" else 1.0)
    bandwidth = plan.chip.memory_bandwidth * rates.memory
    seconds = 0.0
    if "core_attn" in names:
        seconds += forward.attention
        if layer.mixer in ("delta", "mamba") and traits.recomputes_delta_rule:
            chunks = chunks_seconds(plan, layer, plan.job.seq_len, rates)
            seconds += work.scan_bytes * rates.scan / bandwidth + chunks / 3
    if "layernorm" in names:
        norms = 2 * 3 * BF16 * plan.model.dim * work.dense_rows / plan.layout.tp
        seconds += norms * rates.passes / bandwidth
    if layer.ffn == "moe":
        act = work.expert_moved_bytes * rates.passes / bandwidth
        if "moe" in names:
            seconds += forward.experts + act + 0.5 * forward.elementwise + 0.7 * forward.quantize
        elif "moe_act" in names:
            seconds += act
        if "shared_experts" in names or (traits.recomputes_moe_as_one and "moe" in names):
            seconds += gemm * flops.shared / dense
    elif "mlp" in names and layer.ffn == "dense":
        seconds += gemm * flops.ffn / dense + forward.tp / 4  # its input is gathered once more
    recomputes_heads = "mla_up_proj" in names and not plan.exchanges_latents  # latents: `time/context_parallel.py`
    if recomputes_heads and layer.mixer == "attention" and isinstance(plan.model.attention, MlaSpec):
        spec = plan.model.attention
        up = spec.num_heads * ((spec.q_rank or 0) * spec.qk_dim + spec.kv_rank * (spec.nope_dim + spec.v_dim))
        seconds += gemm * 2 * up / dense
    recomputes_norm = "gdn_norm_out" in names and traits.recomputes_delta_rule
    if recomputes_norm and layer.mixer == "delta" and plan.model.delta:
        # The delta rule's output and the gate are read, and their product is written.
        moved = 3 * BF16 * plan.model.delta.values * work.dense_rows / plan.layout.tp
        seconds += moved * rates.passes / bandwidth
    return seconds
