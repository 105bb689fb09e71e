"""The router in few passes: logits on tensor cores, then choice, weights, loads and entropy from one look at them.

Products of bf16 numbers are exact in fp32, in which tensor cores sum them: logits are as good as those of fp32 copies.
Their gradient is split in two bf16 parts, 16 bits in all, where what is made of it is rounded to 8.

Kept for the backward: the router's input, the logits and the choice.

Shapes: T tokens, D model dim, E experts, K experts of a token, P programs, X = 2 E.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.ways import stood_for

_MOST_EXPERTS = 1024


@dataclass(frozen=True)
class Choosing:
    """How experts are chosen and weighted. `first_slot`: not None where they take turns instead."""

    top_k: int
    softmax: bool
    norm: bool
    scale: float
    num_groups: int = 1
    top_groups: int = 1
    first_slot: int | None = None

    def fits(self, num_experts: int) -> bool:
        """Groups are cut from a tile whose sides are powers of two."""
        if num_experts > _MOST_EXPERTS or self.num_groups == 1:
            return num_experts <= _MOST_EXPERTS
        sides = num_experts, self.num_groups
        return all(side & (side - 1) == 0 for side in sides) and num_experts >= 2 * self.num_groups


@dataclass(frozen=True)
class Choice:
    weight_TK: Tensor
    expert_TK: Tensor
    load_E: Tensor  # copies of tokens each expert was asked to take
    entropy: Tensor  # mean over tokens of the scores' entropy, in nats


def logits_of(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """fp32, of an input and a weight in bf16."""
    logits_TE: Tensor = _Logits.apply(x_TD, weight_ED)
    return logits_TE


def choose(logits_TE: Tensor, bias_E: Tensor | None, how: Choosing) -> Choice:
    """`bias_E` is added to the scores where they are compared, and nowhere else."""
    weight_TK, expert_TK, load_E, part_P = _Choose.apply(logits_TE, bias_E, how)
    return Choice(weight_TK, expert_TK, load_E, part_P.sum() / len(logits_TE))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _product(x_TD, weight_ED.t(), torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        num_experts = len(weight_ED)
        grad_TX = x_TD.new_empty(len(x_TD), 2 * num_experts)
        if not stood_for():
            from threefold.engine.kernels.routing_passes import launch_split

            launch_split(grad_TE.contiguous(), grad_TX)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad_TX @ torch.cat([weight_ED, weight_ED])
        if ctx.needs_input_grad[1]:
            both_XD = _product(grad_TX.t(), x_TD, torch.float32)
            weight_grad = both_XD.unflatten(0, (2, num_experts)).sum(dim=0).to(weight_ED.dtype)
        return x_grad, weight_grad


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype`, not to that of the factors."""
    if not a.is_cuda:  # torch has this product on CUDA only
        return a.to(dtype) @ b.to(dtype) if not stood_for() else a.new_empty(len(a), b.shape[1], dtype=dtype)
    return torch.mm(a, b, out_dtype=dtype)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, how: Choosing) -> tuple[Tensor, ...]:
        num_tokens, num_experts = logits_TE.shape
        ctx.set_materialize_grads(False)
        logits_TE = logits_TE.contiguous()
        weight_TK = logits_TE.new_empty(num_tokens, how.top_k)
        expert_TK = torch.empty(weight_TK.shape, dtype=torch.long, device=logits_TE.device)
        load_E = torch.zeros(num_experts, dtype=torch.long, device=logits_TE.device)
        programs = -(-num_tokens // tokens_of(num_experts))
        part_P = logits_TE.new_empty(programs)
        if not stood_for():
            from threefold.engine.kernels.routing_passes import launch_choose

            launch_choose(logits_TE, bias_E, weight_TK, expert_TK, load_E, part_P, how)
        ctx.save_for_backward(logits_TE, expert_TK)
        ctx.how = how
        ctx.mark_non_differentiable(expert_TK, load_E, part_P)
        return weight_TK, expert_TK, load_E, part_P

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor | None, *unused: object) -> tuple[Tensor | None, None, None]:
        logits_TE, expert_TK = ctx.saved_tensors
        if grad_TK is None:
            return None, None, None
        out_TE = torch.empty_like(logits_TE)
        if not stood_for():
            from threefold.engine.kernels.routing_passes import launch_choose_grad

            launch_choose_grad(grad_TK.contiguous(), logits_TE, expert_TK, out_TE, ctx.how)
        return out_TE, None, None


def tokens_of(num_experts: int) -> int:
    """That a program looks at together."""
    return max(1, 2048 // (1 << (num_experts - 1).bit_length()))
