"""What this machine is: chips, driver, software, packages, and which kernels run."""

import platform
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.machine.packages import PACKAGES, Found, look
from threefold.spec.chips import CHIPS
from threefold.units import MIB


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None

    @property
    def chip(self) -> str | None:
        """Our name for it; the longest that fits, as GB200 is no B200."""
        words = self.name.lower()
        fitting = [name for name in CHIPS if name in words]
        return max(fitting, key=len, default=None)


@dataclass(frozen=True, slots=True)
class Probe:
    """A kernel tried on this GPU: `trouble` says why it does not run."""

    kernel: str
    works: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    python: str
    system: str
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)  # torch, cuda, cudnn, nccl
    packages: tuple[Found, ...] = ()
    kernels: tuple[Probe, ...] = ()

    @property
    def chip(self) -> str | None:
        return self.gpus[0].chip if self.gpus else "cpu"

    def found(self, name: str) -> Found:
        return next(found for found in self.packages if found.package.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "chip": self.chip,
            "packages": [
                {**asdict(found.package), "version": found.version, "works": found.works, "trouble": found.trouble}
                for found in self.packages
            ],
        }


def this_machine(try_kernels: bool = True) -> Machine:
    """Packages are imported and kernels run, each apart, so that what is broken is named and nothing else fails."""
    with ThreadPoolExecutor(4) as pool:
        packages = tuple(pool.map(look, PACKAGES))
    gpus, driver = _asked_driver()
    versions: dict[str, str | None] = {}
    kernels: tuple[Probe, ...] = ()
    if next(found for found in packages if found.package.name == "torch").works:
        from threefold.engine.here import gpus_here, probed, versions_here

        versions = versions_here()
        gpus = tuple(Gpu(*facts) for facts in gpus_here()) or gpus
        kernels = _probes(probed() if try_kernels else ())
    return Machine(platform.python_version(), platform.platform(), gpus, driver, versions, packages, kernels)


def _probes(tried: Iterable[tuple[str, str]]) -> tuple[Probe, ...]:
    return tuple(Probe(name, not trouble, trouble) for name, trouble in tried)


def _asked_driver() -> tuple[tuple[Gpu, ...], str | None]:
    """From the driver's own tool: there without torch, and where torch was built for the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), None
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.strip()]
        gpus = tuple(Gpu(name, int(mebibytes) * MIB) for name, mebibytes, _ in rows)
    except (OSError, ValueError, subprocess.SubprocessError):
        return (), None
    return gpus, rows[0][2] if rows else None
