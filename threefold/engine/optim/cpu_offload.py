"""CPU offload of optimizer states: they live in host memory and are copied to the device by chunks for the update.

A few chunks of device memory (slots) are used in turn. While one chunk is updated, the next ones are copied in and
those before are copied out, each on its own stream, so that both directions of the link are busy. The host never waits
in between: an event of each slot orders its copies. When the last chunk of a step leaves its slot, the first chunks of
the next step are copied in, long before that step's gradients are there. Where the model is on the CPU, the states stay
where they are, and the same steps run without a copy. `AdamW` uses it (`knobs.optimizer_offload`).
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.optim.pending_updates import PendingUpdates

# Chunks on the device. An update waits until a kernel of the forward that runs with it leaves the multiprocessors, some
# milliseconds with many tokens; so long the link continues with the chunks after it.
NUM_SLOTS = 8
CHUNKS_PER_STEP = 128  # so that slots take six percent of the states, and few copies queue up in the streams
MIN_CHUNK = 2**21  # elements: copies of 4 MiB or more saturate the link (measured on an H200)
MAX_CHUNK = 2**24  # elements: slots of 1.5 GiB
_ALIGN = 256  # bytes: a view of any dtype starts at a multiple, as kernels want


@dataclass(eq=False)
class _Slot:
    """Device memory for the states of one chunk."""

    memory: Tensor  # bytes
    free: torch.cuda.Event | None = None  # its last copy is complete

    def views(self, group: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in this memory with the dtypes and shapes of a group."""
        views, at = [], 0
        for tensor in group:
            num_bytes = tensor.numel() * tensor.element_size()
            views.append(self.memory[at : at + num_bytes].view(tensor.dtype).view(tensor.shape))
            at += _aligned(num_bytes)
        return views


@dataclass(eq=False)
class _Arrival:
    """A chunk that was copied to the device, or is on its way."""

    slot: _Slot
    tensors: list[Tensor]
    arrived: torch.cuda.Event


class PinnedMemory:
    """Pinned host memory for tensors that take `num_bytes` together.

    torch rounds each pinned allocation up to a power of two, which takes up to twice the memory. Here tensors share
    blocks whose size is one.
    """

    def __init__(self, num_bytes: int, pin: bool = True) -> None:
        self.pin, self._to_come = pin, num_bytes
        self._free: list[Tensor] = []  # what is left of each block

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        size = _aligned(num_bytes)
        index = next((n for n, free in enumerate(self._free) if free.numel() >= size), None)
        if index is None:
            # The largest power of two within what is to come, or the smallest that holds this tensor.
            block = max(2 ** (self._to_come.bit_length() - 1) if self._to_come else 0, 2 ** (size - 1).bit_length())
            self._free.append(torch.empty(block, dtype=torch.uint8, pin_memory=self.pin))
            index = len(self._free) - 1
        self._to_come = max(0, self._to_come - size)
        memory, self._free[index] = self._free[index][:num_bytes], self._free[index][size:]
        return memory.view(dtype).view(tuple(shape))


class HostStates:
    """Optimizer states in host memory. Call `synchronize` before using them outside of `stream_to_device`."""

    def __init__(self, names: Sequence[str], sizes: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`names` are all parameters. `sizes` are the elements of each parameter whose states are on the host, and the
        bytes of these states for an element."""
        self.device = device
        self.chunk_numel = chunk_numel(sum(numel for numel, _ in sizes))
        self._memory = PinnedMemory(sum(numel * element_bytes for numel, element_bytes in sizes))
        self.updates = PendingUpdates(names, device)
        self._slots: deque[_Slot] = deque()  # those that hold no arrival
        self._arrivals: dict[int, _Arrival] = {}  # by the address of a chunk's first tensor, in the order of copies

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in host memory; on a CPU the tensor itself."""
        if is_simulated():
            return self.zeros(tensor, tensor.dtype)
        return self._memory.empty(tensor.shape, tensor.dtype).copy_(tensor) if self.device.type == "cuda" else tensor

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros of the shape of `like` in (pinned) host memory."""
        if is_simulated():  # a dry run must not count it as device memory
            return torch.zeros((), dtype=dtype, device=self.device).expand(like.shape)
        if self.device.type == "cuda":
            return self._memory.empty(like.shape, dtype).zero_()
        return torch.zeros_like(like, dtype=dtype)

    def allocate_slots(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Allocate device memory for chunks of these states, given by parameter."""
        if not tensors or not (is_simulated() or self.device.type == "cuda"):
            return
        sizes = [[x.element_size() * min(x.numel(), self.chunk_numel) for x in states] for states in tensors]
        slot_bytes = max(sum(map(_aligned, of_chunk)) for of_chunk in sizes)
        num_chunks = sum(-(-states[0].numel() // self.chunk_numel) for states in tensors)
        for _ in range(min(NUM_SLOTS, num_chunks)):
            slot = _Slot(torch.empty(slot_bytes, dtype=torch.uint8, device=self.device))
            if not is_simulated():
                for stream in self._streams:
                    slot.memory.record_stream(stream)
                self.updates.hold(slot.memory)
            self._slots.append(slot)

    @property
    def slot_memory(self) -> list[Tensor]:
        """The device memory of all chunks."""
        return [slot.memory for slot in (*self._slots, *(arrival.slot for arrival in self._arrivals.values()))]

    def stream_to_device(self, groups: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield device copies of each group of host tensors. Requesting the next group writes the copies back.

        The current stream waits for each group. In the end the first groups are copied in again for the next step.
        """
        if is_simulated():
            yield from (self._slots[0].views(group) for group in groups)
            return
        if self.device.type != "cuda":
            yield from map(list, groups)
            return
        wanted = {_key(group) for group in groups}
        for key in [key for key in self._arrivals if key not in wanted]:
            self._drop_arrival(key)
        to_come = deque(groups)
        for group in groups:
            if _key(group) not in self._arrivals:
                if not self._slots:  # all hold later groups
                    self._drop_arrival(next(reversed(self._arrivals)))
                self._copy_in(deque([group]))
            if to_come and to_come[0] is group:
                to_come.popleft()
            self._copy_in(to_come)
            arrival = self._arrivals.pop(_key(group))
            torch.cuda.current_stream(self.device).wait_event(arrival.arrived)
            yield arrival.tensors
            self._copy_out(group, arrival)
        copy_in_stream, copy_out_stream = self._streams
        copy_in_stream.wait_stream(copy_out_stream)  # the groups that come in again must have gone out
        self._copy_in(deque(groups))

    def _copy_in(self, groups: deque[Sequence[Tensor]]) -> None:
        """Start to copy the first groups that are not on their way, as many as there are slots, and remove them."""
        copy_in_stream, _ = self._streams
        while self._slots and groups:
            group = groups.popleft()
            if _key(group) in self._arrivals:
                continue
            slot = self._slots.popleft()
            if slot.free is not None:
                copy_in_stream.wait_event(slot.free)
            views = slot.views(group)
            with torch.cuda.stream(copy_in_stream):
                for target, source in zip(views, group, strict=True):
                    target.copy_(source, non_blocking=True)
            self._arrivals[_key(group)] = _Arrival(slot, views, _recorded(copy_in_stream))

    def _copy_out(self, group: Sequence[Tensor], arrival: _Arrival) -> None:
        _, copy_out_stream = self._streams
        copy_out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(copy_out_stream):
            for target, source in zip(group, arrival.tensors, strict=True):
                target.copy_(source, non_blocking=True)
        arrival.slot.free = _recorded(copy_out_stream)
        self._slots.append(arrival.slot)

    def _drop_arrival(self, key: int) -> None:
        arrival = self._arrivals.pop(key)
        arrival.slot.free = arrival.arrived
        self._slots.append(arrival.slot)

    def synchronize(self) -> None:
        """Wait for all updates, and until the host tensors are complete. From here on they may be changed, too."""
        self.updates.wait()
        if "_streams" in self.__dict__:
            for stream in self._streams:
                stream.synchronize()
        for key in list(self._arrivals):
            self._drop_arrival(key)


def _key(group: Sequence[Tensor]) -> int:
    return group[0].data_ptr()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def chunk_numel(num_elements: int) -> int:
    """Elements of a chunk where so many are on the host: whole blocks of the kernel that updates them."""
    return min(MAX_CHUNK, max(MIN_CHUNK, -(-num_elements // CHUNKS_PER_STEP // 2048) * 2048))


def choose_offloaded(sizes: Sequence[int], fraction: float) -> set[int]:
    """The indices of the tensors to offload, as near to the fraction of all elements as possible: the largest first,
    and among equal ones the last, which the forward uses later. Norms and biases of a large model are not worth their
    copies."""
    remaining, smallest = fraction * sum(sizes), sum(sizes) / 2**17
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda n: (-sizes[n], -n)):
        if remaining > sizes[index] / 2 and sizes[index] >= smallest:
            chosen.add(index)
            remaining -= sizes[index]
    return chosen
