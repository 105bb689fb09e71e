"""CPU offload of optimizer states: they live in host memory and are copied to the device by chunks for the update.

While one chunk is updated, the next is copied in and the one before is copied out, each on its own stream. Where the
model is on the CPU, the states stay where they are, and the same steps run without a copy. `AdamW` uses it
(`knobs.optimizer_offload`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from threefold.engine.device import is_simulated

CHUNK_NUMEL = 2**24  # elements of a chunk: enough to saturate the link; three chunks on the device take little memory


class HostStates:
    """Optimizer states in host memory. Call `synchronize` before reading them outside of `stream_to_device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in host memory."""
        on_host = self.zeros(tensor, tensor.dtype) if is_simulated() or self.device.type == "cuda" else tensor
        return on_host if is_simulated() else on_host.copy_(tensor)

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros of the shape of `like` in (pinned) host memory."""
        if is_simulated():  # a dry run must not count it as device memory
            return torch.zeros((), dtype=dtype, device=self.device).expand(like.shape)
        if self.device.type == "cuda":
            return torch.zeros(like.shape, dtype=dtype, pin_memory=True)
        return torch.zeros_like(like, dtype=dtype)

    def stream_to_device(self, groups: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield device copies of each group. Requesting the next group writes the copies back to the host."""
        if self.device.type != "cuda":
            yield from ([x.clone() if is_simulated() else x for x in group] for group in groups)
            return
        copy_in_stream, copy_out_stream = self._streams
        compute_stream = torch.cuda.current_stream(self.device)
        copy_in_stream.wait_stream(copy_out_stream)
        current: tuple[Sequence[Tensor], list[Tensor], torch.cuda.Event] | None = None
        pending: deque[torch.cuda.Event] = deque()
        for group in [*groups, None]:
            if len(pending) > 1:  # the host must not run ahead: every chunk in flight takes device memory
                pending.popleft().synchronize()
            next_group = None if group is None else (group, *self._copy_in(group, copy_in_stream))
            if current is not None:
                host_group, device_group, copied = current
                compute_stream.wait_event(copied)
                yield device_group
                pending.append(self._copy_out(host_group, device_group, compute_stream, copy_out_stream))
            current = next_group

    def _copy_in(
        self, group: Sequence[Tensor], copy_in_stream: torch.cuda.Stream
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        with torch.cuda.stream(copy_in_stream):
            device_group = [tensor.to(self.device, non_blocking=True) for tensor in group]
        copied = torch.cuda.Event()
        copied.record(copy_in_stream)
        return device_group, copied

    def _copy_out(
        self,
        host_group: Sequence[Tensor],
        device_group: list[Tensor],
        compute_stream: torch.cuda.Stream,
        copy_out_stream: torch.cuda.Stream,
    ) -> torch.cuda.Event:
        copy_out_stream.wait_stream(compute_stream)
        with torch.cuda.stream(copy_out_stream):
            for target, source in zip(host_group, device_group, strict=True):
                target.copy_(source, non_blocking=True)
                # Allocated on the copy-in stream, used on two others: its memory is free when all three are done.
                source.record_stream(compute_stream)
                source.record_stream(copy_out_stream)
        copied = torch.cuda.Event()
        copied.record(copy_out_stream)
        return copied

    def synchronize(self) -> None:
        """Wait until all copies to the host are done."""
        if "_streams" in self.__dict__:
            self._streams[1].synchronize()


def choose_offloaded(sizes: Sequence[int], fraction: float) -> set[int]:
    """The indices of the tensors to offload: the largest first, as near to the fraction of all elements as possible."""
    remaining = fraction * sum(sizes)
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if remaining > sizes[index] / 2:
            chosen.add(index)
            remaining -= sizes[index]
    return chosen
