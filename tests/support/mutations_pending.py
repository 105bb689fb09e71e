"""Mutations of what is pending between two steps: weights that are read without waiting for an update or a gather."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mutation_registry import breaks, replace_attribute, wrap_attribute
from torch import Tensor

from threefold.engine import build
from threefold.engine.data_parallel import zero1
from threefold.engine.data_parallel.buckets import Bucket
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.collectives import all_gather
from threefold.engine.optim import pending_updates
from threefold.engine.optim.pending_updates import PendingUpdates


def read_without_waiting(pattern: str) -> None:
    """Leave the parameters with such names unmarked, for updates and for gathers.

    Each parameter has a bucket of its own, because whoever reads one waits for its bucket.
    """
    names: dict[int, str] = {}
    wrap_attribute(build, "data_parallel_settings", lambda old, *args: replace(old(*args), bucket_elements=1))

    def made(old: Callable[..., None], data: Zero1, *args: Any, **more: Any) -> None:
        old(data, *args, **more)
        entries = [(entry.name, entry.parameter) for bucket in data.buckets for entry in bucket.entries]
        entries += [(name, owned.parameter) for name, owned in data.unbucketed.items()]
        names.update({id(parameter): name for name, parameter in entries})

    def mark(old: Callable[..., None], tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
        old([x for x in tensors if not re.search(pattern, names.get(id(x), ""))], wait)

    wrap_attribute(Zero1, "__init__", made)
    for module in (zero1, pending_updates):
        wrap_attribute(module, "mark_pending", mark)


class _LateGather:
    """Gathered weights that arrive when they are waited for, as on a network that is slow enough."""

    def __init__(self, bucket: Bucket) -> None:
        assert bucket.params is not None
        self.target, self.arriving = bucket.params, bucket.params.clone()
        self.call = all_gather(self.arriving, bucket.local_shard(bucket.params), bucket.group)

    def wait(self) -> None:
        self.call.wait()
        self.target.copy_(self.arriving)


def deliver_gathers_late() -> None:
    """Without a mistake elsewhere this changes nothing."""

    def start(bucket: Bucket) -> None:
        if bucket.params is not None:
            bucket.gathering = _LateGather(bucket)  # type: ignore[assignment]

    replace_attribute(Bucket, "start_gather", start)


# Parameters of each kind, by a pattern of their names, and layouts where an update of them is pending. The head is read
# by a function of a chunk that calls no module of it. Where `m` and `L` are one chunk, the depths wait for it before.
_UPDATED = {
    "offload, head shared by m and L": (
        r"^head",
        r"^embed",
        r"^norm",
        r"\.mixer\.",
        r"\.experts\.",
        r"router",
        r"^mtp",
    ),
    "offload, head in two chunks": (r"^head", r"^mtp"),
    "offload, head alone, dualpipev": (r"^head",),
    "offload, m of five stages": (r"^head",),
    "offload of most, tp": (r"^head", r"^embed"),
    "offload, default stages": (r"_up\.weight",),
}
# And layouts where they are gathered. A tied embedding is the head. A gather on gloo waits for its update at once.
_GATHERED = {
    "dp": (r"^head", r"^embed", r"^norm", r"\.mixer\.", r"\.experts\.", r"router"),
    "offload, loss alone, dp": (r"^head", r"^norm", r"^mtp"),
    "mtp and tied over pp": (r"^embed",),
    "offload, default stages": (r"^embed",),
    "offload, tied and mtp": (r"^embed",),
}
_OFTEN = {("offload, head shared by m and L", r"^head"), ("offload, tied and mtp", r"^embed"), ("dp", r"\.mixer\.")}


def _register(case: str, pattern: str, is_gathered: bool) -> None:
    def mutate() -> None:
        if is_gathered:
            deliver_gathers_late()
        read_without_waiting(pattern)

    mutate.__name__ = f"{pattern} is read while it is {'gathered' if is_gathered else 'updated'} ({case})"
    breaks(case, often=(case, pattern) in _OFTEN)(mutate)


for _layouts, _is_gathered in ((_UPDATED, False), (_GATHERED, True)):
    for _case, _patterns in _layouts.items():
        for _pattern in _patterns:
            _register(_case, _pattern, _is_gathered)


@breaks("offload, default stages", often=True)
def nothing_waits_for_updates_in_the_end() -> None:
    replace_attribute(Zero1, "finish_param_sync", lambda data: None)
    replace_attribute(PendingUpdates, "wait", lambda updates: None)
    replace_attribute(pending_updates, "mark_pending", lambda tensors, wait: None)


@breaks("dp")
def gathers_are_waited_for_by_nobody() -> None:
    deliver_gathers_late()
    replace_attribute(Bucket, "wait_for_gather", lambda bucket: None)
