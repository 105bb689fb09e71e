"""For tests only: the ranks of this machine share its first GPU, so that one GPU runs several real NCCL ranks.

NCCL refuses two ranks on one device, and takes two ranks for neighbours where their hosts have the same hash. With
another `NCCL_HOSTID` in every process it takes each rank for a host with one GPU and connects them over the loopback
interface. `join` reads the variable `SHARED_GPU`, which only `tests/support/shared_gpu.py` sets. Kernels of the ranks
are time-sliced, so that results can be compared and times mean nothing.
"""

from collections.abc import Mapping

SHARED_GPU = "THREEFOLD_TEST_SHARED_GPU"

_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # both would look for the other ranks' memory across NVLink
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",  # a communicator starts faster, and its kernels leave room for those of other ranks
}


def ranks_share_gpu(environ: Mapping[str, str]) -> bool:
    """Whether a test asked for ranks that share a GPU."""
    return environ.get(SHARED_GPU) == "1"


def shared_gpu_variables(rank: int) -> dict[str, str]:
    """What NCCL must find in the environment of this rank's process before the first communicator is made."""
    return {**_VARIABLES, "NCCL_HOSTID": f"threefold-rank-{rank}"}
