"""Routed experts with random weights and loads, and three ways to run them, for the tests of the expert kernels.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts.
"""

from typing import Any

import torch

from threefold.engine.dispatch.received_rows import order_of_blocks
from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts
from threefold.engine.kernels.experts.kernel_choice import KernelChoice
from threefold.engine.moe.experts import Experts

LOADS = ["spread", "empty experts", "one takes all", "one each"]


def draw_experts(num_tokens: int, top_k: int, num_experts: int, load: str) -> Any:
    """Random experts of tokens, (T, K). Those of one token differ, except where one expert takes all."""
    if load == "one takes all":
        return torch.full((num_tokens, top_k), num_experts - 2)
    usable = num_experts // 2 if load == "empty experts" else num_experts
    chosen_TK = torch.rand(num_tokens, usable).topk(min(top_k, usable), dim=1).indices
    return chosen_TK[:, :1] if load == "one each" else chosen_TK


def make_experts(num_experts: int, dim: int, expert_dim: int, activation: str, bias: bool) -> Any:
    experts = Experts(num_experts, dim, expert_dim, bias, activation, backend="loop")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts


def parameters_of(experts: Any) -> list[Any]:
    return [experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias]


def run_plain(experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any) -> Any:
    """Sort, run expert by expert and sum back, all with operations that autograd differentiates."""
    order_R = expert_TK.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_TK.flatten(), minlength=len(experts.down))
    y_RD = experts(x_TD[order_R // expert_TK.shape[1]], weight_TK.flatten()[order_R], count_E)
    return y_RD[order_R.argsort()].unflatten(0, expert_TK.shape).sum(dim=1)


def run_fused(
    experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any, activation: str, choice: KernelChoice | None
) -> Any:
    """`fused_experts`: tokens in, tokens out."""
    return fused_experts(x_TD, weight_TK, expert_TK, *parameters_of(experts), activation, choice=choice)


def run_grouped(
    experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any, activation: str, choice: KernelChoice | None
) -> Any:
    """`grouped_experts` on rows that were sorted before."""
    order_R = expert_TK.flatten().argsort(stable=True)
    count_E = torch.bincount(expert_TK.flatten(), minlength=len(experts.down))
    x_RD, weight_R = x_TD[order_R // expert_TK.shape[1]], weight_TK.flatten()[order_R]
    y_RD = grouped_experts(x_RD, weight_R, count_E, *parameters_of(experts), activation, choice=choice)
    return y_RD[order_R.argsort()].unflatten(0, expert_TK.shape).sum(dim=1)


def run_arrived(
    experts: Any, x_TD: Any, weight_TK: Any, expert_TK: Any, activation: str, choice: KernelChoice | str | None
) -> Any:
    """`grouped_experts` on rows that lie in three blocks, each sorted by expert, as ranks have sent them."""
    num_experts, (num_tokens, top_k) = len(experts.down), expert_TK.shape
    expert_R, block_R = expert_TK.flatten(), torch.arange(num_tokens * top_k, device=expert_TK.device) % 3
    arrived_R = (block_R * num_experts + expert_R).argsort(stable=True)
    count_Be = torch.stack([torch.bincount(expert_R[block_R == block], minlength=num_experts) for block in range(3)])
    x_RD, weight_R = x_TD[arrived_R // top_k], weight_TK.flatten()[arrived_R]
    order, parameters = order_of_blocks(count_Be, len(arrived_R)), parameters_of(experts)
    y_RD = grouped_experts(x_RD, weight_R, count_Be.sum(0), *parameters, activation, choice=choice, order=order)
    return y_RD[arrived_R.argsort()].unflatten(0, expert_TK.shape).sum(dim=1)


def gradients(y: Any, experts: Any, x_TD: Any, weight_TK: Any, slope: Any) -> list[Any]:
    """-> [y, gradients of x, of the router weights and of every parameter]."""
    return [y, *torch.autograd.grad(y, [x_TD, weight_TK, *experts.parameters()], slope)]


def relative_error(found: Any, expected: Any) -> float:
    """The norm of the difference over the norm of the expected tensor; nan if any value is nan."""
    found, expected = found.detach().double(), expected.detach().double()
    length = expected.norm()
    return float((found - expected).norm() / length if length else found.norm())
