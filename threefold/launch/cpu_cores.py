"""The CPU cores and threads of a rank, chosen before its process starts threads. `engine/train_setup.py` calls it.

`plan/cores.py` reads the text of `run.cores`. "auto" gives each rank cores of the NUMA node of its GPU; ranks whose
GPUs share a node divide its cores. Where there are no GPUs, ranks divide all cores of the machine.

The threads of all ranks are at most the cores there are, and a model whose GEMMs are too small to divide gets fewer.
OpenMP's threads spin while they wait for each other. On a machine with other work the thread that they wait for may
have no core: there two spinning threads of a small model took ten times as long as one. `sleep_while_waiting` makes
them sleep.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path

from threefold.findings import Finding, FindingsError
from threefold.plan.cores import AUTO, CORES_ADVICE, parse_core_range, parse_core_sets, useful_threads
from threefold.plan.plan import Plan

SYSFS = Path("/sys")


def pin_to_cores(cores: str, local_rank: int = 0, local_size: int = 1, on_gpu: bool = False) -> set[int]:
    """Keep this process on its cores, so that the scheduler does not move it away from its GPU; returns the cores."""
    sets = auto_core_sets(local_size, on_gpu) if cores == AUTO else core_sets(cores, local_size)
    chosen = sets[min(local_rank, len(sets) - 1)]
    try:
        os.sched_setaffinity(0, chosen)
    except OSError as error:
        raise _refuse(f"{cores!r} names no cores of this machine: {error.strerror}") from None
    missing = chosen - os.sched_getaffinity(0)
    if missing:
        raise _refuse(f"{cores!r}: this machine has no core {min(missing)} to give")
    return chosen


def core_sets(cores: str, local_size: int) -> list[set[int]]:
    """The sets that are written in `cores`: one for all ranks of a machine, or one for each of them."""
    try:
        return parse_core_sets(cores, local_size)
    except ValueError as error:
        raise _refuse(str(error)) from None


def auto_core_sets(local_size: int, on_gpu: bool, sysfs: Path = SYSFS) -> list[set[int]]:
    """Cores for each local rank: of the NUMA node of its GPU, divided by the ranks that share them."""
    available = os.sched_getaffinity(0)
    near = [_cores_near(address, sysfs) & available for address in visible_gpus()] if on_gpu else []
    if len(near) == 1 and local_size > 1 and near[0]:
        return near  # Slurm may show each task its own GPU only, so that nobody knows who shares the node
    near = [*near[:local_size], *[available] * (local_size - len(near))]
    near = [cores or available for cores in near]
    sets = []
    for rank, cores in enumerate(near):
        sharing = [other for other, of_other in enumerate(near) if of_other == cores]
        sets.append(_divide(_siblings_together(cores, sysfs), len(sharing))[sharing.index(rank)])
    return sets


def visible_gpus() -> list[str]:
    """The PCI addresses, as sysfs spells them, of the GPUs that this process sees, in CUDA's order; from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [index for index, _, _ in rows] if shown is None else [name.strip() for name in shown.split(",")]
    addresses = []
    for name in names:
        matches = [address for index, uuid, address in rows if name == index or (name and uuid.startswith(name))]
        addresses += [address.lower()[-12:] for address in matches[:1]]  # nvidia-smi writes eight digits of the domain
    return addresses


def _cores_near(address: str, sysfs: Path) -> set[int]:
    try:
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii")
        return {core for part in text.strip().split(",") for core in parse_core_range(part)}
    except (OSError, ValueError):
        return set()


def _siblings_together(cores: Iterable[int], sysfs: Path) -> list[int]:
    """The cores in an order that keeps hardware threads of one physical core together."""

    def first_sibling(core: int) -> int:
        try:
            path = sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            return parse_core_range(path.read_text(encoding="ascii").strip().split(",")[0]).start
        except (OSError, ValueError):
            return core

    return sorted(cores, key=lambda core: (first_sibling(core), core))


def _divide(cores: Sequence[int], count: int) -> list[set[int]]:
    """The cores in `count` parts, as equal as possible. Where there are too few, several parts share a core."""
    if len(cores) < count:
        return [{cores[n % len(cores)]} for n in range(count)]
    return [set(cores[len(cores) * n // count : len(cores) * (n + 1) // count]) for n in range(count)]


def _refuse(problem: str) -> FindingsError:
    return FindingsError([Finding(rule="cores-exist", at="run.cores", problem=problem, advice=CORES_ADVICE)])


CGROUP = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: the quota and the period, in microseconds


def choose_threads(plan: Plan, local_size: int, given: int | None, on_gpu: bool) -> tuple[int, str]:
    """The number of threads of this rank, and why."""
    if given:
        return given, "as --threads says"
    if (variable := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(variable):
        return int(variable), "as OMP_NUM_THREADS says"
    cores = num_cores()
    share = max(1, cores // local_size)
    of_all = f"{cores} cores for {local_size} ranks" if local_size > 1 else f"{cores} cores"
    useful = useful_threads(plan)
    if on_gpu or useful >= share:
        return share, of_all
    return useful, f"{of_all}, and GEMMs too small for more"


def sleep_while_waiting(environ: MutableMapping[str, str]) -> None:
    """Ask OpenMP for threads that sleep while they wait, unless the user chose. It must happen before torch loads."""
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def num_cores() -> int:
    """The cores that this process may use: those it is pinned to, within the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP.read_text(encoding="ascii").split()
        return min(allowed, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return allowed
