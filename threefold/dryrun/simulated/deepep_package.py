"""A stand-in for the `deep_ep` package (DeepEP V2 and HybridEP) that returns empty tensors of the expected sizes.

The dispatchers of `engine/dispatch/` import the package and find classes with the signatures of the real ones. How many
tokens arrive follows from the size source of `ExpertLoads`. The real package's communication buffers lie outside of
torch's allocator, so a rehearsal does not count them.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.dispatch.packages.find_package import PACKAGE
from threefold.engine.dist.host_sizes import SizeSource

RecordTraffic = Callable[[str, int, Sequence[int]], None]  # operation, bytes sent, ranks
_FINISHED_EVENT = SimpleNamespace(current_stream_wait=lambda: None)


def rank_visit_probability(num_experts: int, ep: int, top_k: int) -> float:
    """The probability that a token has an expert on a given rank, if all sets of `top_k` experts are equally likely."""
    elsewhere = num_experts - num_experts // ep
    return 1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k)


@dataclass(frozen=True)
class _Traffic:
    """Decides how many tokens arrive, and records the bytes of each call."""

    size_source: SizeSource
    top_k: int
    record: RecordTraffic

    def record_call(self, operation: str, group: Any, num_received: int, x: Tensor) -> None:
        """A rank sends as many tokens as it receives. One part in `ep` of them stays on the rank."""
        ranks = dist.get_process_group_ranks(group)
        self.record(operation, num_received * (len(ranks) - 1) // len(ranks) * x.shape[1] * x.element_size(), ranks)

    def num_arriving(self, num_experts: int, ep: int, tokens: int) -> tuple[int, int]:
        """How many rows (one for each token and expert) and how many tokens arrive on this rank."""
        rows = sum(self.size_source(ep, tokens * self.top_k, False))
        even = tokens * ep * rank_visit_probability(num_experts, ep, self.top_k)
        return rows, min(tokens * ep, round(even * rows / (tokens * self.top_k)))


class _ElasticBuffer:
    """The buffer class of DeepEP V2."""

    traffic: _Traffic

    def __init__(self, group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
        self.group, self.ep = group, group.size()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        return 1

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int = 0,
        handle: Any = None,
        num_sms: int = 0,
        async_with_compute_stream: bool = False,
        num_max_tokens_per_rank: int = 0,
    ) -> tuple[Any, ...]:
        if handle is not None:
            self.traffic.record_call("dispatch", self.group, handle.num_received, x)
            return x.new_empty(handle.num_received, x.shape[1]), None, None, handle, _FINISHED_EVENT
        assert topk_idx is not None
        assert topk_weights is not None
        tokens = len(topk_idx)
        rows, num_received = self.traffic.num_arriving(num_experts, self.ep, tokens)
        self.traffic.record_call("dispatch", self.group, num_received, x)
        counts = self.traffic.size_source(num_experts // self.ep, rows, True)
        handle = SimpleNamespace(num_received=num_received, tokens=tokens, num_recv_tokens_per_expert_list=counts)
        experts, weights = (
            topk_idx.new_empty(num_received, self.traffic.top_k),
            topk_weights.new_empty(num_received, self.traffic.top_k),
        )
        return x.new_empty(num_received, x.shape[1]), experts, weights, handle, _FINISHED_EVENT

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        num_sms: int = 0,
        async_with_compute_stream: bool = False,
    ) -> tuple[Any, ...]:
        self.traffic.record_call("combine", self.group, handle.num_received, x)
        weights = None if topk_weights is None else topk_weights.new_empty(handle.tokens, topk_weights.shape[1])
        return x.new_empty(handle.tokens, x.shape[1]), weights, _FINISHED_EVENT


class _HybridEpBuffer:
    """The buffer class of HybridEP."""

    traffic: _Traffic

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int) -> None:
        self.group, self.ep, self.experts = group, group.size(), num_local_experts

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Any = None,
        num_permuted_tokens: int | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            self.traffic.record_call("dispatch", self.group, handle.num_received, hidden)
            return hidden.new_empty(handle.rows, hidden.shape[1]), None, None, None, handle
        assert probs is not None
        rows, num_received = self.traffic.num_arriving(probs.shape[1], self.ep, len(hidden))
        self.traffic.record_call("dispatch", self.group, num_received, hidden)
        handle = SimpleNamespace(rows=rows, num_received=num_received, tokens=len(hidden), experts=probs.shape[1])
        count_e = torch.empty(self.experts, dtype=torch.long, device=hidden.device)
        return hidden.new_empty(rows, hidden.shape[1]), probs.new_empty(rows), None, count_e, handle

    def combine_with_unpermute(
        self, hidden: Tensor, probs: Tensor | None = None, handle: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        self.traffic.record_call("combine", self.group, handle.num_received, hidden)
        weights = None if probs is None else probs.new_empty(handle.tokens, handle.experts)
        return hidden.new_empty(handle.tokens, hidden.shape[1]), weights


def _make_package(traffic: _Traffic) -> ModuleType:
    package = ModuleType(PACKAGE)
    classes = {"ElasticBuffer": _ElasticBuffer, "HybridEPBuffer": _HybridEpBuffer}
    vars(package).update({name: type(name, (base,), {"traffic": traffic}) for name, base in classes.items()})
    return package


@contextmanager
def fake_deepep_package(size_source: SizeSource, top_k: int, record: RecordTraffic) -> Iterator[None]:
    """Put the stand-in in the place of `deep_ep`, whether that is installed or not.

    `record` is called with the operation, the bytes sent and the ranks of each dispatch and combine.
    """
    before = sys.modules.get(PACKAGE)
    sys.modules[PACKAGE] = _make_package(_Traffic(size_source, top_k, record))
    try:
        yield
    finally:  # Only this entry is restored: other modules that were imported meanwhile stay imported.
        del sys.modules[PACKAGE]
        if before is not None:
            sys.modules[PACKAGE] = before
