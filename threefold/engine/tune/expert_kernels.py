"""Measure the kernels of one shape on this device and keep the fastest of each kind. Takes some seconds, a minute where
the optional package compiles its own for the first time; asked for, never done in passing.

Each step is timed amid the others, and kernels take turns at every run: a GPU at the limit of its power is as slow as
what ran in the last second has made it. The fastest of each step make a few choices, which are then timed whole.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from threefold.engine.autograd.token_chunks import chunk_size
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.kernels.availability import has_cute_kernels, has_triton_kernels
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
    save_choice,
    triton_candidates,
)
from threefold.engine.kernels.launch_config import CuteConfig, TritonConfig
from threefold.plan.plan import Plan

_ROW_ITEM_BYTES = 2  # these kernels take no wider rows
_WARMUP, _REPEATS, _WHOLE_REPEATS = 3, 15, 25
Run = Callable[[KernelChoice, tuple[str, str]], tuple[Any, Any]]  # -> events before the one step and behind the other
Times = dict[str, dict[StepConfig, float]]  # milliseconds of each step by each kernel


def tune(shape: ExpertShape, top_k: int, device: torch.device) -> KernelChoice:
    """The choices are kept on disk for `choose` to find. Loads of experts are drawn as a balanced router's."""
    work = _work(shape, top_k, device)
    theirs = has_cute_kernels(device)
    starts = [default_choice(shape), *([default_choice(shape, "cute")] if theirs and shape.plain else [])]
    times = {start: _step_times(work, start, shape.gathered, theirs) for start in starts}
    kinds = {"torch": [KernelChoice()], "triton": [default_choice(shape), _best(times[starts[0]], (TritonConfig,))]}
    if theirs:
        kinds["cute"] = [_best(times[start], (CuteConfig,)) for start in starts]
        kinds["auto"] = [_best(times[start], (TritonConfig, CuteConfig)) for start in starts]
    tried = {choice: None for choices in kinds.values() for choice in choices}
    whole = _turns(work, tried, (STEPS[0], STEPS[-1]), _WHOLE_REPEATS)
    for kind, choices in kinds.items():
        if kind != "auto":
            save_choice(device, shape, min(choices, key=whole.__getitem__), kind)
    best = min(whole, key=whole.__getitem__)
    save_choice(device, shape, best)
    return best


def tuned(plan: Plan) -> dict[str, KernelChoice]:
    """Measured for the experts of a plan; nothing where its experts or this device have no such kernels."""
    device = torch.device("cuda")
    if plan.model.moe is None or not torch.cuda.is_available() or not has_triton_kernels(device):
        return {}
    shape = shape_of(plan)
    return {shape.key: tune(shape, plan.model.moe.top_k, device)}


def shape_of(plan: Plan) -> ExpertShape:
    """The experts of one rank, with the rows of one microbatch shared out evenly, or of one chunk of it."""
    layout, moe = plan.layout, plan.model.moe
    assert moe is not None
    tokens = plan.job.micro_batch * plan.job.seq_len // (layout.tp * layout.cp)
    here = layout.ep * layout.etp == 1 and plan.job.capacity_factor is None
    if here:
        tokens = chunk_size(tokens, moe.top_k * plan.model.dim * _ROW_ITEM_BYTES)
    sizes = moe.num_experts // layout.ep, plan.model.dim, moe.expert_dim // layout.etp
    bent = moe.bias or plan.model.activation != "silu"
    return ExpertShape(_kept(plan, tokens * moe.top_k) * layout.etp, *sizes, gathered=here, plain=not bent)


def _kept(plan: Plan, num_copies: int) -> int:
    """Of copies of tokens, the rows that a capacity leaves. One rank fills its experts up; others send no padding."""
    layout, moe, factor = plan.layout, plan.model.moe, plan.job.capacity_factor
    assert moe is not None
    if factor is None:
        return num_copies
    held = moe.num_experts * Capacity(factor, moe.num_experts).rows_per_expert(num_copies)
    return held if layout.tp * layout.cp * layout.ep * layout.etp == 1 else min(held, num_copies)


def _step_times(work: Run, start: KernelChoice, gathered: bool, theirs: bool) -> Times:
    """Of each kernel of a step amid the others of `start`, where FC1's output is laid out as that has it."""
    found: Times = {}
    for step in STEPS:
        configs = [*triton_candidates(step), *(cute_candidates(step, gathered) if theirs else [])]
        choices = [replace(start, **{step: config}) for config in _allowed(step, start, configs)]
        taken = _turns(work, choices, (step, step))
        found[step] = {getattr(choice, step): taken[choice] for choice in choices}
    return found


def _allowed(step: str, start: KernelChoice, configs: list[Any]) -> Iterator[StepConfig]:
    if start.interleaved and step in FC1_OUTPUT_STEPS:
        yield from (config for config in configs if isinstance(config, CuteConfig))
        return
    yield None
    apart = step in ("up", "act_grad")  # which decide how FC1's output lies
    yield from (config for config in configs if not (apart and isinstance(config, CuteConfig)))


def _best(times: Times, kinds: tuple[type, ...]) -> KernelChoice:
    best: dict[str, StepConfig] = {}
    for step, taken in times.items():
        kept = {config: ms for config, ms in taken.items() if config is None or isinstance(config, kinds)}
        best[step] = min(kept, key=kept.__getitem__)
    return KernelChoice(**best)


def _turns(
    work: Run, choices: Iterable[KernelChoice], timed: tuple[str, str], repeats: int = _REPEATS
) -> dict[KernelChoice, float]:
    """Median milliseconds of each."""
    marks: dict[KernelChoice, list[Any]] = {choice: [] for choice in choices}
    failed: set[KernelChoice] = set()
    for turn in range(_WARMUP + repeats):
        for choice in [choice for choice in marks if choice not in failed]:
            try:
                mark = work(choice, timed)
            except Exception:  # too large for this device's shared memory, or refused by this release of triton
                failed.add(choice)
                continue
            if turn >= _WARMUP:
                marks[choice].append(mark)
    torch.cuda.synchronize()
    return {
        choice: float("inf") if choice in failed else statistics.median(begin.elapsed_time(end) for begin, end in taken)
        for choice, taken in marks.items()
    }


def _work(shape: ExpertShape, top_k: int, device: torch.device) -> Run:
    """-> a function that runs all steps by one choice, on inputs made once: with biases and clamps, as GPT-OSS has
    them, unless the shape is plain."""

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    num_rows, num_experts, dim, half = shape.num_rows, shape.num_experts, shape.dim, shape.expert_dim
    if not shape.gathered:
        top_k = 1
    score_TE = torch.rand(num_rows // top_k, num_experts, device=device)
    rows = counting_sort(score_TE.topk(top_k, dim=1).indices, num_experts)
    given = rows if shape.gathered else None
    x, grad, weight_R = made(len(score_TE), dim), made(len(score_TE), dim), torch.rand(num_rows, device=device)
    gate_up, down = made(num_experts, 2 * half, dim) * dim**-0.5, made(num_experts, dim, half) * half**-0.5
    bias, starts = None if shape.plain else made(num_experts, 2 * half), rows.starts_F if shape.gathered else None

    def steps(choice: KernelChoice) -> GpuSteps:
        return GpuSteps(rows.ends_E, num_rows, not shape.plain, choice, starts)

    gate_up_RX, act_RH = steps(KernelChoice()).up(x, given, weight_R, gate_up, bias)

    def run(choice: KernelChoice, timed: tuple[str, str]) -> tuple[Any, Any]:
        forward, backward = steps(choice), steps(choice)
        calls: dict[str, Callable[[], object]] = {
            "up": lambda: forward.up(x, given, weight_R, gate_up, bias),
            "down": lambda: forward.down(act_RH, down),
            "act_grad": lambda: backward.act_grad(grad, given, weight_R, down, gate_up_RX),
            "input_grad": lambda: backward.input_grad(gate_up_RX, gate_up),
            "up_grad": lambda: backward.up_grad(gate_up_RX, x, given),
            "down_grad": lambda: backward.down_grad(grad, given, act_RH),
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
