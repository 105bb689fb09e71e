"""Routed experts in low precision: fused FP8 kernels where they exist for the recipe, else one expert at a time.

`moe/experts.py` holds a `LowPrecisionExperts` where a recipe is set and calls it in place of its own GEMMs.

Shapes: T tokens, K experts of a token, R rows (token copies sorted by expert), D model dim, E experts, H expert dim,
X = 2 H, I and O dims in and out of a GEMM.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.dist.host_sizes import host_sizes
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.fp8 import fused_experts as fused
from threefold.engine.kernels.fp8.quantized_tensors import Fp8ExpertWeights
from threefold.engine.precision.low_precision_linear import LinearPrecision, low_precision_linears
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.scaled_mm_backends import compute_capability_major
from threefold.engine.precision.weight_cache import WeightCache

_FUSED_RECIPES: dict[str, fused.Recipe] = {"fp8-blockwise": "blockwise", "fp8-rowwise": "rowwise"}
_HOPPER = 9


class LowPrecisionExperts:
    """The expert GEMMs of one layer by a recipe, with a cache of the quantized weights."""

    def __init__(self, recipe: Recipe, cache_weights: bool = True) -> None:
        self.recipe, self.cache_weights = recipe, cache_weights
        self._fused_cache: WeightCache[Fp8ExpertWeights] = WeightCache(cache_weights)
        self._precisions: dict[str, list[LinearPrecision]] = {}

    def can_fuse(self, down_EDH: Tensor, biased: bool) -> bool:
        """Whether the fused FP8 kernels take these experts: both layers and the activation in one."""
        dim, expert_dim = down_EDH.shape[1:]
        if (
            self.recipe.name not in _FUSED_RECIPES
            or biased
            or down_EDH.dtype != torch.bfloat16
            or not fused.supports_sizes(dim, expert_dim)
        ):
            return False
        return is_simulated() or (
            down_EDH.is_cuda
            and has_triton_kernels(down_EDH.device)
            and compute_capability_major(down_EDH.device) == _HOPPER
        )

    def weight_caches(self) -> Iterator[WeightCache[Any]]:
        yield self._fused_cache
        for precisions in self._precisions.values():
            yield from (precision.cache for precision in precisions)

    def forward_rows(
        self,
        x_RD: Tensor,
        weight_R: Tensor,
        count_E: Tensor,
        up_EXD: Tensor,
        down_EDH: Tensor,
        clamped: bool,
        order: SortedRows | None = None,
    ) -> Tensor:
        """Run the fused kernels on rows, as `Experts.forward` does."""
        arguments = x_RD, weight_R, count_E, up_EXD, down_EDH
        fp8_weights = self._quantized_weights(up_EXD, down_EDH)
        return fused.fp8_experts(*arguments, fp8_weights, _FUSED_RECIPES[self.recipe.name], clamped, order)

    def forward_tokens(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        up_EXD: Tensor,
        down_EDH: Tensor,
        clamped: bool,
        starts: ChunkStarts | None = None,
    ) -> Tensor:
        """Run the fused kernels on tokens, as `Experts.forward_tokens` does."""
        arguments = x_TD, weight_TK, expert_TK, up_EXD, down_EDH
        fp8_weights = self._quantized_weights(up_EXD, down_EDH)
        return fused.fp8_experts_of_tokens(*arguments, fp8_weights, _FUSED_RECIPES[self.recipe.name], clamped, starts)

    def _quantized_weights(self, up_EXD: Tensor, down_EDH: Tensor) -> Fp8ExpertWeights | None:
        """The cached weights, or None: then the kernels quantize them in the forward and once more in the backward."""

        def make() -> Fp8ExpertWeights:
            return fused.quantize_weights(up_EXD, down_EDH, _FUSED_RECIPES[self.recipe.name])

        return self._fused_cache.get_or_make(make, "fused", up_EXD, down_EDH) if self.cache_weights else None

    def up(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
        return self._run_each_expert("up", x_RI, weight_EOI, bias_EO, count_E)

    def down(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
        return self._run_each_expert("down", x_RI, weight_EOI, bias_EO, count_E)

    def _run_each_expert(
        self, name: str, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor
    ) -> Tensor:
        """Run each expert on its own, so that no block of rows holds rows of two experts."""
        if name not in self._precisions:
            self._precisions[name] = [
                LinearPrecision(self.recipe, WeightCache(self.cache_weights), part="experts") for _ in weight_EOI
            ]
        parts = x_RI.split(host_sizes(count_E, len(x_RI)))
        outs = [
            low_precision_linears(x, [(weight, precision)])[0]
            for x, weight, precision in zip(parts, weight_EOI.unbind(), self._precisions[name], strict=True)
        ]
        if bias_EO is not None:
            outs = [out + bias for out, bias in zip(outs, bias_EO.unbind(), strict=True)]
        return torch.cat(outs)
