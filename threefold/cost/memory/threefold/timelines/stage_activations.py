"""Activations of a pipeline rank of our own engine: those of its layers for all microbatches in flight, and the ends.

`model.py` adds them to the states of a stage at the moment of the peak. `activations.py` counts those of one layer.
"""

from collections.abc import Sequence

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.local_sizes import FP32, INT64, LocalSizes
from threefold.cost.memory.threefold.timelines.pipeline_buffers import PipelineBuffers
from threefold.cost.stage_contents import StageContents, chunk_layers, first_gradient_in
from threefold.cost.trained_weights import first_gradient
from threefold.plan.plan import Plan
from threefold.spec.model import Layer


def add_stage_activations(
    plan: Plan,
    stage: int,
    contents: StageContents,
    saved: dict[Layer, Terms],
    terms: Terms,
    in_flight: Sequence[int],
    finished: Sequence[int],
) -> None:
    """Add to `terms` the activations of every microbatch in flight, and the token ids of the whole step.

    `saved` is what each kind of layer saves on the device, `in_flight` the microbatches by chunk, and `finished` those
    whose backward is over.
    """
    local = LocalSizes(plan)
    b, dim, t = local.element_bytes, plan.model.dim, local.tokens
    for chunk, count in zip(contents.chunks, in_flight, strict=False):
        for layer in (layers := chunk_layers(plan, chunk)):
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count
        terms["attention"] = terms.get("attention", 0.0) + _rope_tables(local, layers) * count
        # An MTP depth saves the next token's embedding and the hidden state, the norms of both side by side, and the
        # input of its last norm.
        is_norm_input = chunk.embedding and bool(layers) and first_gradient_in(layers[0]) == "input"
        embedded = b * dim * t * (chunk.mtp + is_norm_input)
        final_norm = (local.residual_bytes + (b * dim * t if local.model.streams else 0.0)) * chunk.loss
        ends = chunk.mtp * b * dim * t * 5 + final_norm - embedded
        # The first norm saves an embedding without a gradient only for a gradient of its own, or to be recomputed.
        is_recomputed = bool(local.recompute & {"layernorm", "full"})
        if is_norm_input and first_gradient(plan) == (0, "mixer") and not is_recomputed:
            embedded -= b * dim * t
        terms["norms"] = terms.get("norms", 0.0) + ends * count
        terms["embedding"] = terms.get("embedding", 0.0) + embedded * count
        if chunk.embedding:
            terms["embedding"] += 2 * INT64 * local.gathered_tokens * count
    num_buffers = PipelineBuffers(plan, stage, contents).count(in_flight, finished)
    terms["norms"] = terms.get("norms", 0.0) + num_buffers * local.residual_bytes
    step_tokens = plan.job.micro_batch * plan.job.seq_len
    terms["embedding"] = terms.get("embedding", 0.0) + 2 * INT64 * step_tokens * max(1, plan.num_microbatches)


def _rope_tables(local: LocalSizes, layers: Sequence[Layer]) -> float:
    """Cosine and sine of the rotary embedding in fp32, which all layers of a kind share."""
    dims = sum(spec.rope_dim for spec in {local.model.attention_of(layer) for layer in layers} if spec)
    return FP32 * dims * local.gathered_tokens
