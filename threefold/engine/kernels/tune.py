"""Measure the kernels of one shape on this device and keep the fastest of each kind. Takes some seconds, a minute where
the optional package compiles its own for the first time; asked for, never done in passing.

Each step is measured by itself, which leaves a few choices; these are then measured whole, taking turns.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from threefold.engine.kernels.choose import (
    HALVED,
    STEPS,
    Choice,
    Shape,
    Tiling,
    candidates,
    cute_candidates,
    cute_works,
    default,
    save,
    works,
)
from threefold.engine.kernels.counting import counting_sort
from threefold.engine.kernels.launch import CuteConfig
from threefold.engine.kernels.steps import Steps
from threefold.plan.plan import Plan

_WARMUP, _REPEATS, _ROUNDS = 3, 9, 3
_WHOLE = 5, 15  # longer: a GPU that is hot and at the limit of its power runs other kernels best
Run = Callable[[str, Choice], object]


def tune(shape: Shape, top_k: int, device: torch.device) -> Choice:
    """The choices are kept on disk for `choose` to find. Loads of experts are drawn as a balanced router's."""
    work = _work(shape, top_k, device)
    kinds: dict[str, list[Choice]] = {"torch": [Choice()], "triton": [_best(work, Choice(), candidates)]}
    if cute_works(device):
        all_cute = [default(shape, "cute")] if shape.plain else []
        theirs = partial(cute_candidates, gathered=shape.gathered)
        kinds["cute"] = [_best(work, start, theirs) for start in (Choice(), *all_cute)]
        # Their products beside our fused steps, and ours beside theirs.
        kinds["auto"] = [
            _best(work, start, lambda step: [*candidates(step), *theirs(step)]) for start in (Choice(), *all_cute)
        ]
    times = _whole(work, {choice for choices in kinds.values() for choice in choices})
    for kind, choices in kinds.items():
        if kind != "auto":
            save(device, shape, min(choices, key=times.__getitem__), kind)
    best = min(times, key=times.__getitem__)
    save(device, shape, best)
    return best


def tuned(plan: Plan) -> dict[str, Choice]:
    """Measured for the experts of a plan; nothing where its experts or this device have no such kernels."""
    device = torch.device("cuda")
    if plan.model.moe is None or not torch.cuda.is_available() or not works(device):
        return {}
    shape = shape_of(plan)
    return {shape.key: tune(shape, plan.model.moe.top_k, device)}


def shape_of(plan: Plan) -> Shape:
    """The experts of one rank, with the rows of one microbatch shared out evenly."""
    layout, moe = plan.layout, plan.model.moe
    assert moe is not None
    tokens = plan.job.micro_batch * plan.job.seq_len // (layout.tp * layout.cp)
    here = layout.ep * layout.etp == 1 and plan.job.capacity_factor is None
    sizes = moe.num_experts // layout.ep, plan.model.dim, moe.expert_dim // layout.etp
    bent = moe.bias or plan.model.activation != "silu"
    return Shape(tokens * moe.top_k * layout.etp, *sizes, gathered=here, plain=not bent)


def _best(work: Run, start: Choice, wanted: Callable[[str], list[Any]]) -> Choice:
    """The fastest of each step, where FC1's output is laid out as `start` has it."""
    best: dict[str, Tiling] = {}
    for step in STEPS:
        tried: dict[Tiling, float] = {}
        for config in _allowed(step, start, wanted(step)):
            try:
                tried[config] = _milliseconds(partial(work, step, replace(start, **{step: config})))
            except Exception:  # too large for this device's shared memory, or refused by this release of triton
                continue
        best[step] = min(tried, key=tried.__getitem__, default=getattr(start, step))
    return Choice(**best)


def _allowed(step: str, start: Choice, configs: list[Any]) -> Iterator[Tiling]:
    if start.interleaved and step in HALVED:
        yield from (config for config in configs if isinstance(config, CuteConfig))
        return
    yield None
    apart = step in ("up", "act_grad")  # which decide how FC1's output lies
    yield from (config for config in configs if not (apart and isinstance(config, CuteConfig)))


def _whole(work: Run, choices: set[Choice]) -> dict[Choice, float]:
    """Milliseconds of all steps together, a median over rounds in which the choices take turns."""
    found: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for _ in range(_ROUNDS):
        for choice, times in found.items():
            times.append(_milliseconds(partial(work, "all", choice), *_WHOLE))
    return {choice: statistics.median(times) for choice, times in found.items()}


def _work(shape: Shape, top_k: int, device: torch.device) -> Run:
    """-> a function that runs one step by one choice, or `all`, on inputs made once."""

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
    gate_up_RX, act_RH = Steps(rows.ends_E, num_rows, False, Choice()).up(x, given, weight_R, gate_up, None)

    def run(step: str, choice: Choice) -> None:
        forward, backward = (Steps(rows.ends_E, num_rows, False, choice) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {
            "up": lambda: forward.up(x, given, weight_R, gate_up, None),
            "down": lambda: forward.down(act_RH, down),
            "act_grad": lambda: backward.act_grad(grad, given, weight_R, down, gate_up_RX),
            "input_grad": lambda: backward.input_grad(gate_up_RX, gate_up),
            "up_grad": lambda: backward.up_grad(gate_up_RX, x, given),
            "down_grad": lambda: backward.down_grad(grad, given, act_RH),
        }
        for name in STEPS if step == "all" else (step,):
            calls[name]()

    return run


def _milliseconds(work: Callable[[], object], warmup: int = _WARMUP, repeats: int = _REPEATS) -> float:
    for _ in range(warmup):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))
