"""How fast each attention kernel is, by head dims and sequence length; `backend.py` asks `fastest_first`.

The built-in table holds causal training in bf16 on an H200, measured by `benchmarks/attention.py` (torch 2.11, cuDNN
9.19; `benchmarks/results/attention-h200.json`). `engine/tune/attention_kernels.py` measures the kernels on the machine
at hand. The speeds of FlashAttention-4 ("fa4") are of one release, which may not be installed. MLA has values narrower
than keys: cuDNN takes them as they are, and flash needs them padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

import torch

from threefold.engine.attention.flash_attention_4 import installed_release
from threefold.engine.kernels.tuned_cache import cache_path, read_entries


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """The speed of every kernel for one size of attention."""

    dim: int  # head dim of queries and keys
    value_dim: int
    length: int
    kernels: dict[str, int]  # TFLOP/s of forward and backward together, by kernel

    def ranked(self) -> list[tuple[str, int]]:
        return sorted(self.kernels.items(), key=lambda measured: -measured[1])


MEASURED = (
    KernelSpeed(64, 64, 4096, {"cudnn": 332, "flash": 232}),
    KernelSpeed(64, 64, 32768, {"cudnn": 430, "flash": 290}),
    KernelSpeed(128, 128, 4096, {"cudnn": 460, "flash": 250, "fa4": 517}),
    KernelSpeed(128, 128, 32768, {"cudnn": 562, "flash": 328, "fa4": 612}),
    KernelSpeed(128, 128, 131072, {"cudnn": 538, "flash": 325}),
    KernelSpeed(192, 128, 4096, {"cudnn": 473, "flash": 202, "fa4": 502}),
    KernelSpeed(192, 128, 16384, {"cudnn": 491, "flash": 235}),
    KernelSpeed(192, 128, 32768, {"cudnn": 507, "flash": 241, "fa4": 530}),
    KernelSpeed(192, 128, 65536, {"cudnn": 504, "flash": 240}),
    KernelSpeed(256, 256, 4096, {"cudnn": 288, "flash": 205}),
    KernelSpeed(256, 256, 32768, {"cudnn": 438, "flash": 275}),
)


def fastest_first(
    dim: int, value_dim: int, length: int, here: Sequence[KernelSpeed] = (), has_fa4: bool = False
) -> list[str]:
    """Names of the kernels, fastest first, by the nearest measurement.

    Measurements of this machine (`here`) count where they have these head dims; else `MEASURED` does, nearest in head
    dims first and then in length. Its speeds of FlashAttention-4 count if the release that was measured is installed
    (`has_fa4`), and for the head dims that were measured: it may not take others.
    """
    same_dims = [measured for measured in here if measured.kernels and not _head_dim_distance(measured, dim, value_dim)]

    def distance(measured: KernelSpeed) -> tuple[int, float]:
        return _head_dim_distance(measured, dim, value_dim), abs(log(measured.length / max(length, 1)))

    if same_dims:
        return [name for name, _ in min(same_dims, key=distance).ranked()]
    nearest = min(MEASURED, key=distance)
    takes_fa4 = has_fa4 and not _head_dim_distance(nearest, dim, value_dim)
    return [name for name, _ in nearest.ranked() if name != "fa4" or takes_fa4]


def _head_dim_distance(measured: KernelSpeed, dim: int, value_dim: int) -> int:
    return abs(measured.dim - dim) + abs(measured.value_dim - value_dim)


@cache
def speeds_measured_here(device: torch.device) -> tuple[KernelSpeed, ...]:
    """The speeds that `engine/tune` measured on this device; empty where it did not."""
    if device.type != "cuda":
        return ()
    try:
        return tuple(KernelSpeed(**facts) for facts in read_entries(speeds_file(device)).values())
    except TypeError:
        return ()  # written by another release


def speeds_file(device: torch.device) -> Path:
    return cache_path("attention", device, {"fa4": installed_release()})
