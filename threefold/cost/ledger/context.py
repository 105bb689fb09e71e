"""What our engine sends for context parallelism, of one mixer and one microbatch."""

from collections.abc import Iterator
from math import gcd

from threefold.cost.ledger.calls import Call, Sizes, all_gather, all_to_all, gather, reduce_scatter
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec


def context_calls(plan: Plan, layer: Layer, kind: str, sizes: Sizes) -> Iterator[Call]:
    if plan.layout.cp == 1:
        return
    if layer.mixer == "delta" and plan.model.delta:
        yield from _delta(plan, plan.model.delta, kind, sizes)
        return
    spec = plan.model.local_attention if layer.mixer == "window" else plan.model.attention
    if spec is None:
        return
    cp = plan.layout.cp
    traders, trading, readers, reading = "cp", 1, "cp", cp
    if kind == "a2a":
        trading, reading = cp, 1
    elif kind == "a2a+p2p":
        trading = inner_ranks(plan)
        traders, readers, reading = "cp inner", "cp outer", cp // trading
    # Between modules tokens are cut by tp; inside, heads are.
    column = sizes.tokens * plan.layout.tp * sizes.width
    queries, keys, values, out = _columns(spec, plan.layout.tp)
    for _ in ("forward", "backward"):
        yield from all_to_all(traders, trading, column * (queries + keys + values))
        yield from all_to_all(traders, trading, column * out)
    if kind == "all_gather":
        for share in (column * keys, column * values):
            yield from 2 * all_gather(readers, reading, share)  # not kept for the backward
            yield from reduce_scatter(readers, reading, share)
    else:
        # Forward, again backward, and gradients: each goes round once.
        yield from [(readers, "send", column * (keys + values))] * (3 * (reading - 1))


def inner_ranks(plan: Plan) -> int:
    """Neighbours within a fast domain that trade heads; where one domain holds all of cp, nobody does."""
    link = plan.link("cp")
    return gcd(plan.layout.cp, link.in_domain) if link.link == "network" else 1


def _columns(spec: GqaSpec | MlaSpec, tp: int) -> tuple[int, int, int, int]:
    """Of queries, keys, values and output on a rank. With more ranks than key/value heads, ranks hold copies."""
    heads = spec.num_heads // tp
    if isinstance(spec, MlaSpec):
        return heads * spec.qk_dim, heads * spec.qk_dim, heads * spec.v_dim, heads * spec.v_dim
    keys = max(1, spec.num_kv_heads // tp) * spec.head_dim
    return heads * spec.head_dim, keys, keys, heads * spec.head_dim


def _delta(plan: Plan, spec: DeltaSpec, kind: str, sizes: Sizes) -> Iterator[Call]:
    """Sequence traded for heads; or the ends of each rank's two spans, for the convolution, and what the spans do to
    a state, gathered."""
    tp, cp = plan.layout.tp, plan.layout.cp
    column = sizes.tokens * sizes.width  # of all heads: tp cuts them as it cuts tokens elsewhere
    if kind == "a2a" and spec.num_k_heads // tp % cp == 0:
        for _ in ("forward", "backward"):
            yield from all_to_all("cp", cp, column * (2 * spec.keys + spec.values + 2 * spec.num_v_heads))
            yield from all_to_all("cp", cp, column * spec.values)
        return
    spans = 2 * plan.job.micro_batch
    tail = min(spec.conv - 1, plan.job.seq_len // (2 * cp))
    channels = (2 * spec.keys + spec.values) // tp
    yield from gather("cp", cp, spans * tail * channels * sizes.width)
    state = spec.num_v_heads // tp * spec.k_dim * (spec.v_dim + spec.k_dim)
    yield from gather("cp", cp, spans * state * sizes.wide)
