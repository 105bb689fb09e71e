"""What our engine sends for the tokens of one microbatch: tensor parallel parts, embedding, loss, balancing losses."""

from collections.abc import Iterator

from threefold.cost.ledger.calls import Call, Sizes, all_reduce, gather, scatter
from threefold.plan.plan import Plan
from threefold.spec.model import Layer, MlaSpec

# Of logits in fp32 that the loss holds at a time, in whole tiles of tokens.
_LOGITS_BYTES = {"cpu": 256 * 2**20}
_GPU_LOGITS_BYTES = 5 * 2**30
_TILE, _FEWEST_TOKENS = 128, 64


def tensor_calls(plan: Plan, layer: Layer, sizes: Sizes) -> Iterator[Call]:
    """A cut part gathers the sequence, or only the latents of it, and sums its output back into shares."""
    tp, model = plan.layout.tp, plan.model
    column = sizes.tokens * sizes.width
    spec = model.attention
    if layer.mixer == "attention" and isinstance(spec, MlaSpec):
        yield from gather("tp", tp, column * ((spec.q_rank or model.dim) + spec.kv_rank + spec.rope_dim))
        yield from _beside_product(plan, column * model.dim)
    elif layer.mixer != "none":
        yield from 2 * _beside_product(plan, column * model.dim)
    for _ in range((layer.ffn == "dense") + has_shared(plan, layer)):
        yield from 2 * _beside_product(plan, column * model.dim)


def _beside_product(plan: Plan, share: int) -> list[Call]:
    """Gathered before a product or summed behind it, and the transpose in the backward; rings where they overlap."""
    tp = plan.layout.tp
    return [("tp", "send", share)] * (2 * (tp - 1)) if plan.knobs.tp_overlap else gather("tp", tp, share)


def has_shared(plan: Plan, layer: Layer) -> bool:
    return bool(layer.ffn == "moe" and plan.model.moe and plan.model.moe.num_shared)


def balance_calls(plan: Plan, layer: Layer, sizes: Sizes) -> Iterator[Call]:
    """Copies of tokens at each expert, over all that share a microbatch: of all its sequences, or of each."""
    job, size = plan.job, plan.layout.cp * plan.layout.tp
    if layer.ffn == "moe":
        row = sizes.wide * plan.model.num_experts
        if job.aux_loss:
            yield from all_reduce("cp x tp", size, row)
        if job.seq_aux_loss:
            yield from all_reduce("cp x tp", size, row * job.micro_batch)


def end_calls(plan: Plan, sizes: Sizes) -> Iterator[Call]:
    """Embedding and loss, for the next token and again for each MTP depth."""
    tp = plan.layout.tp
    share = sizes.tokens * sizes.width * plan.model.dim
    for _ in range(1 + plan.mtp):
        yield from scatter("tp", tp, share)
        yield from gather("tp", tp, share)
        for tokens in _loss_chunks(plan, sizes):
            # The largest logit of a token; then the sum of exponentials, and the logit of its label.
            yield from all_reduce("tp", tp, sizes.wide * tokens)
            yield from all_reduce("tp", tp, sizes.wide * tokens * 2)


def _loss_chunks(plan: Plan, sizes: Sizes) -> list[int]:
    """Tokens of each chunk, of all that the tensor-parallel group holds."""
    tokens, vocab = sizes.tokens * plan.layout.tp, -(-plan.model.vocab // plan.layout.tp)
    most = max(_FEWEST_TOKENS, _LOGITS_BYTES.get(plan.cluster.chip, _GPU_LOGITS_BYTES) // (4 * vocab))
    number = max(1, -(-tokens // most))
    chunk = -(-tokens // (number * _TILE)) * _TILE or _TILE
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
