"""Collectives of our engine, as far as their bytes go. A group of one rank calls nobody."""

from dataclasses import dataclass

from threefold.plan.plan import Plan

Call = tuple[str, str, int]  # group, operation, bytes that a rank sends to others
LONG, DOUBLE = 8, 8  # bytes of a count, and of a number that is logged


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one microbatch on one rank."""

    tokens: int  # between modules: the share of cp x tp
    width: int  # bytes of an activation or a weight
    wide: int  # bytes of a sum: fp32 at least


def sizes_of(plan: Plan) -> Sizes:
    job, layout = plan.job, plan.layout
    width = 4 if plan.knobs.precision == "fp32" else 2
    return Sizes(job.micro_batch * job.seq_len // (layout.cp * layout.tp), width, max(4, width))


def all_gather(group: str, size: int, share: int) -> list[Call]:
    """`share`: bytes of what each rank has."""
    return [(group, "all_gather", share * (size - 1))] if size > 1 else []


def reduce_scatter(group: str, size: int, share: int) -> list[Call]:
    """`share`: bytes of what each rank gets."""
    return [(group, "reduce_scatter", share * (size - 1))] if size > 1 else []


def all_reduce(group: str, size: int, num_bytes: int) -> list[Call]:
    return [(group, "all_reduce", 2 * num_bytes * (size - 1) // size)] if size > 1 else []


def all_to_all(group: str, size: int, num_bytes: int) -> list[Call]:
    """Even parts, one of which stays."""
    return [(group, "all_to_all", num_bytes - num_bytes // size)] if size > 1 else []


def gather(group: str, size: int, share: int) -> list[Call]:
    """Forward, and the sum of gradients that its backward is."""
    return [*all_gather(group, size, share), *reduce_scatter(group, size, share)]


def scatter(group: str, size: int, share: int) -> list[Call]:
    """Its transpose: the same calls, the other way round."""
    return [*reduce_scatter(group, size, share), *all_gather(group, size, share)]
