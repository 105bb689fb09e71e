"""LoRA: low-rank adapters next to frozen weights.

An adapter is two matrices next to a frozen weight W: the output x W^T becomes x W^T + (alpha / rank) (x A^T) B^T. They
are parameters of the module that holds the weight, for example `layers.0.mixer.q.lora_a` (rank x in) and
`layers.0.mixer.q.lora_b` (out x rank); of routed experts `layers.0.ffn.experts.down_lora_a` (experts x rank x in). The
model's options hold the `LoraSettings` of a job (`model_options`).

`models/build.py` replaces the linear layers that a job targets by `LoraLinear`. Their weight is frozen: its GEMM
has no weight gradient, and only the adapter saves the input. `layers/input_linears.py` and `shard/tensor_parallel.py`
compute the frozen part together with other linears and call `add_adapter` after it.

Shapes: ... any dims before, I and O dims in and out, r rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.precision.low_precision_linear import LowPrecisionLinear, low_precision_linears
from threefold.plan.plan import Job

LORA_A, LORA_B = "lora_a", "lora_b"  # what the names of adapters end in


@dataclass(frozen=True)
class LoraSettings:
    """The adapters that a model gets."""

    rank: int
    scale: float  # of the adapters' output: alpha over the rank
    targets: tuple[str, ...]  # of LORA_TARGETS in `plan.py`
    draws_b: bool = False  # whether B begins with random numbers and not with zeros: then A has a gradient at once


def lora_settings(job: Job) -> LoraSettings | None:
    """The adapters that a job asks for; None where it trains the weights themselves."""
    if job.lora_rank is None:
        return None
    alpha = 2 * job.lora_rank if job.lora_alpha is None else job.lora_alpha
    return LoraSettings(job.lora_rank, alpha / job.lora_rank, job.lora_targets)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))


class LoraLinear(nn.Linear):
    """A linear layer, in low precision or not, with an adapter. Its weight and bias keep their names."""

    def __init__(self, base: nn.Linear, settings: LoraSettings) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.precision = base.precision if isinstance(base, LowPrecisionLinear) else None
        self.lora = settings
        self.lora_a = nn.Parameter(base.weight.new_empty(settings.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, settings.rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.add_adapter(self.forward_frozen(x), x)

    def forward_frozen(self, x: Tensor) -> Tensor:
        """The output without the adapter."""
        if self.precision is None:
            return F.linear(x, self.weight, self.bias)
        [y] = low_precision_linears(x, [(self.weight, self.precision)])
        return self.add_bias(y)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias

    def add_adapter(self, y: Tensor, x: Tensor) -> Tensor:
        """The output `y` of the frozen weight for `x`, with that of the adapter added."""
        return add_low_rank(y, x, self.lora_a, self.lora_b, self.lora.scale)


def add_low_rank(y: Tensor, x: Tensor, a_rI: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """y + scale (x A^T) B^T. The GEMM with B adds to `y` before it rounds."""
    hidden = F.linear(x, a_rI)
    return torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), b_Or.t(), alpha=scale).view_as(y)
