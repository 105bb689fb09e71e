"""The rates of a stack: what its kernels and links reach of the chip's peaks, and the shipped calibration of them.

Each rate has a physical meaning and was fitted from published runs (`tools/fit_rates.py`). The fitted values are
data, in `calibration.json`; `estimate` reads them with `calibration(stack)` and the modules of `time/` apply them.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from threefold.plan.plan import Plan
from threefold.spec.chips import ChipSpec, gemm_format

WATTS_PER_FLOPS = 500 / 1e15  # of a Blackwell chip in the middle of those that are sold: 444 to 560


@dataclass(frozen=True, slots=True)
class Rates:
    """What a stack reaches of the chip's peaks. A rate without a unit in its comment is a fraction of a peak."""

    gemm: float = 0.72  # large dense GEMM in 16 bits, of the 16-bit peak
    gemm_fp8: float = 0.60  # large dense GEMM in 8 bits, of the 8-bit peak
    gemm_fp4: float = 0.40  # large dense GEMM in 4 bits, of the 4-bit peak
    gemm_rows: float = 300.0  # rows at which a dense GEMM reaches half its rate
    grouped: float = 0.85  # rate of a grouped GEMM over that of a dense one
    grouped_rows: float = 60.0  # rows per expert at which a grouped GEMM reaches half its rate
    attention: float = 0.55  # attention kernel, of the bf16 peak
    attention_blackwell: float = 0.50  # the same on Blackwell
    attention_tokens: float = 0.0  # tokens of a sequence at which the attention kernel reaches half its rate
    attention_latent: float = 0.52  # rate of MLA (large keys, small values) over that of GQA
    attention_sinks: float = 1.0  # rate of attention with sinks over that without
    attention_window: float = 1.0  # rate of attention in a sliding window over that of a whole sequence
    sink_passes: float = 8.0  # loss of 16-bit attention with sinks, in passes over `layer_work.SINK_SCORES` scores
    memory: float = 0.80  # memory-bound kernels, of HBM bandwidth
    passes: float = 1.5  # elementwise passes over those that `layer_work` counts
    latent_passes: float = 1.0  # factor on those of MLA's heads, which are split and concatenated
    routing_passes: float = 1.0  # factor on those over scores and routing maps
    expert_passes: float = 1.0  # factor on those around the experts' GEMMs
    quant_passes: float = 1.0  # quantization passes over one read and two writes
    expert_quant: float = 1.0  # factor on those of the experts' rows
    scan: float = 1.5  # passes of linear mixers over those that `layer_work` counts
    chunk_seconds: float = 15e-6  # a 64-token chunk of the delta rule, forward and backward; chunks are sequential
    fla_chunk_seconds: float = 15e-6  # the same in our engine by flash-linear-attention's kernels
    fusion: float = 0.3  # fraction of an expert's elementwise passes that is left when they are fused
    alltoall: float = 0.65  # NCCL all-to-all, of link bandwidth
    deepep: float = 0.6  # DeepEP, of link bandwidth
    hybridep: float = 0.7  # HybridEP, of link bandwidth
    network: float = 0.9  # exchanges that leave the NVLink domain, of the network's bandwidth
    dp_hidden: float = 0.5  # fraction of a microbatch's time that data-parallel traffic can hide behind
    latency_seconds: float = 10e-6  # of a collective within a domain; across domains it is longer
    collective: float = 0.8  # ring collectives of tensor, context and data parallelism, of link bandwidth
    ring: float = 0.0  # the same where the ring leaves the NVLink domain; 0: as inside it
    hidden: float = 0.7  # fraction of an exchange that EP overlap can hide
    contention: float = 0.1  # slowdown of compute per hidden exchange; NCCL's kernels cost 2.5 times as much
    host_mixer_seconds: float = 0.9e-3  # launching a mixer's kernels, forward and backward, without graphs
    host_moe_seconds: float = 2.0e-3  # the same for an MoE feed-forward part
    host_expert_seconds: float = 0.0  # launches that each further local expert adds, where experts are not fused
    host_ring: float = 0.0  # launches that each further step of a ring of context parallelism adds to a mixer's
    host_unfused: float = 1.0  # factor on the MoE part's launches where experts are not fused
    host_fp8: float = 1.5  # factor on launches, for those of quantization
    host_grace: float = 1.2  # factor on launches on a Grace core, against an x86 core
    host_graphed: float = 0.15  # fraction of launches that is left inside a captured scope
    ramp: float = 0.0  # seconds in which kernels fill and drain the GPU, over those of their launches: about 1 of 7 us
    # Measured with our engine on an H200 (docs/log/graphs.md, 2026-11-18): how long the GPU waits until the replay of a
    # graph starts; and the gaps between kernels that a full_iteration graph closes, as a fraction of their launch time.
    replay_seconds: float = 17e-6
    host_gap: float = 0.02
    power: float = 0.0  # exponent with which a Blackwell chip's speed follows its watts per FLOP/s, `power_slowdown`
    adapter: float = 1e12  # bytes/s that the network adapter of a GPU carries at most
    cpu_sharing: float = 1.0  # factor on the work of a rank on a CPU that other ranks share
    sync_seconds: float = 0.5e-3  # host synchronization of the alltoall dispatcher, per layer
    step_seconds: float = 0.05  # logging, data and start-up of collectives, per step
    optimizer: float = 0.6  # the optimizer step, of HBM bandwidth
    # Bytes/s of the optimizer step on the host, per GPU. A step then takes 1.8, 2.6 and 4.2 times as long with 25%, 50%
    # and all of the states there, where Bridge's skill on CPU offloading measured 1.9, 2.5 and 4.2 (2026-08-22).
    host_adam: float = 36e9
    host_copy: float = 0.9  # copies to the host, of the link; 58 of 64 GB/s in benchmarks/results/recompute-h200.json
    drift: dict[str, float] = field(default_factory=dict)  # by release: step time over that of the reference release


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates with where they came from and how far off their estimates were."""

    rates: Rates
    provenance: str  # a sentence for the reader of an estimate
    rows: int  # published runs behind the fit
    band: float  # 90th percentile of the relative error of step time in cross-validation
    wide_band: float  # the same for plans that are unlike all of the runs
    memory_band: float  # relative error of the peak of memory
    seen: tuple[str, ...]  # among the rows: `chip:precision` pairs and dispatchers
    longest: int  # sequence among the rows, in tokens
    most_gpus: int  # among the rows


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
        wide_band=data["wide_band"],
        memory_band=data["memory_band"],
        seen=tuple(data["seen"]),
        longest=data["longest"],
        most_gpus=data["most_gpus"],
    )


def rates_of(plan: Plan) -> Rates:
    """The rates that a plan is priced with: those of its stack, with those of a chip file in place of them."""
    shipped, measured = calibration(plan.target).rates, plan.chip.measured_rates
    return replace(shipped, **measured) if measured else shipped


def rates_from(data: dict[str, Any]) -> Rates:
    """The default rates with the known names of a table in place of theirs."""
    known = {f.name for f in fields(Rates)}
    return replace(Rates(), **{name: value for name, value in data.items() if name in known})


def rates_to(rates: Rates) -> dict[str, Any]:
    """The table that `rates_from` reads."""
    return asdict(rates)


def peak_flops(chip: ChipSpec, precision: str) -> float:
    """Dense peak in FLOP/s of a precision's GEMM format. A format that the chip lacks is emulated at the peak of
    bf16."""
    return chip.dense_peak(precision)[1]


def power_slowdown(plan: Plan, rates: Rates) -> float:
    """Seconds of kernels on a chip over those on one with `WATTS_PER_FLOPS`.

    Blackwell chips of one design are sold with 1000 to 1400 W and run at the clock that their power sustains.
    """
    chip = plan.chip
    if not rates.power or chip.power_watts is None or chip.architecture != "blackwell":
        return 1.0
    return float((WATTS_PER_FLOPS * chip.peak_flops["bf16"] / chip.power_watts) ** rates.power)


def network_bandwidth(plan: Plan, rates: Rates) -> float:
    """Bytes/s out of one GPU to other domains: its ports as sold, or what its adapter carries of them."""
    return min(plan.chip.network_bandwidth, rates.adapter)


def release_drift(plan: Plan, rates: Rates) -> float:
    """Step time of the plan's release over that of the reference. A patch (26.04.01) has the drift of what it
    patches."""
    release = plan.stack.release or ""
    return rates.drift.get(release, rates.drift.get(release[:5], 1.0))


def gemm_rate(rates: Rates, plan: Plan, precision: str, rows: float) -> float:
    """FLOP/s of a dense GEMM with `rows` rows. Few rows do not fill the chip."""
    fraction = {"fp8": rates.gemm_fp8, "fp4": rates.gemm_fp4}.get(gemm_format(precision), rates.gemm)
    if gemm_format(precision) not in plan.chip.peak_flops:
        fraction = rates.gemm
    rows = max(rows, 1.0)  # less than a token a rank is refused by a rule, which may ask for the price all the same
    return peak_flops(plan.chip, precision) * fraction * rows / (rows + rates.gemm_rows)
