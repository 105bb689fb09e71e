"""Time on the device: of the phases of a step, and by module, forward and backward, from events between hooks."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from threefold.dryrun.where import Where


class Phases(Where):
    """A step's phases, each waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        yield
        torch.cuda.synchronize(self.device)
        self.seconds[phase] = time.perf_counter() - began


# Those that take and give tensors: torch tells of no other's backward.
_TIMED = ("mixer", "mixer_norm", "ffn_norm", "ffn", "experts", "shared", "norm")
Marks = list[tuple[Any, Any]]


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._forward: dict[str, Marks] = {}
        self._backward: dict[str, Marks] = {}
        self._open: dict[tuple[str, str], Any] = {}

    @contextmanager
    def on(self, chunks: Iterable[nn.Module]) -> Iterator[None]:
        handles = []
        for chunk in chunks:
            for path, module in chunk.named_modules():
                if path.rpartition(".")[2] in _TIMED:
                    handles += self._hooks(path, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        def begin(kind: str) -> Any:
            def hook(*_: Any) -> None:
                self._open[kind, path] = self._now()

            return hook

        def end(kind: str, into: dict[str, Marks]) -> Any:
            def hook(*_: Any) -> None:
                before = self._open.pop((kind, path), None)
                if before is not None:
                    into.setdefault(path, []).append((before, self._now()))

            return hook

        return [
            module.register_forward_pre_hook(begin("forward")),
            module.register_forward_hook(end("forward", self._forward)),
            module.register_full_backward_pre_hook(begin("backward")),
            module.register_full_backward_hook(end("backward", self._backward)),
        ]

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, tuple[float, float]]:
        """(forward, backward) of all calls, by path."""
        torch.cuda.synchronize(self.device)
        paths = dict.fromkeys([*self._forward, *self._backward])
        return {path: (_sum(self._forward.get(path, [])), _sum(self._backward.get(path, []))) for path in paths}


def _sum(marks: Marks) -> float:
    return sum(before.elapsed_time(after) for before, after in marks) / 1e3
