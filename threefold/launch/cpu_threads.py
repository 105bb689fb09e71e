"""How many CPU threads a rank computes with. `train.py` calls `choose_threads` and says what was chosen.

The threads of all ranks are at most the cores there are, and a model whose GEMMs are too small to divide gets fewer.
OpenMP's threads spin while they wait for each other. On a machine with other work the thread that they wait for may
have no core: there two spinning threads of a small model took ten times as long as one. `sleep_while_waiting` makes
them sleep.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from threefold.plan.cores import useful_threads
from threefold.plan.plan import Plan

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
