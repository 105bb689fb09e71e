"""One rank joins the others: from what torchrun or Slurm put into its environment to the default process group."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.plan.ranks import Seat, seat

JOIN_SECONDS = 300.0  # for the slowest rank to start: a cold file system takes minutes to import torch


@dataclass(frozen=True, slots=True)
class World:
    """This process among all. `store` is None where it is alone."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    attempt: int  # how often all ranks were started again
    store: Store | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: progress, the contract, metrics."""
        return self.rank == 0


def join(plan: Plan, limit_seconds: float | None = None, environ: Mapping[str, str] = os.environ) -> World:
    """The default process group of the plan's ranks; none where the plan has one rank and the environment no more.

    `limit_seconds` bounds every collective, behind whatever watches them. The group is bound to no device: torch would
    then split every further group off this one, for which NCCL waits until all ranks have called. A mesh makes groups
    by their members alone, some of them on one pipeline stage only.
    """
    place = seat(environ)
    size = place.size if place else 1
    if size != plan.cluster.gpus:
        raise _refuse("cluster.gpus", f"the plan is for {plan.cluster.gpus} ranks, {size} were started")
    device = _device(plan, place)
    if device.type == "cpu" and place:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // place.local_size))
    if place is None:
        return World(0, 1, 0, device, 0)
    store = _store(place, _address(environ), _port(environ))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=limit_seconds) if limit_seconds else None,
    )
    return World(place.rank, place.size, place.local_rank, device, place.attempt, store)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# How gloo and NCCL say that another process is gone.
_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
    "Connection refused",
)


def lost_a_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


def _device(plan: Plan, place: Seat | None) -> torch.device:
    if plan.cluster.chip == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = place.local_rank if place else 0
    count = torch.cuda.device_count()
    if local >= count and place and count == 1:  # Slurm may show each task its own GPU and no other
        local = 0
    if local >= count:
        raise _refuse("LOCAL_RANK", f"local rank {local} has no GPU of its own: this machine shows {count}")
    return torch.device("cuda", local)


def _store(place: Seat, address: str, port: int) -> Store:
    """Where ranks find each other. One prefix an attempt: a rank that starts again must not read what the dead wrote.

    An agent that keeps its store over restarts holds it; otherwise rank 0 does, and each attempt has a new one.
    """
    try:
        store = TCPStore(
            address,
            port,
            place.size,
            is_master=place.rank == 0 and not place.agent_store,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise _refuse("MASTER_ADDR", f"{address}:{port} cannot be reached: {str(error).splitlines()[0]}") from None
    return PrefixStore(f"attempt/{place.attempt if place.agent_store else 0}", store)


def _address(environ: Mapping[str, str]) -> str:
    if found := environ.get("MASTER_ADDR"):
        return found
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise _refuse("MASTER_ADDR", "not set: ranks do not know where to meet")
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
        )
        return said.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise _refuse("MASTER_ADDR", f"not set, and scontrol does not name the first host of {nodes}") from None


def _port(environ: Mapping[str, str]) -> int:
    given = environ.get("MASTER_PORT")
    if given is None and environ.get("SLURM_JOB_ID", "").isdigit():  # one port a job: jobs may share a node
        return 20_000 + int(environ["SLURM_JOB_ID"]) % 20_000
    if given is None or not given.isdigit() or not 0 < int(given) < 65_536:
        raise _refuse("MASTER_PORT", f"{given!r} is no port")
    return int(given)


def _refuse(at: str, problem: str) -> FindingsError:
    advice = "start ranks with `threefold train --nproc`, torchrun, or a script of `threefold launch`"
    return FindingsError([Finding(rule="ranks-meet", at=at, problem=problem, advice=advice)])


def num_devices(plan: Plan) -> int | None:
    """GPUs of this machine; None where the plan's ranks are mere processes."""
    return None if plan.cluster.chip == "cpu" else torch.cuda.device_count()
