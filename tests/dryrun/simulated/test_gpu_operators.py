"""Operators of a rehearsal save and allocate what the GPU kernels do."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from threefold.dryrun.simulated.expert_kernels import EmptyExpertSteps, empty_expert_steps
from threefold.dryrun.simulated.gpu_operators import WORKSPACES, use_gpu_operators
from threefold.dryrun.simulated.process_group import peer_ranges
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.memory_tracker import MemoryTracker
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.kernels.experts import fused_experts
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import SimulatedBackend


def test_a_norm_keeps_its_input_and_one_number_a_row_as_the_gpu_kernel() -> None:
    tracker = MemoryTracker(OriginTracker())
    with FakeTensorMode(), tracker, use_gpu_operators():
        x = torch.zeros(256, 1024, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(1024, dtype=torch.bfloat16)
        given = tracker.live_bytes
        node = nn.functional.rms_norm(x, (1024,), weight).grad_fn  # the result itself is gone
        assert tracker.live_bytes - given == 256 * 4
        del node


def test_attention_keeps_output_and_log_sum_exp_and_widens_query_gradients() -> None:
    tracker = MemoryTracker(OriginTracker(), workspaces=WORKSPACES)
    shape, heads = (1, 8, 512, 64), 8
    with FakeTensorMode(), tracker, use_gpu_operators():
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        base = tracker.live_bytes
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        size = q.numel() * 2
        assert tracker.live_bytes - base == pytest.approx(size + 4 * heads * 512, abs=64)  # fp32, one a query and head
        grad = torch.zeros(shape, dtype=torch.bfloat16)
        at = tracker.live_bytes
        tracker.peak_bytes = at
        out.backward(grad)
        # dq, dk, dv and, while the kernel runs, dq in fp32 with a correction a query.
        assert tracker.peak_bytes - at == pytest.approx(3 * size + 2 * size + 4 * heads * 512, abs=64)


def public_methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_empty_expert_steps_have_every_step_of_the_kernels() -> None:
    assert public_methods(EmptyExpertSteps) == public_methods(fused_experts.ReferenceSteps)
    replaced, replacement = fused_experts._make_steps, empty_expert_steps
    assert [*inspect.signature(replaced).parameters] == [*inspect.signature(replacement).parameters]


def test_weight_gradients_of_given_rows_are_made_before_they_are_added() -> None:
    """torch's grouped GEMM makes them, and where experts are wide it reads rows that were gathered from tokens."""
    steps = EmptyExpertSteps(torch.empty(4, dtype=torch.int32))
    grad_RX, x_RD, main_grad = torch.empty(6, 2 * 2048), torch.empty(6, 8), torch.empty(4, 2 * 2048, 8)
    made = steps.up_grad(grad_RX, x_RD, None)
    assert made is not None
    assert made.shape == (4, 4096, 8)
    assert steps.up_grad(grad_RX, x_RD, None, main_grad) is None
    down = steps.down_grad(x_RD, None, torch.empty(6, 2048))
    assert down is not None
    assert down.shape == (4, 8, 2048)
    steps.up_grad(grad_RX, torch.empty(3, 8), rows=SimpleNamespace(target_R=None))
    assert steps._gathered is not None
    assert steps._gathered[1].shape == (6, 8)


def test_dry_runs_store_scales_in_the_bytes_of_the_format() -> None:
    for name, num_bytes in (("mxfp8", 1), ("nvfp4", 1), ("fp8-blockwise", 4)):
        quantized = SimulatedBackend().quantize_rows(torch.empty(64, 256, device="meta"), RECIPES[name].input)
        assert quantized.scales.element_size() == num_bytes


def test_ranks_of_etp_hold_slices_of_the_same_experts() -> None:
    """Experts 4 to 8 of 8, and half of the columns of gate and of up."""
    placement = Placement((8, 12, 5), (((4, 8),), ((0, 3), (6, 9)), ((0, 5),)), ("edp",))
    other = peer_ranges(placement, Group("etp", (0, 1), 0, None), 1)
    assert other == (((4, 8),), ((3, 6), (9, 12)), ((0, 5),))
