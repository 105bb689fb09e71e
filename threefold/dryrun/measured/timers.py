"""Times of a rank: of the phases of a step, and on a GPU of the forward and backward of each module.

`measure` runs one step with `PhaseTimer` in the place of the origin tracker, and another with `ModuleTimer`, which
records CUDA events in module hooks. `measure.py` times phases only.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.tune.trial_steps import synchronized_time


class PhaseTimer(OriginTracker):
    """Times the phases of a step. The device is synchronized before and after each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        began = synchronized_time(self.device)
        yield
        self.seconds[phase] = synchronized_time(self.device) - began


# Last parts of the paths of timed modules. These take and return tensors; torch has no backward hooks for others.
_TIMED_MODULES = ("mixer", "mixer_norm", "ffn_norm", "ffn", "experts", "shared", "norm")
EventPairs = list[tuple[Any, Any]]  # CUDA events at the start and at the end of each call


class ModuleTimer:
    """Times the forward and the backward of modules with CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._forward: dict[str, EventPairs] = {}
        self._backward: dict[str, EventPairs] = {}
        self._started: dict[tuple[str, str], Any] = {}

    @contextmanager
    def module_hooks(self, chunks: Iterable[nn.Module]) -> Iterator[None]:
        """Install the hooks for the time of the block."""
        handles = []
        for chunk in chunks:
            for path, module in chunk.named_modules():
                if path.rpartition(".")[2] in _TIMED_MODULES:
                    handles += self._register_hooks(path, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _register_hooks(self, path: str, module: nn.Module) -> list[Any]:
        def begin(kind: str) -> Any:
            def hook(*_: Any) -> None:
                self._started[kind, path] = self._record_event()

            return hook

        def end(kind: str, into: dict[str, EventPairs]) -> Any:
            def hook(*_: Any) -> None:
                before = self._started.pop((kind, path), None)
                if before is not None:
                    into.setdefault(path, []).append((before, self._record_event()))

            return hook

        return [
            module.register_forward_pre_hook(begin("forward")),
            module.register_forward_hook(end("forward", self._forward)),
            module.register_full_backward_pre_hook(begin("backward")),
            module.register_full_backward_hook(end("backward", self._backward)),
        ]

    def _record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, tuple[float, float]]:
        """(forward, backward) seconds by module path, summed over all calls."""
        torch.cuda.synchronize(self.device)
        paths = dict.fromkeys([*self._forward, *self._backward])
        return {
            path: (_total_seconds(self._forward.get(path, [])), _total_seconds(self._backward.get(path, [])))
            for path in paths
        }


def _total_seconds(pairs: EventPairs) -> float:
    return sum(before.elapsed_time(after) for before, after in pairs) / 1e3
