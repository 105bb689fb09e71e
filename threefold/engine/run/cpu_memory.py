"""Lets the C library keep memory that tensors of a CPU run gave back.

By default glibc returns every freed tensor above 32 MiB, and the end of its heap, to the kernel. The next step asks
for the same memory again, and the kernel clears it page by page: a sixth of the CPU time of a small model's step
(docs/log/finetune.md). `engine/train.py` calls `keep_freed_memory` on ranks that compute on the CPU.
"""

import ctypes

# Numbers of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1  # bytes at the end of the heap; mallopt takes an int


def keep_freed_memory() -> bool:
    """Take all memory from the heap and give none of it back before the process ends. False without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
