"""The Triton kernels of `topk_router.py`'s backward: the gradient of the logits, and its split into two bf16 parts.

Shapes: T tokens, E experts, K experts of a token, X = 2 E.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.topk_router import TopKOptions, tokens_per_program
from threefold.engine.kernels.elementwise.topk_router_triton import (
    EPS,
    WARPS,
    exp_logits,
    expert_scores,
    kernel_sizes,
    loss_factors,
    num_useful,
    programs_per_sequence,
    router_weights,
    useful_tokens,
)
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv


def launch_topk_grad(
    grad_TK: Tensor | None,
    grad_TE: Tensor | None,
    loss_grads: tuple[Tensor | None, ...],
    logits_TE: Tensor,
    expert_TK: Tensor,
    total: Tensor | None,
    pad_T: Tensor | None,
    useful_B: Tensor | None,
    out: Tensor,
    options: TopKOptions,
    sequences: int,
) -> None:
    """The gradient of the logits: (T, E) in fp32, or (T, 2 E) split into two bf16 parts."""
    num_tokens, num_experts = logits_TE.shape
    num_programs = cdiv(num_tokens, tokens_per_program(num_experts, options.top_k))
    _topk_grad[(num_programs,)](
        grad_TK, grad_TE, *loss_grads, logits_TE, expert_TK, total, pad_T, useful_B, out, num_tokens,
        *loss_factors(num_experts, options.top_k, sequences),
        programs_per_sequence(num_programs, sequences), sequences,
        SPLIT=out.shape[1] != num_experts, num_warps=WARPS, **kernel_sizes(logits_TE, options),
    )  # fmt: skip


def launch_split_bf16(grad_TE: Tensor, out_TX: Tensor) -> None:
    size, block = grad_TE.numel(), 1024
    _split_bf16[(cdiv(size, block),)](grad_TE, out_TX, size, grad_TE.shape[1], block)


@triton.jit
def _store_split(at, grad, mask, E: tl.constexpr):
    """Store values rounded to bf16, and E further on the rounding errors in bf16."""
    dtype: tl.constexpr = at.dtype.element_ty
    high = grad.to(dtype)
    tl.store(at, high, mask=mask)
    tl.store(at + E, (grad - high.to(tl.float32)).to(dtype), mask=mask)


@fast_launch
@triton.jit
def _split_bf16(grad_ptr, out_ptr, size, E: tl.constexpr, BLOCK: tl.constexpr):
    """Write each row twice as wide: its values rounded to bf16, then the rounding errors in bf16."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    _store_split(out_ptr + n // E * (2 * E) + n % E, tl.load(grad_ptr + n, mask=mask, other=0.0), mask, E)


@fast_launch
@triton.jit
def _topk_grad(
    grad_ptr, logits_grad_ptr, aux_grad_ptr, seq_grad_ptr, z_grad_ptr, logits_ptr, expert_ptr, total_ptr, pad_ptr,
    useful_ptr, out_ptr, num_tokens, aux_factor, seq_factor, per_sequence, sequences, E: tl.constexpr, NE: tl.constexpr,
    K: tl.constexpr, NK: tl.constexpr, TOKENS: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    useful = useful_tokens(pad_ptr, token, live)
    token = token.to(tl.int64)
    e = tl.arange(0, NE)[None, :]
    known = e < E
    mask = live[:, None] & known
    at = token[:, None] * E + e
    logits = tl.where(known, tl.load(logits_ptr + at, mask=mask, other=0.0), float("-inf"))
    out = tl.zeros((TOKENS, NE), tl.float32)
    if grad_ptr is not None:
        out = _weight_grad(grad_ptr, logits_ptr, expert_ptr, logits, token, live, e, known, E, NE, K, NK, TOKENS,
                           SOFTMAX, NORM, SCALE)  # fmt: skip
    if aux_grad_ptr is not None or seq_grad_ptr is not None:
        slope = _score_slope(aux_grad_ptr, seq_grad_ptr, total_ptr, useful_ptr, tl.program_id(0) // per_sequence,
                             aux_factor, seq_factor, num_tokens, sequences, E, NE)  # fmt: skip
        score = expert_scores(logits, known, SOFTMAX)
        size = tl.sum(score, 1)[:, None]
        probability = score if SOFTMAX else score / size
        inner = slope[None, :] - tl.sum(probability * slope[None, :], 1)[:, None]
        out += probability * inner if SOFTMAX else inner / size * score * (1.0 - score)
    if z_grad_ptr is not None:
        exponential = exp_logits(logits, known)
        size = tl.sum(exponential, 1)
        lse = tl.max(logits, 1) + tl.log(size)
        z_factor = 2.0 / num_useful(useful_ptr, 0, sequences, num_tokens)
        out += exponential * (tl.load(z_grad_ptr) * z_factor * lse / size)[:, None]
    out = tl.where(useful[:, None], out, 0.0)
    if logits_grad_ptr is not None:
        out += tl.load(logits_grad_ptr + at, mask=mask, other=0.0)
    if SPLIT:
        _store_split(out_ptr + token[:, None] * (2 * E) + e, out, mask, E)
    else:
        tl.store(out_ptr + at, out, mask=mask)


@triton.jit
def _score_slope(
    aux_grad_ptr, seq_grad_ptr, total_ptr, useful_ptr, sequence, aux_factor, seq_factor, num_tokens, sequences,
    E: tl.constexpr, NE: tl.constexpr,
):  # fmt: skip
    """The gradient of the balancing losses for the scores of a token: it is the same for all tokens of a sequence."""
    e = tl.arange(0, NE)
    slope = tl.zeros((NE,), tl.float32)
    if aux_grad_ptr is not None:
        load = tl.zeros((NE,), tl.int32)
        for n in range(sequences):
            load += tl.load(total_ptr + n * E + e, mask=e < E, other=0)
        count = num_useful(useful_ptr, 0, sequences, num_tokens)
        slope += load.to(tl.float32) * (tl.load(aux_grad_ptr) * aux_factor / count / count)
    if seq_grad_ptr is not None:
        load = tl.load(total_ptr + sequence * E + e, mask=e < E, other=0)
        count = num_useful(useful_ptr, sequence, sequence + 1, num_tokens // sequences)
        slope += load.to(tl.float32) * (tl.load(seq_grad_ptr) * seq_factor / count / count)
    return slope


@triton.jit
def _weight_grad(
    grad_ptr, logits_ptr, expert_ptr, logits, token, live, e, known, E: tl.constexpr, NE: tl.constexpr,
    K: tl.constexpr, NK: tl.constexpr, TOKENS: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits from that of the router weights."""
    slot = tl.arange(0, NK)[None, :]
    chosen = slot < K
    chosen_mask = live[:, None] & chosen
    at = token[:, None] * K + slot
    grad = tl.load(grad_ptr + at, mask=chosen_mask, other=0.0) * SCALE
    expert = tl.load(expert_ptr + at, mask=chosen_mask, other=0)
    picked = tl.load(logits_ptr + token[:, None] * E + expert, mask=chosen_mask, other=0.0)
    if SOFTMAX and NORM:
        picked = router_weights(picked, chosen, 1.0, SOFTMAX, NORM)
        grad = picked * (grad - tl.sum(picked * grad, 1)[:, None])
    elif NORM:
        score = tl.where(chosen, tl.sigmoid(picked), 0.0)
        total = tl.sum(score, 1)[:, None] + EPS
        grad = (grad - tl.sum(grad * score, 1)[:, None] / total) / total
    spread = tl.zeros((TOKENS, NE), tl.float32)
    for k in tl.static_range(K):
        one = slot == k
        one_expert = tl.sum(tl.where(one, expert, 0), 1)
        one_grad = tl.sum(tl.where(one, grad, 0.0), 1)
        spread += tl.where(e == one_expert[:, None], one_grad[:, None], 0.0)
    if not (SOFTMAX and NORM):
        score = expert_scores(logits, known, SOFTMAX)
        if SOFTMAX:
            spread = score * (spread - tl.sum(score * spread, 1)[:, None])
        else:
            spread = spread * score * (1.0 - score)
    return spread
