"""Seconds of the chunks of the gated delta rule. States pass from one chunk to the next; all else is done by heads."""

from threefold.cost.delta_rule import DELTA_CHUNK, cp_comm_of, uses_fla
from threefold.cost.rates import Rates
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

# Heads x sequences of the step behind `fla_chunk_seconds` (benchmarks/results/step-qwen3-next-h200.json).
MEASURED_HEADS = 32 * 4
# A chunk of so few heads that passing states is most of it: the rate of three published rows with 4 to 8 heads a rank
# (`chunk_seconds` of Megatron Bridge in docs/log/estimate.md). What is between is assumed to be proportional.
FEW_HEADS_SECONDS = 15e-6


def chunks_seconds(plan: Plan, layer: Layer, seq_len: int, rates: Rates) -> float:
    """Forward and backward of the chunks of a microbatch in a layer. Kernels of flash-linear-attention take as long as
    their heads, from a few heads on; other chunks run one after the other, however many ranks share the heads."""
    if layer.mixer != "delta":
        return 0.0
    heads = delta_heads(plan)
    of_heads = max(FEW_HEADS_SECONDS, rates.fla_chunk_seconds * heads / MEASURED_HEADS)
    return seq_len / DELTA_CHUNK * (of_heads if heads else rates.chunk_seconds)


def delta_heads(plan: Plan) -> float:
    """Heads x sequences of a rank that kernels of flash-linear-attention work on at once; 0 where they do not run."""
    cp_comm, delta = cp_comm_of(plan, "delta"), plan.model.delta
    if delta is None or not uses_fla(plan, cp_comm):
        return 0.0
    shards = plan.layout.tp * (plan.layout.cp if cp_comm == "a2a" else 1)
    return delta.num_v_heads / shards * plan.job.micro_batch
