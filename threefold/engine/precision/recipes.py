"""Low-precision recipes: what `knobs.precision` means below sixteen bits, for each side of a layer's three GEMMs.

    y = x W^T        sums over the input's width:   x by `input`, W by `weight`
    dx = dy W        sums over the output's width:  dy by `grad`, W^T by `weight`
    dW = dy^T x      sums over tokens:              dy^T by `grad_t`, x^T by `input_t`

Sums are taken in fp32. Every side is quantized along the dim that is summed over, from sixteen bits, never twice.
`build.py` looks a recipe up by name: `RECIPES["fp8-blockwise"]`.
"""

from dataclasses import dataclass

from threefold.engine.precision.float_formats import E2M1, E4M3, E5M2
from threefold.engine.precision.quantize import QuantSpec


@dataclass(frozen=True)
class Recipe:
    """How each side of the GEMMs is quantized. Without `input_t` and `grad_t`, weight gradients have sixteen bits."""

    name: str
    input: QuantSpec
    weight: QuantSpec
    grad: QuantSpec
    input_t: QuantSpec | None
    grad_t: QuantSpec | None

    @property
    def block(self) -> int | None:
        """The block length: a dim sharded over ranks must hold multiples of it, so that all round as one rank does."""
        return self.input.block[1]


_ROW = QuantSpec(E4M3, (1, None))
_TENSOR, _TENSOR_GRAD = QuantSpec(E4M3, (None, None)), QuantSpec(E5M2, (None, None))
_BLOCK, _SQUARE = QuantSpec(E4M3, (1, 128), "power"), QuantSpec(E4M3, (128, 128), "power")
_MX = QuantSpec(E4M3, (1, 32), "e8m0")
_NV, _NV_GRAD = QuantSpec(E2M1, (1, 16), "e4m3"), QuantSpec(E2M1, (1, 16), "e4m3", stochastic=True)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # DeepSeek-V3 (arXiv 2412.19437), section 3.3. Scales are powers of two as in Transformer Engine's
        # Float8BlockScaling, except for weights: a fixed grid rounds a slow weight to the same side for many steps.
        # Both of them use 1x128 blocks for the inputs of weight gradients too. 128x128 blocks make that GEMM as fast as
        # the others, and cost nothing while the values of a block lie within 2 ** 14, the span of normal e4m3.
        Recipe("fp8-blockwise", _BLOCK, QuantSpec(E4M3, (128, 128)), _BLOCK, _SQUARE, _BLOCK),
        # Weight gradients use blocks here too: their rows run over all tokens, whose gradients differ much in size.
        Recipe("fp8-rowwise", _ROW, _ROW, _ROW, _SQUARE, _BLOCK),
        # One scale a matrix, from its own amax; gradients in e5m2: Transformer Engine's Float8CurrentScaling.
        Recipe("fp8-cs", _TENSOR, _TENSOR, _TENSOR_GRAD, _TENSOR, _TENSOR_GRAD),
        # OCP Microscaling Formats 1.0; e4m3 forward and backward, exponents rounded up, as Transformer Engine's MXFP8.
        Recipe("mxfp8", _MX, _MX, _MX, _MX, _MX),
        # arXiv 2509.25149: weights in 16x16 blocks, stochastic rounding of gradients, Hadamard for weight gradients.
        Recipe(
            "nvfp4",
            _NV,
            QuantSpec(E2M1, (16, 16), "e4m3"),
            _NV_GRAD,
            QuantSpec(E2M1, (1, 16), "e4m3", hadamard=True),
            QuantSpec(E2M1, (1, 16), "e4m3", stochastic=True, hadamard=True),
        ),
    )
}
