"""The module, phase and microbatch that make each allocation of a step.

`MemoryTracker` asks `OriginTracker.current()` for every new storage. An answer is, for example,
`Origin("forward", "layers.3.ffn.experts", 0)`, which prints as "forward of microbatch 0, layers.3.ffn.experts".

In the forward, global module hooks keep a stack of module paths. In the backward, autograd tells only the graph node
that runs, and autograd numbers nodes in the order in which the forward creates them. The tracker therefore records the
sequence number at which each module starts and ends, and looks up the node's number in that record.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from threefold.engine.models.decoder import Block
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.schedule.microbatch_runners import ChunkForward

# What the model does itself, between its parts, belongs to one of them: features of pictures are put at their tokens,
# and added to the residual stream. By the part that ended last.
_BY_MODEL = {"embed": "embed", "vision": "embed", "projector": "embed", "layers": "layers"}
_MAX_SEQUENCE_NUMBER = 2**63  # nodes that accumulate into `.grad` have numbers from here on and belong to no module


@dataclass(frozen=True, slots=True)
class Origin:
    """The point of a step at which an allocation is made."""

    phase: str  # build, batch, forward, backward, recompute, reduce or optimizer
    module: str = ""  # a path such as layers.3.ffn.experts; empty for the model itself
    microbatch: int | None = None  # counted from 0

    def __str__(self) -> str:
        part = self.phase if self.microbatch is None else f"{self.phase} of microbatch {self.microbatch}"
        return f"{part}, {self.module}" if self.module else part


class OriginTracker:
    """Follows a step through its phases and modules. `current()` is the origin of an allocation made now."""

    def __init__(self) -> None:
        self.phase = "build"
        self.failed_at: Origin | None = None  # the origin at which an exception was first seen
        self._paths: dict[nn.Module, str] = {}
        self._roots: set[nn.Module] = set()
        self._stack: list[str] = []
        # The parent of the module that ended last. The overlapped schedule calls the parts of a layer directly, so
        # work between two of its parts belongs to the layer although the layer's own forward never starts.
        self._parent_of_last = ""
        self._last_top = ""  # the part of the model that ended last, such as "embed" or "layers"
        self._microbatch: int | None = None
        self._made: dict[tuple[str, str, int | None], Origin] = {}
        # `_owners[i]` (module path, microbatch) creates the graph nodes numbered from `_first_numbers[i]` on.
        self._first_numbers: list[int] = [0]
        self._owners: list[tuple[str, int | None]] = [("", None)]
        self._last_owner = self._owners[0]

    def register_modules(self, chunks: Mapping[int, nn.Module]) -> None:
        """Learn the paths of all modules. Without a pipeline, a call of the whole model starts a microbatch."""
        for chunk in chunks.values():
            self._paths |= {module: path for path, module in chunk.named_modules()}
        self._roots = set(chunks.values())

    def current(self) -> Origin:
        key = self._current()
        origin = self._made.get(key)
        if origin is None:
            origin = self._made[key] = Origin(*key)
        return origin

    def _current(self) -> tuple[str, str, int | None]:
        """The fields of the current origin."""
        node = torch._C._current_autograd_node()
        if node is None:
            module = self._stack[-1] if self._stack else self._parent_of_last
            if not module and self.phase == "forward" and self._last_top in _BY_MODEL:
                module = _BY_MODEL[self._last_top]
            return self.phase, module, self._microbatch
        if self._stack:
            return "recompute", self._stack[-1], self._last_owner[1]
        number = node._sequence_nr()
        if number < _MAX_SEQUENCE_NUMBER:
            self._last_owner = self._owners[bisect_right(self._first_numbers, number) - 1]
        return "backward", *self._last_owner

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase, self._microbatch, self._parent_of_last = self.phase, phase, None, ""
        try:
            yield
        except Exception:
            self.failed_at = self.failed_at or self.current()
            raise
        finally:
            self.phase, self._microbatch, self._parent_of_last = before, None, ""

    @contextmanager
    def module_hooks(self) -> Iterator[None]:
        """Install hooks on the forward of every module for the time of the block."""
        before = register_module_forward_pre_hook(self._enter)
        # The hook must also run after an exception, because a recompute stops early by raising one.
        after = register_module_forward_hook(self._leave, always_call=True)

        def tracked(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any) -> Any:
                self._enter(module, args)
                try:
                    return method(module, *args)
                finally:
                    self._leave(module, args, True)

            return call

        # A CUDA graph of the router, fused experts that read tokens by index, and EP overlap call these and no forward.
        called = ((MoeLayer, "compute_routed"), (Experts, "forward_tokens"), (Block, "add_output"))
        try:
            with ExitStack() as patches:
                for kind, name in called:
                    patches.enter_context(mock.patch.object(kind, name, tracked(getattr(kind, name))))
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._roots:
            self._microbatch = 0 if self._microbatch is None else self._microbatch + 1
        elif module not in self._paths:
            if isinstance(module, ChunkForward):  # the pipeline calls it with (hidden states, microbatch)
                self._microbatch = args[1]
            return
        self._stack.append(self._paths[module])
        self._record_owner()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and self.failed_at is None:
            self.failed_at = self.current()
        if module in self._paths and self._stack:
            left = self._stack.pop()
            parent = left.rpartition(".")[0]
            self._last_top = left.partition(".")[0]
            self._parent_of_last = "" if parent in ("layers", "mtp") or left.endswith(".norm") else parent
            self._record_owner()

    def _record_owner(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        owner = (self._stack[-1] if self._stack else "", self._microbatch)
        if self._first_numbers[-1] == number:
            self._owners[-1] = owner
        else:
            self._first_numbers.append(number)
            self._owners.append(owner)
