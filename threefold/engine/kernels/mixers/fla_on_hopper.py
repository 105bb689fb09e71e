"""Mends flash-linear-attention 0.6 where torch's Triton compiles some of its kernels wrongly: on Hopper, before 3.7.1.

The package refuses the backward of its gated rule there. `mend_fla` registers `delta_chunk_grads.py` with it in place
of the kernel that is refused, and leaves each of the other kernels one launch configuration. These were compared with
our rule in fp64 on an H200 with Triton 3.6; others of the package may be compiled wrongly too
(https://github.com/fla-org/flash-linear-attention/pull/988), and to measure them all takes minutes.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from threefold.engine.kernels.mixers.delta_chunk_grads import CHUNK, chunk_grads

VERIFIED_DIM = 128  # of keys and of values: with 16 and 32 our own kernel was wrong on an H200 with Triton 3.6
_TENSORS = ("q", "k", "v", "do", "h", "dh", "g", "dv")  # the package's names for those of `chunk_grads`
# Kernels of the package by module, with the configuration that is kept.
_KEPT: dict[str, dict[str, dict[str, int]]] = {
    "fla.ops.gated_delta_rule.gate": {
        "gdn_gate_chunk_cumsum_scalar_kernel": {"num_warps": 2},
        "gdn_gate_bwd_kernel": {"num_warps": 1},
    },
    "fla.ops.utils.cumsum": {"chunk_local_cumsum_scalar_kernel": {"num_warps": 2}},
    "fla.ops.gated_delta_rule.chunk_fwd": {
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 2},
    },
    "fla.ops.gated_delta_rule.wy_fast": {
        "recompute_w_u_fwd_kernel": {"num_warps": 4, "num_stages": 3},
        "prepare_wy_repr_bwd_kernel": {"num_warps": 2, "num_stages": 3},
    },
    "fla.ops.common.chunk_delta_h": {
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 64, "num_warps": 4, "num_stages": 2},
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 64, "num_warps": 4, "num_stages": 2},
    },
    "fla.ops.common.chunk_o": {
        "chunk_fwd_kernel_o": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
        "chunk_bwd_kernel_dv_local": {"num_warps": 4, "num_stages": 2},
    },
}


def mend_fla() -> None:
    """Change the package in this process, where it needs it. Raises where it is not as it was when this was written."""
    from fla.backends import BaseBackend, register  # type: ignore
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1  # type: ignore

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return

    class ThreefoldBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "threefold"

        def chunk_bwd_dqkwg_verifier(self, *args: Any, **named: Any) -> tuple[bool, str | None]:
            fits = not args and is_gated_delta_rule(named)
            return fits, None if fits else "only the gated delta rule in chunks of 64"

        def chunk_bwd_dqkwg(self, **named: Any) -> tuple[Tensor, ...]:
            q, k, v, out_grad, state, state_grad, decay, v_grad = (named[name] for name in _TENSORS)
            rest = named["scale"], named["cu_seqlens"], named["chunk_indices"]
            return chunk_grads(q, k, v, out_grad, state, state_grad, decay, v_grad, *rest)

    for module, kernels in _KEPT.items():
        for name, config in kernels.items():
            keep_config(getattr(import_module(module), name), config)
    register("common")(ThreefoldBackend)


def is_gated_delta_rule(named: dict[str, Any]) -> bool:
    """Whether a call of the package's `chunk_bwd_dqkwg` asks for what `chunk_grads` computes."""
    is_other = named.get("g_gamma") is not None or named.get("state_v_first") or named.get("chunk_size", CHUNK) != CHUNK
    if is_other or named.get("g") is None or named.get("dv") is None:
        return False
    return bool(named["q"].shape[-1] == named["v"].shape[-1] == VERIFIED_DIM)


def keep_config(kernel: Any, wanted: dict[str, int]) -> None:
    """Leave an autotuned kernel of Triton one of its configurations."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    kept = [config for config in kernel.configs if wanted.items() <= config.all_kwargs().items()]
    if len(kept) != 1:
        raise RuntimeError(f"{len(kept)} configurations of {kernel.base_fn.__name__} are {wanted}")
    kernel.configs = kept
