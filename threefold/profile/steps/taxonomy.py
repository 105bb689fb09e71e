"""What a device operation is to a step: network, packing, routing, compute, a copy or unknown, and of which library.

Packing (permuting rows into and out of buffers) and routing (counting tokens, choosing experts) belong to the exchange
of tokens, but no byte crosses a link in them: they are neither compute nor network time. `budget.py` and `ranks/`
call it. The classes of `classify.py` stay as they are, because walls are judged by them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from threefold.profile.classify import Classified
from threefold.profile.intervals import union
from threefold.profile.kernel_names import CLASSES, COMMUNICATION, COMPUTE, COPY, UNKNOWN
from threefold.profile.trace import Ints, Trace

NETWORK, PACKING, ROUTING = "network", "packing", "routing"
KINDS = (NETWORK, PACKING, ROUTING, COMPUTE, COPY, UNKNOWN)

_ROUTING = re.compile(
    r"get_dispatch_layout|deep_?ep::layout|hybrid_?ep::\w*(scan|preprocess)|permute_preprocessing|"
    r"fused_topk_with_score|fused_score_for_moe|_(count|rank)_experts|moe_align_block",
    re.IGNORECASE,
)
_PACKING = re.compile(r"(^|[^a-z])_?(un)?permute|unpermute|moe_(un)?permute|_pack_|\bpack_kernel", re.IGNORECASE)
_LIBRARIES = (
    ("HybridEP", r"hybrid_?ep|device_sync_kernel|update_expected_value_kernel"),
    (
        "DeepEP",
        r"deep_?ep|(intranode|internode|internode_ll|low_latency)\w*::|notify_(dispatch|combine)"
        r"|\b(dispatch|combine)_kernel\b|get_dispatch_layout",
    ),
    ("NVSHMEM", r"nvshmem"),
    ("NCCL", r"nccl"),
    ("RCCL", r"rccl"),
    ("gloo", r"gloo"),
    ("userbuffers", r"userbuffers|\bub_"),
    ("symmetric memory", r"multimem|symm_?mem|(one|two)_?shot_?all"),
)


@dataclass(frozen=True, slots=True)
class LibraryUse:
    """Kernels of one communication library on a device. Its seconds are a union, not the time of the network alone."""

    num_kernels: int
    network_seconds: float
    packing_seconds: float
    routing_seconds: float


@lru_cache(maxsize=65_536)
def moves_tokens_locally(name: str) -> str | None:
    """Packing or routing, by the name of a kernel that is no network time."""
    if _ROUTING.search(name):
        return ROUTING
    return PACKING if _PACKING.search(name) else None


@lru_cache(maxsize=65_536)
def library_of(name: str) -> str:
    return next((library for library, words in _LIBRARIES if re.search(words, name, re.IGNORECASE)), "other")


def kinds_of(trace: Trace, found: Classified) -> Ints:
    """For each device span the index of its kind in `KINDS`."""
    by_label = np.array([KINDS.index(NETWORK if one == COMMUNICATION else one) for one in CLASSES])
    local = [moves_tokens_locally(name) for name in trace.names] or [None]
    by_name = np.array([-1 if kind is None else KINDS.index(kind) for kind in local])[trace.device_spans.name]
    is_local = (by_name >= 0) & (found.label != CLASSES.index(COMMUNICATION)) & (found.label != CLASSES.index(COPY))
    return np.where(is_local, by_name, by_label[found.label])


def inventory(trace: Trace, chosen: Ints, kinds: Ints) -> Mapping[str, LibraryUse]:
    """The communication libraries whose kernels ran on a device."""
    spans = trace.device_spans
    libraries = [library_of(name) for name in trace.names] or ["other"]
    known = dict.fromkeys(libraries)
    number = np.array([list(known).index(one) for one in libraries])[spans.name[chosen]]
    kind = kinds[chosen]
    is_part = (kind == KINDS.index(NETWORK)) | ((number != _index(known, "other")) & (kind <= KINDS.index(ROUTING)))
    found = {}
    for place, library in enumerate(known):
        own = chosen[is_part & (number == place)]
        if len(own):
            parts = [own[kinds[own] == KINDS.index(one)] for one in (NETWORK, PACKING, ROUTING)]
            seconds = [union(spans.start[part], spans.end[part]).seconds for part in parts]
            found[library] = LibraryUse(len(own), *seconds)
    return dict(sorted(found.items(), key=lambda item: -item[1].network_seconds))


def _index(known: Mapping[str, None], name: str) -> int:
    return list(known).index(name) if name in known else -1
