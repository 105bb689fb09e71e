"""Which kernel attends fastest, by head dims and length: causal training attention in bf16 on an H200.

Measured by `benchmarks/attention.py` (torch 2.11, cuDNN 9.19; `benchmarks/results/attention-h200.json`). Values
narrower than keys are latent attention's: only cuDNN takes them as they are, flash wants them padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log


@dataclass(frozen=True, slots=True)
class Speed:
    """TFLOP/s of forward and backward together."""

    dim: int
    value_dim: int
    length: int
    kernels: dict[str, int]

    def ranked(self) -> list[tuple[str, int]]:
        return sorted(self.kernels.items(), key=lambda one: -one[1])


MEASURED = (
    Speed(64, 64, 4096, {"cudnn": 332, "flash": 232}),
    Speed(64, 64, 32768, {"cudnn": 430, "flash": 290}),
    Speed(128, 128, 4096, {"cudnn": 460, "flash": 250}),
    Speed(128, 128, 32768, {"cudnn": 562, "flash": 328}),
    Speed(128, 128, 131072, {"cudnn": 538, "flash": 325}),
    Speed(192, 128, 4096, {"cudnn": 473, "flash": 202}),
    Speed(192, 128, 16384, {"cudnn": 491, "flash": 235}),
    Speed(192, 128, 32768, {"cudnn": 507, "flash": 241}),
    Speed(192, 128, 65536, {"cudnn": 504, "flash": 240}),
    Speed(256, 256, 4096, {"cudnn": 288, "flash": 205}),
    Speed(256, 256, 32768, {"cudnn": 438, "flash": 275}),
)


def fastest_first(dim: int, value_dim: int, length: int, here: Sequence[Speed] = ()) -> list[str]:
    """As measured nearest: `here` for these head dims, else in head dims first, then in length."""
    own = [one for one in here if one.kernels and not _far(one, dim, value_dim)]
    best = min(own or MEASURED, key=lambda one: (_far(one, dim, value_dim), abs(log(one.length / max(length, 1)))))
    return [name for name, _ in best.ranked()]


def _far(one: Speed, dim: int, value_dim: int) -> int:
    return abs(one.dim - dim) + abs(one.value_dim - value_dim)
