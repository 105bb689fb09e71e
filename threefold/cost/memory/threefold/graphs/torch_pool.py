"""The memory pool of CUDA graphs as torch's allocator keeps it.

The estimate goes through the passes of a layer with it (`layer_pool.py`), the rehearsal through every operator
(`dryrun/tracking/memory_tracker.py`).

Memory that one graph frees only a later graph of the same pool can use, and nothing is given back. A request takes the
smallest free block that is large enough, or a new segment; blocks of two segments are never joined. So a pool is larger
than what is live in it: a gradient of a weight does not fit into the block of an activation. The sizes are those of
torch's `CUDACachingAllocator.cpp`.

Mirrors no file of the engine.
"""

from bisect import bisect_left, insort

from threefold.units import MIB

GRANULE_BYTES = 512
SMALL_BYTES = MIB  # requests up to this share segments of their own
SMALL_SEGMENT_BYTES = 2 * MIB
MIDDLE_BYTES = 10 * MIB  # requests below it share segments of 20 MiB
MIDDLE_SEGMENT_BYTES = 20 * MIB
LARGE_GRANULE_BYTES = 2 * MIB

Block = tuple[int, int, int]  # bytes, segment, where it begins in the segment


class GraphPool:
    """Segments and free blocks. `num_bytes` is what the pool holds."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._segment_bytes: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # sorted, by whether segments are of small requests

    def resize(self, key: int, size: int) -> int:
        """Give the allocation with this key so many bytes, 0 to free it; the bytes by which the pool grows."""
        before = self.num_bytes
        if block := self._blocks.pop(key, None):
            self._release(block)
        if size:
            self._blocks[key] = self._allocate(size)
        return self.num_bytes - before

    def _allocate(self, size: int) -> Block:
        size = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        at = bisect_left(free, (size, 0, 0))
        found, segment, begin = free.pop(at) if at < len(free) else self._new_segment(size)
        rest = found - size
        if rest >= (GRANULE_BYTES if is_small else SMALL_BYTES + 1):
            insort(free, (rest, segment, begin + size))
            return size, segment, begin
        return found, segment, begin

    def _release(self, block: Block) -> None:
        """Join the block with free neighbors of its segment."""
        size, segment, begin = block
        free = self._free[self._segment_bytes[segment] == SMALL_SEGMENT_BYTES]
        of_segment = [one for one in free if one[1] == segment]
        for other in [one for one in of_segment if begin in (one[2] + one[0], one[2] - size)]:
            free.remove(other)
            size, begin = size + other[0], min(begin, other[2])
        insort(free, (size, segment, begin))

    def _new_segment(self, size: int) -> Block:
        if size <= SMALL_BYTES:
            size = SMALL_SEGMENT_BYTES
        elif size < MIDDLE_BYTES:
            size = MIDDLE_SEGMENT_BYTES
        else:
            size = -(-size // LARGE_GRANULE_BYTES) * LARGE_GRANULE_BYTES
        self._segment_bytes.append(size)
        self.num_bytes += size
        return size, len(self._segment_bytes) - 1, 0
