"""The Triton kernels of `topk_router.py`'s forward. A tile is some tokens with the logits of all experts.

Scores are compared as 64-bit integers: the upper half orders like the float, and the lower half is the expert's number
counted from the end, so that the lower expert wins a tie. NaN counts as the largest score: chosen experts stay in
range, and the NaN shows in the loss.

Partial sums are stored by program and summed by `_sum_routing`, always in the same order. Only counts, whose sum does
not depend on the order, are added atomically.

Shapes: T tokens, E experts, K experts of a token, P programs, S sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.topk_router import TopKOptions, tokens_per_program
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

WARPS = 4
_SUM_EXPERTS, _SUM_PROGRAMS = 8, 512  # sides of a tile of `_sum_routing`
_TAKEN: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # less than every key
EPS: tl.constexpr = tl.constexpr(1e-20)  # DeepSeek-V3's code adds it to the sum of scores before the division


def kernel_sizes(logits_TE: Tensor, options: TopKOptions) -> dict[str, int | float | bool]:
    """The constants that all kernels of the router take."""
    num_experts = logits_TE.shape[1]
    return {
        "E": num_experts,
        "NE": next_power_of_2(num_experts),
        "K": options.top_k,
        "NK": next_power_of_2(options.top_k),
        "TOKENS": tokens_per_program(num_experts, options.top_k),
        "SOFTMAX": options.softmax,
        "NORM": options.norm,
        "SCALE": options.scale,
    }


def loss_factors(num_experts: int, top_k: int, sequences: int) -> tuple[float, float]:
    """A balancing loss is E * sum_e (fraction of copies at e) * (mean score of e): these factors of `aux` and `seq_aux`
    multiply the sum of (copies at e) * (sum of scores of e) / (number of useful tokens)^2."""
    return num_experts / top_k, num_experts / (sequences * top_k)


def programs_per_sequence(num_programs: int, sequences: int) -> int:
    """More than one sequence is whole programs (`topk_router.computes_losses`)."""
    return num_programs if sequences == 1 else num_programs // sequences


def launch_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    pad_T: Tensor | None,
    weight_TK: Tensor,
    expert_TK: Tensor,
    count_PE: Tensor,
    total: Tensor,
    part_PS: Tensor,
    options: TopKOptions,
    sequences: int,
) -> None:
    """Choose experts, count them by program, and sum them by sequence into `total`, which is zero."""
    num_programs, num_sums = len(count_PE), part_PS.shape[1]
    _topk[(num_programs,)](
        logits_TE, bias_E, pad_T, weight_TK, expert_TK, count_PE, total, part_PS, len(logits_TE),
        options.first_slot or 0, programs_per_sequence(num_programs, sequences), sequences,
        BIASED=bias_E is not None, GROUPS=options.num_groups,
        TOP_GROUPS=options.top_groups, ROUND_ROBIN=options.first_slot is not None, NUM_SUMS=num_sums,
        Z="z" in options.losses, num_warps=WARPS, **kernel_sizes(logits_TE, options),
    )  # fmt: skip


def launch_sum_routing(
    start_PE: Tensor,
    total: Tensor,
    part_PS: Tensor,
    useful_B: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    num_tokens: int,
    options: TopKOptions,
    sequences: int,
) -> None:
    """Turn the counts in `start_PE` into starts of rows, and sum what `_topk` left.

    `outputs` are load_E, ends_E, starts_F, the entropy, and the losses in the order of `FUSED_LOSSES`.
    """
    (num_programs, num_experts), num_sums = start_PE.shape, part_PS.shape[1]
    _sum_routing[(cdiv(num_experts, _SUM_EXPERTS),)](
        start_PE, total, part_PS, useful_B, *outputs, num_programs, programs_per_sequence(num_programs, sequences),
        num_tokens, sequences, *loss_factors(num_experts, options.top_k, sequences), num_experts,
        next_power_of_2(num_experts), num_sums, _SUM_EXPERTS,
        min(_SUM_PROGRAMS, next_power_of_2(num_programs)),
    )  # fmt: skip


@triton.jit
def useful_tokens(pad_ptr, token, live):
    """Whether each token is there and does not pad."""
    if pad_ptr is not None:
        live = live & (tl.load(pad_ptr + token, mask=live, other=1) == 0)
    return live


@triton.jit
def num_useful(useful_ptr, first, after, num_tokens):
    """The useful tokens of some sequences; `num_tokens` are those of a job without padding. At least one."""
    if useful_ptr is not None:
        count = tl.zeros((), tl.int64)
        for sequence in range(first, after):
            count += tl.load(useful_ptr + sequence)
        return tl.maximum(count, 1).to(tl.float32)
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return num_tokens * 1.0


@triton.jit
def exp_logits(logits, known):
    return tl.where(known, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)


@triton.jit
def expert_scores(logits, known, SOFTMAX: tl.constexpr):
    """Scores of all experts, and zeros in the padding after them."""
    if SOFTMAX:
        score = exp_logits(logits, known)
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
def router_weights(picked, chosen, SCALE: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr):
    """Router weights from `picked`, which are logits where a softmax is normalized over the chosen experts, else
    scores."""
    if NORM and SOFTMAX:
        picked = tl.where(chosen, picked, float("-inf"))
        picked = tl.exp(picked - tl.max(picked, 1)[:, None])
        picked = picked / tl.sum(picked, 1)[:, None]
    elif NORM:
        picked = picked / (tl.sum(tl.where(chosen, picked, 0.0), 1)[:, None] + EPS)
    return picked * SCALE


@fast_launch
@triton.jit
def _topk(
    logits_ptr, bias_ptr, pad_ptr, weight_ptr, expert_ptr, count_ptr, total_ptr, part_ptr, num_tokens, first_slot,
    per_sequence, sequences, E: tl.constexpr, NE: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, TOKENS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, ROUND_ROBIN: tl.constexpr, NUM_SUMS: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    useful = useful_tokens(pad_ptr, token, live)
    token = token.to(tl.int64)
    e = tl.arange(0, NE)[None, :]
    known = e < E
    mask = live[:, None] & known
    logits = tl.load(logits_ptr + token[:, None] * E + e, mask=mask, other=0.0)
    logits = tl.where(known, logits, float("-inf"))
    score = expert_scores(logits, known, SOFTMAX)
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
        picked = tl.exp(picked - tl.max(logits, 1)[:, None]) / tl.sum(exp_logits(logits, known), 1)[:, None]
    elif not SOFTMAX:
        picked = tl.sigmoid(picked)
    tl.store(expert_ptr + out, expert.to(tl.int64), mask=chosen_mask)
    weight = tl.where(useful[:, None], router_weights(picked, chosen, SCALE, SOFTMAX, NORM), 0.0)
    tl.store(weight_ptr + out, weight, mask=chosen_mask)
    program, one_e = tl.program_id(0), tl.arange(0, NE)
    count = tl.sum((live[:, None] & (key == _TAKEN)).to(tl.int32), 0)
    tl.store(count_ptr + program * E + one_e, count, mask=one_e < E)
    if pad_ptr is not None:
        tl.atomic_add(total_ptr + sequences * E + one_e, count, mask=(one_e < E) & (count > 0), sem="relaxed")
        count = tl.sum((useful[:, None] & (key == _TAKEN)).to(tl.int32), 0)
    total_ptr += program // per_sequence * E
    tl.atomic_add(total_ptr + one_e, count, mask=(one_e < E) & (count > 0), sem="relaxed")
    mask = useful[:, None] & known
    probability = score if SOFTMAX else score / tl.sum(score, 1)[:, None]
    entropy = tl.where(mask & (probability > 0), -probability * tl.log(probability), 0.0)
    part_ptr += program * NUM_SUMS
    tl.store(part_ptr, tl.sum(tl.sum(entropy, 1), 0))
    if Z:
        lse = _log_sum_exp(logits, known)
        tl.store(part_ptr + 1, tl.sum(tl.where(useful, lse * lse, 0.0), 0))
    if NUM_SUMS > 2:
        tl.store(part_ptr + 2 + one_e, tl.sum(tl.where(mask, probability, 0.0), 0), mask=one_e < E)


@triton.jit
def _log_sum_exp(logits, known):
    return tl.max(logits, 1) + tl.log(tl.sum(exp_logits(logits, known), 1))


@triton.jit
def _sum_column(ptr, begin, end, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of one column of partial sums."""
    part = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        n = first + tl.arange(0, BLOCK)
        part += tl.load(ptr + n * STRIDE, mask=n < end, other=0.0)
    return tl.sum(part, 0)


@fast_launch
@triton.jit
def _sum_routing(
    start_ptr, total_ptr, part_ptr, useful_ptr, load_ptr, ends_ptr, starts_ptr, entropy_ptr, aux_ptr, seq_ptr, z_ptr,
    num_programs, per_sequence, num_tokens, sequences, aux_factor, seq_factor, E: tl.constexpr, NE: tl.constexpr,
    NUM_SUMS: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A program takes some experts, all chunks of tokens. The last one to come adds the losses of all experts up."""
    every, expert = tl.arange(0, NE), tl.program_id(0) * BE + tl.arange(0, BE)
    known = expert < E
    load_of_every, load = tl.zeros((NE,), tl.int32), tl.zeros((BE,), tl.int32)
    for sequence in range(sequences):
        load_of_every += tl.load(total_ptr + sequence * E + every, mask=every < E, other=0)
        load += tl.load(total_ptr + sequence * E + expert, mask=known, other=0)
    tl.store(load_ptr + expert, load.to(tl.int64), mask=known)
    num_rows, num_loads = load, sequences
    if useful_ptr is not None:  # padding has rows too
        load_of_every = tl.load(total_ptr + sequences * E + every, mask=every < E, other=0)
        num_rows = tl.load(total_ptr + sequences * E + expert, mask=known, other=0)
        num_loads += 1
    row = tl.sum(tl.where(every[None, :] < expert[:, None], load_of_every[None, :], 0), 1)
    tl.store(ends_ptr + expert, row + num_rows, mask=known)
    tl.store(starts_ptr + 1 + expert, row + num_rows, mask=known)
    count = num_useful(useful_ptr, 0, sequences, num_tokens)
    for first in range(0, num_programs, BP):
        n = first + tl.arange(0, BP)
        mask = (n < num_programs)[:, None] & known[None, :]
        at = start_ptr + n[:, None] * E + expert[None, :]
        rows = tl.load(at, mask=mask, other=0)
        tl.store(at, row[None, :] + tl.cumsum(rows, 0) - rows, mask=mask)
        row += tl.sum(rows, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr, 0)
        tl.store(entropy_ptr, _sum_column(part_ptr, 0, num_programs, NUM_SUMS, BP) / count)
        if z_ptr is not None:
            tl.store(z_ptr, _sum_column(part_ptr + 1, 0, num_programs, NUM_SUMS, BP) / count)
    if NUM_SUMS > 2:
        whole, by_sequence = tl.zeros((BE,), tl.float32), tl.zeros((BE,), tl.float32)
        for sequence in range(sequences):
            score = tl.zeros((BE,), tl.float32)
            for first in range(sequence * per_sequence, (sequence + 1) * per_sequence, BP):
                n = first + tl.arange(0, BP)
                mask = (n < (sequence + 1) * per_sequence)[:, None] & known[None, :]
                at = part_ptr + n[:, None] * NUM_SUMS + 2 + expert[None, :]
                score += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
            copies = tl.load(total_ptr + sequence * E + expert, mask=known, other=0)
            whole += score
            of_sequence = num_useful(useful_ptr, sequence, sequence + 1, num_tokens // sequences)
            by_sequence += score * copies.to(tl.float32) / of_sequence / of_sequence
        term_ptr = part_ptr + num_programs * NUM_SUMS + 2
        tl.store(term_ptr + expert, whole * load.to(tl.float32) / count / count, mask=known)
        tl.store(term_ptr + NUM_SUMS + expert, by_sequence, mask=known)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(total_ptr + num_loads * E, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            if aux_ptr is not None:
                term = tl.load(term_ptr + every, mask=every < E, other=0.0, cache_modifier=".cg")
                tl.store(aux_ptr, tl.sum(term, 0) * aux_factor)
            if seq_ptr is not None:
                term = tl.load(term_ptr + NUM_SUMS + every, mask=every < E, other=0.0, cache_modifier=".cg")
                tl.store(seq_ptr, tl.sum(term, 0) * seq_factor)
