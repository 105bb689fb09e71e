"""Counts which code paths one step takes, as evidence of which settings took effect. `recorder.py` enters it once.

Some counts come from `count_event` deep inside the engine. The rest come from methods that are wrapped for the length
of the step. A count has a kind and a detail:

    dispatcher               class of the dispatcher        calls of `token_dispatch`
    exchange on ep           operation                      collectives on the expert-parallel group
    package call             method                         calls into the buffers of DeepEP or HybridEP
    exchange of rows         overlapped, alone              whether another microbatch computed between start and wait
    weight gradient          queued                         delayed weight gradients
    graph replay, eager      scope                          CUDA graphs, and parts that ran without theirs
    graph fallback           scope and reason               parts that a graph of theirs could not replay
    shared experts           overlapped, alone              whether rows traveled meanwhile
    gradient reduction       during backward, after it      buckets of ZeRO-1
    parameter gather         left open, awaited             buckets of ZeRO-1
    compiled call            class of the module            torch.compile
    low-precision linears, low-precision experts, low-precision head, experts, expert kernels, main_grad, attention,
    rows in FP8, tensor-parallel ring     by `count_event`
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.build import Parts
from threefold.engine.context import Method, override, wrapped_method
from threefold.engine.data_parallel.buckets import Bucket
from threefold.engine.dispatch.async_exchange import AsyncExchange
from threefold.engine.dispatch.deepep import DeepEpDispatcher
from threefold.engine.dispatch.hybridep import HybridEpDispatcher
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.graphs.full_iteration import FullIterationGraph
from threefold.engine.graphs.graphed_part import GraphedPart
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.schedule.autograd_nodes import observe_nodes

EventCounts = Counter[tuple[str, str]]


@contextmanager
def count_step_events(parts: Parts) -> Iterator[EventCounts]:
    """Inside the `with` block, which must hold a whole training step, count what it does."""
    counts: EventCounts = Counter({("device", parts.device.type): 1})
    step = _ObservedStep(parts, counts)
    with ExitStack() as stack:
        stack.enter_context(override("event_counts", counts))
        stack.enter_context(observe_collectives(step.see_collective))
        stack.enter_context(observe_nodes(step.enter_node))
        for target, method, wrapper in step.wrappers():
            stack.enter_context(wrapped_method(target, method, wrapper))
        with _graph_fallbacks(parts.runner.graph_stats, counts):
            yield counts


@contextmanager
def _graph_fallbacks(graph_stats: GraphStats | None, counts: EventCounts) -> Iterator[None]:
    before = Counter(graph_stats.fallbacks) if graph_stats else Counter()
    yield
    if graph_stats:
        for (scope, reason), times in (graph_stats.fallbacks - before).items():
            counts["graph fallback", f"{scope}: {reason}"] += times


class _ObservedStep:
    """The state between the methods that are wrapped."""

    def __init__(self, parts: Parts, counts: EventCounts) -> None:
        self.parts, self.counts = parts, counts
        self._part = ""  # of the node that runs: "forward", "backward" or "weights"
        self._ended: Counter[str] = Counter()  # nodes that ended, by part
        self._started: dict[tuple[int, str], tuple[str, Counter[str]]] = {}  # exchanges under way
        self._reduces_late = False  # the backward is over

    def wrappers(self) -> Iterator[tuple[Any, str, Callable[[Method], Method]]]:
        for way in ("forward", "backward"):
            yield AsyncExchange, f"start_{way}", self._starting(way)
            yield AsyncExchange, f"wait_{way}", self._awaiting(way)
        yield WgradQueue, "finish", self._finishing_wgrads
        yield GraphedPart, "replay", self._replaying(lambda part: part.scope)
        yield FullIterationGraph, "run", self._replaying(lambda _: "full_iteration")
        yield Bucket, "start_reduce", self._reducing
        yield self.parts.data, "finish_grad_sync", self._finishing_reduction
        yield self.parts.data, "start_param_sync", self._gathering
        seen: set[int] = set()  # layers share dispatchers
        for module in (module for chunk in self.parts.chunks.values() for module in chunk.modules()):
            if module._compiled_call_impl is not None:
                yield module, "_compiled_call_impl", self._counting("compiled call", type(module).__name__)
            if isinstance(module, MoeLayer):
                if module.shared is not None:
                    yield module, "compute_shared", self._sharing
                if id(module.dispatcher) not in seen:
                    seen.add(id(module.dispatcher))
                    yield from self._dispatcher_wrappers(module)

    def _dispatcher_wrappers(self, layer: MoeLayer) -> Iterator[tuple[Any, str, Callable[[Method], Method]]]:
        name = type(layer.dispatcher).__name__
        yield layer.dispatcher, "token_dispatch", self._counting("dispatcher", name)
        if isinstance(layer.dispatcher, DeepEpDispatcher):
            for method in ("dispatch", "dispatch_with_handle", "combine"):
                yield layer.dispatcher.buffers, method, self._counting("package call", method)
        elif isinstance(layer.dispatcher, HybridEpDispatcher):
            yield layer.dispatcher, "_fit", self._counting("package call", "dispatch")

    def _counting(self, kind: str, detail: str) -> Callable[[Method], Method]:
        def wrapper(inner: Method) -> Method:
            def counted(*args: Any, **kwargs: Any) -> Any:
                self.counts[kind, detail] += 1
                return inner(*args, **kwargs)

            return counted

        return wrapper

    def see_collective(self, call: CollectiveCall) -> None:
        if call.group.name == "ep":
            self.counts["exchange on ep", call.operation] += 1

    @contextmanager
    def enter_node(self, part: str, name: str, layer: str) -> Iterator[None]:
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before
            self._ended[part] += 1

    def _starting(self, way: str) -> Callable[[Method], Method]:
        def wrapper(inner: Method) -> Method:
            def start(exchange: AsyncExchange, *args: Any) -> Any:
                self._started[id(exchange), way] = self._part, Counter(self._ended)
                return inner(exchange, *args)

            return start

        return wrapper

    def _awaiting(self, way: str) -> Callable[[Method], Method]:
        def wrapper(inner: Method) -> Method:
            def wait(exchange: AsyncExchange, *args: Any) -> Any:
                started = self._started.pop((id(exchange), way), None)
                if started is not None:
                    part, before = started
                    # The two microbatches of a pair run in opposite directions.
                    others = (self._ended - before).keys() - {part}
                    self.counts["exchange of rows", "overlapped" if others else "alone"] += 1
                received = inner(exchange, *args)
                self._started.pop((id(exchange), way), None)  # a wait may start the exchange itself
                return received

            return wait

        return wrapper

    def _finishing_wgrads(self, inner: Method) -> Method:
        def finish(queue: WgradQueue) -> None:
            self.counts["weight gradient", "queued"] += len(queue.pending)
            inner(queue)

        return finish

    def _replaying(self, scope_of: Callable[[Any], str]) -> Callable[[Method], Method]:
        def wrapper(inner: Method) -> Method:
            def replay(part: Any, *args: Any) -> Any:
                made = inner(part, *args)
                self.counts["graph replay" if made is not None else "graph eager", scope_of(part)] += 1
                return made

            return replay

        return wrapper

    def _sharing(self, inner: Method) -> Method:
        def compute_shared(*args: Any) -> Any:
            traveling = any(way == "forward" for _, way in self._started)
            self.counts["shared experts", "overlapped" if traveling else "alone"] += 1
            return inner(*args)

        return compute_shared

    def _reducing(self, inner: Method) -> Method:
        def start_reduce(bucket: Bucket) -> None:
            if not bucket.group.is_trivial:
                self.counts["gradient reduction", "after it" if self._reduces_late else "during backward"] += 1
            inner(bucket)

        return start_reduce

    def _finishing_reduction(self, inner: Method) -> Method:
        def finish_grad_sync() -> None:
            self._reduces_late = True
            inner()

        return finish_grad_sync

    def _gathering(self, inner: Method) -> Method:
        def start_param_sync() -> None:
            inner()
            zero1 = getattr(self.parts.data, "others", self.parts.data)
            for bucket in getattr(zero1, "buckets", ()):
                if not bucket.group.is_trivial:
                    self.counts["parameter gather", "left open" if bucket.gathering is not None else "awaited"] += 1

        return start_param_sync
