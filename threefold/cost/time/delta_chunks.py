"""Seconds of the chunks of the gated delta rule: the state passes from chunk to chunk, however many ranks share the
heads."""

from threefold.cost.rates import Rates
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

CHUNK_TOKENS = 64


def chunks_seconds(plan: Plan, layer: Layer, seq_len: int, rates: Rates) -> float:
    """Forward and backward of the chunks of one sequence in a layer."""
    if layer.mixer != "delta":
        return 0.0
    return seq_len / CHUNK_TOKENS * (rates.fla_chunk_seconds if _uses_fla(plan) else rates.chunk_seconds)


def _uses_fla(plan: Plan) -> bool:
    """Whether our engine is asked for flash-linear-attention's kernels and has them: not in fp32, and not on spans of a
    sequence that context-parallel ranks pass states between."""
    passes_states = plan.layout.cp > 1 and plan.knobs.cp_comm[-1:] != ("a2a",)
    return plan.knobs.delta_kernels == "fla" and plan.knobs.precision != "fp32" and not passes_states
