"""Bytes that norms save, and those that the additional norms of Gemma 4 save, for one layer and one microbatch.

`activations.py` adds them to the other tensors of a layer, `offloaded.py` to those that go to the host. The norms are
those of `engine/attention/gqa.py` (`v_norm`, `out_norm`) and `engine/moe/layer.py` (`MoeSpec.own_norms`).

Mirrors `engine/attention/gqa.py`, `engine/moe/layer.py`, `engine/layers/norm.py`.
"""

from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes
from threefold.spec.model import GqaSpec


def norm_bytes(local: LocalSizes, dim: float, groups: float = 1) -> float:
    """Bytes per token inside norms of `dim` numbers in `groups` groups: the input. Plain torch takes an RMS norm apart
    into operations in fp32, which save the input, the normalized numbers, and two statistics of each group."""
    if local.has_fused_kernels:
        return local.element_bytes * dim
    if local.model.norm == "layer":
        return local.element_bytes * dim + 2 * FP32 * groups
    return 2 * FP32 * (dim + groups)


def norms_in_fp32(local: LocalSizes) -> bool:
    """Whether norms save copies of their input in fp32."""
    return local.is_16_bit and not local.has_fused_kernels


def has_own_norms(local: LocalSizes) -> bool:
    """Whether router, routed and shared experts multiply the normed tokens by weights of their own."""
    return local.model.moe is not None and local.model.moe.own_norms


def value_norm_bytes(local: LocalSizes, spec: GqaSpec, width: float) -> float:
    """Bytes per token of the norm of values, `width` numbers on a rank: a statistic of each head, and the values where
    they are not the keys, which the norm of keys saves."""
    if not spec.v_norm:
        return 0.0
    return FP32 * width / spec.head_dim + (0 if spec.shared_kv else local.element_bytes * width)


def out_norm_bytes(local: LocalSizes, spec: GqaSpec) -> float:
    """The input of the norm behind attention."""
    return norm_bytes(local, local.model.dim) * local.tokens if spec.out_norm else 0.0


def router_input_bytes(local: LocalSizes) -> float:
    """The tokens as the router reads them, where it does not save them in fp32; and the experts' factors."""
    moe = local.model.moe
    if not has_own_norms(local) or moe is None:
        return 0.0
    saves_input = "router" in local.saved_inputs and not local.routes_in_fp32
    factors = 2 * FP32 * moe.top_k if moe.expert_scale else 0
    return (local.element_bytes * local.model.dim * saves_input + factors) * local.tokens


def expert_norm_bytes(local: LocalSizes) -> float:
    """The inputs of the norms of the routed experts' output and of the sum, and the tokens as shared experts read
    them."""
    if not has_own_norms(local):
        return 0.0
    return (2 * norm_bytes(local, local.model.dim)) * local.tokens + _shared_input_bytes(local)


def _shared_input_bytes(local: LocalSizes) -> float:
    """With TP the gathered sequence is saved in its place; in low precision the quantized one."""
    is_elsewhere = local.gathers_sequence or (local.quantized_bytes and not local.has_adapters)
    is_saved = "shared" in local.saved_inputs and "shared_experts" not in local.recompute
    return local.element_bytes * local.model.dim * local.tokens if is_saved and not is_elsewhere else 0.0


def shared_norm_bytes(local: LocalSizes) -> float:
    """The input of the norm of the shared experts' output."""
    return norm_bytes(local, local.model.dim) * local.tokens if has_own_norms(local) else 0.0
