"""Measure the kernels of a plan's attention on this device, and keep their speeds for `speeds.fastest_first` to find.

What a table of an H200 cannot say: another GPU, another release, and FlashAttention-4 where it is installed. Causal, in
bf16, forward and backward; kernels take turns, for a GPU at the limit of its power is as slow as what ran before.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from threefold.engine.attention.flash_attention_4 import flash_attention_4, has_flash_attention_4
from threefold.engine.attention.kernel_speeds import KernelSpeed, speeds_file, speeds_measured_here
from threefold.engine.attention.torch_kernels import SDPA, pad_head_dim
from threefold.engine.kernels.tuned_cache import add_entries
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MlaSpec

_WARMUP, _REPEATS = 2, 7
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """Of one rank; `value_dim` narrower than `dim`: latent attention."""

    num: int
    num_kv: int
    dim: int
    value_dim: int

    def flops(self, length: int) -> float:
        """Of a forward; the causal half is counted."""
        return length * length * self.num * (self.dim + self.value_dim)


def tuned(plan: Plan, say: Callable[[str], None]) -> list[KernelSpeed]:
    """Nothing without a GPU, or where a sequence is cut over ranks: then its parts attend by kernels of their own."""
    heads = heads_of(plan)
    if heads is None or plan.layout.cp > 1 or not torch.cuda.is_available():
        return []
    speed = tune(heads, plan.job.seq_len, torch.device("cuda"), say, plan.job.micro_batch)
    return [speed] if speed.kernels else []


def heads_of(plan: Plan) -> Heads | None:
    """None where there is no choice: sinks have one kernel."""
    spec, tp = plan.model.attention, plan.layout.tp
    if spec is None or (isinstance(spec, GqaSpec) and spec.sinks):
        return None
    if isinstance(spec, MlaSpec):
        return Heads(spec.num_heads // tp, spec.num_heads // tp, spec.qk_dim, spec.v_dim)
    return Heads(spec.num_heads // tp, max(1, spec.num_kv_heads // tp), spec.head_dim, spec.head_dim)


def tune(heads: Heads, length: int, device: torch.device, say: Callable[[str], None], batch: int = 1) -> KernelSpeed:
    """Kept, unless none ran: such a length may be too much for this device."""
    found = speeds(heads, (batch, length), device, kernels(heads, device), say)
    speed = KernelSpeed(heads.dim, heads.value_dim, length, found)
    if not speed.kernels:
        return speed
    add_entries(speeds_file(device), {f"dim {heads.dim} values {heads.value_dim} length {length}": asdict(speed)})
    speeds_measured_here.cache_clear()
    return speed


def kernels(heads: Heads, device: torch.device) -> dict[str, Attention]:
    found = {name: _by_torch(name, heads) for name in SDPA}
    if has_flash_attention_4(device):
        found["fa4"] = lambda q, k, v: flash_attention_4(q, k, v, scale=heads.dim**-0.5)
    return found


def speeds(
    heads: Heads, sizes: tuple[int, int], device: torch.device, tried: dict[str, Attention], say: Callable[[str], None]
) -> dict[str, int]:
    """TFLOP/s of those that run, for this batch and length; the backward counts as 2.5 forwards."""
    given = [
        torch.randn(*sizes, *each, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for each in ((heads.num, heads.dim), (heads.num_kv, heads.dim), (heads.num_kv, heads.value_dim))
    ]
    taken: dict[str, list[float]] = {name: [] for name in tried}
    for turn in range(_WARMUP + _REPEATS):
        for name in [*taken]:
            try:
                seconds = _seconds(tried[name], given, device)
            except Exception as error:  # not these heads, not on this device, or no memory: the others have speeds
                say(f"attention by {name} does not run here: {str(error).splitlines()[0] if str(error) else error!r}")
                del taken[name]
                continue
            if turn >= _WARMUP:
                taken[name].append(seconds)
    flops = 3.5 * sizes[0] * heads.flops(sizes[1])
    return {name: round(flops / statistics.median(times) / 1e12) for name, times in taken.items()}


def _seconds(call: Attention, given: list[Tensor], device: torch.device) -> float:
    def done() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = done()
    out = call(*given)
    torch.autograd.grad(out, given, torch.ones_like(out))
    return done() - began


def _by_torch(name: str, heads: Heads) -> Attention:
    width = heads.dim if name == "flash" else heads.value_dim  # cuDNN takes narrower values

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPA[name]):
            out = F.scaled_dot_product_attention(
                q, k, pad_head_dim(width, v), is_causal=True, enable_gqa=heads.num != heads.num_kv
            )
        return out[..., : heads.value_dim]

    return call
