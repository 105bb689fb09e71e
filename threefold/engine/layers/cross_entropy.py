"""The language-model loss: head GEMM and cross entropy in chunks of tokens, so that all logits never exist at once.

The forward of each chunk computes its logits, its loss and its gradients, and frees the logits. `head_gemms.py` has the
GEMMs, in the dtype of the weight or in low precision. `Decoder.mean_loss` calls `cross_entropy_sum`. With tensor
parallelism each rank holds some columns of the logits (`VocabShard`): per token one maximum and two sums are reduced
over ranks, logits never travel.

Shapes: T tokens, C tokens of a chunk, D model dim, V vocabulary, or this rank's shard of it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.device import device_type, is_simulated
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Group
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.layers.head_gemms import HeadPrecision, LowPrecisionGemms, PlainGemms
from threefold.engine.sum_dtype import fp32_or_wider

IGNORE = -100  # a label without a loss, as in torch's cross entropy
# The limit for the logits of a chunk, counted in fp32. Each chunk adds to the whole gradient of the head: on a GPU that
# costs as much as the GEMMs of 500 tokens, so a chunk should have thousands.
_CHUNK_BYTES = {"cuda": 5 * 2**30, "cpu": 256 * 2**20}
_TILE = 128


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that this rank holds, with tensor parallelism."""

    first: int  # the first token of the shard
    width: int  # tokens of the largest shard; the last shards may be smaller
    group: Group  # the ranks that hold the other shards


def cross_entropy_sum(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk: int | None = None,
    vocab_shard: VocabShard | None = None,
    softcap: float | None = None,
    precision: HeadPrecision | None = None,
    expected_grad: Tensor | None = None,
) -> Tensor:
    """Sum of -log softmax(x W^T)[label] over labels that are not IGNORE, in fp32.

    With `vocab_shard` every rank of its group gets the whole sum, and the part of the gradient of x that comes from its
    own columns. `chunk` is the number of tokens of a chunk; None chooses it by memory. `softcap` bounds the logits z:
    softcap * tanh(z / softcap). `precision` quantizes the GEMMs; softmax and sums stay in fp32.

    `expected_grad` is the gradient that the backward will bring to the sum, where the caller knows it. On a GPU in bf16
    the gradients are made with it then, and the backward need not pass over that of the whole head to scale it. Another
    gradient may come all the same.
    """
    # Shards may differ in size, but all ranks must make the same number of chunks.
    width = len(weight_VD) if vocab_shard is None else vocab_shard.width
    size = chunk or _chunk_size(x_TD, width, precision is not None)
    return _ChunkedCrossEntropy.apply(x_TD, weight_VD, labels_T, size, vocab_shard, softcap, precision, expected_grad)


def _chunk_size(x_TD: Tensor, vocab: int, is_low_precision: bool) -> int:
    """Tokens of a chunk: chunks of equal size, in whole GEMM tiles.

    In low precision they are half as long, because the quantized gradients of several chunks lie beside the logits.
    """
    limit = max(64, _CHUNK_BYTES.get(device_type(x_TD.device), _CHUNK_BYTES["cpu"]) // (4 * vocab))
    limit = limit // 2 if is_low_precision else limit
    num_chunks = max(1, -(-len(x_TD) // limit))
    return -(-len(x_TD) // (num_chunks * _TILE)) * _TILE or _TILE


def reference(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None) -> Tensor:
    """`cross_entropy_sum` with all logits in memory: the oracle of the tests."""
    logits_TV = F.linear(x_TD, weight_VD).to(fp32_or_wider(x_TD.dtype))
    if softcap is not None:
        logits_TV = softcap * (logits_TV / softcap).tanh()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are computed in the forward, while the logits exist; computing the logits twice would cost a GEMM.

    They are gradients of the sum, or of its product with `expected_grad`. The backward scales them by what is missing.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, labels_T, chunk, vocab_shard, softcap, precision, expected_grad):  # type: ignore[no-untyped-def]
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        needs_grad = wants_x or wants_weight
        loss = x_TD.new_zeros((), dtype=fp32_or_wider(x_TD.dtype))
        given = x_TD, weight_VD, chunk, wants_x, wants_weight
        gemms = PlainGemms(*given) if precision is None else LowPrecisionGemms(*given, precision, softcap)
        # In fp16 products with a small factor would be 0.
        can_scale = precision is None and x_TD.dtype == torch.bfloat16 and _uses_in_place_kernel(x_TD)
        ctx.scale = expected_grad if can_scale else None
        for start in range(0, len(x_TD), chunk):
            labels_C = labels_T[start : start + chunk]
            if isinstance(gemms, LowPrecisionGemms) and gemms.takes_statistics:
                loss += _one_chunk_in_fp8(gemms, start, labels_C, vocab_shard, needs_grad)
                gemms.multiply_columns(start)
                continue
            ignored_C1: Tensor | None = None
            if vocab_shard is not None:
                chunk_loss, logits_grad_CV = _one_chunk_of_shard(
                    gemms, start, labels_C, softcap, vocab_shard, ctx.scale
                )
            elif _uses_in_place_kernel(x_TD):
                chunk_loss, logits_grad_CV = _one_chunk_in_place(gemms, start, labels_C, softcap, ctx.scale)
            else:
                chunk_loss, logits_grad_CV = _one_chunk(gemms, start, labels_C, softcap, needs_grad)
                ignored_C1 = (labels_C == IGNORE)[:, None]
            loss += chunk_loss
            gemms.add_grad(start, logits_grad_CV, ignored_C1)
            del logits_grad_CV  # before the next chunk makes its own
        ctx.grads, ctx.dtypes = gemms.grads(), (x_TD.dtype, weight_VD.dtype)
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.grads is None:
            raise RuntimeError("the gradients of this loss were handed out by an earlier backward")
        pairs, ctx.grads = zip(ctx.grads, ctx.dtypes, strict=True), None
        return (
            *(None if made is None else _scale_grad(made, grad, ctx.scale, dtype) for made, dtype in pairs),
            *(None,) * 6,
        )


def _scale_grad(x: Tensor, grad: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x * grad / scale, multiplied in fp32 and rounded once: x itself if it has this dtype already."""
    if has_triton_kernels(x.device) and x.dtype != torch.float64 and x.is_contiguous():
        from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import scale_and_cast

        return scale_and_cast(x, grad, scale, dtype)
    # torch rounds a factor without dims to the dtype of x first.
    return torch.mul(x, grad.view(1, 1), out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))


def _uses_in_place_kernel(x_TD: Tensor) -> bool:
    if x_TD.dtype not in (torch.bfloat16, torch.float16):
        return False
    return is_simulated() or has_triton_kernels(x_TD.device)


def _chunk_logits(gemms: PlainGemms, start: int, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """The logits of a chunk, and where they are capped their derivative by the logits before."""
    logits_CV = gemms.logits(start)
    if softcap is None:
        return logits_CV, None
    tanh_CV = logits_CV.div_(softcap).tanh_()
    slope_CV = tanh_CV.square().neg_().add_(1)
    return tanh_CV.mul_(softcap), slope_CV


def _before_cap(grad_CV: Tensor, slope_CV: Tensor | None) -> Tensor:
    """The gradient of the logits before their cap, in place of the one behind it."""
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _one_chunk_in_place(
    gemms: PlainGemms, start: int, labels_C: Tensor, softcap: float | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_one_chunk` by a kernel that overwrites the logits with their gradient; rows of ignored tokens are zeros."""
    logits_CV, slope_CV = _chunk_logits(gemms, start, softcap)
    if is_simulated():
        return logits_CV.new_empty(len(logits_CV), dtype=torch.float32).sum(), logits_CV
    from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import cross_entropy_in_place

    return cross_entropy_in_place(logits_CV, labels_C, IGNORE, scale).sum(), _before_cap(logits_CV, slope_CV)


def _one_chunk(
    gemms: PlainGemms, start: int, labels_C: Tensor, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and the gradient of its logits in their dtype; rows of ignored tokens are undefined."""
    logits_CV, slope_CV = _chunk_logits(gemms, start, softcap)
    dtype = logits_CV.dtype
    log_CV = logits_CV.log_softmax(dim=-1, dtype=fp32_or_wider(dtype))
    del logits_CV  # before the gradient is made
    ignored_C = labels_C == IGNORE
    index_C1 = labels_C.masked_fill(ignored_C, 0)[:, None]
    log_prob_C1 = log_CV.gather(1, index_C1)
    loss = -log_prob_C1[:, 0].masked_fill(ignored_C, 0).sum()
    if not needs_grad:
        return loss, log_CV
    logits_grad_CV = log_CV if log_CV.dtype == dtype else torch.empty_like(log_CV, dtype=dtype)
    torch.exp(log_CV, out=logits_grad_CV)
    # The gradient at the label is p - 1, which would be 0 where bf16 rounds p to 1; expm1 of log p is exact there.
    logits_grad_CV.scatter_(1, index_C1, log_prob_C1.expm1().to(dtype))
    return loss, _before_cap(logits_grad_CV, slope_CV)


def _one_chunk_of_shard(
    gemms: PlainGemms,
    start: int,
    labels_C: Tensor,
    softcap: float | None,
    shard: VocabShard,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`_one_chunk` where this rank has only some columns of the logits: one max and one sum are reduced over ranks.

    The gradient's rows of ignored tokens are zeros.
    """
    logits_CV, slope_CV = _chunk_logits(gemms, start, softcap)
    index_C, ignored_C = labels_C - shard.first, labels_C == IGNORE
    passes = _InPlacePasses() if _uses_in_place_kernel(logits_CV) else _TorchPasses()
    log_sum_C, label_logit_C = _reduce_statistics(*passes.softmax_statistics(logits_CV, index_C), shard)
    loss = (log_sum_C - label_logit_C).masked_fill(ignored_C, 0).sum()
    log_sum_C = log_sum_C.masked_fill(ignored_C, float("inf"))  # exp(logit - infinity) is 0
    return loss, _before_cap(passes.logits_grad(logits_CV, index_C, log_sum_C, scale), slope_CV)


def _reduce_statistics(
    local_max_C: Tensor, local_sum_C: Tensor, label_logit_C: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """log(sum of exp(logit)) and the label's logit, from their parts on all ranks of the shard's group."""
    max_C = local_max_C.clone()
    all_reduce(max_C, shard.group, "max").wait()
    sums_2C = torch.stack([local_sum_C * (local_max_C - max_C).exp(), label_logit_C])
    all_reduce(sums_2C, shard.group).wait()
    return max_C + sums_2C[0].log(), sums_2C[1]


def _one_chunk_in_fp8(
    gemms: LowPrecisionGemms, start: int, labels_C: Tensor, shard: VocabShard | None, needs_grad: bool
) -> Tensor:
    """The loss of a chunk. One kernel in `gemms` makes the gradient of the logits and quantizes it."""
    logits_CV, ignored_C = gemms.logits(start), labels_C == IGNORE
    index_C = labels_C if shard is None else labels_C - shard.first
    max_C, sum_C, label_logit_C = _InPlacePasses().softmax_statistics(logits_CV, index_C)
    if shard is None:
        log_sum_C = max_C + sum_C.log()
    else:
        log_sum_C, label_logit_C = _reduce_statistics(max_C, sum_C, label_logit_C, shard)
    if needs_grad:
        # exp(logit - infinity) is 0: rows of ignored tokens change no scale of their blocks.
        gemms.add_softmax_grad(start, logits_CV, index_C, log_sum_C.masked_fill(ignored_C, float("inf")))
    return (log_sum_C - label_logit_C).masked_fill(ignored_C, 0).sum()


class _TorchPasses:
    """The passes over a shard of the logits in plain torch."""

    def softmax_statistics(self, logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The maximum, the sum of exp(logit - maximum), and the logit at `index_C`, 0 where that is on another rank."""
        logits_CV = logits_CV.to(fp32_or_wider(logits_CV.dtype))
        max_C = logits_CV.new_full((len(logits_CV),), float("-inf"))
        if not logits_CV.shape[1]:
            return max_C, torch.zeros_like(max_C), torch.zeros_like(max_C)
        max_C = logits_CV.amax(dim=-1)
        is_local_C, index_C1 = _local_index(logits_CV, index_C)
        label_logit_C = logits_CV.gather(1, index_C1)[:, 0].masked_fill(~is_local_C, 0)
        return max_C, (logits_CV - max_C[:, None]).exp_().sum(dim=-1), label_logit_C

    def logits_grad(self, logits_CV: Tensor, index_C: Tensor, log_sum_C: Tensor, scale: Tensor | None) -> Tensor:
        """softmax minus one at the label, for the columns of this rank."""
        assert scale is None
        log_CV = logits_CV.to(log_sum_C.dtype) - log_sum_C[:, None]
        if not logits_CV.shape[1]:
            return logits_CV
        is_local_C, index_C1 = _local_index(logits_CV, index_C)
        logits_grad_CV = log_CV.exp().to(logits_CV.dtype)
        label_grad_C1 = log_CV.gather(1, index_C1).expm1().to(logits_CV.dtype)
        return logits_grad_CV.scatter_(
            1, index_C1, torch.where(is_local_C[:, None], label_grad_C1, logits_grad_CV.gather(1, index_C1))
        )


class _InPlacePasses:
    """The same passes by kernels that overwrite the logits with their gradient."""

    def softmax_statistics(self, logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if is_simulated():
            numbers = logits_CV.new_empty(3, len(logits_CV), dtype=torch.float32)
            return numbers[0], numbers[1], numbers[2]
        from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import softmax_statistics

        return softmax_statistics(logits_CV, index_C)

    def logits_grad(self, logits_CV: Tensor, index_C: Tensor, log_sum_C: Tensor, scale: Tensor | None) -> Tensor:
        if not is_simulated():
            from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import softmax_grad_in_place

            softmax_grad_in_place(logits_CV, index_C, log_sum_C, scale)
        return logits_CV


def _local_index(logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels lie in this shard, and an index that is safe to gather with for all of them."""
    is_local_C = (index_C >= 0) & (index_C < logits_CV.shape[1])
    return is_local_C, index_C.masked_fill(~is_local_C, 0)[:, None]
