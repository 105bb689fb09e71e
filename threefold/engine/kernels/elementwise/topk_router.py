"""The router as one autograd Function: logits by a bf16 GEMM, then two kernels for everything that follows them.

`moe/router.py` calls `route_tokens`. The first kernel chooses experts and computes their weights, and leaves partial
sums; the second one sums these to loads, entropy and balancing losses, and says where the rows of each expert start,
which `experts/counting_sort.py` continues with. The backward is one kernel and two GEMMs. `Router.forward` and
`moe/balance.py` have the same in plain torch.

Products of bf16 numbers are exact in fp32, and tensor cores sum them in fp32, so the logits are as good as those of
fp32 copies. The gradient of the logits is split into two bf16 parts with 16 significant bits together; the gradients
that are computed from it are bf16. The router's input, the logits, the chosen experts and, for balancing losses, the
loads are saved for the backward.

Shapes: T tokens, D model dim, E experts, K experts of a token, P programs, X = 2 E, F = E + 1,
S sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.batch import Padding
from threefold.engine.device import is_simulated
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_MAX_EXPERTS = 1024
_TILE = 2048  # scores in the tile of a program
_MAX_SLOTS = 256  # chosen experts in the tile of a program, which are then sorted together
FUSED_LOSSES = ("aux", "seq_aux", "z")  # those that the kernels compute; see `moe/balance.py`


@dataclass(frozen=True)
class TopKOptions:
    """How the experts of a token are chosen and weighted, and which balancing losses are computed."""

    top_k: int
    softmax: bool  # scores are a softmax over experts, else sigmoids
    norm: bool  # weights of a token are divided by their sum
    scale: float  # multiplies the weights
    num_groups: int = 1  # DeepSeek-V3: experts are chosen from the best `top_groups` of this many groups
    top_groups: int = 1
    first_slot: int | None = None  # forced balance: experts are given out round robin from this slot, not by score
    losses: tuple[str, ...] = ()  # among FUSED_LOSSES
    num_sequences: int = 1  # for "seq_aux"

    def fits(self, num_experts: int) -> bool:
        """Whether the kernel takes this many experts. Groups must split a tile whose sides are powers of two."""
        if num_experts > _MAX_EXPERTS or self.num_groups == 1:
            return num_experts <= _MAX_EXPERTS
        sides = num_experts, self.num_groups
        return all(side & (side - 1) == 0 for side in sides) and num_experts >= 2 * self.num_groups


@dataclass(frozen=True)
class ChunkStarts:
    """A half-finished sort of token copies by expert: chunks of tokens, and where the rows of each chunk go."""

    start_PE: Tensor  # the first row of each expert's copies from each chunk
    ends_E: Tensor  # end of each expert's rows
    starts_F: Tensor  # `ends_E` with a zero in front
    tokens: int  # tokens of a chunk


@dataclass(frozen=True)
class TopKResult:
    """What the router decides for a batch of tokens."""

    weight_TK: Tensor
    expert_TK: Tensor
    logits_TE: Tensor
    load_E: Tensor  # copies of tokens that chose each expert
    entropy: Tensor  # entropy of the scores in nats, mean over tokens
    losses: dict[str, Tensor]
    starts: ChunkStarts
    x_TD: Tensor | None = None  # see `route_tokens`


def route_tokens(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, options: TopKOptions, padding: Padding | None = None
) -> TopKResult:
    """Route an input in bf16 with a router in bf16. `bias_E` is added to the scores that are compared, and does not
    change the weights. Tokens of `padding` get experts, weights of 0, and no part in loads, entropy and losses.

    `TopKResult.x_TD` is the input again, for the experts to read. The gradient that they compute for it passes through
    the backward of the router, whose GEMM adds to it in place; otherwise autograd would add the two in a pass of its
    own. So an operation that reads `x_TD` must return a new tensor as its gradient. It is None for an input that
    requires no gradient, because an output of an autograd Function requires one as soon as the router trains.
    """
    chosen = _Chosen()
    weight_TK, logits_TE, same_TD, *losses = _Route.apply(x_TD, weight_ED, bias_E, options, chosen, padding)
    return _result(weight_TK, logits_TE, losses, chosen, same_TD if x_TD.requires_grad else None)


def route_logits(
    logits_TE: Tensor, bias_E: Tensor | None, options: TopKOptions, padding: Padding | None = None
) -> TopKResult:
    """The same for logits that were computed elsewhere, in fp32."""
    chosen = _Chosen()
    weight_TK, _, _, *losses = _Route.apply(logits_TE, None, bias_E, options, chosen, padding)
    return _result(weight_TK, logits_TE, losses, chosen)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits in fp32 from an input and a weight in bf16, for routers that add a bias to them."""
    logits_TE: Tensor = _RouterLogits.apply(x_TD, weight_ED)
    return logits_TE


def tokens_per_program(num_experts: int, top_k: int) -> int:
    """Tokens that one program of the kernel takes; a power of two."""
    return max(1, min(_TILE // next_power_of_2(num_experts), _MAX_SLOTS // next_power_of_2(top_k)))


def computes_losses(names: tuple[str, ...], num_tokens: int, num_sequences: int, num_experts: int, top_k: int) -> bool:
    """Whether the kernels compute these losses. For a loss of each sequence no program may cross into the next one."""
    whole = num_tokens // num_sequences % tokens_per_program(num_experts, top_k) == 0
    return all(name in FUSED_LOSSES for name in names) and ("seq_aux" not in names or num_sequences == 1 or whole)


def useful_tokens(padding: Padding, sequences: int) -> tuple[Tensor, Tensor]:
    """Whether each token pads, as the kernels read it, and the useful tokens of every sequence."""
    return padding.is_padding_BS.flatten().view(torch.uint8), padding.num_useful_B.view(sequences, -1).sum(dim=1)


class _Chosen:
    """Results of `_Route` that have no gradients. They do not pass through autograd, which takes time for each of
    them."""

    expert_TK: Tensor
    load_E: Tensor
    entropy: Tensor
    starts: ChunkStarts


def _result(
    weight_TK: Tensor, logits_TE: Tensor, losses: list[Tensor | None], chosen: _Chosen, x_TD: Tensor | None = None
) -> TopKResult:
    computed = {name: loss for name, loss in zip(FUSED_LOSSES, losses, strict=True) if loss is not None}
    made = weight_TK, chosen.expert_TK, logits_TE, chosen.load_E, chosen.entropy, computed, chosen.starts
    return TopKResult(*made, x_TD)


class _Route(torch.autograd.Function):
    """From tokens, or from logits where `weight_ED` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight_ED: Tensor | None,
        bias_E: Tensor | None,
        options: TopKOptions,
        chosen: _Chosen,
        padding: Padding | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        logits_TE = given.contiguous() if weight_ED is None else _gemm(given, weight_ED.t(), torch.float32)
        (num_tokens, num_experts), device = logits_TE.shape, logits_TE.device
        tokens = tokens_per_program(num_experts, options.top_k)
        programs = cdiv(num_tokens, tokens)
        sequences = options.num_sequences if "seq_aux" in options.losses else 1
        weight_TK = logits_TE.new_empty(num_tokens, options.top_k)
        expert_TK = torch.empty(weight_TK.shape, dtype=torch.long, device=device)
        # The loads of every sequence, those with padding, and how many programs of the second kernel are done.
        num_loads = sequences + (padding is not None)
        total = torch.zeros(num_loads * num_experts + 1, dtype=torch.int32, device=device)
        start_PE = torch.empty(programs, num_experts, dtype=torch.int32, device=device)
        ends_E, starts_F = (torch.empty(num_experts + n, dtype=torch.int32, device=device) for n in range(2))
        load_E = torch.empty(num_experts, dtype=torch.long, device=device)
        scalars = [logits_TE.new_empty(()) if name in options.losses else None for name in FUSED_LOSSES]
        entropy = logits_TE.new_empty(())
        balanced = scalars[0] is not None or scalars[1] is not None
        # Sums over the tokens of a program: entropy, the z loss, and the scores of every expert. Two more rows hold the
        # terms of experts in the losses.
        part_PS = logits_TE.new_empty(programs + 2, 2 + num_experts) if balanced else logits_TE.new_empty(programs, 2)
        useful = (None, None) if padding is None else useful_tokens(padding, sequences)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_triton import launch_sum_routing, launch_topk

            sums = start_PE, total, part_PS
            launch_topk(logits_TE, bias_E, useful[0], weight_TK, expert_TK, *sums, options, sequences)
            outputs = load_E, ends_E, starts_F, entropy, *scalars
            launch_sum_routing(*sums, useful[1], outputs, num_tokens, options, sequences)
        # The input is for the weight gradient alone: a frozen router needs none.
        x_TD = given if weight_ED is not None and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x_TD, weight_ED, logits_TE, expert_TK, total if balanced else None, *useful)
        ctx.options, ctx.sequences = options, sequences
        chosen.expert_TK, chosen.load_E, chosen.entropy = expert_TK, load_E, entropy
        chosen.starts = ChunkStarts(start_PE, ends_E, starts_F, tokens)
        return (weight_TK, None, None, *scalars) if weight_ED is None else (weight_TK, logits_TE, given, *scalars)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_TK, grad_TE, grad_TD, *loss_grads = grads
        x_TD, weight_ED, logits_TE, expert_TK, total, pad_T, useful_B = ctx.saved_tensors
        if grad_TK is None and grad_TE is None and all(grad is None for grad in loss_grads):
            return grad_TD, None, None, None, None, None
        num_tokens, num_experts = logits_TE.shape
        if weight_ED is None:
            out = torch.empty_like(logits_TE)
        else:
            out = weight_ED.new_empty(num_tokens, 2 * num_experts)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_grad_triton import launch_topk_grad

            weight_grad, logits_grad = (None if grad is None else grad.contiguous() for grad in (grad_TK, grad_TE))
            saved = logits_TE, expert_TK, total, pad_T, useful_B
            launch_topk_grad(weight_grad, logits_grad, tuple(loss_grads), *saved, out, ctx.options, ctx.sequences)
        if weight_ED is None:
            return out, None, None, None, None, None
        return *_gemm_grads(out, x_TD, weight_ED, ctx.needs_input_grad, grad_TD), None, None, None, None


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, weight_ED)
        return _gemm(x_TD, weight_ED.t(), torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_TX = weight_ED.new_empty(len(grad_TE), 2 * len(weight_ED))
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_grad_triton import launch_split_bf16

            launch_split_bf16(grad_TE.contiguous(), grad_TX)
        return _gemm_grads(grad_TX, x_TD, weight_ED, ctx.needs_input_grad)


def _gemm_grads(
    grad_TX: Tensor,
    x_TD: Tensor | None,
    weight_ED: Tensor,
    wanted: tuple[bool, ...],
    grad_TD: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight from that of the logits, which comes in two bf16 parts side by side. That of the
    input is added to `grad_TD`."""
    num_experts = len(weight_ED)
    x_grad = weight_grad = None
    if wanted[0]:
        twice_XD = torch.cat([weight_ED, weight_ED])
        x_grad = grad_TX @ twice_XD if grad_TD is None else grad_TD.addmm_(grad_TX, twice_XD)
    if wanted[1]:
        assert x_TD is not None
        both_XD = _gemm(grad_TX.t(), x_TD, torch.float32)
        # One pass: the sum is rounded once, as it is written.
        weight_grad = torch.add(both_XD[:num_experts], both_XD[num_experts:], out=torch.empty_like(weight_ED))
    return x_grad, weight_grad


def _gemm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in `dtype`, which is wider than that of the inputs."""
    if not a.is_cuda:  # torch has `out_dtype` on CUDA only
        return a.to(dtype) @ b.to(dtype) if not is_simulated() else a.new_empty(len(a), b.shape[1], dtype=dtype)
    return torch.mm(a, b, out_dtype=dtype)
