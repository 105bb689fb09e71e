"""The bytes that the rehearsal counts of a kernel are those that Triton's interpreter loads and stores.

Loads of integers wider than a byte are indices, which the rehearsal leaves out.

Shapes: T tokens, K experts of a token, R rows, D model dim, H expert dim.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from threefold.dryrun.simulated import byte_ledger

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py")
COUNTS, DIM, HALF = [128, 0, 128], 128, 256


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes that kernels load and store in the block: what no mask hides."""
    from triton.runtime.interpreter import InterpreterBuilder

    total = [0]

    def wrapped(name: str, is_load: bool) -> Any:
        run = getattr(InterpreterBuilder, name)

        def counting(self: Any, ptrs: Any, *args: Any) -> Any:
            kind, mask = ptrs.get_element_ty(), args[0 if is_load else 1]
            if not (is_load and kind.is_int() and kind.primitive_bitwidth > 8):
                total[0] += int(mask.data.sum()) * kind.primitive_bitwidth // 8
            return run(self, ptrs, *args)

        return mock.patch.object(InterpreterBuilder, name, counting)

    with wrapped("create_masked_load", True), wrapped("create_masked_store", False):
        yield total


def test_interpreted_bytes_of_permutations() -> None:
    from threefold.engine.kernels.elementwise.permute import permute_tokens, unpermute_sum

    x_TD, row_TK = torch.randn(6, 80), torch.randperm(18).view(6, 3)
    with counted_bytes() as found:
        rows_RD = permute_tokens(x_TD, row_TK.flatten().argsort() // 3, row_TK, False)
    assert found[0] == byte_ledger.copy_bytes(6, 18, 80, 4)
    with counted_bytes() as found:
        unpermute_sum(rows_RD, row_TK, False)
    assert found[0] == byte_ledger.copy_bytes(18, 6, 80, 4)


def test_interpreted_bytes_of_an_activation() -> None:
    from threefold.engine.kernels.experts.row_kernels import weighted_swiglu_grad

    with counted_bytes() as found:
        weighted_swiglu_grad(torch.randn(7, 40), torch.randn(7, 80), torch.rand(7), False)
    assert found[0] == byte_ledger.swiglu_grad_bytes(7, 40, 4)


def test_interpreted_bytes_of_rows_that_travel_in_fp8() -> None:
    from threefold.engine.kernels.fp8.packed_rows import pack_tokens, unpack_rows

    x_TD, row_TK = torch.ones(4, DIM), torch.randperm(12).view(4, 3)
    packed = torch.empty(12, DIM + DIM // 128, dtype=torch.uint8)
    with counted_bytes() as found:
        pack_tokens(x_TD, row_TK, packed)
    assert found[0] == byte_ledger.pack_bytes(4, 12, DIM, 4)
    with counted_bytes() as found:
        unpack_rows(packed, torch.empty(12, DIM))
    assert found[0] == byte_ledger.pack_bytes(12, 12, DIM, 4)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rowwise", [False, pytest.param(True, marks=pytest.mark.slow)])  # seconds in the interpreter
def test_interpreted_bytes_of_fp8_steps(rowwise: bool, columns: bool) -> None:
    from threefold.engine.kernels.fp8.gpu_steps import BlockwiseGpuSteps, RowwiseGpuSteps

    num_rows, ends_E = sum(COUNTS), torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    steps = (RowwiseGpuSteps if rowwise else BlockwiseGpuSteps)(ends_E, num_rows, False)
    x_RD, gate_up_RX = (torch.ones(num_rows, width, dtype=torch.bfloat16) for width in (DIM, 2 * HALF))
    weight_R, grad_RH = torch.ones(num_rows), torch.ones(num_rows, HALF, dtype=torch.bfloat16)
    for square in (False, True):
        with counted_bytes() as found:
            steps.quantize(x_RD, None, columns, square)
        assert found[0] == byte_ledger.quantize_bytes(num_rows, DIM, rowwise, columns, square)
    with counted_bytes() as found:
        steps.swiglu(gate_up_RX, weight_R)
    assert found[0] == byte_ledger.swiglu_fp8_bytes(num_rows, HALF, rowwise)
    with counted_bytes() as found:
        steps.swiglu_grad(grad_RH, gate_up_RX, weight_R, columns, columns)
    assert found[0] == pytest.approx(byte_ledger.swiglu_grad_fp8_bytes(num_rows, HALF, rowwise, columns), rel=0.01)
