"""Parts of a model that are replayed as CUDA graphs where their inputs match, and run eagerly elsewhere.

`scopes.py` makes a `GraphedPart` for each part of a layer that a plan's scopes name. `ChunkGraphs`, also defined here,
gives every microbatch in flight a slot of memory of its own (`graph_slot.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from threefold.engine.context import context
from threefold.engine.graphs.graph_slot import GraphSlot, RopeKey
from threefold.engine.graphs.graphed_function import Function, GraphedFunction
from threefold.engine.graphs.recorder import CudaRecorder, Recorder
from threefold.engine.graphs.stats import GraphStats

WARMUP = 2  # microbatches that run eagerly first, so that kernels are chosen, compiled and tuned
MAX_SLOTS = 16  # microbatches in flight with graphs; further ones run eagerly


class ChunkGraphs:
    """The graph slots of one model chunk, and the slot of the microbatch whose forward runs now."""

    def __init__(
        self,
        make_recorder: Callable[[], Recorder],
        graph_stats: GraphStats | None = None,
        warmup: int = WARMUP,
        max_bytes: float | None = None,
    ) -> None:
        self.make_recorder, self.graph_stats = make_recorder, graph_stats or GraphStats()
        self.max_bytes = max_bytes  # the budget of all graphs of the rank; None: any
        self.slot: GraphSlot | None = None  # None: this microbatch runs eagerly
        self.delays_wgrad = False  # whether some microbatch came with a queue for its weight gradients
        self.rope_keys: set[RopeKey] = set()  # the rotary tables that the model has asked for
        self.slots: list[GraphSlot] = []
        self._warmup = warmup
        self._disabled = False
        self._reported_bytes = 0  # bytes that `graph_stats` already counts

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Enter around the forward of a microbatch. Its backward must run before its slot is used again."""
        self.slot = self._free_slot() if torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self.slot = None

    def reset(self) -> None:
        """Start a step: no microbatch is in flight, even if the last step failed half-way."""
        for slot in self.slots:
            slot.num_in_flight = 0
        self._report_bytes()

    def _report_bytes(self) -> None:
        held = sum(slot.num_bytes for slot in self.slots)
        self.graph_stats.num_bytes += held - self._reported_bytes
        self._reported_bytes = held

    def disable(self, scope: str, error: Exception) -> None:
        """Run eagerly from now on, because recording failed."""
        self._disabled, self.slot = True, None
        self.graph_stats.count_fallback(scope, "could not be recorded", str(error).partition("\n")[0])

    def _free_slot(self) -> GraphSlot | None:
        if self._warmup:
            self._warmup -= 1
            return None
        if self._disabled:
            self.graph_stats.count_fallback("microbatch", "recording failed before")
            return None
        free = next((slot for slot in self.slots if not slot.num_in_flight), None)
        if free is None and len(self.slots) == MAX_SLOTS:
            self.graph_stats.count_fallback("microbatch", f"more than {MAX_SLOTS} in flight")
            return None
        if free is None and (reason := self._over_budget()):
            self.graph_stats.count_fallback("microbatch", reason)
            return None
        if free is None:
            free = GraphSlot(self.make_recorder(), self.make_recorder())
            free.recorder.prepare()
            self.slots.append(free)
        free.begin_microbatch()
        return free

    def _over_budget(self) -> str | None:
        """Why the budget has no room for one more slot, if it is as large as the largest so far; None where it has."""
        if self.max_bytes is None:
            return None
        if any(slot.num_in_flight and not slot.is_sealed for slot in self.slots):
            return "the memory of a microbatch that is being recorded is not known yet"
        self._report_bytes()
        largest = max((slot.num_bytes for slot in self.slots), default=0)
        exceeds = self.graph_stats.num_bytes + largest > self.max_bytes
        return "no memory left in knobs.graph_memory_gb" if exceeds else None


def cuda_graphs(
    device: torch.device, graph_stats: GraphStats | None = None, max_bytes: float | None = None
) -> ChunkGraphs:
    return ChunkGraphs(lambda: CudaRecorder(device), graph_stats, max_bytes=max_bytes)


class GraphedPart:
    """One part of a layer (a scope such as "attn") with the modules whose parameters it uses."""

    def __init__(self, scope: str, graphs: ChunkGraphs, modules: Sequence[nn.Module]) -> None:
        self.scope, self.graphs, self.modules = scope, graphs, tuple(modules)

    def replay(self, function: Function, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """The outputs of `function`; None where the caller must run it eagerly.

        A part may be called several times in a microbatch: each call of a slot has a graph of its own.
        """
        slot, graph_stats = self.graphs.slot, self.graphs.graph_stats
        self.graphs.delays_wgrad |= context.wgrad_queue is not None
        if slot is None:
            return None
        functions, call = slot.functions[self], slot.num_calls[self]
        slot.num_calls[self] += 1
        if call == len(functions) and not slot.is_sealed:
            try:
                functions.append(GraphedFunction(slot, function, self.modules, inputs, self.graphs.delays_wgrad))
            except RuntimeError as error:
                self.graphs.disable(self.scope, error)
                return None
            graph_stats.recorded += 1
        graphed = functions[call] if call < len(functions) else None
        if graphed is None or (slot.is_sealed and not graphed.has_backward_graph):
            graph_stats.count_fallback(self.scope, "not recorded with the others")
            return None
        if mismatch := graphed.mismatch(inputs):
            graph_stats.count_fallback(self.scope, *mismatch)
            return None
        graph_stats.replays[self.scope] += 1
        return graphed(*inputs)
