"""Seconds of the chunks of the gated delta rule, which run one after the other."""

from threefold.cost.delta_rule import DELTA_CHUNK, last_cp_comm, uses_fla
from threefold.cost.rates import Rates
from threefold.plan.plan import Plan
from threefold.spec.model import Layer


def chunks_seconds(plan: Plan, layer: Layer, seq_len: int, rates: Rates) -> float:
    """Forward and backward of the chunks of one sequence in a layer, however many ranks share its heads."""
    if layer.mixer != "delta":
        return 0.0
    is_fla = uses_fla(plan, last_cp_comm(plan))
    return seq_len / DELTA_CHUNK * (rates.fla_chunk_seconds if is_fla else rates.chunk_seconds)
