"""Measures what this machine reaches: GEMMs by rows, experts, attention by length, copies, launches, and collectives.

`threefold calibrate` shows the speeds, and begins its fit of the estimate's rates with them. A measurement is the
median of several runs. GPU work is long enough to hide the launch, but for the launch itself.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from threefold.engine.dist.collectives import all_reduce, all_to_all
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.tune.trial_steps import synchronized_time
from threefold.launch.plan_session import Speed
from threefold.units import KIB, MIB

REPEATS = 7
LAUNCHES = 2000
COLLECTIVE_BYTES = (64 * KIB, MIB, 16 * MIB)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that fill a kind of device for about a millisecond."""

    dim: int
    rows: tuple[int, ...]
    experts: tuple[int, int, int]  # their number, model dim and expert dim
    expert_rows: tuple[int, ...]  # of one expert
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    copied_bytes: int


GPU_SIZES = Sizes(4096, (256, 1024, 4096, 16384), (32, 2048, 768), (32, 256, 1024), 32, 128, (2048, 8192, 32768), 2**30)
CPU_SIZES = Sizes(512, (64, 256, 1024), (8, 256, 256), (16, 128), 8, 64, (128, 512, 1024), 2**26)


def machine_speeds(mesh: Mesh) -> Iterator[Speed]:
    """All measurements, one after the other; collectives of the axes that have several ranks."""
    device = mesh.device
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    yield from _gemms(device, sizes, dtype)
    yield from _expert_gemms(device, sizes, dtype)
    yield from _attention(device, sizes, dtype)
    yield from _copies(device, sizes)
    yield from _launches(device)
    for axis in ("tp", "cp", "dp", "ep"):
        if not (group := mesh.group(axis)).is_trivial:
            yield from _collectives(device, axis, group)


def _gemms(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Speed]:
    weight = torch.randn(sizes.dim, sizes.dim, device=device, dtype=dtype)
    for rows in sizes.rows:
        x = torch.randn(rows, sizes.dim, device=device, dtype=dtype)
        seconds = _median_seconds(lambda x=x: x @ weight, device)  # type: ignore[misc]
        yield Speed(f"gemm {_name(dtype)}", rows, 2 * rows * sizes.dim**2 / seconds)


def _expert_gemms(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Speed]:
    """The up-projections of experts with equal loads, by torch's grouped GEMM."""
    num, dim, expert_dim = sizes.experts
    weight = torch.randn(num, dim, 2 * expert_dim, device=device, dtype=dtype)
    for rows in sizes.expert_rows:
        x = torch.randn(num, rows, dim, device=device, dtype=dtype)
        ends = torch.arange(rows, (num + 1) * rows, rows, device=device, dtype=torch.int32)

        def grouped(x: torch.Tensor = x, ends: torch.Tensor = ends) -> torch.Tensor:
            if device.type == "cuda":
                return torch._grouped_mm(x.flatten(0, 1), weight, offs=ends)  # type: ignore[attr-defined]
            return torch.bmm(x, weight)

        yield Speed("experts' gemm", rows, 2 * num * rows * dim * 2 * expert_dim / _median_seconds(grouped, device))


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Speed]:
    """Causal attention, forward and backward; the backward counts as 2.5 forwards."""
    for length in sizes.lengths:
        shape = (1, sizes.heads, length, sizes.head_dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

        def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        flops = 3.5 * 2 * length * length * sizes.heads * sizes.head_dim
        yield Speed("attention", length, flops / _median_seconds(run, device))


def _copies(device: torch.device, sizes: Sizes) -> Iterator[Speed]:
    source = torch.ones(sizes.copied_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), device)
    yield Speed("copy", sizes.copied_bytes, 2 * sizes.copied_bytes / seconds)  # read and written
    if device.type == "cuda":
        host = torch.ones(sizes.copied_bytes, dtype=torch.uint8, pin_memory=True)
        seconds = _median_seconds(lambda: target.copy_(host, non_blocking=True), device)
        yield Speed("copy from the host", sizes.copied_bytes, sizes.copied_bytes / seconds)


def _launches(device: torch.device) -> Iterator[Speed]:
    """Small operations one after the other, as the host sees them."""
    x = torch.zeros(1, device=device)
    synchronized_time(device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        x += 1
    yield Speed("launch", 1, LAUNCHES / (time.perf_counter() - began))
    synchronized_time(device)


def _collectives(device: torch.device, axis: str, group: Group) -> Iterator[Speed]:
    """Bytes of a rank over the seconds of a collective, as `cost/time/communication.py` counts them."""
    for size in COLLECTIVE_BYTES:
        x = torch.zeros(size // 4 // group.size * group.size, device=device)
        out = torch.empty_like(x)
        moved = x.numel() * 4 * (group.size - 1) / group.size
        seconds = _median_seconds(lambda x=x: all_reduce(x, group).wait(), device)  # type: ignore[misc]
        yield Speed(f"all-reduce {axis}", size, 2 * moved / seconds)
        seconds = _median_seconds(lambda x=x, out=out: all_to_all(out, x, group).wait(), device)  # type: ignore[misc]
        yield Speed(f"all-to-all {axis}", size, moved / seconds)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):
        run()
    seconds = []
    for _ in range(REPEATS):
        began = synchronized_time(device)
        run()
        seconds.append(synchronized_time(device) - began)
    return statistics.median(seconds)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
