"""How a kernel is launched: sizes of tiles, and how many programs share the device."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """Tiles of `m` rows (of the result), `n` columns and `k` steps; `per_sm` programs on a multiprocessor."""

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    per_sm: int = 1
    strip: int = 64  # columns that act_grad finishes at a time
    flat: bool = False  # one loop for all tiles: the next one's loads begin while one is stored


@dataclass(frozen=True)
class CuteConfig:
    """Tiles of quack's kernels: `pingpong` lets two groups of warps take turns, `cluster` tiles of rows share loads,
    `group` of them come before the next tile of columns."""

    m: int = 128
    n: int = 256
    pingpong: bool = False
    cluster: int = 2
    group: int = 8


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def num_programs(device: torch.device, config: Config) -> int:
    return _multiprocessors(device) * config.per_sm
