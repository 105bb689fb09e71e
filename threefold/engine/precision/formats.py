"""Narrow floating-point formats: every value they have, and rounding to them, in plain torch on any device.

Shapes: ... any dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """Sign, exponent and mantissa. Nothing above `largest`: rounding stops there. Not-a-number stays what it is."""

    name: str
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number; below it the steps stay
    largest: float
    dtype: torch.dtype | None  # that torch stores it in; None: codes of four bits

    def nearest(self, x: Tensor) -> Tensor:
        """In fp32; ties to the even mantissa."""
        step = self._step(x)
        return self.cut((x / step).round() * step)

    def stochastic(self, x: Tensor) -> Tensor:
        """Up or down with the odds that make the mean exact."""
        step = self._step(x)
        return self.cut((x / step + torch.rand_like(x)).floor() * step)

    def _step(self, x: Tensor) -> Tensor:
        """Between neighbours around x; powers of two, so that dividing by them is exact."""
        _, exponent = torch.frexp(x)  # x = m * 2 ** exponent with m in [0.5, 1)
        power = (exponent - 1).clamp(min=self.min_exponent) - self.mantissa_bits
        return torch.ldexp(torch.ones_like(x), power)

    def cut(self, x: Tensor) -> Tensor:
        return x.clamp(-self.largest, self.largest)


# OCP 8-bit floating point specification 1.0 (e4m3 and e5m2); OCP Microscaling Formats 1.0, section 5.3.3 (e2m1).
E4M3 = Format("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format("e2m1", 1, 0, 6.0, None)

_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor, form: Format, stochastic: bool = False) -> Tensor:
    """Rounded, and as the format keeps it."""
    if stochastic:
        return store(form.stochastic(x), form)
    # torch rounds to its own formats as `nearest` does, and much faster.
    return store(form.nearest(x), form) if form.dtype is None else form.cut(x).to(form.dtype)


def store(x: Tensor, form: Format) -> Tensor:
    """Values that the format has, as it keeps them: a byte each, or two codes in a byte, the first one below."""
    if form.dtype is not None:
        return x.to(form.dtype)
    codes = torch.bucketize(x.abs().contiguous(), x.new_tensor(_CODES)).to(torch.uint8)
    codes = torch.where(torch.signbit(x), codes + 8, codes)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def load(kept: Tensor, form: Format, width: int) -> Tensor:
    """In fp32; `width` numbers a row."""
    if form.dtype is not None:
        return kept.to(torch.float32)[..., :width]
    table = torch.tensor([*_CODES, *(-code for code in _CODES)], device=kept.device)
    codes = torch.stack([kept & 15, kept >> 4], dim=-1).flatten(-2)
    return table[codes[..., :width].long()]


def power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x > 0; what is not finite stays."""
    mantissa, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(x.isfinite(), power, x)
