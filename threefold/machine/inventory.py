"""Takes stock of this machine: GPUs, driver, versions, packages, and which kernels run.

`threefold env` prints a `Machine`, `plan_check` compares a plan with it. torch is imported only if it is installed.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import threefold
from threefold.machine.packages import PACKAGES, PackageStatus, check_package
from threefold.plan.ranks import host_memory_bytes
from threefold.spec.chips import chip_of_device
from threefold.units import MIB


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
