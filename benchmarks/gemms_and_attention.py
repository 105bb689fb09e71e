"""The GEMMs and the attention of a training step and nothing else: no step in bf16 can be faster.

Shapes: R rows, N and K the dims of a weight, B batch, S sequence, H query heads, G key/value heads, D head dim.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from threefold.engine.attention.backend import attend
from threefold.engine.build import options_of
from threefold.engine.models.build import build_model
from threefold.engine.tune.attention_kernels import attention_heads_of
from threefold.plan.plan import Plan

NOT_COUNTED = ("embed.", "router.", "conv")  # a look-up, a GEMM that the FLOPs of a model leave out, a convolution
Run = Callable[[], None]


def gemms_and_attention(plan: Plan, device: torch.device) -> Callable[[Tensor], None]:
    """Linear layers forward and backward by cuBLAS, and attention by the kernel that the engine chooses.

    All rows of the experts are multiplied with one weight, which is faster than the grouped GEMMs of a real step. Of
    mixers other than full attention only the projections are computed.
    """
    linears = [(linear(*shape, device), count) for shape, count in Counter(linear_shapes(plan)).items()]
    num_attentions = sum(layer.mixer == "attention" for layer in plan.model.layers)
    parts = [*linears, (attention(plan, device), num_attentions)] if num_attentions else linears

    def step(tokens_BS: Tensor) -> None:
        for run, count in parts:
            for _ in range(count):
                run()

    return step


def linear_shapes(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(R, N, K) of the GEMMs of every weight."""
    model = build_model(plan.model, plan.mtp, torch.bfloat16, torch.device("meta"), options_of(plan), seed=0)
    tokens = plan.job.micro_batch * plan.job.seq_len
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not any(part in name for part in NOT_COUNTED):
            is_experts = weight.ndim == 3 and plan.model.moe is not None
            n, k = weight.shape[-2:]
            yield tokens * plan.model.moe.top_k if is_experts else tokens, n, k


def linear(rows: int, n: int, k: int, device: torch.device) -> Run:
    x_RK, weight_NK, grad_RN = (_random(shape, device) for shape in ((rows, k), (n, k), (rows, n)))

    def run() -> None:
        x_RK @ weight_NK.T
        grad_RN @ weight_NK
        grad_RN.T @ x_RK

    return run


def attention(plan: Plan, device: torch.device) -> Run:
    heads = attention_heads_of(plan)
    assert heads is not None, "attention sinks have a kernel of their own"

    def random(num: int, dim: int) -> Tensor:  # as a projection leaves them: the heads of a token side by side
        return _random((plan.job.micro_batch, plan.job.seq_len, num, dim), device).transpose(1, 2)

    q_BHSD, k_BGSD = random(heads.num, heads.dim), random(heads.num_kv, heads.dim)
    v_BGSD, grad_BHSD = random(heads.num_kv, heads.value_dim), random(heads.num, heads.value_dim)
    inputs = [x.requires_grad_() for x in (q_BHSD, k_BGSD, v_BGSD)]

    def run() -> None:
        out_BHSD = attend(*inputs, scale=heads.dim**-0.5)
        torch.autograd.grad(out_BHSD, inputs, grad_BHSD)

    return run


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)
