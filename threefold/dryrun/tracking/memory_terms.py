"""The memory term (weights, gradients, attention, experts, ...) that each live allocation belongs to.

Model states are labeled by name: `label_states` before the step, the other `label_` functions after it. Every other
allocation gets its term from its origin: the phase and the module path in which it was made. The names of the terms are
those of `plan/terms.py`, so that a rehearsal and an estimate can be compared term by term.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.dryrun.tracking.memory_tracker import Allocation, MemoryTracker
from threefold.engine.build import Parts
from threefold.engine.data_parallel.fsdp import Fsdp
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LinearPrecision
from threefold.engine.precision.weight_cache import WeightCache
from threefold.engine.schedule.microbatch_runners import Overlapped, Pipelined, Sequential
from threefold.engine.schedule.p2p import P2PChannel
from threefold.plan.terms import MEMORY_TERMS

# Part of a module path -> term. The first match counts, so the more specific parts come first.
_TERM_OF_PATH = (
    (".vision", "vision"),
    (".projector", "vision"),
    (".ffn.experts", "experts"),
    (".ffn.copies", "experts"),
    (".ffn.router", "router"),
    (".ffn.shared", "shared_experts"),
    (".mixer_norm", "norms"),
    (".ffn_norm", "norms"),
    (".mixer", "attention"),
    (".ffn", "mlp"),
    ("embed", "embedding"),
)


def term_of(allocation: Allocation, moe_layers: set[str], has_loss: bool = True) -> str:
    """The term of one allocation.

    A tensor that the forward makes and saves for the backward is an activation of its module; a tensor that the forward
    frees again, or that the backward or the optimizer makes, is workspace. `moe_layers` are the paths that
    `moe_layer_paths` returns.
    """
    if allocation.term is not None:
        return allocation.term
    origin = allocation.origin
    if origin.phase == "recompute":
        return "recompute"
    if origin.phase not in ("forward", "batch") or allocation.is_transient:
        return "workspace"
    path = f".{origin.module}"
    for part, term in _TERM_OF_PATH:
        if part in path:
            if term != "mlp":
                return term
            # An MoE layer allocates outside of its router and experts only to dispatch tokens and to combine results.
            return "dispatch" if path[: path.index(part) + len(part)] in moe_layers else "mlp"
    if ".layers" in path or path.endswith(".norm") or ".mtp." in path:
        return "norms"  # the residual stream
    if origin.phase == "batch":
        return "embedding"
    return "logits" if has_loss else "norms"  # a stage without the loss hands on the residual stream


def moe_layer_paths(chunks: Iterable[nn.Module]) -> set[str]:
    """Paths of the feed-forward modules that hold experts, for example ".layers.3.ffn"."""
    return {
        f".{path.removesuffix('.experts')}"
        for chunk in chunks
        for path, _ in chunk.named_modules()
        if path.endswith(".ffn.experts")
    }


def label_states(tracker: MemoryTracker, parts: Parts) -> None:
    """Label weights, gradient buffers and optimizer states with their terms and the engine's names."""
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            tracker.label(_local(parameter), "weights", name)
        for name, buffer in chunk.named_buffers():
            tracker.label(buffer, "weights", name)
    copies = parts.copies
    for _, copied in copies.layers if copies else ():
        for name, slots in copied.weights.items():
            tracker.label(slots, "weights", f"copies of {copied.name}.{name}")
    data = parts.data
    bucketed = data if isinstance(data, Zero1) else data.others if isinstance(data, Fsdp) else None
    for bucket in [*(bucketed.buckets if bucketed else ()), *(copies.sums.buckets if copies else ())]:
        first, last = bucket.entries[0].name, bucket.entries[-1].name
        name = first if first == last else f"{first} to {last}"
        tracker.label(bucket.grads, "gradients", name)
        if bucket.params is not None:
            tracker.label(bucket.params, "weights", name)
    for name, state in parts.optimizer.states_in_memory():
        tracker.label(state, "optimizer", name)
    # Last, because a weight that is its own fp32 master weight is also listed among the optimizer's states.
    for owned in parts.data.updated:
        tracker.label(owned.value, "weights", owned.name)


@contextmanager
def messages_labeled(tracker: MemoryTracker) -> Iterator[None]:
    """Label the messages of the pipeline: what it sends, wherever that was made, is workspace until it has left; hidden
    states that arrive become the input of a norm."""
    send, receive = P2PChannel.send, P2PChannel.receive

    def labeled(channel: P2PChannel, x: Tensor) -> None:
        allocation = tracker.allocation(x)
        if channel.is_remote and allocation is not None and allocation.term is None:
            allocation.term, allocation.name = "workspace", "message to another stage"
        send(channel, x)

    def received(channel: P2PChannel, microbatch: int) -> None:
        receive(channel, microbatch)
        term = "norms" if channel.description.startswith("activation") else "workspace"
        tracker.label(channel._received[microbatch][1], term, f"received {channel.description}")

    with mock.patch.multiple(P2PChannel, send=labeled, receive=received):
        yield


def label_gradients(tracker: MemoryTracker, parts: Parts) -> None:
    """Label the gradients in `.grad` that lie in no gradient buffer."""
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                allocation = tracker.allocation(_local(parameter.grad))
                if allocation is not None and allocation.term is None:
                    allocation.term, allocation.name = "gradients", name


def label_quantized_weights(tracker: MemoryTracker, parts: Parts) -> None:
    """Label the quantized copies of weights that modules cache beside their parameters."""
    for chunk in parts.chunks.values():
        for path, module in chunk.named_modules():
            for attribute in vars(module).values():
                if isinstance(attribute, LinearPrecision | LowPrecisionExperts):
                    for x in _tensors(attribute):
                        tracker.label(x, "quantized_weights", path)


def label_static_copies(tracker: MemoryTracker, parts: Parts) -> None:
    """Label the inputs and output gradients that CUDA graphs read at fixed addresses."""
    runner = parts.runner
    if isinstance(runner, Pipelined):
        graphs = [chunk.model_graphs.graphs for chunk in runner.chunks.values()]
    else:
        assert isinstance(runner, Sequential | Overlapped)
        graphs = [runner.model_graphs.graphs]
    for slot in (slot for chunk_graphs in graphs if chunk_graphs is not None for slot in chunk_graphs.slots):
        for x in slot.static_copies:
            tracker.label(x, "graphs", "input of a CUDA graph")


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside of nested containers, weight caches and data classes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, WeightCache):
        yield from _tensors(value.cached)
    elif isinstance(value, LowPrecisionExperts):
        yield from _tensors(list(vars(value).values()))
    elif is_dataclass(value):
        yield from _tensors([getattr(value, part.name) for part in fields(value)])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def bytes_by_term(
    allocations: Iterable[tuple[Allocation, int]], moe_layers: set[str], has_loss: bool = True
) -> dict[str, int]:
    sums = dict.fromkeys(MEMORY_TERMS, 0)
    for allocation, size in allocations:
        sums[term_of(allocation, moe_layers, has_loss)] += size
    return {term: size for term, size in sums.items() if size}
