"""How a kernel is launched: the tiles of GEMMs in Triton, in Gluon and of quack, and the number of persistent programs.

`experts/kernel_choice.py` picks a config for every step of the experts, and `tune/expert_kernels.py` measures
candidates. The field names are also the keys of the tuned cache file, for example {"m": 128, "n": 256, "k": 64,
"warps": 8, ...}.
"""

from dataclasses import dataclass
from functools import cache

import torch

from threefold.engine.device import is_simulated

_H200_MULTIPROCESSORS = 132  # a dry run sizes its buffers for this GPU
_INTERPRETED_PROGRAMS = 4  # Triton's interpreter runs one program after another


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch options of a grouped GEMM in Triton."""

    m: int = 128  # rows of the result in a tile
    n: int = 256  # columns of the result in a tile
    k: int = 64  # values of the summed dim in one step
    warps: int = 8
    stages: int = 3  # loads in flight
    group: int = 8  # tiles of rows that come before the next tile of columns, so that weights stay in L2
    per_sm: int = 1  # programs on one multiprocessor
    strip: int = 64  # columns that `fc2_backward` finishes at a time
    flat: bool = False  # one loop over all tiles: loads of the next tile begin while this one is stored


@dataclass(frozen=True)
class GluonConfig:
    """Launch options of our GEMMs in Gluon, for Hopper, whose tiles are fixed (`experts/hopper/`)."""

    group: int = 2  # tiles of rows that come before the next tile of columns


@dataclass(frozen=True)
class CuteConfig:
    """Tile sizes and launch options of a grouped GEMM of quack-kernels, which is written in CuTe."""

    m: int = 128  # rows of the result in a tile
    n: int = 256  # columns of the result in a tile
    pingpong: bool = False  # two groups of warps take turns
    cluster: int = 2  # tiles of rows that share their loads
    group: int = 8  # tiles of rows that come before the next tile of columns


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`. Triton's function of this name is also one for kernels, and costs the host more."""
    return -(-size // block)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less; 1 for 0. Triton's function of this name costs the host more."""
    return 1 << max(number - 1, 0).bit_length()


def num_programs(device: torch.device, per_sm: int) -> int:
    """Programs of a persistent kernel, whose programs go on from tile to tile or from row to row."""
    if device.type == "cuda":
        return _num_multiprocessors(device) * per_sm
    return _H200_MULTIPROCESSORS * per_sm if is_simulated() else _INTERPRETED_PROGRAMS


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
