"""Brings row counts that were computed on the device to the host, where uneven splits need them as Python integers.

Experts and dispatchers call `host_sizes`. A dry run has no values to read, so it installs a function with `sizes_from`
that supplies the counts, balanced or as a run recorded them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from threefold.engine.context import context, override

# (number of sizes, total, exact) -> sizes. Where `exact` is False the total is only what even routing would give.
SizeSource = Callable[[int, int, bool], list[int]]


def sizes_from(source: SizeSource) -> AbstractContextManager[None]:
    """Take sizes from `source` inside the `with` block: for tensors without values, or for loads of another router."""
    return override("size_source", source)


def host_sizes(count_X: Tensor, total: int) -> list[int]:
    """`count_X`, which adds up to `total`, as integers; reading it waits for the device."""
    source = context.size_source
    return source(len(count_X), total, True) if source else count_X.tolist()
