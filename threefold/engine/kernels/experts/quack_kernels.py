"""The steps of the experts with the CuTe kernels of quack-kernels, an optional package. `gpu_steps.py` calls them.

The package's kernels hold gate and up of one column side by side. So FC1's output and its gradient are `interleaved`
between these steps. The weights keep gate and up in two halves, and the kernels read and write them that way.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim. As a dim of weights and
of FC1's output X is 2 H (gate and up). As the first dim of x_XD and grad_XD it is T where `token_R` is given, because
the kernel gathers the rows then, and R otherwise. starts_F are the E + 1 edges of the experts' rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import cache
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.launch_config import CuteConfig

_MAX_PLANS = 4096


def fc1_forward(
    x_XD: Tensor, token_R: Tensor | None, weight_R: Tensor, gate_up_EXD: Tensor, starts_F: Tensor, config: CuteConfig
) -> tuple[Tensor, Tensor]:
    """-> (FC1's output, interleaved; the activation times the router weight)."""
    num_rows, gate_up_dim = len(weight_R), gate_up_EXD.shape[1]
    gate_up_RX, act_RH = x_XD.new_empty(num_rows, gate_up_dim), x_XD.new_empty(num_rows, gate_up_dim // 2)
    _limit_plan_cache(_swiglu_epilogue(), "_plan_cache", "_call_cache")
    _swiglu_epilogue()(
        x_XD, gate_up_EXD.mT, out={"D": gate_up_RX, "act": act_RH}, weight=weight_R.float(),
        config=_gemm_config(config), tuned=False, cu_seqlens_m=starts_F, A_idx=token_R, concat_layout=("B",),
    )  # fmt: skip
    return gate_up_RX, act_RH


def fc2_backward(
    grad_XD: Tensor,
    token_R: Tensor | None,
    weight_R: Tensor,
    down_EDH: Tensor,
    gate_up_RX: Tensor,
    starts_F: Tensor,
    config: CuteConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (gradient of gate_up_RX, interleaved like it; weighted activation; gradient of weight_R)."""
    grad_RX, act_RH = torch.empty_like(gate_up_RX), gate_up_RX.new_empty(len(weight_R), down_EDH.shape[2])
    _limit_plan_cache(_swiglu_grad_epilogue(), "_plan_cache", "_call_cache")
    results = _swiglu_grad_epilogue()(
        grad_XD, down_EDH, gate_up_RX, out={"D": grad_RX, "act": act_RH}, weight=weight_R.float(),
        config=_gemm_config(config), tuned=False, cu_seqlens_m=starts_F, A_idx=token_R,
    )  # fmt: skip
    return grad_RX, act_RH, results["weight_grad"].to(weight_R.dtype)


def grouped_gemm(
    a_RI: Tensor, weight_EOI: Tensor, starts_F: Tensor, config: CuteConfig, interleaved: bool = False
) -> Tensor:
    """The rows of each expert times its weight. `interleaved` says that columns of `a` are gate, up, gate, up, ...,
    while the weight has all of gate before all of up."""
    y_RO = a_RI.new_empty(len(a_RI), weight_EOI.shape[1])
    _gemm(a_RI, weight_EOI, y_RO, config, cu_seqlens_m=starts_F, concat_layout=("B",) if interleaved else None)
    return y_RO


def grouped_wgrad(
    gathered_XM: Tensor,
    token_R: Tensor | None,
    other_RN: Tensor,
    out_EMN: Tensor,
    starts_F: Tensor,
    config: CuteConfig,
    interleaved: bool = False,
) -> Tensor:
    """The weight gradient, summed over the rows of each expert, into `out_EMN`. `interleaved` says that columns of
    `other` are gate, up, gate, up, ..., while the result has all of gate before all of up."""
    edges = {"cu_seqlens_k": starts_F, "A_idx": token_R, "concat_layout": ("out",) if interleaved else None}
    _gemm(gathered_XM.mT, other_RN.mT, out_EMN, config, **edges)
    return out_EMN


def _gemm(a: Tensor, b: Tensor, out: Tensor, config: CuteConfig, **edges: Any) -> None:
    from quack import gemm as quack_gemm  # type: ignore

    _limit_plan_cache(quack_gemm, "_gemm_plan_cache")
    options = {"pingpong": config.pingpong, "max_swizzle_size": config.group}
    quack_gemm.gemm(a, b, out, None, None, config.m, config.n, config.cluster, 1, **options, **edges)


def _limit_plan_cache(owner: Any, *names: str) -> None:
    """Empty quack's caches of launch plans when they grow too large.

    They have one plan for each number of rows, and that number differs in every microbatch of an expert-parallel run.
    """
    for name in names:
        plans = getattr(owner, name, {})
        if len(plans) > _MAX_PLANS:
            plans.clear()


@cache
def _gemm_config(config: CuteConfig) -> Any:
    """The config in quack's own class. One object is made for each, because quack's cache compares configs by
    identity."""
    from quack.gemm_config import GemmConfig  # type: ignore

    return GemmConfig(
        tile_m=config.m, tile_n=config.n, pingpong=config.pingpong, cluster_m=config.cluster, cluster_n=1,
        max_swizzle_size=config.group, is_dynamic_persistent=False, device_capacity=9,
    )  # fmt: skip


@cache
def _swiglu_epilogue() -> Any:
    from quack.activation import gate_fn_map  # type: ignore
    from quack.epilogue.frontend import gemm_epilogue  # type: ignore
    from quack.epilogue.math import pack, unpack  # type: ignore
    from quack.epilogue.ops import ColVecLoad  # type: ignore

    swiglu = gate_fn_map["swiglu"]

    def weighted_swiglu(acc, weight):
        gate, up = unpack(acc)
        return {"D": pack(gate, up), "act": swiglu(gate, up) * weight}

    return gemm_epilogue(outputs=("act",), ops={"weight": ColVecLoad("weight")}, mode="acc_pair")(weighted_swiglu)


@cache
def _swiglu_grad_epilogue() -> Any:
    from quack.activation import dgate_fn_map
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import ColVecLoad, ColVecReduce

    dswiglu = dgate_fn_map["swiglu"]

    def weighted_swiglu_grad(acc, c, weight):
        gate, up = unpack(c)
        gate_grad, up_grad, act = dswiglu(gate, up, acc * weight)
        return {"D": pack(gate_grad, up_grad), "act": act * weight, "weight_grad": (act, acc)}

    return gemm_epilogue(
        outputs=("act",),
        ops={"weight": ColVecLoad("weight")},
        reduces={"weight_grad": ColVecReduce("weight_grad", scaled=True)},
        mode="packed_cd_b16x2",
    )(weighted_swiglu_grad)
