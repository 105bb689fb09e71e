"""Measures the expert kernels of one shape on this device and stores the fastest of each kind (`calibrate PLAN`).

It takes some seconds, or a minute where the optional package compiles its kernels for the first time, and runs only on
request. `kernels/experts/kernel_choice.py` reads the result.

Each step is timed amid the others, and kernels take turns at every run, because at its power limit a GPU's clock
depends on what it ran in the last second. The fastest kernels per step form a few combinations, which are then timed as
a whole.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from threefold.engine.autograd.token_chunks import chunk_size
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.kernels.availability import has_cute_kernels, has_gluon_kernels, has_triton_kernels
from threefold.engine.kernels.experts.counting_sort import counting_sort
from threefold.engine.kernels.experts.gpu_steps import GpuSteps
from threefold.engine.kernels.experts.kernel_choice import (
    FC1_OUTPUT_STEPS,
    STEPS,
    ExpertShape,
    KernelChoice,
    StepConfig,
    cute_candidates,
    default_choice,
    gluon_candidates,
    save_choice,
    triton_candidates,
)
from threefold.engine.kernels.launch_config import CuteConfig, GluonConfig, TritonConfig
from threefold.plan.plan import Plan

_ROW_DTYPE_BYTES = 2  # the kernels take bf16 rows only
_WARMUP, _REPEATS, _ALL_STEPS_REPEATS = 3, 15, 25
# Runs all steps by a choice; returns CUDA events before the first and after the last of the timed steps.
Workload = Callable[[KernelChoice, tuple[str, str]], tuple[Any, Any]]
StepTimes = dict[str, dict[StepConfig, float]]  # milliseconds of each step by each kernel


def tune_experts(shape: ExpertShape, top_k: int, device: torch.device) -> KernelChoice:
    """Measure, store the choices on disk, and return the best one. Expert loads are those of a balanced router."""
    workload = _make_workload(shape, top_k, device)
    has_cute, has_gluon = has_cute_kernels(device), has_gluon_kernels(device)
    default = default_choice(shape, has_gluon=has_gluon)
    starts = [default, *([default_choice(shape, "cute")] if has_cute and shape.plain else [])]
    times = {start: _step_times(workload, start, shape, has_gluon, has_cute) for start in starts}
    ours = TritonConfig, GluonConfig
    choices_by_kind = {"torch": [KernelChoice()], "triton": [default, _fastest_choice(times[default], ours)]}
    if has_cute:
        choices_by_kind["cute"] = [_fastest_choice(times[start], (CuteConfig,)) for start in starts]
        choices_by_kind["auto"] = [_fastest_choice(times[start], (*ours, CuteConfig)) for start in starts]
    all_choices = {choice: None for choices in choices_by_kind.values() for choice in choices}
    total_times = _interleaved_times(workload, all_choices, (STEPS[0], STEPS[-1]), _ALL_STEPS_REPEATS)
    for kind, choices in choices_by_kind.items():
        if kind != "auto":
            save_choice(device, shape, min(choices, key=total_times.__getitem__), kind)
    best = min(total_times, key=total_times.__getitem__)
    save_choice(device, shape, best)
    return best


def tune_experts_of_plan(plan: Plan) -> dict[str, KernelChoice]:
    """Tune the experts of a plan. Empty where the plan has no experts or this device has no kernels for them."""
    device = torch.device("cuda")
    if plan.model.moe is None or not torch.cuda.is_available() or not has_triton_kernels(device):
        return {}
    shape = expert_shape_of(plan)
    return {shape.key: tune_experts(shape, plan.model.moe.top_k, device)}


def expert_shape_of(plan: Plan) -> ExpertShape:
    """The experts of one rank, with an even share of the rows of one microbatch, or of one token chunk of it."""
    layout, moe = plan.layout, plan.model.moe
    assert moe is not None
    tokens = plan.job.micro_batch * plan.job.seq_len // (layout.tp * layout.cp)
    is_single_rank = layout.ep * layout.etp == 1 and plan.job.capacity_factor is None
    if is_single_rank:
        tokens = chunk_size(tokens, moe.top_k * plan.model.dim * _ROW_DTYPE_BYTES)
    sizes = moe.num_experts // layout.ep, plan.model.dim, moe.expert_dim // layout.etp
    has_bias_or_clamp = moe.bias or plan.model.activation != "silu"
    return ExpertShape(
        _num_rows_after_capacity(plan, tokens) * layout.etp,
        *sizes,
        gathered=is_single_rank,
        plain=not has_bias_or_clamp,
    )


def _num_rows_after_capacity(plan: Plan, num_tokens: int) -> int:
    """The rows that a capacity factor leaves. A single rank pads its experts to capacity; several send no padding."""
    layout, moe, factor = plan.layout, plan.model.moe, plan.job.capacity_factor
    assert moe is not None
    num_copies = num_tokens * moe.top_k
    if factor is None:
        return num_copies
    capacity_rows = moe.num_experts * Capacity(factor, moe.num_experts).rows_per_expert(num_tokens, moe.top_k)
    return capacity_rows if layout.tp * layout.cp * layout.ep * layout.etp == 1 else min(capacity_rows, num_copies)


def _step_times(
    workload: Workload, start: KernelChoice, shape: ExpertShape, has_gluon: bool, has_cute: bool
) -> StepTimes:
    """Milliseconds of each kernel of each step amid the other steps of `start`, with its layout of FC1's output."""
    seconds_by_step: StepTimes = {}
    for step in STEPS:
        configs = [
            *triton_candidates(step),
            *(gluon_candidates(step, shape) if has_gluon else []),
            *(cute_candidates(step, shape.gathered) if has_cute else []),
        ]
        choices = [replace(start, **{step: config}) for config in _allowed_configs(step, start, configs)]
        times = _interleaved_times(workload, choices, (step, step))
        seconds_by_step[step] = {getattr(choice, step): times[choice] for choice in choices}
    return seconds_by_step


def _allowed_configs(step: str, start: KernelChoice, configs: list[Any]) -> Iterator[StepConfig]:
    if start.interleaved and step in FC1_OUTPUT_STEPS:
        yield from (config for config in configs if isinstance(config, CuteConfig))
        return
    yield None
    decides_layout = step in ("up", "act_grad")  # these two steps decide the layout of FC1's output
    yield from (config for config in configs if not (decides_layout and isinstance(config, CuteConfig)))


def _fastest_choice(step_times: StepTimes, kinds: tuple[type, ...]) -> KernelChoice:
    best: dict[str, StepConfig] = {}
    for step, times in step_times.items():
        allowed = {config: ms for config, ms in times.items() if config is None or isinstance(config, kinds)}
        best[step] = min(allowed, key=allowed.__getitem__)
    return KernelChoice(**best)


def _interleaved_times(
    workload: Workload, choices: Iterable[KernelChoice], timed: tuple[str, str], repeats: int = _REPEATS
) -> dict[KernelChoice, float]:
    """Median milliseconds of each choice, all run in turns."""
    events: dict[KernelChoice, list[Any]] = {choice: [] for choice in choices}
    failed: set[KernelChoice] = set()
    for round_index in range(_WARMUP + repeats):
        for choice in [choice for choice in events if choice not in failed]:
            try:
                event_pair = workload(choice, timed)
            except Exception:  # it needs too much shared memory, or this release of triton refuses it
                failed.add(choice)
                continue
            if round_index >= _WARMUP:
                events[choice].append(event_pair)
    torch.cuda.synchronize()
    return {
        choice: float("inf") if choice in failed else statistics.median(begin.elapsed_time(end) for begin, end in times)
        for choice, times in events.items()
    }


def _make_workload(shape: ExpertShape, top_k: int, device: torch.device) -> Workload:
    """A function that runs all steps by one choice, on inputs that are made once.

    Unless the shape is plain, experts have biases and a clamp, as in GPT-OSS.
    """

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    num_rows, num_experts, dim, expert_dim = shape.num_rows, shape.num_experts, shape.dim, shape.expert_dim
    if not shape.gathered:
        top_k = 1
    score_TE = torch.rand(num_rows // top_k, num_experts, device=device)
    rows = counting_sort(score_TE.topk(top_k, dim=1).indices, num_experts)
    gathered_rows, stored_rows = rows if shape.gathered else None, rows if shape.stored else None
    x, grad, weight_R = randn(len(score_TE), dim), randn(len(score_TE), dim), torch.rand(num_rows, device=device)
    gate_up = randn(num_experts, 2 * expert_dim, dim) * dim**-0.5
    down = randn(num_experts, dim, expert_dim) * expert_dim**-0.5
    bias = None if shape.plain else randn(num_experts, 2 * expert_dim)
    starts = rows.starts_F if shape.gathered else None

    def steps(choice: KernelChoice) -> GpuSteps:
        return GpuSteps(rows.ends_E, num_rows, not shape.plain, choice, starts)

    gate_up_RX, act_RH = steps(KernelChoice()).up(x, gathered_rows, weight_R, gate_up, bias)

    def run(choice: KernelChoice, timed: tuple[str, str]) -> tuple[Any, Any]:
        forward, backward = steps(choice), steps(choice)
        calls: dict[str, Callable[[], object]] = {
            "up": lambda: forward.up(x, gathered_rows, weight_R, gate_up, bias),
            "down": lambda: forward.down(act_RH, down, stored_rows),
            "act_grad": lambda: backward.act_grad(grad, gathered_rows, weight_R, down, gate_up_RX),
            "input_grad": lambda: backward.input_grad(gate_up_RX, gate_up, stored_rows),
            "up_grad": lambda: backward.up_grad(gate_up_RX, x, gathered_rows),
            "down_grad": lambda: backward.down_grad(grad, gathered_rows, act_RH),
        }
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for name in STEPS:
            if name == timed[0]:
                begin.record()
            calls[name]()
            if name == timed[1]:
                end.record()
        return begin, end

    return run
