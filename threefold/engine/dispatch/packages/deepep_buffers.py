"""DeepEP's two communication buffers behind one interface: V1 (`Buffer`) and V2 (`ElasticBuffer`).

`DeepEpDispatcher` uses the one that is installed. This code has never run with the real package: it follows the
package's documentation and is tested against a stand-in with the same signatures.

Shapes: T tokens of this rank, N tokens received, D model dim, K experts of a token.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.engine.dispatch.async_exchange import Wait


@dataclass(frozen=True, slots=True)
class ReceivedTokens:
    """The tokens that a dispatch brings to this rank, each once, however many experts of this rank it visits."""

    x_ND: Tensor
    expert_NK: Tensor  # counted from this rank's first expert; -1: an expert of another rank
    weight_NK: Tensor
    counts: list[int]  # rows of each expert held here
    handle: Any  # the package's record of the routes, for the way back
    wait: Wait  # makes the current stream wait for the tensors


class DeepEpBuffers(Protocol):
    """What the dispatcher asks of either buffer."""

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> ReceivedTokens:
        """Send every token to the ranks of its experts."""
        ...

    def dispatch_with_handle(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        """Send other rows along the routes of an earlier dispatch."""
        ...

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        """Send rows back and sum them by token on the rank of the token."""
        ...


class ClassicBuffers:
    """DeepEP V1: the caller computes a layout before each dispatch."""

    def __init__(self, buffer_class: Any, group: Any, num_experts: int, num_sms: int | None) -> None:
        self._buffer_class, self._group, self._num_experts = buffer_class, group, num_experts
        self._buffer: Any = None
        self._row_bytes = 0
        if num_sms is not None:
            buffer_class.set_num_sms(num_sms)

    def _buffer_for(self, x: Tensor) -> Any:
        row_bytes = x.shape[1] * max(x.element_size(), 2)
        if row_bytes > self._row_bytes:
            size = self._group.size()
            configs = [self._buffer_class.get_dispatch_config(size), self._buffer_class.get_combine_config(size)]
            nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
            self._buffer, self._row_bytes = self._buffer_class(self._group, nvlink, rdma), row_bytes
        return self._buffer

    def _async_arguments(self) -> dict[str, Any]:
        """Arguments that run a call on the package's own stream, behind what the current stream has queued."""
        return {"previous_event": self._buffer_class.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> ReceivedTokens:
        buffer = self._buffer_for(x_TD)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            expert_TK, self._num_experts, **self._async_arguments()
        )
        x_ND, expert_NK, weight_NK, counts, handle, event = buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=expert_TK,
            topk_weights=weight_TK,
            **{**self._async_arguments(), "previous_event": event},
        )
        return ReceivedTokens(x_ND, expert_NK, weight_NK, counts, handle, event.current_stream_wait)

    def dispatch_with_handle(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        x_ND, *_, event = self._buffer_for(x_TD).dispatch(x_TD, handle=handle, **self._async_arguments())
        return x_ND, event.current_stream_wait

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        x_TD, weight_TK, event = self._buffer_for(x_ND).combine(
            x_ND, handle, topk_weights=weight_NK, **self._async_arguments()
        )
        return x_TD, weight_TK, event.current_stream_wait


class ElasticBuffers:
    """DeepEP V2: the buffer is sized by the largest number of tokens."""

    def __init__(self, buffer_class: Any, package: Any, group: Any, num_experts: int, num_sms: int | None) -> None:
        self._buffer_class, self._group, self._num_experts, self._num_sms = buffer_class, group, num_experts, num_sms
        self._index_dtype = getattr(package, "topk_idx_t", torch.int64)
        self._buffer: Any = None
        self._largest = (0, 0, 0)
        self._arguments: dict[str, Any] = {}

    def _buffer_for(self, num_tokens: int, dim: int, top_k: int) -> Any:
        """The buffer, made anew when a size grows. All ranks have the same number of tokens, so all remake it."""
        tokens, hidden, num_topk = self._largest
        if num_tokens > tokens or dim > hidden or top_k > num_topk:
            self._largest = tokens, hidden, num_topk = max(num_tokens, tokens), max(dim, hidden), max(top_k, num_topk)
            self._buffer = self._buffer_class(
                self._group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=num_topk
            )
            # Every call passes the number of SMs, because the package cannot derive it from a handle.
            sms = self._num_sms or self._buffer.get_theoretical_num_sms(self._num_experts, num_topk)
            self._arguments = {"num_sms": sms, "async_with_compute_stream": True}
        return self._buffer

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> ReceivedTokens:
        buffer = self._buffer_for(x_TD.shape[0], x_TD.shape[1], expert_TK.shape[1])
        x_ND, expert_NK, weight_NK, handle, event = buffer.dispatch(
            x_TD,
            topk_idx=expert_TK.to(self._index_dtype),
            topk_weights=weight_TK,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._largest[0],
            **self._arguments,
        )
        counts = handle.num_recv_tokens_per_expert_list
        return ReceivedTokens(x_ND, expert_NK, weight_NK, counts, handle, event.current_stream_wait)

    def dispatch_with_handle(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Wait]:
        x_ND, *_, event = self._buffer.dispatch(x_TD, handle=handle, **self._arguments)
        return x_ND, event.current_stream_wait

    def combine(self, x_ND: Tensor, weight_NK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Wait]:
        x_TD, weight_TK, event = self._buffer.combine(x_ND, handle=handle, topk_weights=weight_NK, **self._arguments)
        return x_TD, weight_TK, event.current_stream_wait
