"""Makes the default process group of a run from the environment variables of torchrun or Slurm.

`threefold train` calls `join` once in every rank's process and `leave` at the end.
"""

from collections.abc import Mapping
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
import threefold
from threefold.engine.dist.consensus import check_alike_on_ranks
from threefold.engine.dist.mesh import Group
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.plan.ranks import RankEnvironment, host_memory_bytes, rank_environment
from threefold.units import format_many


SHARED_GPU = "THREEFOLD_TEST_SHARED_GPU"

_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # both would look for the other ranks' memory across NVLink
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",  # a communicator starts faster, and its kernels leave room for those of other ranks
}


def ranks_share_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether a test asked for ranks that share a GPU."""
    return environ.get(SHARED_GPU) == "1"


def shared_gpu_variables(rank: int) -> dict[str, str]:
    """Variables that NCCL needs in the environment of this rank's process before the first communicator is made."""
    return {**_VARIABLES, "NCCL_HOSTID": f"threefold-rank-{rank}"}


JOIN_SECONDS = 300.0  # time for the slowest rank to start: importing torch from a cold file system takes minutes


@dataclass(frozen=True, slots=True)
class World:
    """This process and its rank among all processes of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    attempt: int  # how often all ranks have been restarted
    store: Store | None = None  # None in a run of one process

    @property
    def is_leader(self) -> bool:
        """Return whether this rank writes what is written once per run: progress, the contract, metrics."""
        return self.rank == 0


def join(plan: Plan, timeout_seconds: float | None = None, environ: Mapping[str, str] = os.environ) -> World:
    """Make the default process group of the plan's ranks. A plan of one rank outside of torchrun and Slurm gets none.

    `timeout_seconds` bounds every collective; the watchdog has a shorter limit. The group is bound to no device: torch
    would otherwise split every further group off this one, and NCCL waits for all ranks of the world at each split. A
    mesh makes groups by their members alone, some of them on one pipeline stage only.
    """
    env = rank_environment(environ)
    size = env.size if env else 1
    if size != plan.cluster.gpus:
        raise _refuse("cluster.gpus", f"the plan is for {format_many(plan.cluster.gpus, 'rank')}, {size} were started")
    device = _device(plan, env, environ)
    if env is None:
        return World(0, 1, 0, device, 0)
    store = _store(env, _address(environ), _port(environ))
    backend = "gloo"
    if device.type == "cuda":
        if ranks_share_gpu(environ):
            os.environ.update(shared_gpu_variables(env.rank))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.size,
        timeout=timedelta(seconds=timeout_seconds) if timeout_seconds else None,
    )
    world = Group("world", tuple(range(env.size)), env.rank, dist.group.WORLD)
    check_alike_on_ranks(world, "fields of the plan", "plan", lambda: shared_fields(plan))
    return World(env.rank, env.size, env.local_rank, device, env.attempt, store)


def shared_fields(plan: Plan) -> dict[str, Any]:
    """Facts that all ranks must have in common: the plan, and the versions that choose the collectives of a step.

    Each node may keep model and data elsewhere, and have other cores. The content of data is compared once it is open.
    """
    facts = {name: fact for name, fact in asdict(plan.model).items() if name not in ("name", "source")}
    elsewhere = ("model", "job.data", "job.tokenizer", "job.val_data", "run.cores")
    versions = {"threefold": threefold.__version__, "torch": str(torch.__version__)}
    return {"model": facts, **versions, **{path: value for path, value in plan.written if path not in elsewhere}}


_before_leaving: list[Callable[[], None]] = []


def call_before_leaving(callback: Callable[[], None]) -> Callable[[], None]:
    """Register what must be freed before the process groups are destroyed."""
    _before_leaving.append(callback)
    return callback


def leave() -> None:
    """Destroy the process groups of this rank, if it has any."""
    if dist.is_initialized():
        for callback in _before_leaving:
            callback()
        dist.destroy_process_group()


# Messages by which gloo and NCCL report that another process is gone.
_LOST_PEER_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
    "Connection refused",
)


def is_lost_peer_error(error: BaseException) -> bool:
    """Return whether a collective failed because another process of its group is gone."""
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _LOST_PEER_MESSAGES)


def _device(plan: Plan, env: RankEnvironment | None, environ: Mapping[str, str]) -> torch.device:
    if plan.cluster.chip == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks_share_gpu(environ):
        return torch.device("cuda", 0)
    local = env.local_rank if env else 0
    count = torch.cuda.device_count()
    if local >= count and env and count == 1:  # Slurm may show each task its own GPU only
        local = 0
    if local >= count:
        raise _refuse("LOCAL_RANK", f"local rank {local} has no GPU of its own: this machine shows {count}")
    return torch.device("cuda", local)


def open_store() -> TCPStore:
    """A store at a free port of this machine, where an agent's ranks meet (`launch/agent.py`)."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _store(env: RankEnvironment, address: str, port: int) -> Store:
    """The key-value store through which ranks find each other.

    A restarted rank must not read keys of ranks that died. Our agent hosts a new store for every attempt, and so does
    rank 0 where there is no agent. The store of torchrun's agent lives across restarts: there every attempt has a
    prefix of its own, which NCCL's notes about a collective that timed out do not have.
    """
    try:
        store = TCPStore(
            address,
            port,
            env.size,
            is_master=env.rank == 0 and not env.agent_store,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise _refuse("MASTER_ADDR", f"{address}:{port} cannot be reached: {str(error).splitlines()[0]}") from None
    return PrefixStore(f"attempt/{env.attempt if env.agent_store else 0}", store)


def _address(environ: Mapping[str, str]) -> str:
    if address := environ.get("MASTER_ADDR"):
        return address
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise _refuse("MASTER_ADDR", "not set: ranks do not know where to meet")
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise _refuse("MASTER_ADDR", f"not set, and scontrol does not name the first host of {nodes}") from None


def _port(environ: Mapping[str, str]) -> int:
    given = environ.get("MASTER_PORT")
    if given is None and environ.get("SLURM_JOB_ID", "").isdigit():  # a port per job, as jobs may share a node
        return 20_000 + int(environ["SLURM_JOB_ID"]) % 20_000
    if given is None or not given.isdigit() or not 0 < int(given) < 65_536:
        raise _refuse("MASTER_PORT", f"{given!r} is no port")
    return int(given)


def _refuse(at: str, problem: str) -> FindingsError:
    advice = "start ranks with `threefold train --nproc`, torchrun, or a script of `threefold launch`"
    return FindingsError([Finding(rule="ranks-meet", at=at, problem=problem, advice=advice)])


RANK_BYTES = 150 * 2**20  # of a process of its own once it has imported torch (2.13 on Linux, private pages)


def check_ranks_start_here(plan: Plan, advice: str) -> None:
    """Raise a finding where this machine has no GPU for each rank, or on a CPU no memory for each process."""
    ranks, here = format_many(plan.cluster.gpus, "rank"), num_devices(plan)
    if here is not None and here < plan.cluster.gpus:
        problem = f"{ranks} of one {plan.chip.name} each; this machine shows {here}"
    elif here is None and 0 < host_memory_bytes() < plan.cluster.gpus * RANK_BYTES:
        most = host_memory_bytes() // RANK_BYTES
        problem = f"{ranks}, each a process; this machine has memory for {most} at most"
    else:
        return
    raise FindingsError([Finding(rule="ranks-start-here", at="cluster.gpus", problem=problem, advice=advice)])


def num_devices(plan: Plan) -> int | None:
    """The number of GPUs of this machine; None for a plan whose ranks need none of their own."""
    return None if plan.cluster.chip == "cpu" or ranks_share_gpu(os.environ) else torch.cuda.device_count()
