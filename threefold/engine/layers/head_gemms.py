"""The three GEMMs of the output head, chunk by chunk of tokens: logits, input gradient and weight gradient.

`cross_entropy.py` asks for the logits of a chunk, makes their gradient, and hands it back. `PlainGemms` multiplies in
the dtype of the weights, `LowPrecisionGemms` as a `HeadPrecision` says (`knobs.fp8_output`). With gradients in blocks
of 128 on a GPU the latter takes the statistics of the softmax instead of the gradient: one kernel makes the gradient
and quantizes it both ways.

Shapes: T tokens, C tokens of a chunk, D model dim, V vocabulary, or this rank's shard of it.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.autograd.main_grad import accumulate_gemm
from threefold.engine.context import count_event
from threefold.engine.device import device_type, is_simulated
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, E4M3, Fp8Columns, num_blocks
from threefold.engine.precision.emulated_backend import EmulatedBackend, QuantizedWeights
from threefold.engine.precision.low_precision_linear import LinearPrecision
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.scaled_mm_backends import (
    EMULATED,
    BlockwiseBackend,
    RowwiseBackend,
    SimulatedBackend,
    choose_backend,
)
from threefold.engine.sum_dtype import fp32_or_wider

# Chunks whose transposed gradients are kept for one weight-gradient GEMM. `scaled_mm` cannot add to a sum, so that a
# GEMM for each chunk would write and read the whole gradient of the head once more.
CHUNKS_PER_WGRAD = 4
# The longest sums of the logits that are left to the tensor cores, which keep about 14 bits of them. Hopper multiplies
# a third faster then. Each 32 products may cut 2 ** -14 off the sum: less than the rounding to e4m3 before, by far.
MAX_FAST_WIDTH = 4096


@dataclass(frozen=True)
class HeadPrecision(LinearPrecision):
    """How the weight of the head is quantized: by `logits` for the forward GEMM, by `recipe` for both gradients."""

    part: str = "head"
    logits: Recipe | None = None  # None: by `recipe` too


class PlainGemms:
    """GEMMs in the dtype of the weight."""

    takes_statistics = False

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, chunk: int, wants_x: bool, wants_weight: bool) -> None:
        self.x_TD, self.weight_VD, self.chunk = x_TD, weight_VD, chunk
        self.wants_weight = wants_weight
        self.grad_TD = torch.empty_like(x_TD) if wants_x else None
        self.grad_VD: Tensor | None = None
        # fp16 ends at 65504, and no loss scale has shrunk this sum over all tokens yet. On a GPU the sum of two chunks
        # is rounded once more than that of one, and moves half as many bytes as in fp32.
        few = 2 if device_type(x_TD.device) == "cuda" else 1
        self.sums_wider = len(x_TD) > few * chunk or x_TD.dtype == torch.float16

    def _rows(self, start: int) -> Tensor:
        return self.x_TD[start : start + self.chunk]

    def logits(self, start: int) -> Tensor:
        """The logits of the chunk that begins at token `start`."""
        return F.linear(self._rows(start), self.weight_VD)

    def add_grad(self, start: int, logits_grad_CV: Tensor, ignored_C1: Tensor | None) -> None:
        """Multiply the gradient of a chunk's logits. Its rows of ignored tokens may hold anything if `ignored_C1` says
        which these are; else they hold zeros."""
        # Ignored tokens are masked in the tensors of width D, which are much smaller than the logits.
        if self.grad_TD is not None:
            out_CD = torch.mm(logits_grad_CV, self.weight_VD, out=self.grad_TD[start : start + self.chunk])
            if ignored_C1 is not None:
                out_CD.masked_fill_(ignored_C1, 0)
        if not self.wants_weight:
            return
        used_CD = self._rows(start) if ignored_C1 is None else self._rows(start).masked_fill(ignored_C1, 0)
        if self.sums_wider:
            dtype = fp32_or_wider(used_CD.dtype)
            self.grad_VD = accumulate_gemm(self.grad_VD, logits_grad_CV.T, used_CD, dtype)
        elif self.grad_VD is None:
            self.grad_VD = logits_grad_CV.T @ used_CD
        else:
            self.grad_VD.addmm_(logits_grad_CV.T, used_CD)

    def grads(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the input and of the weight, after all chunks."""
        if self.wants_weight and self.grad_VD is None:
            self.grad_VD = torch.zeros_like(self.weight_VD)
        return self.grad_TD, self.grad_VD


class LowPrecisionGemms(PlainGemms):
    """GEMMs by a recipe. The weight is quantized once an optimizer step, and the sums of chunks are in fp32."""

    def __init__(
        self,
        x_TD: Tensor,
        weight_VD: Tensor,
        chunk: int,
        wants_x: bool,
        wants_weight: bool,
        precision: HeadPrecision,
        softcap: float | None,
    ) -> None:
        super().__init__(x_TD, weight_VD, chunk, wants_x, wants_weight)
        self.recipe, self.logits_recipe = precision.recipe, precision.logits or precision.recipe
        self.backend = backend = choose_backend(self.recipe, x_TD, [weight_VD])
        self.logits_backend = choose_backend(self.logits_recipe, x_TD, [weight_VD])
        count_event(f"low-precision {precision.part}", "emulated" if backend is EMULATED else type(backend).__name__, 1)
        sides = (self.logits_backend, self.logits_recipe), (backend, self.recipe)
        # A function of its own: the cache keeps it, and with a method of this object all of its tensors.
        quantize = partial(_quantize_weight, weight_VD.detach(), *sides)
        cached = precision.cache.get_or_make(quantize, tuple(type(one) for one, _ in sides), weight_VD)
        [self.weight], [self.weight_t] = cached.forward, cached.transposed
        in_blocks = isinstance(backend, BlockwiseBackend) and not isinstance(backend, RowwiseBackend)
        in_blocks |= isinstance(backend, SimulatedBackend) and self.recipe.name == "fp8-blockwise"
        # The derivative of capped logits would have to be multiplied in before the gradient is quantized.
        self.takes_statistics = in_blocks and softcap is None
        num_chunks = CHUNKS_PER_WGRAD if chunk % BLOCK == 0 else 1
        self.wgrad_tokens = min(num_chunks * chunk, len(x_TD))
        self.sums_wider = len(x_TD) > (self.wgrad_tokens if self.takes_statistics else chunk)
        self.columns: Fp8Columns | None = None  # the transposed gradients of the tokens since the last wgrad

    def logits(self, start: int) -> Tensor:
        x_CD = self._rows(start)
        rows = self.logits_backend.quantize_rows(x_CD, self.logits_recipe.input)
        is_native = isinstance(self.logits_backend, RowwiseBackend)
        if is_native and rows.spec.block == (1, None) and x_CD.shape[1] <= MAX_FAST_WIDTH:
            a, b, scales_b = rows.values, self.weight.values.T, self.weight.scales.T
            return torch._scaled_mm(a, b, rows.scales, scales_b, out_dtype=x_CD.dtype, use_fast_accum=True)
        return self.logits_backend.matmul(rows, self.weight, x_CD.dtype)

    def add_grad(self, start: int, logits_grad_CV: Tensor, ignored_C1: Tensor | None) -> None:
        recipe, backend, x_CD = self.recipe, self.backend, self._rows(start)
        if self.grad_TD is None and not self.wants_weight:
            return
        if ignored_C1 is not None:  # one number of an ignored row would change the scale of its block
            logits_grad_CV.masked_fill_(ignored_C1, 0)
        if self.grad_TD is not None:
            self._add_input_grad(start, backend.quantize_rows(logits_grad_CV, recipe.grad))
        if not self.wants_weight:
            return
        if recipe.grad_t is None or recipe.input_t is None:
            dtype = fp32_or_wider(x_CD.dtype)
            self.grad_VD = accumulate_gemm(self.grad_VD, logits_grad_CV.T, x_CD, dtype)
            return
        self._add_weight_grad(
            backend.quantize_transposed(logits_grad_CV, recipe.grad_t),
            backend.quantize_transposed(x_CD, recipe.input_t),
        )

    def add_softmax_grad(self, start: int, logits_CV: Tensor, index_C: Tensor, log_sum_C: Tensor) -> None:
        """Make the gradient of a chunk's logits, in FP8 both ways, and multiply it for the gradient of the input."""
        first = start - start % self.wgrad_tokens
        if self.wants_weight and self.columns is None:
            self.columns = _empty_columns(logits_CV, min(self.wgrad_tokens, len(self.x_TD) - first))
        rows = self._quantized_softmax_grad(logits_CV, index_C, log_sum_C, start - first)
        if self.grad_TD is not None:
            self._add_input_grad(start, rows)

    def multiply_columns(self, start: int) -> None:
        """The weight gradient of the last chunks, if `start` began the last of them. The logits are freed by then."""
        first = start - start % self.wgrad_tokens
        end = min(start + self.chunk, len(self.x_TD))
        if self.columns is None or end not in (first + self.wgrad_tokens, len(self.x_TD)):
            return
        assert self.recipe.grad_t is not None
        assert self.recipe.input_t is not None
        columns, self.columns = self.columns, None
        shape = len(self.weight_VD), end - first
        grad_t = Quantized(columns.value_KP, columns.scale.T, None, shape, self.recipe.grad_t)
        self._add_weight_grad(grad_t, self.backend.quantize_transposed(self.x_TD[first:end], self.recipe.input_t))

    def _quantized_softmax_grad(
        self, logits_CV: Tensor, index_C: Tensor, log_sum_C: Tensor, first_row: int
    ) -> Quantized:
        if is_simulated():
            return self.backend.quantize_rows(logits_CV, self.recipe.grad)
        from threefold.engine.kernels.loss_and_optimizer.cross_entropy_fp8 import softmax_grad_fp8

        rows = softmax_grad_fp8(logits_CV, index_C, log_sum_C, self.columns, first_row)
        shape = logits_CV.shape[0], logits_CV.shape[1]
        return Quantized(rows.value_RK, rows.scale_CR.T, None, shape, self.recipe.grad)

    def _add_input_grad(self, start: int, rows: Quantized) -> None:
        assert self.grad_TD is not None
        self.grad_TD[start : start + self.chunk] = self.backend.matmul(rows, self.weight_t, self.x_TD.dtype)

    def _add_weight_grad(self, grad_t: Quantized, x_t: Quantized) -> None:
        dtype = fp32_or_wider(self.x_TD.dtype) if self.sums_wider else self.x_TD.dtype
        grad_VD = self.backend.matmul(grad_t, x_t, dtype)
        self.grad_VD = grad_VD if self.grad_VD is None else self.grad_VD.add_(grad_VD)


def _quantize_weight(
    weight_VD: Tensor, logits: tuple[EmulatedBackend, Recipe], gradient: tuple[EmulatedBackend, Recipe]
) -> QuantizedWeights:
    """The weight as the GEMM of the logits reads it, and its transpose for the input gradient."""
    (logits_backend, logits_recipe), (backend, recipe) = logits, gradient
    if logits_recipe is recipe:
        return backend.quantize_weights([weight_VD], recipe.weight)
    forward = logits_backend.quantize_rows(weight_VD, logits_recipe.weight)
    # Kernels that write the transpose alone have powers of two as scales. A grid that stays where it is could hold slow
    # weights back in the forward GEMM (see `recipes.py`); gradients only get another rounding by it.
    transposed = backend.quantize_transposed(weight_VD, replace(recipe.weight, scale="power"))
    return QuantizedWeights((forward,), (transposed,))


def _empty_columns(logits_CV: Tensor, num_tokens: int) -> Fp8Columns:
    vocab, blocks = logits_CV.shape[1], num_blocks(num_tokens)
    value_VP = logits_CV.new_empty(vocab, blocks * BLOCK, dtype=E4M3)
    return Fp8Columns(value_VP, logits_CV.new_empty(blocks, vocab, dtype=torch.float32))
