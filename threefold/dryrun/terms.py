"""Which of the memory terms a live block belongs to: by name where it has one, else by who made it."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.dryrun.tracker import Block, Tracker
from threefold.engine.build import Parts
from threefold.engine.precision.experts import LowExperts
from threefold.engine.precision.linear import Low
from threefold.engine.precision.weights import Kept
from threefold.engine.shard.data import Zero1
from threefold.engine.shard.fsdp import Fsdp
from threefold.plan.terms import MEMORY_TERMS

# Parts of a module's path, the more specific first.
_MODULES = (
    (".ffn.experts", "experts"),
    (".ffn.router", "router"),
    (".ffn.shared", "shared_experts"),
    (".mixer_norm", "norms"),
    (".ffn_norm", "norms"),
    (".mixer", "attention"),
    (".ffn", "mlp"),
    ("embed", "embedding"),
)


def term_of(block: Block, with_experts: set[str], has_loss: bool = True) -> str:
    """Beside what has a name, tensors of the forward are kept for the backward; those of the backward pass by."""
    if block.term is not None:
        return block.term
    spot = block.spot
    if spot.phase == "recompute":
        return "recompute"
    if spot.phase not in ("forward", "batch"):
        return "workspace"
    path = f".{spot.module}"
    for part, term in _MODULES:
        if part in path:
            if term != "mlp":
                return term
            # What a layer of experts makes outside of its parts is for the way to the experts and back.
            return "dispatch" if path[: path.index(part) + len(part)] in with_experts else "mlp"
    if ".layers." in path or path.endswith(".norm") or ".mtp." in path:
        return "norms"  # the residual stream
    if spot.phase == "batch":
        return "embedding"
    return "logits" if has_loss else "norms"  # what passes between stages is the residual stream too


def expert_paths(chunks: Iterable[nn.Module]) -> set[str]:
    return {
        f".{path.removesuffix('.experts')}"
        for chunk in chunks
        for path, _ in chunk.named_modules()
        if path.endswith(".ffn.experts")
    }


def label_states(tracker: Tracker, parts: Parts) -> None:
    """Weights, gradients and optimizer states, by what the engine calls them."""
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            tracker.label(_local(parameter), "weights", name)
        for name, buffer in chunk.named_buffers():
            tracker.label(buffer, "weights", name)
    data = parts.data
    flat = data if isinstance(data, Zero1) else data.others if isinstance(data, Fsdp) else None
    for bucket in flat.buckets if flat else ():
        first, last = bucket.slots[0].name, bucket.slots[-1].name
        name = first if first == last else f"{first} to {last}"
        tracker.label(bucket.grads, "gradients", name)
        if bucket.values is not None:
            tracker.label(bucket.values, "weights", name)
    for item in parts.optimizer.state_dict().items():
        tracker.label(item[1], "optimizer", item[0])
    # Where a weight is its own master weight the optimizer has no other.
    for owned in parts.data.updated:
        tracker.label(owned.value, "weights", owned.name)


def label_gradients(tracker: Tracker, parts: Parts) -> None:
    """Those that no buffer was made for."""
    for chunk in parts.chunks.values():
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                block = tracker.block(_local(parameter.grad))
                if block is not None and block.term is None:
                    block.term, block.name = "gradients", name


def label_narrow(tracker: Tracker, parts: Parts) -> None:
    """Weights in a narrow format, which modules keep beside their parameters."""
    for chunk in parts.chunks.values():
        for path, module in chunk.named_modules():
            for held in vars(module).values():
                if isinstance(held, Low | LowExperts):
                    for x in _tensors(held):
                        tracker.label(x, "quantised_weights", path)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for part in held:
            yield from _tensors(part)
    elif isinstance(held, dict):
        yield from _tensors(list(held.values()))
    elif isinstance(held, Kept):
        yield from _tensors(held._made)
    elif isinstance(held, LowExperts):
        yield from _tensors(list(vars(held).values()))
    elif is_dataclass(held):
        yield from _tensors([getattr(held, part.name) for part in fields(held)])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def by_term(blocks: Iterable[tuple[Block, int]], with_experts: set[str], has_loss: bool = True) -> dict[str, int]:
    sums = dict.fromkeys(MEMORY_TERMS, 0)
    for block, size in blocks:
        sums[term_of(block, with_experts, has_loss)] += size
    return {term: size for term, size in sums.items() if size}
