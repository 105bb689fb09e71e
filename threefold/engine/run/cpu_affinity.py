"""Pinning of a rank to CPU cores (`run.cores`), such as "0-7,16". `train.py` calls it."""

import os

from threefold.findings import Finding, FindingsError


def pin_to_cores(cores: str) -> None:
    """Keep this process on these cores, so that the scheduler does not move its kernel launches about."""
    try:
        chosen = {core for part in cores.split(",") for core in _core_range(part)}
        os.sched_setaffinity(0, chosen)
    except (ValueError, OSError) as error:
        problem = f"{cores!r} names no cores of this machine: {error}"
        finding = Finding(rule="cores-exist", at="run.cores", problem=problem, advice="write cores as 0-7,16")
        raise FindingsError([finding]) from None


def _core_range(part: str) -> range:
    first, _, last = part.strip().partition("-")
    return range(int(first), int(last or first) + 1)
