"""What our own engine holds for a moment, beside what it keeps: in the loss, at the end of a forward, in a backward."""

import math

from threefold.cost.place import Held
from threefold.cost.share import FP32, WIDEST, Share
from threefold.spec.model import Layer, MlaSpec
from threefold.units import GIB

CHUNK_BYTES = {"cpu": GIB / 4}  # of a chunk's logits, counted in fp32; on GPUs 5 GiB
TILE = 128
GATHERED = 1024  # width of an expert beyond which torch's products are the faster ones, and want rows side by side
MUON_AT_ONCE = 2**26  # elements of the matrices that Muon makes orthogonal together


def loss_moment(share: Share, heads: int) -> tuple[float, float]:
    """(while a chunk of logits becomes a loss, what is kept of all heads for the backward)."""
    b, dim = share.width, share.model.dim
    vocab = -(-share.model.vocab // share.tp)
    limit = max(64, CHUNK_BYTES.get(share.plan.chip.architecture, 5 * GIB) // (4 * vocab))
    count = max(1, -(-share.s // limit))
    chunk = min(share.s, -(-share.s // (count * TILE)) * TILE)
    table = vocab * dim
    weight_grad = table * (b if count == 1 else FP32)
    kept = b * dim * share.s + weight_grad
    on_gpu = share.plan.chip.architecture not in CHUNK_BYTES
    if share.narrow and on_gpu:  # the gradient takes the logits' place, and cuBLAS adds to the head's as it stores
        logits, between = b * chunk * (vocab + dim), float(weight_grad)
    else:
        logits = (3 * FP32 - b if share.narrow else 2 * FP32) * chunk * vocab
        between = weight_grad + (b * table if share.narrow or count > 2 else 0) if count > 1 else 0.0
    entered = b * dim * share.s  # what the loss reads
    return logits + between + entered + b * dim * share.s + (heads - 1) * kept, heads * kept


def embedding_moment(share: Share, twice: bool) -> float:
    """The table's gradient; on a GPU rows of it are added up in fp32, one a token and one more for ten of them. Of a
    table that is used `twice` both uses' and their sum."""
    b, dim = share.width, share.model.dim
    tables = (3 if twice else 1) * share.model.vocab / share.tp
    return b * dim * (tables + share.t) + (1.1 * FP32 * dim * share.s if share.fused and not twice else 0.0)


def optimizer_moment(share: Share, held: Held) -> float:
    """Of Muon, in fp32: the largest stack of matrices as momentum makes it, a copy's part before that, and orthogonal;
    on the way, of some of them at a time, four times as much and a square of the shorter side."""
    model, layout = share.model, share.plan.layout
    if share.plan.job.optimizer != "muon":
        return 0.0
    stacks: list[tuple[float, int, int]] = []  # elements, the other side of a matrix, copies
    if any(layer.ffn == "dense" for layer in held.layers):
        stacks.append((model.dense_dim * model.dim, model.dense_dim, layout.dp * layout.cp))
    if model.moe and any(layer.ffn == "moe" for layer in held.layers):
        side = 2 * model.moe.expert_dim
        stacks.append((side * model.dim * model.moe.num_experts / layout.ep, side, layout.edp))
    if not stacks:
        return 0.0
    whole, side, copies = max(stacks)
    own = whole / copies if copies > 1 else 0.0
    between = 4 + min(side, model.dim) / max(side, model.dim)
    return FP32 * (2 * whole + own + between * min(whole, max(side * model.dim, MUON_AT_ONCE)))


def forward_moment(share: Share, layer: Layer) -> float:
    """At the end of a layer's forward."""
    b, dim = share.width, share.model.dim
    if layer.ffn != "moe" or share.model.moe is None:
        return 2 * b * dim * share.s
    rows = b * dim
    layout, knobs = share.plan.layout, share.plan.knobs
    if layout.ep * layout.etp == 1:
        return rows * (share.r + (0 if share.fused else share.r)) * share.at_once + rows * share.t
    own = share.r / layout.etp
    if knobs.dispatcher == "alltoall":
        # Rows as they came, results as they go back, as they arrive, and as they are summed. With a bias earlier: rows
        # as they came, results, the bias with the router's weight, and their sum.
        summed = share.t if share.fused else share.sent
        biased = rows * 4 * share.r if share.model.moe.bias and not share.fused_experts else 0.0
        return max(rows * (2 * own + share.sent + summed + (share.r if layout.etp > 1 else 0)), biased)
    return rows * (2 * share.r + 2 * share.t)


def backward_moment(share: Share, layer: Layer) -> float:
    """In the feed-forward part of a layer, whose gradients come first; less what has gone by then."""
    b, dim, model = share.width, share.model.dim, share.model
    if layer.ffn == "dense":
        hidden = model.dense_dim / share.tp
        tokens = share.s * (share.mlp_at_once if share.again & {"mlp", "full"} else 1)
        weight = b * hidden * dim
        waits = weight if share.plan.knobs.data_parallel != "zero1" else 0.0  # for all of its unit
        # The activation's gradient with the last weight's; then its own two, when what it was made of has gone.
        own = b * hidden * tokens
        return b * dim * share.s + max(weight + own, waits + (2 if share.fused else 1) * own)
    return max(expert_steps(share).values()) if layer.ffn == "moe" else mixer_moment(share, layer)


def expert_steps(share: Share) -> dict[str, float]:
    """The same, of experts, by whose backward it is, in their order."""
    b, dim, moe = share.width, share.model.dim, share.model.moe
    assert moe is not None
    hidden, weights = _expert_sizes(share)
    r = share.r * share.at_once
    rows = b * dim * r
    act = (share.width + 2 * FP32 if share.narrow else 2 * FP32) * hidden * r
    biased = 0.0
    if moe.bias:  # comes first, for its rows and the router's weights in fp32; then its rows are gone
        made = 6 * b * hidden * r if "moe_act" in share.again else 0.0
        biased, act = (2 * b + 2 * FP32) * dim * r - made, act - rows
    waits = weights / 3 if _waits(share) else 0.0  # FC2's, for FC1's
    # Chunks add to the gradients of those before them.
    summed = (0.0 if share.at_once == 1 else weights) + (b * dim * share.t if share.in_one else 0.0)
    if share.fused_experts:
        return {"fused_group_mlp": _fused_backward(share, rows, hidden * r, weights) + summed}
    # Rows on their way back; FC2's two products; the activation, in fp32 for the router's weights; FC1's products. In a
    # narrow format each expert has gradients of its own first.
    weights *= 2 if share.low else 1
    steps = {
        "combine": 2 * rows,
        "expert_fc2": max(rows + b * hidden * r + weights / 3, biased),
        "moe_act": act + waits,
        "expert_fc1": rows - 3 * b * hidden * r + 2 * weights / 3 + waits,
    }
    return {name: size + summed for name, size in steps.items()}


def _waits(share: Share) -> bool:
    """Whether gradients of experts are kept until all of them are there."""
    layout = share.plan.layout
    return share.plan.knobs.data_parallel != "zero1" and layout.edp > layout.replicate


def _fused_backward(share: Share, rows: float, inner: float, weights: float) -> float:
    """Gradients of the rows on both sides; of the activation, its product and FC1's output; of the weights, which
    kernels of bf16 add to their sums as they make them, those of FP8 one by one."""
    b, low = share.width, share.low
    if share.sinks:
        weights *= 2 / 3 if low else 0
    if share.in_one and not low and _expert_sizes(share)[0] <= GATHERED:
        # Gradients of tokens are read where they are, and rows summed into such.
        tokens = b * share.model.dim * share.t * share.at_once
        return max(3 * b * inner, rows + tokens + 2 * b * inner + weights)
    if not low:
        return max(rows + 4 * b * inner, 2 * rows + 2 * b * inner + weights)
    turned = low * rows / b
    return max(rows + turned + (b + 5 * low) * inner, 2 * rows + 2 * low * inner + weights)


def _expert_sizes(share: Share) -> tuple[float, float]:
    """Width of an expert here, and bytes of the gradients of all that are here."""
    layout, moe = share.plan.layout, share.model.moe
    assert moe is not None
    hidden = moe.expert_dim / layout.etp
    return hidden, share.width * 3 * hidden * share.model.dim * moe.num_experts / layout.ep


def mixer_moment(share: Share, layer: Layer) -> float:
    """In the backward of attention: gradients of its output, of queries, keys and values; those of queries once more in
    fp32, in which they are summed."""
    spec = share.model.attention if layer.mixer == "attention" else share.model.local_attention
    if spec is None:
        return 0.0
    b, tp, heads = share.width, share.tp, spec.num_heads / share.tp
    if scores := share.scores(spec):  # gradients of those that softmax made, and of those it read
        return 2 * scores
    if isinstance(spec, MlaSpec):
        wide, values = spec.qk_dim, heads * spec.v_dim
        q = k = heads * wide
        out, shared = values, False
    else:
        wide = spec.head_dim
        q, k = spec.q_dim / tp, max(1.0, spec.num_kv_heads / tp) * wide
        out, values, shared = q, k, spec.num_kv_heads != spec.num_heads
    # Where queries share keys and values, each makes gradients of its own for these first. Some heads at a time.
    summed = FP32 * (q + heads) + (2 * b * q if shared else 0)
    stream = b * share.model.dim * share.t
    if share.plan.layout.cp > 1 and share.plan.knobs.cp_comm == "p2p":
        # In fp32 and, of keys and values, also those that go on; keys and values that came; two tiles of half a ring's
        # share at a time, values as wide as keys.
        padded = b * (2 * heads * wide + k) / 2 if isinstance(spec, MlaSpec) else 0.0
        sums = FP32 * (q + 2 * k + 2 * values) + b * (k + values) + b * (q + 2 * k) + padded + summed / 2
        return (sums + b * out) * share.s + stream
    if isinstance(spec, MlaSpec):
        return (b * (out + q + k + values) + summed) * share.heads_at_once * share.s + stream
    groups = min(max(1.0, spec.num_kv_heads / tp), math.ceil(FP32 * q * share.s / WIDEST))
    if groups > 1:  # each has results of its own, but in fp32 queries are laid out among those of all heads
        summed = FP32 * q + (summed - FP32 * q + b * (q + k + values)) / groups
    return (b * (out + q + k + values) + summed) * share.s + stream
