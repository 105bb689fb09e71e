"""Rotary position embedding (RoPE): plain or scaled (`RopeScaling`), on all of a head or a part of it.

Dims turn as halves or as interleaved pairs. The attention modules ask `Positions.rope` for the tables and rotate
queries and keys with them.

Shapes: B batch, S sequence, H heads, R rotated dims of a head, F = R / 2 frequencies.
"""

import math

import torch
from torch import Tensor, nn

from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.elementwise.rotary import RotaryOptions, norm_and_rotate
from threefold.engine.layers.norm import RMSNorm
from threefold.spec.model import RopeScaling


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def logit_scale(scaling: RopeScaling | None) -> float:
    """DeepSeek's extra factor on the attention logits under YaRN: mscale_all_dim once for q, once for k."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def table_scale(scaling: RopeScaling | None) -> float:
    """The factor of YaRN and LongRoPE on cos and sin."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        is_stretched = scaling.factor > 1
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_len)) if is_stretched else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor)


def frequencies(
    dim: int,
    theta: float,
    scaling: RopeScaling | None,
    device: torch.device | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Radians per position for each pair of dims, in fp32 as every published model was trained.

    `length` is that of the longest document in the microbatch, a tensor so that no host waits for it. Without it,
    frequencies that depend on the length are those of the context of training.
    """
    exponent_F = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    if scaling is not None and scaling.kind in ("dynamic", "ntk_alpha"):
        return 1.0 / _stretched_base(dim, theta, scaling, length) ** exponent_F
    plain_F = 1.0 / theta**exponent_F
    if scaling is None:
        return plain_F
    if scaling.kind == "proportional":
        num_turning = int(scaling.turning_fraction * dim // 2)
        return torch.where(exponent_F < exponent_F[num_turning - 1] + 1 / dim, plain_F / scaling.factor, 0.0)
    if scaling.kind == "linear":
        return plain_F / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain_F, scaling)
    if scaling.kind == "longrope":
        return plain_F / _longrope_factors(scaling, plain_F, length)
    assert scaling.kind == "yarn"  # build_model refuses others
    low, high = _yarn_ramp(dim, theta, scaling)
    position_F = torch.arange(dim // 2, dtype=torch.float32, device=device)
    slow_F = ((position_F - low) / (high - low)).clamp(0, 1)
    return plain_F / scaling.factor * slow_F + plain_F * (1 - slow_F)


def _stretched_base(dim: int, theta: float, scaling: RopeScaling, length: Tensor | None) -> Tensor | float:
    """The base of NTK-aware scaling: stretched by a fixed alpha, or by how far a text is beyond the context."""
    power = dim / (dim - 2)
    if scaling.kind == "ntk_alpha":
        return float(theta * scaling.factor**power)
    if length is None:
        return theta
    ratio = length.clamp(min=scaling.original_len).to(torch.float32) / scaling.original_len
    return theta * (scaling.factor * ratio - (scaling.factor - 1)) ** power


def _longrope_factors(scaling: RopeScaling, like_F: Tensor, length: Tensor | None) -> Tensor:
    short_F, long_F = like_F.new_tensor(scaling.short_factor), like_F.new_tensor(scaling.long_factor)
    return short_F if length is None else torch.where(length > scaling.original_len, long_F, short_F)


def _llama3_frequencies(plain_F: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones left alone, and those between are blended."""
    turns_F = scaling.original_len * plain_F / (2 * math.pi)  # within the context of training
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return plain_F / scaling.factor * (1 - kept_F) + plain_F * kept_F


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The dims between which YaRN blends from unscaled to interpolated frequencies."""

    def at(turns: float) -> float:
        return dim * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = at(scaling.beta_fast), at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high  # 0.001: as YaRN's code avoids the division by zero


def rope_tables(
    positions_BS: Tensor, dim: int, theta: float, scaling: RopeScaling | None, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos_BSF and sin_BSF in fp32. `length`: see `frequencies`."""
    freq_F = frequencies(dim, theta, scaling, positions_BS.device, length)
    return _tables_of_angles(positions_BS.to(torch.float32)[..., None] * freq_F, scaling)


def multimodal_rope_tables(
    positions_3BS: Tensor, dim: int, theta: float, scaling: RopeScaling | None, sections: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """`rope_tables` where each frequency turns by one of three positions: time, height or width (interleaved M-RoPE).

    The axes take turns from frequency to frequency. One that has had as many as its section says leaves its turns to
    time.
    """
    freq_F = frequencies(dim, theta, scaling, positions_3BS.device)
    axis_F = [n % 3 if n < 3 * sections[n % 3] else 0 for n in range(len(freq_F))]
    angle_BSF = positions_3BS.to(torch.float32).movedim(0, -1)[..., axis_F] * freq_F
    return _tables_of_angles(angle_BSF, scaling)


def _tables_of_angles(angle_BSF: Tensor, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    scale = table_scale(scaling)
    return angle_BSF.cos() * scale, angle_BSF.sin() * scale


def norm_and_rotate_heads(
    x_BSHd: Tensor, norm: nn.Module, table: tuple[Tensor, Tensor] | None, pairs: bool = False
) -> Tensor:
    """Projected heads after the norm of queries or keys and the rotation, as (B, H, S, d) for attention.

    Without a table nothing is rotated.
    """
    if table is None:
        return norm(x_BSHd).transpose(1, 2)
    if isinstance(norm, RMSNorm) and runs_fused(x_BSHd):
        options = RotaryOptions(interleaved=pairs, eps=norm.eps, zero_centered=norm.zero_centered)
        return norm_and_rotate(x_BSHd, norm.weight, table, options).transpose(1, 2)
    return rotate(norm(x_BSHd).transpose(1, 2), table, pairs)


def rotate(x_BHSR: Tensor, table: tuple[Tensor, Tensor], pairs: bool = False) -> Tensor:
    """Rotate the first 2F dims of every head and leave the rest.

    With `pairs`, neighboring dims form a pair (Megatron's `rotary_interleaved`), and the result comes out as two
    halves: queries and keys are permuted alike, so that their dot products do not change.
    """
    if runs_fused(x_BHSR):
        return norm_and_rotate(x_BHSR.transpose(1, 2), None, table, RotaryOptions(interleaved=pairs)).transpose(1, 2)
    cos_BSF, sin_BSF = table
    num_rotated = 2 * cos_BSF.shape[-1]
    cos, sin = cos_BSF[:, None].to(x_BHSR.dtype), sin_BSF[:, None].to(x_BHSR.dtype)
    head, rest = x_BHSR[..., :num_rotated], x_BHSR[..., num_rotated:]
    first, second = (head[..., 0::2], head[..., 1::2]) if pairs else head.chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)
