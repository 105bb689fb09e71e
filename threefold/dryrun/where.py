"""Which module, phase and microbatch an allocation belongs to.

In the forward, hooks on modules keep a stack. The backward knows the node of the graph it is at, and nodes are numbered
as they are made: the stack's changes, by number, tell whose node it is.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_NEVER = 2**63  # numbers of nodes that belong to no moment, such as those that fill `.grad`


@dataclass(frozen=True, slots=True)
class Spot:
    """`module` is a path such as layers.3.ffn.experts, empty for the model itself; microbatches count from 0."""

    phase: str
    module: str = ""
    microbatch: int | None = None

    def __str__(self) -> str:
        part = self.phase if self.microbatch is None else f"{self.phase} of microbatch {self.microbatch}"
        return f"{part}, {self.module}" if self.module else part


class Where:
    def __init__(self) -> None:
        self.phase = "build"
        self._paths: dict[nn.Module, str] = {}
        self._roots: set[nn.Module] = set()
        self._stack: list[str] = []
        self._beside = ""  # the module around the one left last: some schedules call modules part by part
        self._microbatch: int | None = None
        self._began: list[int] = [0]
        self._was: list[tuple[str, int | None]] = [("", None)]
        self._last = self._was[0]
        self.failed: Spot | None = None  # where an exception was first seen

    def name(self, chunks: Mapping[int, nn.Module]) -> None:
        """Modules by their paths. A call of a whole model begins a microbatch; a pipeline's chunk says which."""
        for chunk in chunks.values():
            self._paths |= {module: path for path, module in chunk.named_modules()}
        self._roots = set(chunks.values())

    def __call__(self) -> Spot:
        """Now."""
        node = torch._C._current_autograd_node()
        if node is None:
            return Spot(self.phase, self._stack[-1] if self._stack else self._beside, self._microbatch)
        if self._stack:
            return Spot("recompute", self._stack[-1], self._last[1])
        number = node._sequence_nr()
        if number < _NEVER:
            self._last = self._was[bisect_right(self._began, number) - 1]
        return Spot("backward", *self._last)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase, self._microbatch, self._beside = self.phase, phase, None, ""
        try:
            yield
        except Exception:
            self.failed = self.failed or self()
            raise
        finally:
            self.phase, self._microbatch, self._beside = before, None, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(self._enter)
        # Also behind an exception: a recompute stops early by one.
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._roots:
            self._microbatch = 0 if self._microbatch is None else self._microbatch + 1
        elif module not in self._paths:
            if len(args) == 2 and isinstance(args[1], int):  # a chunk, as the pipeline calls it
                self._microbatch = args[1]
            return
        self._stack.append(self._paths[module])
        self._note()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and self.failed is None:
            self.failed = self()
        if module in self._paths and self._stack:
            left = self._stack.pop()
            around = left.rpartition(".")[0]
            self._beside = "" if around in ("layers", "mtp") or left.endswith(".norm") else around
            self._note()

    def _note(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        spot = (self._stack[-1] if self._stack else "", self._microbatch)
        if self._began[-1] == number:
            self._was[-1] = spot
        else:
            self._began.append(number)
            self._was.append(spot)
