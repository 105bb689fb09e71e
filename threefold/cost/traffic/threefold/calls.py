"""Collectives of our own engine as (group, operation, bytes that a rank sends), and the sizes they are computed from.

The functions return a list of calls, empty for a group of one rank, which calls nobody. `("tp", "all_gather", 4096)` is
an all-gather in which a rank sends 4,096 bytes to others.
"""

from dataclasses import dataclass

from threefold.plan.plan import Plan

Call = tuple[str, str, int]  # group, operation, bytes that a rank sends to others
INT64, FP64 = 8, 8  # bytes of a count, and of a number that is logged


@dataclass(frozen=True, slots=True)
class MicrobatchSizes:
    """Sizes of one microbatch on one rank."""

    tokens: int  # tokens between modules, sharded over cp x tp
    element_bytes: int  # bytes of an element of activations and weights
    sum_bytes: int  # bytes of an element of a sum: at least those of fp32


def microbatch_sizes(plan: Plan) -> MicrobatchSizes:
    job, layout = plan.job, plan.layout
    element_bytes = 4 if plan.knobs.precision == "fp32" else 2
    tokens = job.micro_batch * job.seq_len // (layout.cp * layout.tp)
    return MicrobatchSizes(tokens, element_bytes, max(4, element_bytes))


def all_gather(group: str, size: int, shard_bytes: int) -> list[Call]:
    """`shard_bytes` is what each rank has before."""
    return [(group, "all_gather", shard_bytes * (size - 1))] if size > 1 else []


def reduce_scatter(group: str, size: int, shard_bytes: int) -> list[Call]:
    """`shard_bytes` is what each rank has afterwards."""
    return [(group, "reduce_scatter", shard_bytes * (size - 1))] if size > 1 else []


def all_reduce(group: str, size: int, num_bytes: int) -> list[Call]:
    return [(group, "all_reduce", 2 * num_bytes * (size - 1) // size)] if size > 1 else []


def all_to_all(group: str, size: int, num_bytes: int) -> list[Call]:
    """`num_bytes` are sent in even parts, one of which stays on the rank."""
    return [(group, "all_to_all", num_bytes - num_bytes // size)] if size > 1 else []


def gather_both_ways(group: str, size: int, shard_bytes: int) -> list[Call]:
    """An all-gather in the forward, and the reduce-scatter of gradients that is its backward."""
    return [*all_gather(group, size, shard_bytes), *reduce_scatter(group, size, shard_bytes)]


def scatter_both_ways(group: str, size: int, shard_bytes: int) -> list[Call]:
    """A reduce-scatter in the forward, and the all-gather of gradients that is its backward."""
    return [*reduce_scatter(group, size, shard_bytes), *all_gather(group, size, shard_bytes)]
