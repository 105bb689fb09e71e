"""What our own engine holds for a moment, beside what it keeps: in the loss, at the end of a forward, in a backward."""

from threefold.cost.share import FP32, Share
from threefold.spec.model import Layer, MlaSpec
from threefold.units import GIB

CHUNK_BYTES = {"cpu": GIB / 4}  # of a chunk's logits, counted in fp32; on GPUs 5 GiB
TILE = 128


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
        # Rows as they came, results as they go back, as they arrive, and as they are summed.
        summed = share.t if share.fused else share.sent
        return rows * (2 * own + share.sent + summed + (share.r if layout.etp > 1 else 0))
    return rows * (2 * share.r + 2 * share.t)


def backward_moment(share: Share, layer: Layer) -> float:
    """In the feed-forward part of a layer, whose gradients come first; less what has gone by then."""
    b, dim, model = share.width, share.model.dim, share.model
    if layer.ffn == "dense":
        hidden = model.dense_dim / share.tp
        tokens = share.s * (share.mlp_at_once if share.again & {"mlp", "full"} else 1)
        return b * (hidden * dim + dim * share.s + hidden * tokens)
    if layer.ffn != "moe" or model.moe is None:
        return _mixer_backward(share)
    hidden, weights = _expert_sizes(share)
    r = share.r * share.at_once
    rows = b * dim * r
    act = (share.width + 2 * FP32 if share.narrow else 2 * FP32) * hidden * r
    act += rows if model.moe.bias else 0.0  # the bias asks for the same gradient, later
    # Chunks add to the gradients of those before them.
    summed = (0.0 if share.at_once == 1 else weights) + (b * dim * share.t if share.in_one else 0.0)
    if share.fused_experts:
        return _fused_backward(share, rows, hidden * r, weights) + summed
    # Rows on their way back; FC2's two products; the activation, in fp32 for the router's weights; FC1's products.
    first = rows + b * hidden * r + weights / 3
    return max(2 * rows, first, act, rows - 3 * b * hidden * r + 2 * weights / 3) + summed


def _fused_backward(share: Share, rows: float, inner: float, weights: float) -> float:
    """Gradients of the rows on both sides; of the activation, its product and FC1's output; of the weights."""
    b, low = share.width, share.low
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


def _mixer_backward(share: Share) -> float:
    spec = share.model.attention
    if spec is None:
        return 0.0
    q = spec.num_heads * (spec.qk_dim if isinstance(spec, MlaSpec) else spec.head_dim) / share.tp
    return (3 * share.width + FP32) * q * share.s
