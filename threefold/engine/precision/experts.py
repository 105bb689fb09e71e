"""Routed experts in a narrow format: fused kernels where the device has them for the recipe, else one expert at a time.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H, I and O dims in and out of a product.
"""

import torch
from torch import Tensor

from threefold.engine.dispatch.splits import host_sizes
from threefold.engine.kernels.choose import works
from threefold.engine.kernels.fp8 import experts as fused
from threefold.engine.kernels.fp8.format import QuantizedWeights
from threefold.engine.precision.linear import Low, low_linears
from threefold.engine.precision.native import capability
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.weights import Kept
from threefold.engine.ways import stood_for

_FUSED: dict[str, fused.Recipe] = {"fp8-blockwise": "blockwise", "fp8-rowwise": "rowwise"}
_HOPPER = 9


class LowExperts:
    def __init__(self, recipe: Recipe, keep: bool = True) -> None:
        self.recipe, self.keep = recipe, keep
        self._both: Kept[QuantizedWeights] = Kept(keep)
        self._lows: dict[str, list[Low]] = {}

    def fuses(self, down_EDH: Tensor, biased: bool) -> bool:
        """Whether kernels of our own take these experts whole."""
        dim, half = down_EDH.shape[1:]
        if self.recipe.name not in _FUSED or biased or down_EDH.dtype != torch.bfloat16 or not fused.fits(dim, half):
            return False
        return stood_for() or (down_EDH.is_cuda and works(down_EDH.device) and capability(down_EDH.device) == _HOPPER)

    def rows(
        self, x_RD: Tensor, weight_R: Tensor, count_E: Tensor, up_EXD: Tensor, down_EDH: Tensor, clamped: bool
    ) -> Tensor:
        """As `Experts.forward`, in one."""
        given = x_RD, weight_R, count_E, up_EXD, down_EDH
        return fused.fp8_experts(*given, self._weights(up_EXD, down_EDH), _FUSED[self.recipe.name], clamped)

    def tokens(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, up_EXD: Tensor, down_EDH: Tensor, clamped: bool
    ) -> Tensor:
        """As `Experts.of_tokens`."""
        given = x_TD, weight_TK, expert_TK, up_EXD, down_EDH
        made = self._weights(up_EXD, down_EDH)
        return fused.fp8_experts_of_tokens(*given, made, _FUSED[self.recipe.name], clamped)

    def _weights(self, up_EXD: Tensor, down_EDH: Tensor) -> QuantizedWeights | None:
        """None: made by whoever uses them, and again for the backward."""

        def make() -> QuantizedWeights:
            return fused.quantize_weights(up_EXD, down_EDH, _FUSED[self.recipe.name])

        return self._both.of(make, "fused", up_EXD, down_EDH) if self.keep else None

    def up(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
        return self._each("up", x_RI, weight_EOI, bias_EO, count_E)

    def down(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
        return self._each("down", x_RI, weight_EOI, bias_EO, count_E)

    def _each(self, name: str, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
        """Blocks along the rows never hold those of two experts."""
        if name not in self._lows:
            self._lows[name] = [Low(self.recipe, Kept(self.keep)) for _ in weight_EOI]
        parts = x_RI.split(host_sizes(count_E, len(x_RI)))
        outs = [
            low_linears(x, [(weight, low)])[0]
            for x, weight, low in zip(parts, weight_EOI.unbind(), self._lows[name], strict=True)
        ]
        if bias_EO is not None:
            outs = [out + bias for out, bias in zip(outs, bias_EO.unbind(), strict=True)]
        return torch.cat(outs)
