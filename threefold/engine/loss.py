"""Cross entropy that never holds all logits: chunks of tokens, each reduced to its loss and gradients at once.

Shapes: T tokens, C tokens of a chunk, D model dim, V vocabulary, or this rank's part of it.

With the vocabulary spread over ranks each holds some columns of the logits: maxima and sums travel, logits do not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels.choose import works
from threefold.engine.mesh import Group
from threefold.engine.norm import wide
from threefold.engine.shard.collectives import all_reduce
from threefold.engine.sinks import add_product
from threefold.engine.ways import stood_for, way

IGNORE = -100
# Of logits at a time, counted in fp32. Each chunk adds to the head's whole gradient: on a GPU that costs as much as the
# products of 500 tokens, so that chunks of thousands are wanted there.
_CHUNK_BYTES = {"cuda": 5 * 2**30, "cpu": 256 * 2**20}
_TILE = 128


@dataclass(frozen=True)
class VocabPart:
    """Tokens first.. of the vocabulary, of which the ranks of `group` hold one part each, of at most `width`."""

    first: int
    width: int
    group: Group


def cross_entropy_sum(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None = None, part: VocabPart | None = None
) -> Tensor:
    """Sum of -log softmax(x W^T)[label] over labels that are not IGNORE, in fp32.

    With `part` every rank of its group gets the whole sum, and of the gradient of x the part of its own columns.
    """
    # Parts may differ in size, but ranks must not in the number of chunks.
    width = len(weight_VD) if part is None else part.width
    return _Chunked.apply(x_TD, weight_VD, labels_T, chunk or _chunk_size(x_TD, width), part)


def _chunk_size(x_TD: Tensor, vocab: int) -> int:
    """Chunks of equal size, in whole tiles of a matrix product."""
    limit = max(64, _CHUNK_BYTES.get(way(x_TD.device), _CHUNK_BYTES["cpu"]) // (4 * vocab))
    num_chunks = max(1, -(-len(x_TD) // limit))
    return -(-len(x_TD) // (num_chunks * _TILE)) * _TILE or _TILE


def reference(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The same with all logits in memory."""
    logits_TV = F.linear(x_TD, weight_VD).to(wide(x_TD.dtype))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")


class _Chunked(torch.autograd.Function):
    """The gradients are made in the forward, where the logits are at hand: one product less than doing them again.

    They are those of the sum, so that the softmax's rounding in bf16 does not depend on the number of tokens.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, labels_T, chunk, vocab):  # type: ignore[no-untyped-def]
        need_x, need_weight = ctx.needs_input_grad[:2]
        dtype = wide(x_TD.dtype)
        loss = x_TD.new_zeros((), dtype=dtype)
        grad_TD = torch.empty_like(x_TD) if need_x else None
        grad_VD = None
        for start in range(0, len(x_TD), chunk):
            x_CD, labels_C = x_TD[start : start + chunk], labels_T[start : start + chunk]
            if vocab is not None:
                part, slope_CV = _one_chunk_of_part(x_CD, weight_VD, labels_C, vocab)
            elif _in_place(x_TD):
                part, slope_CV = _one_chunk_in_place(x_CD, weight_VD, labels_C)
            else:
                part, slope_CV = _one_chunk(x_CD, weight_VD, labels_C, need_x or need_weight)
            loss += part
            # Ignored tokens are taken out of the narrow factors, not out of the wide one.
            ignored_C1 = (labels_C == IGNORE)[:, None]
            if grad_TD is not None:
                torch.mm(slope_CV, weight_VD, out=grad_TD[start : start + chunk]).masked_fill_(ignored_C1, 0)
            if need_weight:
                kept_CD = x_CD.masked_fill(ignored_C1, 0)
                grad_VD = (
                    slope_CV.T @ kept_CD if len(x_TD) <= chunk else add_product(grad_VD, slope_CV.T, kept_CD, dtype)
                )
            del slope_CV  # before the next chunk makes its own
        if need_weight and grad_VD is None:
            grad_VD = torch.zeros_like(weight_VD)
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.dtypes = x_TD.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if made is None else _scaled(made, grad, dtype) for made, dtype in pairs), None, None, None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied in fp32 and rounded once: a factor without dims would be rounded to the dtype of x first."""
    if works(x.device) and x.dtype != torch.float64 and x.is_contiguous():
        from threefold.engine.kernels.cross_entropy import scaled

        return scaled(x, factor, dtype)
    return torch.mul(x, factor.view(1, 1), out=torch.empty_like(x, dtype=dtype))


def _in_place(x_TD: Tensor) -> bool:
    if x_TD.dtype not in (torch.bfloat16, torch.float16):
        return False
    return stood_for() or works(x_TD.device)


def _one_chunk_in_place(x_CD: Tensor, weight_VD: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """As `_one_chunk`, with nothing beside the logits; rows of ignored tokens are zeros."""
    logits_CV = F.linear(x_CD, weight_VD)
    if stood_for():
        return logits_CV.new_empty(len(x_CD), dtype=torch.float32).sum(), logits_CV
    from threefold.engine.kernels.cross_entropy import slope_in_place

    return slope_in_place(logits_CV, labels_C, IGNORE).sum(), logits_CV


def _one_chunk(x_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, need_slope: bool) -> tuple[Tensor, Tensor]:
    """The chunk's loss, and the gradient of its logits in the model's dtype; rows of ignored tokens mean nothing."""
    log_CV = F.linear(x_CD, weight_VD).log_softmax(dim=-1, dtype=wide(x_CD.dtype))
    ignored_C = labels_C == IGNORE
    index_C1 = labels_C.masked_fill(ignored_C, 0)[:, None]
    picked_C1 = log_CV.gather(1, index_C1)
    loss = -picked_C1[:, 0].masked_fill(ignored_C, 0).sum()
    if not need_slope:
        return loss, log_CV
    slope_CV = log_CV if log_CV.dtype == x_CD.dtype else torch.empty_like(log_CV, dtype=x_CD.dtype)
    torch.exp(log_CV, out=slope_CV)
    # expm1: p - 1 would be 0 for a p that bf16 rounds to 1.
    return loss, slope_CV.scatter_(1, index_C1, picked_C1.expm1().to(x_CD.dtype))


def _one_chunk_of_part(x_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, vocab: VocabPart) -> tuple[Tensor, Tensor]:
    """The same where this rank's logits are some columns of the whole: two reductions of one number a token each."""
    logits_CV = F.linear(x_CD, weight_VD)
    at_C = labels_C - vocab.first
    passes = _InPlace() if _in_place(x_CD) else _Plain()
    own_top_C, own_sum_C, picked_C = passes.statistics(logits_CV, at_C)
    top_C = own_top_C.clone()
    all_reduce(top_C, vocab.group, "max").wait()
    sums_2C = torch.stack([own_sum_C * (own_top_C - top_C).exp(), picked_C])
    all_reduce(sums_2C, vocab.group).wait()
    log_sum_C = top_C + sums_2C[0].log()
    loss = (log_sum_C - sums_2C[1]).masked_fill(labels_C == IGNORE, 0).sum()
    return loss, passes.slope(logits_CV, at_C, log_sum_C)


class _Plain:
    """The passes over a part of the logits."""

    def statistics(self, logits_CV: Tensor, at_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Largest, sum of exp(logit - largest), and the logit at `at_C`, 0 outside of the part."""
        logits_CV = logits_CV.to(wide(logits_CV.dtype))
        top_C = logits_CV.new_full((len(logits_CV),), float("-inf"))
        if not logits_CV.shape[1]:
            return top_C, torch.zeros_like(top_C), torch.zeros_like(top_C)
        top_C = logits_CV.amax(dim=-1)
        here_C, at_C1 = _inside(logits_CV, at_C)
        picked_C = logits_CV.gather(1, at_C1)[:, 0].masked_fill(~here_C, 0)
        return top_C, (logits_CV - top_C[:, None]).exp_().sum(dim=-1), picked_C

    def slope(self, logits_CV: Tensor, at_C: Tensor, log_sum_C: Tensor) -> Tensor:
        log_CV = logits_CV.to(log_sum_C.dtype) - log_sum_C[:, None]
        if not logits_CV.shape[1]:
            return logits_CV
        here_C, at_C1 = _inside(logits_CV, at_C)
        slope_CV = log_CV.exp().to(logits_CV.dtype)
        correct_C1 = log_CV.gather(1, at_C1).expm1().to(logits_CV.dtype)
        return slope_CV.scatter_(1, at_C1, torch.where(here_C[:, None], correct_C1, slope_CV.gather(1, at_C1)))


class _InPlace:
    def statistics(self, logits_CV: Tensor, at_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if stood_for():
            numbers = logits_CV.new_empty(3, len(logits_CV), dtype=torch.float32)
            return numbers[0], numbers[1], numbers[2]
        from threefold.engine.kernels.cross_entropy import statistics

        return statistics(logits_CV, at_C)

    def slope(self, logits_CV: Tensor, at_C: Tensor, log_sum_C: Tensor) -> Tensor:
        if not stood_for():
            from threefold.engine.kernels.cross_entropy import slope_of_part

            slope_of_part(logits_CV, at_C, log_sum_C)
        return logits_CV


def _inside(logits_CV: Tensor, at_C: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels lie in this part, and an index that is safe for all."""
    here_C = (at_C >= 0) & (at_C < logits_CV.shape[1])
    return here_C, at_C.masked_fill(~here_C, 0)[:, None]
