"""Measure the kernels of one shape on this device and keep the fastest of each step. Takes some seconds; asked for,
never done in passing.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from threefold.engine.kernels.choose import STEPS, Choice, Shape, candidates, save
from threefold.engine.kernels.counting import counting_sort
from threefold.engine.kernels.steps import Steps

_WARMUP, _REPEATS = 3, 9


def tune(shape: Shape, top_k: int, device: torch.device) -> Choice:
    """The choice is kept on disk for `choose` to find. Loads of experts are drawn as a balanced router's."""
    work = _work(shape, top_k, device)
    best: dict[str, Any] = {}
    for step in STEPS:
        tried = {}
        for config in candidates(step):
            try:
                choice = replace(Choice(), **{step: config})
                tried[config] = _milliseconds(partial(work, step, choice))
            except Exception:  # too large for this device's shared memory, or refused by this release of triton
                continue
        best[step] = min(tried, key=tried.__getitem__, default=None)
    choice = Choice(**best)
    save(device, shape, choice)
    return choice


def _work(shape: Shape, top_k: int, device: torch.device) -> Callable[[str, Choice], object]:
    """-> a function that runs one step by one choice, on inputs made once."""

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

    def run(step: str, choice: Choice) -> object:
        steps = Steps(rows.ends_E, num_rows, False, choice)
        calls: dict[str, Callable[[], object]] = {
            "up": lambda: steps.up(x, given, weight_R, gate_up, None),
            "down": lambda: steps.down(act_RH, down),
            "act_grad": lambda: steps.act_grad(grad, given, weight_R, down, gate_up_RX),
            "input_grad": lambda: steps.input_grad(gate_up_RX, gate_up),
            "up_grad": lambda: steps.up_grad(gate_up_RX, x, given),
            "down_grad": lambda: steps.down_grad(grad, given, act_RH),
        }
        return calls[step]()

    return run


def _milliseconds(work: Callable[[], object]) -> float:
    for _ in range(_WARMUP):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))
