"""Floating-point formats below sixteen bits (e4m3, e5m2, e2m1) and rounding to them, in plain torch on any device.

`quantize` uses them. Example: `E4M3.round_nearest(torch.tensor(0.3))` is 0.3125.

Shapes: ... any dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A format of sign, exponent and mantissa. Rounding saturates at `max_value`; NaN stays NaN."""

    name: str
    mantissa_bits: int
    min_exponent: int  # exponent of the smallest normal number; below it numbers are equally spaced
    max_value: float
    dtype: torch.dtype | None  # the torch dtype that stores it; None for codes of four bits

    def round_nearest(self, x: Tensor) -> Tensor:
        """The nearest numbers of the format, in fp32; ties go to the even mantissa."""
        step = self._step(x)
        return self.clamp_to_range((x / step).round() * step)

    def round_stochastic(self, x: Tensor) -> Tensor:
        """Round up or down at random, with the probability that makes the mean exact."""
        step = self._step(x)
        return self.clamp_to_range((x / step + torch.rand_like(x)).floor() * step)

    def _step(self, x: Tensor) -> Tensor:
        """The distance between neighbors around x: powers of two, so that dividing by them is exact."""
        _, exponent = torch.frexp(x)  # x = m * 2 ** exponent with m in [0.5, 1)
        power = (exponent - 1).clamp(min=self.min_exponent) - self.mantissa_bits
        return torch.ldexp(torch.ones_like(x), power)

    def clamp_to_range(self, x: Tensor) -> Tensor:
        return x.clamp(-self.max_value, self.max_value)


# OCP 8-bit floating point specification 1.0 (e4m3 and e5m2); OCP Microscaling Formats 1.0, section 5.3.3 (e2m1).
E4M3 = FloatFormat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = FloatFormat("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = FloatFormat("e2m1", 1, 0, 6.0, None)

_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor, float_format: FloatFormat, stochastic: bool = False) -> Tensor:
    """Round to the format and return it as it is stored."""
    if stochastic:
        return to_storage(float_format.round_stochastic(x), float_format)
    # torch rounds to its own formats as `round_nearest` does, and much faster.
    return (
        to_storage(float_format.round_nearest(x), float_format)
        if float_format.dtype is None
        else float_format.clamp_to_range(x).to(float_format.dtype)
    )


def to_storage(x: Tensor, float_format: FloatFormat) -> Tensor:
    """Store numbers of the format: a byte each, or two codes in a byte, the first one in the low bits."""
    if float_format.dtype is not None:
        return x.to(float_format.dtype)
    codes = torch.bucketize(x.abs().contiguous(), x.new_tensor(_CODES)).to(torch.uint8)
    codes = torch.where(torch.signbit(x), codes + 8, codes)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def decode(stored: Tensor, float_format: FloatFormat, width: int) -> Tensor:
    """The stored numbers in fp32, `width` per row."""
    if float_format.dtype is not None:
        return stored.to(torch.float32)[..., :width]
    table = torch.tensor([*_CODES, *(-code for code in _CODES)], device=stored.device)
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)
    return table[codes[..., :width].long()]


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x > 0; infinities and NaN stay."""
    mantissa, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(x.isfinite(), power, x)
