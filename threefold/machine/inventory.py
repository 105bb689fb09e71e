"""Takes stock of this machine: GPUs, driver, versions, packages, and which kernels run.

`threefold env` prints a `Machine`, `plan_check` compares a plan with it. torch is imported only if it is installed.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any

import threefold
from threefold.plan.ranks import host_memory_bytes
from threefold.spec.chips import chip_of_device
from threefold.spec.stacks import FLA_RELEASES
from threefold.units import MIB

_IMPORT_SECONDS = 120
_DEEPEP = "https://github.com/deepseek-ai/DeepEP"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that the planner does not need."""

    name: str  # of the distribution, and in tables
    module: str  # the module that must import
    gives: str  # what it is used for
    install: str  # how to get it
    attribute: str = ""  # what the module must have too, where releases of the same name differ
    distribution: str = ""  # where two entries look at one distribution
    releases: tuple[str, ...] = ()  # beginnings of the versions that were tried, where no others are used

    @property
    def probe(self) -> str:
        """The statement that must succeed in a process of its own."""
        return f"from {self.module} import {self.attribute}" if self.attribute else f"import {self.module}"


_TRAIN = "pip install 'threefold[train]'"
PACKAGES = (
    Package("torch", "torch", "training and rehearsal", _TRAIN),
    Package("triton", "triton", "our own kernels for experts, norms, router, loss", "it comes with torch on Linux"),
    Package(
        "quack-kernels",
        "quack.gemm",
        "CuTe kernels for experts (knobs.expert_kernels)",
        "pip install 'threefold[cute]'",
    ),
    Package(
        "flash-attn-4",
        "flash_attn.cute",
        "FlashAttention-4, where `calibrate PLAN`, or an H200 with release 4.0.0b36, found it fastest",
        "pip install 'threefold[fa4]'",
    ),
    Package("deep_ep", "deep_ep", "DeepEP (knobs.dispatcher=deepep)", f"build it from {_DEEPEP}", "Buffer"),
    Package(
        "hybrid-ep",
        "deep_ep",
        "HybridEP (knobs.dispatcher=hybridep)",
        f"build it from {_DEEPEP}, its branch hybrid-ep",
        "HybridEPBuffer",
        "deep_ep",
    ),
    Package(
        "flash-linear-attention",
        "fla",
        "a fused gated delta rule (Qwen3-Next)",
        "pip install 'threefold[fla]'",
        releases=FLA_RELEASES,
    ),
    Package(
        "mamba-ssm",
        "mamba_ssm.ops.triton.ssd_combined",
        "a fused scan for Mamba-2 layers",
        "pip install mamba-ssm",
        "mamba_chunk_scan_combined",
    ),
    Package(
        "transformer-engine",
        "transformer_engine",
        "what target megatron-bridge runs on",
        "pip install transformer-engine",
    ),
    Package(
        "flash-attn",
        "flash_attn",
        "attention of target megatron-bridge; our engine uses cuDNN's and torch's own kernels",
        "pip install flash-attn",
        "flash_attn_func",
    ),
    Package("transformers", "transformers", "Hugging Face as oracle and as peer", "pip install transformers"),
    Package("torchtitan", "torchtitan", "a peer to measure against", "pip install torchtitan"),
    Package("sonic-moe", "sonicmoe", "a peer to measure experts against", "pip install sonic-moe (Python 3.12)"),
    Package("safetensors", "safetensors", "Hugging Face checkpoints in and out", _TRAIN),
    Package("tokenizers", "tokenizers", "tokenizer files", _TRAIN),
    Package("jinja2", "jinja2", "chat templates of tokenizers", _TRAIN),
    Package("pillow", "PIL.Image", "pictures as data", _TRAIN),
    Package(
        "pyarrow", "pyarrow.parquet", "Parquet files and saved datasets as data", "pip install 'threefold[parquet]'"
    ),
    Package("tensorboard", "tensorboard", "TensorBoard events", _TRAIN),
    Package("wandb", "wandb", "logging to Weights & Biases (run.wandb)", "pip install wandb"),
    Package("matplotlib", "matplotlib", "plots", "pip install 'threefold[report]'"),
)


@dataclass(frozen=True, slots=True)
class PackageStatus:
    """Whether a package is here and works."""

    package: Package
    version: str | None  # None if it is not installed
    trouble: str = ""  # why it does not import

    @property
    def works(self) -> bool:
        return self.version is not None and not self.trouble


def check_package(package: Package) -> PackageStatus:
    """Find a package and import it in another process."""
    version = _version(package)
    if version is not None and package.releases and not version.startswith(package.releases):
        tried = " and ".join(f"{release}*" for release in package.releases)
        return PackageStatus(package, version, f"this release was not tried, {tried} were")
    return PackageStatus(package, version, "" if version is None else _import_error(package.probe))


def _version(package: Package) -> str | None:
    """The installed version; "?" if the module is found without the metadata of an installation."""
    try:
        return distribution(package.distribution or package.name).version
    except PackageNotFoundError:
        return "?" if _is_importable(package.module) else None


def _is_importable(module: str) -> bool:
    """Whether Python finds the module. A folder of that name is not enough, though Python takes it for a namespace."""
    try:
        spec = find_spec(module.partition(".")[0])
        if spec is not None and spec.origin is None:
            spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _import_error(probe: str) -> str:
    """Why the import does not succeed; empty if it does.

    The import runs in its own process, because a broken package can crash it and a working one takes memory.
    """
    command = [sys.executable, "-c", probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"import takes more than {_IMPORT_SECONDS} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"import ended with code {done.returncode}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver or torch reports it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None

    @property
    def chip(self) -> str | None:
        """The name in `spec/chips.py`."""
        found = chip_of_device(self.name)
        return found.name if found else None


@dataclass(frozen=True, slots=True)
class KernelProbe:
    """The result of trying a kernel on this GPU."""

    kernel: str
    works: bool
    trouble: str = ""  # why it does not run


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has. `threefold env --json` prints the fields under these names."""

    python: str
    system: str
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)  # torch, cuda, cudnn, nccl
    packages: tuple[PackageStatus, ...] = ()
    kernels: tuple[KernelProbe, ...] = ()
    num_cores: int = 0
    host_memory_bytes: int = 0
    threefold: str = threefold.__version__

    @property
    def chip(self) -> str | None:
        return self.gpus[0].chip if self.gpus else "cpu"

    def package(self, name: str) -> PackageStatus:
        return next(status for status in self.packages if status.package.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "chip": self.chip,
            "packages": [
                {
                    **asdict(status.package),
                    "probe": status.package.probe,
                    "version": status.version,
                    "works": status.works,
                    "trouble": status.trouble,
                }
                for status in self.packages
            ],
        }


def this_machine(try_kernels: bool = True) -> Machine:
    """Import each package and run each kernel separately, so that a broken one is named and stops nothing else."""
    with ThreadPoolExecutor(4) as pool:
        packages = tuple(pool.map(check_package, PACKAGES))
    gpus, driver = _query_driver()
    versions: dict[str, str | None] = {}
    kernels: tuple[KernelProbe, ...] = ()
    if next(status for status in packages if status.package.name == "torch").works:
        from threefold.engine.tune.runnable_kernels import local_gpus, probe_kernels, torch_versions

        versions = torch_versions()
        gpus = tuple(Gpu(*facts) for facts in local_gpus()) or gpus
        kernels = _probes(probe_kernels() if try_kernels else ())
    cores, memory_bytes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0, host_memory_bytes()
    system = (platform.python_version(), platform.platform())
    return Machine(*system, gpus, driver, versions, packages, kernels, cores or os.cpu_count() or 0, memory_bytes)


def _probes(tried: Iterable[tuple[str, str]]) -> tuple[KernelProbe, ...]:
    return tuple(KernelProbe(name, not trouble, trouble) for name, trouble in tried)


def _query_driver() -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs and driver version from nvidia-smi, which needs no torch and also works if torch is built for the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), None
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.strip()]
        gpus = tuple(Gpu(name, int(mebibytes) * MIB) for name, mebibytes, _ in rows)
    except (OSError, ValueError, subprocess.SubprocessError):
        return (), None
    return gpus, rows[0][2] if rows else None
