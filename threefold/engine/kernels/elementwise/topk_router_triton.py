"""The Triton kernels of `topk_router.py`. A tile is some tokens with the logits of all experts.

Scores are compared as 64-bit integers: the upper half orders like the float, and the lower half is the expert's number
counted from the end, so that the lower expert wins a tie. NaN counts as the largest score: chosen experts stay in
range, and the NaN shows in the loss.

Shapes: T tokens, E experts, K experts of a token, P programs, X = 2 E.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.topk_router import TopKOptions, tokens_per_program

_WARPS = 4
_TAKEN: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # less than every key
_EPS: tl.constexpr = tl.constexpr(1e-20)  # DeepSeek-V3's code adds it to the sum of scores before the division


def _sizes(logits_TE: Tensor, options: TopKOptions) -> dict[str, int | float | bool]:
    num_experts = logits_TE.shape[1]
    return {
        "E": num_experts,
        "NE": triton.next_power_of_2(num_experts),
        "K": options.top_k,
        "NK": triton.next_power_of_2(options.top_k),
        "TOKENS": tokens_per_program(num_experts),
        "SOFTMAX": options.softmax,
        "NORM": options.norm,
        "SCALE": options.scale,
    }


def launch_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    weight_TK: Tensor,
    expert_TK: Tensor,
    load_E: Tensor,
    part_P: Tensor,
    options: TopKOptions,
) -> None:
    _topk[(len(part_P),)](
        logits_TE, bias_E, weight_TK, expert_TK, load_E, part_P, len(logits_TE), options.first_slot or 0,
        BIASED=bias_E is not None, GROUPS=options.num_groups, TOP_GROUPS=options.top_groups,
        ROUND_ROBIN=options.first_slot is not None, num_warps=_WARPS, **_sizes(logits_TE, options),
    )  # fmt: skip


def launch_topk_grad(
    grad_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, out_TE: Tensor, options: TopKOptions
) -> None:
    sizes = _sizes(logits_TE, options)
    grid = (triton.cdiv(len(logits_TE), sizes["TOKENS"]),)
    _topk_grad[grid](grad_TK, logits_TE, expert_TK, out_TE, len(logits_TE), **sizes)


def launch_split_bf16(grad_TE: Tensor, out_TX: Tensor) -> None:
    size, block = grad_TE.numel(), 1024
    _split_bf16[(triton.cdiv(size, block),)](grad_TE, out_TX, size, grad_TE.shape[1], block)


@triton.jit
def _split_bf16(grad_ptr, out_ptr, size, E: tl.constexpr, BLOCK: tl.constexpr):
    """Write each row twice as wide: its values rounded to bf16, then the rounding errors in bf16."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < size
    grad = tl.load(grad_ptr + n, mask=mask, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    high = grad.to(dtype)
    at = out_ptr + n // E * (2 * E) + n % E
    tl.store(at, high, mask=mask)
    tl.store(at + E, (grad - high.to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _exp_logits(logits, known):
    return tl.where(known, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)


@triton.jit
def _scores(logits, known, SOFTMAX: tl.constexpr):
    """Scores of all experts, and zeros in the padding after them."""
    if SOFTMAX:
        score = _exp_logits(logits, known)
        return score / tl.sum(score, 1)[:, None]
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return tl.where(known, tl.sigmoid(logits), 0.0)


@triton.jit
def _sort_keys(choice, tie_breaker):
    """Integers in the order of `choice`, and of `tie_breaker` where that is equal."""
    choice = tl.where(choice == 0.0, 0.0, choice)  # -0 equals 0, but its bits differ
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | tie_breaker.to(tl.int64)


@triton.jit
def _mask_groups(choice, TOKENS: tl.constexpr, NE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Set scores outside the best groups to -inf. As in DeepSeek-V3, the score of a group is the sum of its best
    two."""
    size: tl.constexpr = NE // GROUPS
    each = tl.reshape(choice, (TOKENS, GROUPS, size))
    best = tl.argmax(each, 2)
    other = tl.where(tl.arange(0, size)[None, None, :] == best[:, :, None], float("-inf"), each)
    value = tl.max(each, 2) + tl.max(other, 2)
    group = tl.arange(0, GROUPS)[None, :]
    chosen = tl.zeros((TOKENS, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        hit = group == tl.argmax(value, 1)[:, None]
        chosen = tl.where(hit, 1, chosen)
        value = tl.where(hit, float("-inf"), value)
    inside = tl.reshape(tl.broadcast_to(chosen[:, :, None], (TOKENS, GROUPS, size)), (TOKENS, NE))
    return tl.where(inside == 1, choice, float("-inf"))


@triton.jit
def _router_weights(picked, chosen, SCALE: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr):
    """Router weights from `picked`, which are logits where a softmax is normalized over the chosen experts, else
    scores."""
    if NORM and SOFTMAX:
        picked = tl.where(chosen, picked, float("-inf"))
        picked = tl.exp(picked - tl.max(picked, 1)[:, None])
        picked = picked / tl.sum(picked, 1)[:, None]
    elif NORM:
        picked = picked / (tl.sum(tl.where(chosen, picked, 0.0), 1)[:, None] + _EPS)
    return picked * SCALE


@triton.jit
def _topk(
    logits_ptr, bias_ptr, weight_ptr, expert_ptr, load_ptr, part_ptr, num_tokens, first_slot, E: tl.constexpr,
    NE: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, TOKENS: tl.constexpr, SOFTMAX: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    ROUND_ROBIN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    token = token.to(tl.int64)
    e = tl.arange(0, NE)[None, :]
    known = e < E
    mask = live[:, None] & known
    logits = tl.load(logits_ptr + token[:, None] * E + e, mask=mask, other=0.0)
    logits = tl.where(known, logits, float("-inf"))
    score = _scores(logits, known, SOFTMAX)
    # Softmax keeps the order of logits but rounds close ones to the same score, so logits are compared if no bias is
    # added.
    choice = logits if SOFTMAX and not BIASED else score
    if BIASED:
        choice += tl.load(bias_ptr + e, mask=known, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(known, choice, float("-inf"))
    if GROUPS > 1 and not ROUND_ROBIN:
        choice = _mask_groups(choice, TOKENS, NE, GROUPS, TOP_GROUPS)
    slot = tl.arange(0, NK)[None, :]
    expert = tl.zeros((TOKENS, NK), tl.int32)
    key = _sort_keys(choice, NE - 1 - e)
    for k in tl.static_range(K):
        if ROUND_ROBIN:
            at = ((first_slot + token * K + k) % E).to(tl.int32)
        else:
            at = NE - 1 - (tl.max(key, 1) & (NE - 1)).to(tl.int32)
        hit = e == at[:, None]
        key = tl.where(hit, _TAKEN, key)
        expert = tl.where(slot == k, at[:, None], expert)
    chosen = slot < K
    out = token[:, None] * K + slot
    chosen_mask = live[:, None] & chosen
    picked = tl.load(logits_ptr + token[:, None] * E + expert, mask=chosen_mask, other=0.0)
    if SOFTMAX and not NORM:
        picked = tl.exp(picked - tl.max(logits, 1)[:, None]) / tl.sum(_exp_logits(logits, known), 1)[:, None]
    elif not SOFTMAX:
        picked = tl.sigmoid(picked)
    tl.store(expert_ptr + out, expert.to(tl.int64), mask=chosen_mask)
    tl.store(weight_ptr + out, _router_weights(picked, chosen, SCALE, SOFTMAX, NORM), mask=chosen_mask)
    count = tl.sum((live[:, None] & (key == _TAKEN)).to(tl.int64), 0)
    one_e = tl.arange(0, NE)
    tl.atomic_add(load_ptr + one_e, count, mask=(one_e < E) & (count > 0), sem="relaxed")
    probability = score if SOFTMAX else score / tl.sum(score, 1)[:, None]
    entropy = tl.where(mask & (probability > 0), -probability * tl.log(probability), 0.0)
    tl.store(part_ptr + tl.program_id(0), tl.sum(tl.sum(entropy, 1), 0))


@triton.jit
def _topk_grad(
    grad_ptr, logits_ptr, expert_ptr, out_ptr, num_tokens, E: tl.constexpr, NE: tl.constexpr, K: tl.constexpr,
    NK: tl.constexpr, TOKENS: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    token = token.to(tl.int64)
    e = tl.arange(0, NE)[None, :]
    mask = live[:, None] & (e < E)
    slot = tl.arange(0, NK)[None, :]
    chosen = slot < K
    chosen_mask = live[:, None] & chosen
    at = token[:, None] * K + slot
    grad = tl.load(grad_ptr + at, mask=chosen_mask, other=0.0) * SCALE
    expert = tl.load(expert_ptr + at, mask=chosen_mask, other=0)
    picked = tl.load(logits_ptr + token[:, None] * E + expert, mask=chosen_mask, other=0.0)
    if SOFTMAX and NORM:
        picked = _router_weights(picked, chosen, 1.0, SOFTMAX, NORM)
        grad = picked * (grad - tl.sum(picked * grad, 1)[:, None])
    elif NORM:
        score = tl.where(chosen, tl.sigmoid(picked), 0.0)
        total = tl.sum(score, 1)[:, None] + _EPS
        grad = (grad - tl.sum(grad * score, 1)[:, None] / total) / total
    spread = tl.zeros((TOKENS, NE), tl.float32)
    for k in tl.static_range(K):
        one = slot == k
        one_expert = tl.sum(tl.where(one, expert, 0), 1)
        one_grad = tl.sum(tl.where(one, grad, 0.0), 1)
        spread += tl.where(e == one_expert[:, None], one_grad[:, None], 0.0)
    if not (SOFTMAX and NORM):
        logits = tl.load(logits_ptr + token[:, None] * E + e, mask=mask, other=0.0)
        score = _scores(tl.where(e < E, logits, float("-inf")), e < E, SOFTMAX)
        if SOFTMAX:
            spread = score * (spread - tl.sum(score * spread, 1)[:, None])
        else:
            spread = spread * score * (1.0 - score)
    tl.store(out_ptr + token[:, None] * E + e, spread, mask=mask)
