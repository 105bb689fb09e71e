"""The rates of a stack: a few numbers with a physical meaning, fitted from published runs and kept as data."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from threefold.plan.plan import Plan
from threefold.spec.chips import ChipSpec


@dataclass(frozen=True, slots=True)
class Rates:
    """What a stack reaches of what the chip has. Fractions of peak unless a unit is named."""

    gemm: float = 0.72  # large dense GEMM in 16 bits
    gemm_fp8: float = 0.60  # the same in eight bits, of the eight-bit peak
    gemm_fp4: float = 0.40
    gemm_rows: float = 300.0  # rows at which a dense GEMM reaches half its rate
    grouped: float = 0.85  # grouped GEMM over dense
    grouped_rows: float = 60.0  # rows an expert at which it reaches half its rate
    attention: float = 0.55  # attention kernel, of the bf16 peak
    attention_blackwell: float = 0.50
    attention_latent: float = 0.52  # latent attention (wide keys, narrow values) over plain attention
    sink_passes: float = 8.0  # passes over the scores, forward and backward, of attention with sinks in 16 bits
    memory: float = 0.80  # of HBM bandwidth
    passes: float = 1.5  # elementwise passes over those that were counted
    quant_passes: float = 1.0  # quantisation passes over one read and two writes
    scan: float = 1.5  # passes of linear mixers over those that were counted
    chunk_seconds: float = 15e-6  # of the delta rule, a 64-token chunk after the other, forward and backward
    fusion: float = 0.3  # what is left of an expert's elementwise passes when fused
    alltoall: float = 0.65  # of link bandwidth: NCCL all-to-all
    deepep: float = 0.6
    hybridep: float = 0.7
    network: float = 0.75  # of the network's bandwidth, on top of the dispatcher's own
    dp_hidden: float = 0.5  # of a microbatch, what data-parallel traffic can hide behind
    collective: float = 0.8  # ring collectives of tensor, context and data parallel
    hidden: float = 0.7  # of an exchange, what EP overlap can hide
    contention: float = 0.1  # slowdown of compute per hidden exchange; NCCL's kernels take more than twice that
    host_mixer_seconds: float = 0.9e-3  # launches of a mixer, forward and backward, without graphs
    host_moe_seconds: float = 2.0e-3
    host_fp8: float = 1.5  # more launches for quantisation
    host_grace: float = 1.2  # a Grace core against an x86 core
    host_graphed: float = 0.15  # launches left inside a captured scope
    sync_seconds: float = 0.5e-3  # host synchronisation of the alltoall dispatcher, a layer
    step_seconds: float = 0.05  # logging, data, collective start-up
    optimizer: float = 0.6  # of HBM bandwidth in the optimizer step
    host_adam: float = 18e9  # bytes/s of the optimizer step on the host, a GPU's share
    host_copy: float = 0.9  # of the link to the host; 58 of 64 GB/s in benchmarks/results/recompute-h200.json
    drift: dict[str, float] = field(default_factory=dict)  # of a release: time over the reference release


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates with where they came from and how far off they were."""

    rates: Rates
    provenance: str
    rows: int
    band: float  # 90th percentile of the relative error in cross-validation
    memory_band: float
    seen: tuple[str, ...]  # chip:precision:dispatcher combinations among the rows


@lru_cache(maxsize=8)
def calibration(stack: str) -> Calibration:
    """The shipped calibration of a stack."""
    text = resources.files("threefold.cost").joinpath("calibration.json").read_text(encoding="utf-8")
    data = json.loads(text)[stack]
    rates = rates_from(data["rates"])
    return Calibration(
        rates=rates,
        provenance=data["provenance"],
        rows=data["rows"],
        band=data["band"],
        memory_band=data["memory_band"],
        seen=tuple(data["seen"]),
    )


def rates_from(data: dict[str, Any]) -> Rates:
    known = {f.name for f in fields(Rates)}
    return replace(Rates(), **{name: value for name, value in data.items() if name in known})


def rates_to(rates: Rates) -> dict[str, Any]:
    return asdict(rates)


def gemm_format(precision: str) -> str:
    """The peak that a precision is measured against."""
    if precision in ("bf16", "fp16"):
        return "bf16"
    if precision == "nvfp4":
        return "fp4"
    return "fp32" if precision == "fp32" else "fp8"


def peak(chip: ChipSpec, precision: str) -> float:
    """Dense peak of the format, or of the widest narrower-than-needed one the chip has: emulation runs in bf16."""
    return chip.peak_flops.get(gemm_format(precision), chip.peak_flops["bf16"])


def gemm_rate(rates: Rates, plan: Plan, precision: str, rows: float) -> float:
    """FLOP/s of a dense GEMM with so many rows."""
    share = {"fp8": rates.gemm_fp8, "fp4": rates.gemm_fp4}.get(gemm_format(precision), rates.gemm)
    if gemm_format(precision) not in plan.chip.peak_flops:
        share = rates.gemm
    return peak(plan.chip, precision) * share * rows / (rows + rates.gemm_rows)
