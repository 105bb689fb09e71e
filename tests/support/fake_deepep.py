"""Stand-ins for `deep_ep`: the documented signatures of DeepEP V1, V2 and HybridEP on torch's own collectives.

They show that the adapters call what is documented and wait before they look. That the real packages do what their
documentation says was never tried here. Two liberties: any float dtype (the packages: bf16), and CPU tensors.

Shapes: T tokens, N tokens that came, R rows by local expert, E experts, X ranks.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

UNSET = -(10**6)  # what a result holds until its event was waited for


def weight_dtype(x: Tensor) -> torch.dtype:
    """What the packages carry routing weights in: fp32. For rows in fp64, which the oracle has, fp64."""
    return torch.promote_types(x.dtype, torch.float32)


class Event:
    def __init__(self, arrive: Callable[[], None] = lambda: None) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        self._arrive()


def late(asynchronous: bool, *results: Tensor | None) -> tuple[list[Tensor | None], Event]:
    if not asynchronous:
        return list(results), Event()
    given = [None if result is None else torch.full_like(result, UNSET) for result in results]

    def arrive() -> None:
        for out, result in zip(given, results, strict=True):
            if out is not None and result is not None:
                out.copy_(result)

    return given, Event(arrive)


def swap(x: Tensor, sizes: list[int], out_sizes: list[int], group: Any) -> Tensor:
    assert x.is_contiguous()
    out = x.new_empty(sum(out_sizes), *x.shape[1:])
    dist.all_to_all_single(out, x, out_sizes, sizes, group=group)
    return out


class Way:
    """Tokens to every rank that holds one of their experts, and summed back."""

    def __init__(self, in_rank_TX: Tensor, group: Any) -> None:
        self.group, self.in_rank_TX = group, in_rank_TX
        sent = in_rank_TX.sum(dim=0)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=group)
        self.sizes, self.out_sizes = sent.tolist(), came.tolist()
        self.token = torch.cat([in_rank_TX[:, rank].nonzero()[:, 0] for rank in range(group.size())])

    def there(self, x: Tensor) -> Tensor:
        return swap(x[self.token], self.sizes, self.out_sizes, self.group)

    def back(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(self.in_rank_TX), *x.shape[1:])
        return out.index_add_(0, self.token, swap(x, self.out_sizes, self.sizes, self.group))


def in_rank(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    held = num_experts // num_ranks
    rank_TK = torch.where(topk_idx < 0, num_ranks, topk_idx // held)
    return torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool).scatter_(1, rank_TK, True)[:, :-1]


def to_local(expert_NK: Tensor, num_experts: int, group: Any) -> tuple[Tensor, list[int]]:
    held = num_experts // group.size()
    expert_NK = expert_NK - group.rank() * held
    expert_NK = expert_NK.masked_fill((expert_NK < 0) | (expert_NK >= held), -1)
    return expert_NK, [int((expert_NK == e).sum()) for e in range(held)]


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    num_sms = 20

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ) -> None:
        self.group, self.num_nvl_bytes = group, num_nvl_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> Event:
        return Event()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert topk_idx.dtype == torch.int64
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        in_rank_TX = in_rank(topk_idx, num_experts, self.group.size())
        per_expert = torch.tensor([int((topk_idx == e).sum()) for e in range(num_experts)], dtype=torch.int)
        return in_rank_TX.sum(dim=0).int(), None, per_expert, in_rank_TX, Event()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.shape[1] * x.element_size() * self.group.size() <= self.num_nvl_bytes
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            (recv_x,), event = late(async_finish, handle[0].there(x))
            return recv_x, None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert topk_weights.dtype == weight_dtype(x)
        way = Way(is_token_in_rank, self.group)
        expert_NK, counts = to_local(way.there(topk_idx), len(num_tokens_per_expert), self.group)
        given, event = late(async_finish, way.there(x), expert_NK, way.there(topk_weights))
        return *given, counts, (way,), event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        (way,) = handle
        assert topk_weights is None or topk_weights.dtype == weight_dtype(x)
        weights = None if topk_weights is None else way.back(topk_weights)
        given, event = late(async_finish, way.back(x), weights)
        return *given, event


class EPHandle:
    def __init__(self, way: Way, topk_idx: Tensor, counts: list[int], num_sms: int) -> None:
        self.way, self.topk_idx, self.num_sms = way, topk_idx, num_sms
        self.num_recv_tokens_per_expert_list = counts


class ElasticBuffer:
    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, **settings
    ) -> None:
        self.group, self.limits = group, (num_max_tokens_per_rank, hidden, num_topk)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        assert num_experts % self.group.size() == 0
        return 4

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_expand=False,
    ):
        # The package works this out before it looks into the handle.
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, 0)
        assert len(x) <= self.limits[0]
        assert x.shape[1] <= self.limits[1]
        if handle is not None:
            assert topk_idx is None
            (recv_x,), event = late(async_with_compute_stream, handle.way.there(x))
            return recv_x, None, None, handle, event
        assert topk_weights.dtype == weight_dtype(x)
        assert topk_idx.shape[1] <= self.limits[2]
        way = Way(in_rank(topk_idx, num_experts, self.group.size()), self.group)
        expert_NK, counts = to_local(way.there(topk_idx), num_experts, self.group)
        given, event = late(async_with_compute_stream, way.there(x), expert_NK, way.there(topk_weights))
        return *given, EPHandle(way, topk_idx, counts, num_sms), event

    def combine(self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, async_with_compute_stream=False):
        weights = None if topk_weights is None else handle.way.back(topk_weights)
        given, event = late(async_with_compute_stream, handle.way.back(x), weights)
        return *given, event


class HybridEPBuffer:
    def __init__(
        self,
        group,
        hidden_dim,
        max_num_of_tokens_per_rank,
        num_local_experts,
        use_fp8=False,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
    ) -> None:
        assert group.size() > 1
        self.group, self.held, self.limits = group, num_local_experts, (max_num_of_tokens_per_rank, hidden_dim)

    def dispatch_with_permute(
        self,
        *,
        hidden,
        topk_idx=None,
        topk_weights=None,
        num_of_experts_per_rank=None,
        routing_map=None,
        probs=None,
        scaling_factor=None,
        num_permuted_tokens=None,
        pad_multiple=None,
        handle=None,
        non_blocking=False,
    ):
        assert len(hidden) <= self.limits[0]
        assert hidden.shape[1] <= self.limits[1]
        if handle is None:
            handle = self._plan(routing_map)
        way, source_R, place_R, counts, _ = handle
        rows_RD = way.there(hidden)[source_R]
        assert num_permuted_tokens in (None, len(rows_RD))
        probs_R = None
        if probs is not None:
            assert probs.dtype == weight_dtype(hidden)
            probs_R = way.there(probs)[source_R, place_R]
        return rows_RD, probs_R, None, counts, handle

    def _plan(self, routing_map):
        assert routing_map.dtype == torch.bool
        num_ranks, num_experts = self.group.size(), routing_map.shape[1]
        assert num_experts == self.held * num_ranks
        everyone = routing_map.new_empty(num_ranks * len(routing_map), num_experts)
        dist.all_gather_into_tensor(everyone, routing_map, group=self.group)  # as many tokens on every rank
        way = Way(routing_map.view(len(routing_map), num_ranks, -1).any(dim=2), self.group)
        first = self.group.rank() * self.held
        local_Ne = way.there(routing_map)[:, first : first + self.held]
        expert_R, source_R = local_Ne.T.nonzero(as_tuple=True)
        return way, source_R, first + expert_R, local_Ne.sum(dim=0).int(), num_experts

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None):
        way, source_R, place_R, _, num_experts = handle
        num_came = sum(way.out_sizes)
        y_ND = hidden.new_zeros(num_came, hidden.shape[1]).index_add_(0, source_R, hidden)
        probs_TE = None
        if probs is not None:
            probs_NE = probs.new_zeros(num_came, num_experts)
            probs_NE[source_R, place_R] = probs
            probs_TE = way.back(probs_NE)
        return way.back(y_ND), probs_TE


def package(*classes: type) -> ModuleType:
    """A module named `deep_ep` with these classes."""
    made = ModuleType("deep_ep")
    for each in classes:
        setattr(made, each.__name__, each)
    return made
