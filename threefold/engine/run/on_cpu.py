"""Makes a process that trains on a CPU as fast as the CPU is: it keeps freed memory, and multiplies by oneDNN.

By default glibc returns every freed tensor above 32 MiB, and the end of its heap, to the kernel. The next step asks
for the same memory again, and the kernel clears it page by page: a sixth of the CPU time of a small model's step.

torch's wheels multiply fp32 matrices by MKL, which takes AVX-512 on Intel's CPUs only. On other CPUs with AVX-512
oneDNN, which is in the same wheels, is about twice as fast. Torch's CPU kernels of two operators are replaced, because
linear layers, their gradients and grouped GEMMs all end there. docs/log/finetune.md has the figures; `train_setup.py`
enters `fast_on_cpu` on ranks that compute on the CPU.
"""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

# Numbers of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1  # bytes at the end of the heap; mallopt takes an int

CPU_FACTS = Path("/proc/cpuinfo")
MIN_PRODUCT = 2**21  # multiplications from which on oneDNN is faster
# oneDNN compiles a kernel for each size, which takes as long as multiplying 100 rows of an expert, and the number of
# rows changes in every step. So it gets whole multiples of this, and MKL the rest.
ROWS = 32


@contextmanager
def fast_on_cpu() -> Iterator[None]:
    """Keep freed memory from now on, and multiply by oneDNN until the block ends where that is faster."""
    keep_freed_memory()
    if not mkl_lacks_avx512():
        yield
        return
    with onednn_gemms():
        yield


def keep_freed_memory() -> bool:
    """Take all memory from the heap and give none of it back before the process ends. False without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def mkl_lacks_avx512() -> bool:
    """Return whether this CPU has AVX-512, and torch multiplies by an MKL that does not take it there."""
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    with suppress(OSError):
        return "GenuineIntel" not in CPU_FACTS.read_text(encoding="utf-8") and torch.backends.mkldnn.is_available()
    return False


@contextmanager
def onednn_gemms() -> Iterator[None]:
    """Multiply large fp32 matrices by oneDNN wherever torch multiplies two matrices on the CPU."""
    library = torch.library.Library("aten", "IMPL")  # torch's own kernels are back when it is deleted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        library.impl("mm", multiply, "CPU")
        library.impl("mm.out", multiply_into, "CPU")
    try:
        yield
    finally:
        del library


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two matrices."""
    if not _pays(a, b):
        return _by_torch(a, b)
    if len(a) % ROWS or len(b) % ROWS:
        return multiply_into(a, b, out=a.new_empty(len(a), b.shape[1]))
    return _by_onednn(a, b)


def multiply_into(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """`torch.mm(a, b, out=out)`."""
    rows, inner = len(a) // ROWS * ROWS, len(b) // ROWS * ROWS
    if not _pays(a, b) or not rows or not inner or out.shape != (len(a), b.shape[1]):
        return _by_torch(a, b, out)
    out[:rows] = _by_onednn(a[:rows, :inner], b[:inner])
    if inner < len(b):
        out[:rows].addmm_(a[:rows, inner:], b[inner:])
    if rows < len(a):
        _by_torch(a[rows:], b, out[rows:])
    return out


def _pays(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.shape[1] == len(b) and a.numel() * b.shape[1] >= MIN_PRODUCT


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def _by_torch(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.addmm(a.new_zeros(()), a, b, beta=0, out=out)
