"""Ranks on gloo that hang in known ways, and the flight recorder dumps that they leave."""

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor  # which the dump of a stack would import on every rank
import torch.distributed as dist

WORLD = 4
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
_SECONDS_IN_CALL = 0.4
_NUM_OVER = 3  # collectives before the hang


def _late(rank: int, tp: Any, dp: Any, x: torch.Tensor) -> Any:
    return dist.all_reduce(x, async_op=True) if rank != 3 else None


def _chain(rank: int, tp: Any, dp: Any, x: torch.Tensor) -> Any:
    if rank == 0:
        return dist.all_reduce(x, group=dp, async_op=True)
    return dist.all_reduce(x, group=tp, async_op=True) if rank == 2 else None


def _operation(rank: int, tp: Any, dp: Any, x: torch.Tensor) -> Any:
    if rank == 1:
        return dist.broadcast(x, 0, async_op=True)
    return dist.all_reduce(x, async_op=True)


def _sizes(rank: int, tp: Any, dp: Any, x: torch.Tensor) -> Any:
    return dist.all_reduce(torch.ones(8) if rank == 2 else x, async_op=True)


def _circle(rank: int, tp: Any, dp: Any, x: torch.Tensor) -> Any:
    return dist.all_reduce(x, group=tp if rank in (0, 3) else dp, async_op=True)


CASES: dict[str, Callable[..., Any]] = {
    "late": _late,
    "chain": _chain,
    "operation": _operation,
    "sizes": _sizes,
    "circle": _circle,
}


def record_hang(case: str, folder: Path) -> list[Path]:
    """Let four ranks hang, and return the pickles of their rings; JSON lies beside each."""
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                _hang(case, folder, rank)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * WORLD
    return [folder / f"trace_rank_{rank}" for rank in range(WORLD)]


def _hang(case: str, folder: Path, rank: int) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    tp, dp = [
        next(group for group, ranks in [(dist.new_group(list(r)), r) for r in groups] if rank in ranks)
        for groups in (TP, DP)
    ]
    x = torch.ones(4)
    for group in (dist.group.WORLD, tp, dp):
        dist.all_reduce(x, group=group)
    work = CASES[case](rank, tp, dp, x)
    from torch._C import _distributed_c10d as c10d

    folder.joinpath(f"in_call_{rank}").touch()
    while True:  # on a busy machine a rank, or the end of what is over, comes seconds later
        time.sleep(_SECONDS_IN_CALL)
        content = c10d._dump_fr_trace()
        num_over = sum(bool(entry["retired"]) for entry in pickle.loads(content)["entries"])
        if num_over >= _NUM_OVER and len(list(folder.glob("in_call_*"))) == WORLD:
            break
    folder.joinpath(f"trace_rank_{rank}").write_bytes(content)
    folder.joinpath(f"trace_rank_{rank}.json").write_text(json.dumps(json.loads(c10d._dump_fr_trace_json())))
    del work
