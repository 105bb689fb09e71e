"""Stand-ins for the packages of the flex dispatchers: their signatures, and results of the sizes routing gives.

The packages' own buffers lie outside of torch's allocator, and so outside of a rehearsal.

Shapes: T tokens, N tokens that came, R rows by local expert, D model dim, K experts of a token, e experts held here.
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

from threefold.engine.dispatch.packages import PACKAGE
from threefold.engine.dispatch.splits import Source

Tell = Callable[[str, int, Sequence[int]], None]  # operation, bytes sent, ranks
_ARRIVED = SimpleNamespace(current_stream_wait=lambda: None)


def visits(num_experts: int, ep: int, top_k: int) -> float:
    """The chance that a token has any expert on a given rank, if its experts are any `top_k`."""
    elsewhere = num_experts - num_experts // ep
    return 1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k)


@dataclass(frozen=True)
class _Traffic:
    """How many tokens come, and who hears of it."""

    source: Source
    top_k: int
    tell: Tell

    def travel(self, operation: str, group: Any, came: int, x: Tensor) -> None:
        """As many tokens leave as come, a share of which stays."""
        ranks = dist.get_process_group_ranks(group)
        self.tell(operation, came * (len(ranks) - 1) // len(ranks) * x.shape[1] * x.element_size(), ranks)

    def arriving(self, num_experts: int, ep: int, tokens: int) -> tuple[int, int]:
        """Rows and tokens."""
        rows = sum(self.source(ep, tokens * self.top_k, False))
        even = tokens * ep * visits(num_experts, ep, self.top_k)
        return rows, min(tokens * ep, round(even * rows / (tokens * self.top_k)))


class _Elastic:
    """DeepEP V2."""

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
            self.traffic.travel("dispatch", self.group, handle.came, x)
            return x.new_empty(handle.came, x.shape[1]), None, None, handle, _ARRIVED
        assert topk_idx is not None
        assert topk_weights is not None
        tokens = len(topk_idx)
        rows, came = self.traffic.arriving(num_experts, self.ep, tokens)
        self.traffic.travel("dispatch", self.group, came, x)
        counts = self.traffic.source(num_experts // self.ep, rows, True)
        handle = SimpleNamespace(came=came, tokens=tokens, num_recv_tokens_per_expert_list=counts)
        experts, weights = (
            topk_idx.new_empty(came, self.traffic.top_k),
            topk_weights.new_empty(came, self.traffic.top_k),
        )
        return x.new_empty(came, x.shape[1]), experts, weights, handle, _ARRIVED

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        num_sms: int = 0,
        async_with_compute_stream: bool = False,
    ) -> tuple[Any, ...]:
        self.traffic.travel("combine", self.group, handle.came, x)
        weights = None if topk_weights is None else topk_weights.new_empty(handle.tokens, topk_weights.shape[1])
        return x.new_empty(handle.tokens, x.shape[1]), weights, _ARRIVED


class _Hybrid:
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
            self.traffic.travel("dispatch", self.group, handle.came, hidden)
            return hidden.new_empty(handle.rows, hidden.shape[1]), None, None, None, handle
        assert probs is not None
        rows, came = self.traffic.arriving(probs.shape[1], self.ep, len(hidden))
        self.traffic.travel("dispatch", self.group, came, hidden)
        handle = SimpleNamespace(rows=rows, came=came, tokens=len(hidden), experts=probs.shape[1])
        count_e = torch.empty(self.experts, dtype=torch.long, device=hidden.device)
        return hidden.new_empty(rows, hidden.shape[1]), probs.new_empty(rows), None, count_e, handle

    def combine_with_unpermute(
        self, hidden: Tensor, probs: Tensor | None = None, handle: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        self.traffic.travel("combine", self.group, handle.came, hidden)
        weights = None if probs is None else probs.new_empty(handle.tokens, handle.experts)
        return hidden.new_empty(handle.tokens, hidden.shape[1]), weights


def _package(traffic: _Traffic) -> ModuleType:
    made = ModuleType(PACKAGE)
    kinds = {"ElasticBuffer": _Elastic, "HybridEPBuffer": _Hybrid}
    vars(made).update({name: type(name, (kind,), {"traffic": traffic}) for name, kind in kinds.items()})
    return made


@contextmanager
def flex_stand_ins(source: Source, top_k: int, tell: Tell) -> Iterator[None]:
    """In the place of the package, whether it is installed or not. `tell` hears of what travels."""
    before = sys.modules.get(PACKAGE)
    sys.modules[PACKAGE] = _package(_Traffic(source, top_k, tell))
    try:
        yield
    finally:  # this entry alone: what was imported meanwhile stays
        del sys.modules[PACKAGE]
        if before is not None:
            sys.modules[PACKAGE] = before
