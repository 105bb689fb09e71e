"""Counts the bytes that kernels around the experts' GEMMs read and write, by phase and kernel, a token and MoE layer.

What is counted are rows of the model's or the experts' width: permutation, sums over copies, activation, quantization,
packing for an exchange. GEMMs with what their loads and epilogues do, the exchange itself, indices, router and shared
experts are not. Our kernels launch nothing in a rehearsal, so that their bytes come from the functions below, which
`tests/engine/kernels/test_kernel_bytes.py` compares with the loads and stores that Triton's interpreter runs; torch's
operators count their arguments and results. `rehearse_rank` watches a step with a `ByteLedger`.

Example: with top-8 routing and 2,048 numbers of two bytes, the sum over copies reads 32 KiB a token and writes 4.

Shapes: T tokens, K experts of a token, R rows, D model dim, H expert dim.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from threefold.dryrun.simulated.expert_kernels import EmptyExpertSteps
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.memory_tracker import OperatorRunner
from threefold.engine.dispatch import alltoall, fp8_rows, rows
from threefold.engine.kernels.fp8.dry_run_steps import BlockwiseSimulatedSteps
from threefold.plan.plan import Plan

_BLOCK, _FP32 = 128, 4
_INDEXED = {"index", "index_select", "gather"}  # these read as much as they write
_NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "expand", "lift_fresh"}
_FILLS = {"zeros", "new_zeros", "zeros_like", "ones_like", "full_like", "fill_", "zero_"}  # these read nothing


def copy_bytes(num_read: int, num_written: int, width: int, element_bytes: int) -> float:
    """Rows copied to others, or summed into fewer."""
    return (num_read + num_written) * width * element_bytes


def pack_bytes(num_tokens: int, num_rows: int, width: int, element_bytes: int) -> float:
    """`pack_tokens`, and `unpack_rows` with one row a token."""
    return num_tokens * width * element_bytes + num_rows * (width + width // _BLOCK)


def swiglu_grad_bytes(num_rows: int, expert_dim: int, element_bytes: int) -> float:
    """`weighted_swiglu_grad` in 16 bits, with the router weights and their gradient."""
    return num_rows * (6 * expert_dim * element_bytes + 2 * _FP32)


def quantize_bytes(num_rows: int, width: int, rowwise: bool, columns: bool, square: bool) -> float:
    """Rows quantized along rows and, for a weight gradient, along columns of whole blocks. `rowwise` is two passes."""
    blocks = num_rows * width / _BLOCK  # of 1 x 128 or 128 x 1
    by_row = num_rows * (2 * width + width) + _FP32 * (num_rows if rowwise else blocks)
    by_column = num_rows * width + _FP32 * (blocks / _BLOCK if square else blocks)
    return by_row + columns * (by_column + rowwise * 2 * num_rows * width)


def swiglu_fp8_bytes(num_rows: int, expert_dim: int, rowwise: bool) -> float:
    programs = 1 if rowwise else expert_dim / _BLOCK  # of a row; each reads the router weight and stores a scale
    return num_rows * (5 * expert_dim + 2 * _FP32 * programs)


def swiglu_grad_fp8_bytes(num_rows: int, expert_dim: int, rowwise: bool, columns: bool) -> float:
    """The pass by rows, and the one by columns for the weight gradients of both layers."""
    blocks = num_rows * expert_dim / _BLOCK  # of the activation
    scales, sums = (num_rows, num_rows + blocks) if rowwise else (2 * blocks, 2 * blocks)
    by_row = num_rows * (6 * expert_dim + 2 * expert_dim) + _FP32 * (scales + sums)
    router = _FP32 * num_rows * (expert_dim / _BLOCK if not rowwise else 1)  # weights, read by every program
    by_column = num_rows * (6 * expert_dim + 3 * expert_dim) + _FP32 * (2 * blocks + blocks / _BLOCK)
    again = _FP32 * (num_rows * expert_dim / 32 + num_rows * expert_dim / 32)  # weights and amax, by every program
    return by_row + router + columns * (by_column + again)


class ByteLedger:
    """The bytes of the MoE layers of one rank in the microbatches that it runs."""

    def __init__(self, plan: Plan, origins: OriginTracker) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()  # by phase and kernel
        self._origins, self._is_counting = origins, False
        self._moe_paths: set[str] = set()
        moe = plan.model.moe
        hidden = moe.expert_dim // plan.layout.etp if moe else 0
        dim, layout = plan.model.dim, plan.layout
        self._widths = {dim, hidden, 2 * hidden}
        # Weights have the widths of rows too. So many tokens as a weight has rows are tokens.
        lengths = {*self._widths, plan.model.num_experts // layout.ep}
        self._weight_lengths = lengths - {plan.job.micro_batch * plan.job.seq_len // layout.cp // layout.tp}

    @contextmanager
    def counting(self, moe_paths: set[str]) -> Iterator[None]:
        layers = {path.removeprefix(".") for path in moe_paths}
        self._moe_paths, self._is_counting = layers | {f"{path}.experts" for path in layers}, True
        try:
            yield
        finally:
            self._is_counting = False

    def by_phase(self, num_tokens: float) -> dict[str, dict[str, float]]:
        """Bytes by phase and kernel, for each of so many tokens: those of all layers and microbatches together."""
        phases: dict[str, dict[str, float]] = {}
        for (phase, kernel), count in self.bytes.most_common():
            phases.setdefault(phase, {})[kernel] = count / num_tokens
        return phases

    def _add(self, kernel: str, num_bytes: float) -> None:
        if self._is_counting:
            self.bytes[self._origins.current().phase, kernel] += num_bytes  # type: ignore[assignment]

    def run_operator(self, run: OperatorRunner) -> OperatorRunner:
        """`run`, with what torch's operators move inside of MoE layers counted."""

        def counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = run(func, args, kwargs)
            if self._is_counting and func.namespace == "aten" and self._origins.current().module in self._moe_paths:
                self._count_operator(func, args, out)
            return out

        return counted

    def _count_operator(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _NO_KERNEL or "mm" in name or func.is_view:
            return
        written = sum(map(self._row_bytes, tree_leaves(out)))
        read = 0 if name in _FILLS else sum(map(self._row_bytes, tree_leaves(args)))
        read = written if name in _INDEXED else read
        if read + written:
            self._add(name, read + written)

    def _row_bytes(self, x: Any) -> int:
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            return 0
        is_rows = x.shape[-1] in self._widths and x.shape[-2] not in self._weight_lengths
        return min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) if is_rows else 0

    @contextmanager
    def watch_kernels(self) -> Iterator[None]:
        """Count what our kernels would move where a rehearsal makes empty results in their place."""
        with ExitStack() as stack:

            def watch(owner: Any, name: str, count: Callable[..., None]) -> None:
                run = getattr(owner, name)

                def counted(*args: Any, **kwargs: Any) -> Any:
                    out = run(*args, **kwargs)
                    count(out, *args, **kwargs)
                    return out

                stack.enter_context(mock.patch.object(owner, name, counted))

            watch(rows, "permute_tokens", self._permuted)
            watch(rows, "unpermute_sum", self._summed)
            watch(alltoall, "pack_fp8", self._packed)
            watch(fp8_rows, "unpack_fp8", self._unpacked)
            watch(EmptyExpertSteps, "act_grad", self._act_grad)
            watch(EmptyExpertSteps, "_gather", self._gathered)
            watch(EmptyExpertSteps, "_to_tokens", self._to_tokens)
            watch(BlockwiseSimulatedSteps, "quantize", self._quantized)
            watch(BlockwiseSimulatedSteps, "swiglu", self._swiglu)
            watch(BlockwiseSimulatedSteps, "swiglu_grad", self._swiglu_grad)
            watch(BlockwiseSimulatedSteps, "grouped_gemm", self._fp8_gemm)
            yield

    def _permuted(self, out: Tensor, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> None:
        num_read = len(out) if padded else len(x_TD)
        self._add("permute", copy_bytes(num_read, len(out), out.shape[1], out.element_size()))

    def _summed(self, out: Tensor, y_RD: Tensor, row_TK: Tensor, padded: bool) -> None:
        self._add("sum over copies", copy_bytes(row_TK.numel(), len(out), out.shape[1], out.element_size()))

    def _packed(self, out: Tensor, x_TD: Tensor, order: Any) -> None:
        self._add("quantize and permute", pack_bytes(len(x_TD), len(out), x_TD.shape[1], x_TD.element_size()))

    def _unpacked(self, out: None, packed_PB: Tensor, x_PD: Tensor) -> None:
        self._add("dequantize", pack_bytes(len(x_PD), len(x_PD), x_PD.shape[1], x_PD.element_size()))

    def _act_grad(self, out: Any, steps: Any, grad_XD: Tensor, order: Any, weight_R: Tensor, *_: Any) -> None:
        if order is None:  # torch's grouped GEMM, then a kernel
            self._add("activation", swiglu_grad_bytes(len(weight_R), out[1].shape[1], out[1].element_size()))

    def _gathered(self, out: Tensor, steps: Any, x_XD: Tensor, num_rows: int) -> None:
        self._add("gather for torch", copy_bytes(len(x_XD), num_rows, x_XD.shape[1], x_XD.element_size()))

    def _to_tokens(self, out: Tensor, steps: Any, y_RD: Tensor, order: Any) -> None:
        if out is not y_RD:
            self._add("sum over copies", copy_bytes(len(y_RD), len(out), out.shape[1], out.element_size()))

    def _quantized(self, out: Any, steps: Any, x: Tensor, order: Any, with_columns: bool, square: bool) -> None:
        num_bytes = quantize_bytes(steps.num_rows, x.shape[1], steps.rowwise, with_columns, square)
        self._add("quantize", num_bytes)

    def _swiglu(self, out: Any, steps: Any, gate_up_RX: Tensor, weight_R: Tensor) -> None:
        self._add("activation", swiglu_fp8_bytes(steps.num_rows, gate_up_RX.shape[1] // 2, steps.rowwise))

    def _swiglu_grad(self, out: Any, steps: Any, grad_RH: Tensor, *args: Any) -> None:
        num_bytes = swiglu_grad_fp8_bytes(steps.num_rows, grad_RH.shape[1], steps.rowwise, out[1] is not None)
        self._add("activation", num_bytes)

    def _fp8_gemm(self, out: Tensor, steps: Any, a: Any, value: Any, scale: Any, order: Any = None) -> None:
        if order is not None and order.target_R is None:
            self._add("sum over copies", copy_bytes(steps.num_rows, len(out), out.shape[1], out.element_size()))
