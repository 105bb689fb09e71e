"""What `knobs.precision` means below sixteen bits: how each side of the three products of a layer is rounded.

    y = x W^T        sums over the input's width:   x by `input`, W by `weight`
    dx = dy W        sums over the output's width:  dy by `grad`, W^T by `weight`
    dW = dy^T x      sums over tokens:              dy^T by `grad_t`, x^T by `input_t`

Sums are taken in fp32. Every side is rounded along what is summed over, from sixteen bits, never twice.
"""

from dataclasses import dataclass

from threefold.engine.precision.formats import E2M1, E4M3, E5M2
from threefold.engine.precision.quantize import Cast


@dataclass(frozen=True)
class Recipe:
    """Where `input_t` and `grad_t` are None, weight gradients are computed in sixteen bits."""

    name: str
    input: Cast
    weight: Cast
    grad: Cast
    input_t: Cast | None
    grad_t: Cast | None

    @property
    def block(self) -> int | None:
        """What a dim that ranks cut must be a multiple of, so that they round as one rank does."""
        return self.input.block[1]


_ROW = Cast(E4M3, (1, None))
_TENSOR, _TENSOR_GRAD = Cast(E4M3, (None, None)), Cast(E5M2, (None, None))
_BLOCK, _SQUARE = Cast(E4M3, (1, 128), "power"), Cast(E4M3, (128, 128), "power")
_MX = Cast(E4M3, (1, 32), "e8m0")
_NV, _NV_GRAD = Cast(E2M1, (1, 16), "e4m3"), Cast(E2M1, (1, 16), "e4m3", stochastic=True)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # DeepSeek-V3 (arXiv 2412.19437), section 3.3; powers of two as Transformer Engine's Float8BlockScaling, but for
        # weights: a grid that stays where it is rounds a slow weight to the same side for many steps.
        # Both take 1x128 for inputs of weight gradients too. Squares make that product as fast as the others, and cost
        # nothing while values of one lie within 2 ** 14, as far apart as e4m3's largest and smallest normal numbers.
        Recipe("fp8-blockwise", _BLOCK, Cast(E4M3, (128, 128)), _BLOCK, _SQUARE, _BLOCK),
        # Weight gradients in blocks all the same: a row of theirs is all tokens, whose gradients differ much in size.
        Recipe("fp8-rowwise", _ROW, _ROW, _ROW, _SQUARE, _BLOCK),
        # One scale a matrix, from the matrix itself; gradients in e5m2: Transformer Engine's Float8CurrentScaling.
        Recipe("fp8-cs", _TENSOR, _TENSOR, _TENSOR_GRAD, _TENSOR, _TENSOR_GRAD),
        # OCP Microscaling Formats 1.0; e4m3 both ways and exponents rounded up, as Transformer Engine's MXFP8.
        Recipe("mxfp8", _MX, _MX, _MX, _MX, _MX),
        # arXiv 2509.25149: weights in squares, gradients rounded by chance, both sides of weight gradients rotated.
        Recipe(
            "nvfp4",
            _NV,
            Cast(E2M1, (16, 16), "e4m3"),
            _NV_GRAD,
            Cast(E2M1, (1, 16), "e4m3", rotated=True),
            Cast(E2M1, (1, 16), "e4m3", stochastic=True, rotated=True),
        ),
    )
}
