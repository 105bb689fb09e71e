"""Chips and clusters: memory, dense peak rates, links. Rates are per GPU and per direction."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threefold.units import GB, GIB, MIB, TB, TFLOPS

SERVER_OVER_CHIP = 10_200 / 8 / 700  # power of a server over that of its GPUs: DGX H100, 10.2 kW for 8 of 700 W


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """One accelerator in the system it is sold in."""

    name: str
    architecture: str  # ampere, ada, hopper, blackwell, cdna3, cpu
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    # Dense, by GEMM input format: fp32 (TF32 on GPUs), bf16, fp8, fp4.
    peak_flops: Mapping[str, float] = field(hash=False)
    domain: int  # GPUs joined by NVLink
    domain_bandwidth: float  # bytes/s out of one GPU into its domain
    network_bandwidth: float  # bytes/s out of one GPU to other domains
    host_bandwidth: float  # bytes/s between one GPU and host memory
    gpus_per_node: int
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    measured_rates: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of a chip file, names of `cost.Rates`
    cores: int = 1  # of a CPU, which its ranks share
    measured_error: float | None = None  # of predicted steps on the machine that a chip file describes
    measured_gpus: int = 1  # of the steps behind that error
    measured_precisions: tuple[str, ...] = ()  # of the steps behind that error
    power_watts: float | None = None  # the chip's own, as sold (TDP)
    server_watts: float | None = None  # highest power of its server or rack, a GPU's share
    operations: Mapping[str, float] = field(default_factory=dict, hash=False)  # names of `Operations`
    file: str = ""  # `file:` and the path of the user's own file that describes it; empty for a shipped chip

    @property
    def plan_name(self) -> str:
        """What `cluster.chip` of a plan says for this chip."""
        return self.file or self.name

    @property
    def watts(self) -> float | None:
        """Highest power of a GPU with its share of the server; from the chip's own where that is all that is known."""
        if self.server_watts is None and self.power_watts is not None:
            return self.power_watts * SERVER_OVER_CHIP
        return self.server_watts

    @property
    def is_rack_scale(self) -> bool:
        """NVLink reaches past the node, as in NVL72."""
        return self.domain > self.gpus_per_node

    def dense_peak(self, precision: str) -> tuple[str, float]:
        """The GEMM format of a precision and its dense FLOP/s. A format that the chip lacks is emulated in bf16."""
        wanted = gemm_format(precision)
        found = wanted if wanted in self.peak_flops else "bf16"
        return found, self.peak_flops[found]


def chip_of_device(name: str) -> ChipSpec | None:
    """The chip by the name that the driver gives a device, such as "NVIDIA H100 80GB HBM3". The longest match counts,
    because "GB200" also contains "B200"."""
    matches = [chip for chip in CHIPS if chip in name.lower() and chip != "cpu"]
    return CHIPS[max(matches, key=len)] if matches else None


# What makers and clouds write after a chip's name. A PCIe or NVL board has another memory or links: no alias.
_BOARD = re.compile(r"(?:nvidia )?(\w+?)(?: (?:sxm\d?|hgx|dgx|nvl72|80gb|141gb|hbm2e|hbm3e?))*")


def chip_name(name: str) -> str | None:
    """The chip of a name such as `GB200`, `H100-SXM5-80GB` or `gb200-nvl72`; None where it is no shipped one."""
    found = _BOARD.fullmatch(re.sub(r"[-_\s]+", " ", name.strip().lower()))
    return found[1] if found and found[1] in CHIPS else None


def gemm_format(precision: str) -> str:
    """The format, as named in a chip's peaks, that GEMMs of a precision run in."""
    if precision in ("bf16", "fp16"):
        return "bf16"
    if precision == "nvfp4":
        return "fp4"
    return "fp32" if precision == "fp32" else "fp8"


_NVIDIA_SMI = "nvidia-smi memory.total as commonly reported for the part; read by us on an H200 only"

A100 = ChipSpec(
    name="a100",
    architecture="ampere",
    memory_bytes=81_920 * MIB,
    memory_bandwidth=2.039 * TB,
    peak_flops={"fp32": 156 * TFLOPS, "bf16": 312 * TFLOPS},
    domain=8,
    domain_bandwidth=300 * GB,
    network_bandwidth=25 * GB,
    host_bandwidth=32 * GB,
    gpus_per_node=8,
    power_watts=400,
    server_watts=6_500 / 8,
    sources={
        "memory_bytes": _NVIDIA_SMI,
        "rates and NVLink": "NVIDIA A100 80GB SXM datasheet",
        "network": "DGX A100: one 200 Gb/s port a GPU",
        "host": "PCIe 4.0 x16",
        "power": "NVIDIA A100 80GB SXM and DGX A100 datasheets: 400 W, 6.5 kW for 8 GPUs",
    },
)
H100 = ChipSpec(
    name="h100",
    architecture="hopper",
    memory_bytes=81_559 * MIB,
    memory_bandwidth=3.35 * TB,
    peak_flops={"fp32": 494.7 * TFLOPS, "bf16": 989.4 * TFLOPS, "fp8": 1978.9 * TFLOPS},
    domain=8,
    domain_bandwidth=450 * GB,
    network_bandwidth=50 * GB,
    host_bandwidth=64 * GB,
    gpus_per_node=8,
    power_watts=700,
    server_watts=10_200 / 8,
    sources={
        "memory_bytes": _NVIDIA_SMI,
        "rates and NVLink": "NVIDIA H100 SXM datasheet, without sparsity",
        "network": "DGX H100: one 400 Gb/s port a GPU",
        "host": "PCIe 5.0 x16",
        "power": "NVIDIA H100 SXM and DGX H100 datasheets: 700 W, 10.2 kW for 8 GPUs",
    },
)
H200 = ChipSpec(
    name="h200",
    architecture="hopper",
    memory_bytes=143_771 * MIB,
    memory_bandwidth=4.8 * TB,
    peak_flops=H100.peak_flops,
    domain=8,
    domain_bandwidth=450 * GB,
    network_bandwidth=50 * GB,
    host_bandwidth=64 * GB,
    gpus_per_node=8,
    power_watts=700,
    server_watts=10_200 / 8,
    sources={
        "memory_bytes": _NVIDIA_SMI,
        "rates and NVLink": "NVIDIA H200 SXM datasheet, without sparsity",
        "network": "HGX H200: one 400 Gb/s port a GPU",
        "host": "PCIe 5.0 x16",
        "power": "NVIDIA H200 SXM and DGX H200 datasheets: 700 W, 10.2 kW for 8 GPUs",
    },
)
B200 = ChipSpec(
    name="b200",
    architecture="blackwell",
    memory_bytes=183_359 * MIB,
    memory_bandwidth=7.7 * TB,
    peak_flops={"fp32": 1125 * TFLOPS, "bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "fp4": 9000 * TFLOPS},
    domain=8,
    domain_bandwidth=900 * GB,
    network_bandwidth=50 * GB,
    host_bandwidth=64 * GB,
    gpus_per_node=8,
    power_watts=1000,
    server_watts=14_300 / 8,
    sources={
        "memory_bytes": _NVIDIA_SMI,
        "rates and NVLink": "NVIDIA HGX B200 datasheet, a GPU's share, without sparsity",
        "network": "DGX B200: one 400 Gb/s port a GPU",
        "host": "PCIe 5.0 x16",
        "power": "NVIDIA DGX B200 datasheet: 14.3 kW for 8 GPUs; 1000 W a GPU",
    },
)
B300 = ChipSpec(
    name="b300",
    architecture="blackwell",
    memory_bytes=288 * GB,
    memory_bandwidth=8 * TB,
    peak_flops={"fp32": 1125 * TFLOPS, "bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "fp4": 13_500 * TFLOPS},
    domain=8,
    domain_bandwidth=900 * GB,
    network_bandwidth=100 * GB,
    host_bandwidth=64 * GB,
    gpus_per_node=8,
    power_watts=1100,
    server_watts=14_000 / 8,
    sources={
        "memory, rates and NVLink": "NVIDIA HGX B300 datasheet, a GPU's share, without sparsity",
        "network": "DGX B300: one 800 Gb/s port a GPU",
        "host": "PCIe 5.0 x16",
        "power": "NVIDIA DGX B300 datasheet: 14 kW for 8 GPUs; 1100 W a GPU in vendors' HGX B300 systems",
    },
)
GB200 = ChipSpec(
    name="gb200",
    architecture="blackwell",
    memory_bytes=189_471 * MIB,
    memory_bandwidth=8 * TB,
    peak_flops={"fp32": 1250 * TFLOPS, "bf16": 2500 * TFLOPS, "fp8": 5000 * TFLOPS, "fp4": 10_000 * TFLOPS},
    domain=72,
    domain_bandwidth=900 * GB,
    network_bandwidth=50 * GB,
    host_bandwidth=225 * GB,
    gpus_per_node=4,
    power_watts=1200,
    server_watts=120_000 / 72,
    sources={
        "memory_bytes": "as commonly reported; a published run reserved 173.9 GiB, more than the datasheet's 186 GB",
        "rates and NVLink": "NVIDIA GB200 NVL72 datasheet, a GPU's share, without sparsity",
        "network": "GB200 NVL72: one 400 Gb/s port a GPU",
        "host": "NVLink-C2C, 900 GB/s both ways, shared by two GPUs",
        "power": "NVIDIA GB200 NVL72: about 120 kW a rack; 1200 W a GPU",
    },
)
GB300 = ChipSpec(
    name="gb300",
    architecture="blackwell",
    memory_bytes=279 * GB,
    memory_bandwidth=8 * TB,
    peak_flops={"fp32": 1250 * TFLOPS, "bf16": 2500 * TFLOPS, "fp8": 5000 * TFLOPS, "fp4": 15_000 * TFLOPS},
    domain=72,
    domain_bandwidth=900 * GB,
    network_bandwidth=100 * GB,
    host_bandwidth=225 * GB,
    gpus_per_node=4,
    power_watts=1400,
    server_watts=140_000 / 72,
    sources={
        "memory, rates and NVLink": "NVIDIA GB300 NVL72 datasheet, a GPU's share, without sparsity",
        "network": "GB300 NVL72: one 800 Gb/s port a GPU",
        "host": "NVLink-C2C, 900 GB/s both ways, shared by two GPUs",
        "power": "vendors' GB300 NVL72 racks: 132 to 140 kW; 1400 W a GPU",
    },
)
CPU = ChipSpec(
    name="cpu",
    architecture="cpu",
    memory_bytes=16 * GIB,
    memory_bandwidth=20 * GB,
    peak_flops={"fp32": 0.1 * TFLOPS, "bf16": 0.1 * TFLOPS},
    domain=64,
    domain_bandwidth=5 * GB,
    network_bandwidth=1 * GB,
    host_bandwidth=20 * GB,
    gpus_per_node=64,
    sources={"all": "nominal figures of a small machine; every rank is a process on it"},
)

CHIPS: dict[str, ChipSpec] = {chip.name: chip for chip in (A100, H100, H200, B200, B300, GB200, GB300, CPU)}

# Which low precision a chip multiplies natively, from the GEMM formats of its generation.
NATIVE_FORMATS: dict[str, frozenset[str]] = {
    "ampere": frozenset({"bf16", "fp16", "fp32"}),
    "ada": frozenset({"bf16", "fp16", "fp32", "fp8-tensor", "fp8-cs", "fp8-rowwise"}),
    "hopper": frozenset({"bf16", "fp16", "fp32", "fp8-tensor", "fp8-cs", "fp8-rowwise", "fp8-blockwise"}),
    "blackwell": frozenset({"bf16", "fp16", "fp32", "fp8-tensor", "fp8-cs", "fp8-blockwise", "mxfp8", "nvfp4"}),
    "cdna3": frozenset({"bf16", "fp16", "fp32", "fp8-tensor", "fp8-cs", "fp8-rowwise"}),
    "cpu": frozenset({"bf16", "fp32"}),
}
