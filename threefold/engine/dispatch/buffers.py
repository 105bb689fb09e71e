"""DeepEP's two buffers behind one face: V1 (`Buffer`) and V2 (`ElasticBuffer`).

Never run with the real package: written after its documentation and tested against a stand-in with its signatures.

Shapes: T tokens of this rank, N tokens that came, D model dim, K experts of a token.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.dispatch.flight import Wait


@dataclass(frozen=True, slots=True)
class Came:
    """Each token once, however many experts it visits here. Experts count from this rank's first; -1: elsewhere."""

    x_ND: Tensor
    expert_NK: Tensor
    weight_NK: Tensor
    counts: list[int]  # rows of each expert held here
    handle: Any
    wait: Wait


class Buffers(Protocol):
    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Came: ...

    def repeat(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        """Other rows the same way."""
        ...

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        """Sums by token on the rank it came from."""
        ...


class ClassicBuffers:
    def __init__(self, kind: Any, group: Any, num_experts: int, num_sms: int | None) -> None:
        self._kind, self._group, self._num_experts = kind, group, num_experts
        self._buffer: Any = None
        self._row_bytes = 0
        if num_sms is not None:
            kind.set_num_sms(num_sms)

    def _for(self, x: Tensor) -> Any:
        row_bytes = x.shape[1] * max(x.element_size(), 2)
        if row_bytes > self._row_bytes:
            size = self._group.size()
            configs = [self._kind.get_dispatch_config(size), self._kind.get_combine_config(size)]
            nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
            self._buffer, self._row_bytes = self._kind(self._group, nvlink, rdma), row_bytes
        return self._buffer

    def _beside(self) -> dict[str, Any]:
        """On the package's own stream, behind what the current one has queued."""
        return {"previous_event": self._kind.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Came:
        buffer = self._for(x_TD)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            expert_TK, self._num_experts, **self._beside()
        )
        x_ND, expert_NK, weight_NK, counts, handle, event = buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=expert_TK,
            topk_weights=weight_TK,
            **{**self._beside(), "previous_event": event},
        )
        return Came(x_ND, expert_NK, weight_NK, counts, handle, event.current_stream_wait)

    def repeat(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        x_ND, *_, event = self._for(x_TD).dispatch(x_TD, handle=handle, **self._beside())
        return x_ND, event.current_stream_wait

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        x_TD, weight_TK, event = self._for(x_ND).combine(x_ND, handle, topk_weights=weight_NK, **self._beside())
        return x_TD, weight_TK, event.current_stream_wait


class ElasticBuffers:
    def __init__(self, kind: Any, package: Any, group: Any, num_experts: int, num_sms: int | None) -> None:
        self._kind, self._group, self._num_experts, self._num_sms = kind, group, num_experts, num_sms
        self._index_dtype = getattr(package, "topk_idx_t", torch.int64)
        self._buffer: Any = None
        self._largest = (0, 0, 0)
        self._call: dict[str, Any] = {}

    def _fit(self, num_tokens: int, dim: int, top_k: int) -> Any:
        """Made anew when something grows. Every rank has as many tokens, so all of them do."""
        tokens, hidden, num_topk = self._largest
        if num_tokens > tokens or dim > hidden or top_k > num_topk:
            self._largest = tokens, hidden, num_topk = max(num_tokens, tokens), max(dim, hidden), max(top_k, num_topk)
            self._buffer = self._kind(self._group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=num_topk)
            # Said in every call: the package cannot work it out again from a handle.
            sms = self._num_sms or self._buffer.get_theoretical_num_sms(self._num_experts, num_topk)
            self._call = {"num_sms": sms, "async_with_compute_stream": True}
        return self._buffer

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Came:
        buffer = self._fit(x_TD.shape[0], x_TD.shape[1], expert_TK.shape[1])
        x_ND, expert_NK, weight_NK, handle, event = buffer.dispatch(
            x_TD,
            topk_idx=expert_TK.to(self._index_dtype),
            topk_weights=weight_TK,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._largest[0],
            **self._call,
        )
        counts = handle.num_recv_tokens_per_expert_list
        return Came(x_ND, expert_NK, weight_NK, counts, handle, event.current_stream_wait)

    def repeat(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        x_ND, *_, event = self._buffer.dispatch(x_TD, handle=handle, **self._call)
        return x_ND, event.current_stream_wait

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        x_TD, weight_TK, event = self._buffer.combine(x_ND, handle=handle, topk_weights=weight_NK, **self._call)
        return x_TD, weight_TK, event.current_stream_wait
