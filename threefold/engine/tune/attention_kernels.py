"""Measures the attention kernels of a plan on this device and stores their speeds (`threefold calibrate PLAN`).

`attention/kernel_speeds.py` reads them to order the kernels. The built-in table is that of an H200; a measurement is
needed for another GPU, another release of torch, and FlashAttention-4 where it is installed. Attention is causal, in
bf16, forward and backward. Kernels are timed in turns, because at its power limit a GPU's clock depends on what it ran
just before.
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
class AttentionHeads:
    """The attention heads of one rank. MLA has `value_dim` smaller than `dim`."""

    num: int
    num_kv: int
    dim: int
    value_dim: int

    def flops(self, length: int) -> float:
        """FLOPs of a forward over one sequence; only the causal half is counted."""
        return length * length * self.num * (self.dim + self.value_dim)


def tune_attention_of_plan(plan: Plan, log: Callable[[str], None]) -> list[KernelSpeed]:
    """Measure the plan's attention. Empty without a GPU, and with context parallelism, which has kernels of its own."""
    heads = attention_heads_of(plan)
    if heads is None or plan.layout.cp > 1 or not torch.cuda.is_available():
        return []
    speed = tune_attention(heads, plan.job.seq_len, torch.device("cuda"), log, plan.job.micro_batch)
    return [speed] if speed.kernels else []


def attention_heads_of(plan: Plan) -> AttentionHeads | None:
    """The heads of one rank, or None where there is no choice of kernels: attention sinks have one kernel."""
    spec, tp = plan.model.attention, plan.layout.tp
    if spec is None or (isinstance(spec, GqaSpec) and spec.sinks):
        return None
    if isinstance(spec, MlaSpec):
        return AttentionHeads(spec.num_heads // tp, spec.num_heads // tp, spec.qk_dim, spec.v_dim)
    return AttentionHeads(spec.num_heads // tp, max(1, spec.num_kv_heads // tp), spec.head_dim, spec.head_dim)


def tune_attention(
    heads: AttentionHeads, length: int, device: torch.device, log: Callable[[str], None], batch: int = 1
) -> KernelSpeed:
    """Measure all kernels and store their speeds, unless none ran: the length may be too much for this device."""
    measured = measure_tflops(heads, (batch, length), device, runnable_kernels(heads, device), log)
    speed = KernelSpeed(heads.dim, heads.value_dim, length, measured)
    if not speed.kernels:
        return speed
    add_entries(speeds_file(device), {f"dim {heads.dim} values {heads.value_dim} length {length}": asdict(speed)})
    speeds_measured_here.cache_clear()
    return speed


def runnable_kernels(heads: AttentionHeads, device: torch.device) -> dict[str, Attention]:
    """The kernels that are installed, by name. Some may still refuse these heads."""
    kernels = {name: _sdpa_kernel(name, heads) for name in SDPA}
    if has_flash_attention_4(device):
        kernels["fa4"] = lambda q, k, v: flash_attention_4(q, k, v, scale=heads.dim**-0.5)
    return kernels


def measure_tflops(
    heads: AttentionHeads,
    sizes: tuple[int, int],
    device: torch.device,
    kernels: dict[str, Attention],
    log: Callable[[str], None],
) -> dict[str, int]:
    """TFLOP/s of the kernels that run, for this batch and length; the backward counts as 2.5 forwards."""
    inputs = [
        torch.randn(*sizes, *each, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for each in ((heads.num, heads.dim), (heads.num_kv, heads.dim), (heads.num_kv, heads.value_dim))
    ]
    seconds_by_name: dict[str, list[float]] = {name: [] for name in kernels}
    for round_index in range(_WARMUP + _REPEATS):
        for name in [*seconds_by_name]:
            try:
                seconds = _measure_seconds(kernels[name], inputs, device)
            except Exception as error:  # refused heads or device, or out of memory: the other kernels still run
                log(f"attention by {name} does not run here: {str(error).splitlines()[0] if str(error) else error!r}")
                del seconds_by_name[name]
                continue
            if round_index >= _WARMUP:
                seconds_by_name[name].append(seconds)
    flops = 3.5 * sizes[0] * heads.flops(sizes[1])
    return {name: round(flops / statistics.median(times) / 1e12) for name, times in seconds_by_name.items()}


def _measure_seconds(call: Attention, inputs: list[Tensor], device: torch.device) -> float:
    def synchronized_time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = synchronized_time()
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return synchronized_time() - start


def _sdpa_kernel(name: str, heads: AttentionHeads) -> Attention:
    value_dim = heads.dim if name == "flash" else heads.value_dim  # cuDNN takes values with fewer dims than keys

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPA[name]):
            out = F.scaled_dot_product_attention(
                q, k, pad_head_dim(value_dim, v), is_causal=True, enable_gqa=heads.num != heads.num_kv
            )
        return out[..., : heads.value_dim]

    return call
