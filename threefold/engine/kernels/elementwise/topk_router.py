"""The router in two steps: logits by a bf16 GEMM, then one kernel for top-k, weights, loads and entropy.

`moe/router.py` calls it. Products of bf16 numbers are exact in fp32, and tensor cores sum them in fp32, so the logits
are as good as those of fp32 copies. The gradient of the logits is split into two bf16 parts with 16 significant bits
together; the gradients that are computed from it are bf16. The router's input, the logits and the chosen experts are
saved for the backward.

Shapes: T tokens, D model dim, E experts, K experts of a token, P programs, X = 2 E.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated

_MAX_EXPERTS = 1024


@dataclass(frozen=True)
class TopKOptions:
    """How the experts of a token are chosen and weighted."""

    top_k: int
    softmax: bool  # scores are a softmax over experts, else sigmoids
    norm: bool  # weights of a token are divided by their sum
    scale: float  # multiplies the weights
    num_groups: int = 1  # DeepSeek-V3: experts are chosen from the best `top_groups` of this many groups
    top_groups: int = 1
    first_slot: int | None = None  # forced balance: experts are given out round robin from this slot, not by score

    def fits(self, num_experts: int) -> bool:
        """Whether the kernel takes this many experts. Groups must split a tile whose sides are powers of two."""
        if num_experts > _MAX_EXPERTS or self.num_groups == 1:
            return num_experts <= _MAX_EXPERTS
        sides = num_experts, self.num_groups
        return all(side & (side - 1) == 0 for side in sides) and num_experts >= 2 * self.num_groups


@dataclass(frozen=True)
class TopKResult:
    """What the router decides for a batch of tokens."""

    weight_TK: Tensor
    expert_TK: Tensor
    load_E: Tensor  # copies of tokens that chose each expert
    entropy: Tensor  # entropy of the scores in nats, mean over tokens


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits in fp32 from an input and a weight in bf16."""
    logits_TE: Tensor = _RouterLogits.apply(x_TD, weight_ED)
    return logits_TE


def fused_topk(logits_TE: Tensor, bias_E: Tensor | None, options: TopKOptions) -> TopKResult:
    """Choose experts. `bias_E` is added to the scores that are compared, and does not change the weights."""
    weight_TK, expert_TK, load_E, part_P = _TopK.apply(logits_TE, bias_E, options)
    return TopKResult(weight_TK, expert_TK, load_E, part_P.sum() / len(logits_TE))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        # The input is for the weight gradient alone: a frozen router needs none.
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, weight_ED)
        return _gemm(x_TD, weight_ED.t(), torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        num_experts = len(weight_ED)
        grad_TX = weight_ED.new_empty(len(grad_TE), 2 * num_experts)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_triton import launch_split_bf16

            launch_split_bf16(grad_TE.contiguous(), grad_TX)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad_TX @ torch.cat([weight_ED, weight_ED])
        if ctx.needs_input_grad[1]:
            both_XD = _gemm(grad_TX.t(), x_TD, torch.float32)
            weight_grad = both_XD.unflatten(0, (2, num_experts)).sum(dim=0).to(weight_ED.dtype)
        return x_grad, weight_grad


def _gemm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in `dtype`, which is wider than that of the inputs."""
    if not a.is_cuda:  # torch has `out_dtype` on CUDA only
        return a.to(dtype) @ b.to(dtype) if not is_simulated() else a.new_empty(len(a), b.shape[1], dtype=dtype)
    return torch.mm(a, b, out_dtype=dtype)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: TopKOptions) -> tuple[Tensor, ...]:
        num_tokens, num_experts = logits_TE.shape
        ctx.set_materialize_grads(False)
        logits_TE = logits_TE.contiguous()
        weight_TK = logits_TE.new_empty(num_tokens, options.top_k)
        expert_TK = torch.empty(weight_TK.shape, dtype=torch.long, device=logits_TE.device)
        load_E = torch.zeros(num_experts, dtype=torch.long, device=logits_TE.device)
        programs = -(-num_tokens // tokens_per_program(num_experts))
        part_P = logits_TE.new_empty(programs)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_triton import launch_topk

            launch_topk(logits_TE, bias_E, weight_TK, expert_TK, load_E, part_P, options)
        ctx.save_for_backward(logits_TE, expert_TK)
        ctx.options = options
        ctx.mark_non_differentiable(expert_TK, load_E, part_P)
        return weight_TK, expert_TK, load_E, part_P

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor | None, *unused: object) -> tuple[Tensor | None, None, None]:
        logits_TE, expert_TK = ctx.saved_tensors
        if grad_TK is None:
            return None, None, None
        out_TE = torch.empty_like(logits_TE)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.topk_router_triton import launch_topk_grad

            launch_topk_grad(grad_TK.contiguous(), logits_TE, expert_TK, out_TE, ctx.options)
        return out_TE, None, None


def tokens_per_program(num_experts: int) -> int:
    """Tokens that one program of the kernel takes."""
    return max(1, 2048 // (1 << (num_experts - 1).bit_length()))
