"""Checkpoints of many ranks when something goes wrong: all ranks know the same, none waits, and nothing is lost."""

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import FindingsError
from threefold.units import KIB

ROWS = 6 * 1024  # a file of three ranks has 2,048 of them, 64 KiB of fp32
State = dict[str, Tensor | CheckpointShard]


def checkpoints(rank: int, world: int, folder: Path, keep: int = 9) -> Checkpoints:
    return Checkpoints(folder, keep, Group("checkpoint", tuple(range(world)), rank, dist.new_group(backend="gloo")))


def rows(rank: int, world: int) -> Placement:
    step = ROWS // world
    return Placement((ROWS, 8), (((rank * step, (rank + 1) * step),), ((0, 8),)), ())


def state(rank: int, world: int, step: int) -> State:
    return {"model.weight": CheckpointShard(rows(rank, world), torch.full((ROWS // world, 8), float(step)))}


def save(saved: Checkpoints, rank: int, world: int, step: int) -> None:
    saved.save(step, state(rank, world, step), {"step": step}, wait=True)


def told_by(act: Callable[[], object]) -> list[str]:
    with pytest.raises(FindingsError) as caught:
        act()
    return [f"{finding.rule} {finding.at} {finding.problem}" for finding in caught.value.findings]


def loaded(saved: Checkpoints, rank: int, world: int, said: list[str]) -> int:
    """The step that was loaded: every element has its number."""
    want = state(rank, world, -1)
    facts = saved.load_latest(said.append, want)
    assert facts is not None
    shard = want["model.weight"]
    assert isinstance(shard, CheckpointShard)
    assert bool((shard.memory == facts["step"]).all())
    return int(facts["step"])


# One rank that cannot write


def one_rank_fails(rank: int, folder: Path) -> list[str]:
    saved = checkpoints(rank, 3, folder)
    save(saved, rank, 3, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 * KIB, before[1]))
    told = told_by(lambda: save(saved, rank, 3, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert loaded(saved, rank, 3, []) == 1
    save(saved, rank, 3, 2)  # the same objects go on
    assert loaded(saved, rank, 3, []) == 2
    return told


def test_a_rank_that_cannot_write_fails_all_with_one_finding(tmp_path: Path) -> None:
    told = run_ranks(3, one_rank_fails, tmp_path)
    assert told[0] == told[1] == told[2]
    [line] = told[0]
    assert line.startswith(f"checkpoint-writable {tmp_path} ")
    assert "could not be written: rank 1: " in line
    assert os.strerror(errno.EFBIG) in line


def mistakes(rank: int, folder: Path) -> list[str]:
    """Each is made by one rank, or seen by one."""
    saved = checkpoints(rank, 3, folder)
    mine = state(rank, 3, 1)
    save(saved, rank, 3, 1)
    twice = {**mine, "optimizer.steps": torch.tensor(1)} if rank else mine
    lost = {} if rank == 2 else mine
    other = (
        {"model.weight": CheckpointShard(rows(2, 3), torch.zeros(ROWS // 3, 8, dtype=torch.float64))}
        if rank == 2
        else mine
    )
    gone = {"model.weight": torch.empty(3, device="meta")} if rank == 1 else mine
    told = [
        *told_by(lambda: saved.save(2, twice, {}, wait=True)),
        *told_by(lambda: saved.save(2, lost, {}, wait=True)),
        *told_by(lambda: saved.save(2, other, {}, wait=True)),
        *told_by(lambda: saved.save(2, gone, {}, wait=True)),
        *told_by(lambda: saved.save(2, mine, {"step": object()} if rank == 0 else {}, wait=True)),
    ]
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert loaded(saved, rank, 3, []) == 1
    assert threading.active_count() == 1
    return told


def test_mistakes_of_one_rank_are_told_by_all(tmp_path: Path) -> None:
    told = run_ranks(3, mistakes, tmp_path)
    assert told[0] == told[1] == told[2]
    twice, lost, other, gone, facts = told[0]
    assert "optimizer.steps at torch.Size([]) is saved by ranks 1 and 2" in twice
    assert "model.weight" in lost
    assert "model.weight has another shape or dtype on rank 2 than on rank 0" in other
    assert "could not be written: rank 1: " in gone
    assert "meta" in gone
    assert "rank 0: " in facts
    assert "JSON" in facts


# Loading


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def a_bit_flips(rank: int, folder: Path) -> tuple[list[str], list[str], list[str]]:
    saved = checkpoints(rank, 3, folder)
    for step in (1, 2, 3):
        save(saved, rank, 3, step)
    if rank == 0:
        flip(saved.path(3) / "__2_0.distcp")
        flip(saved.path(2) / ".metadata")
    dist.barrier()
    said: list[str] = []
    assert loaded(saved, rank, 3, said) == 1
    misfit = {"model.weight": torch.zeros(5)} if rank == 1 else {}
    more = {"model.bias": torch.zeros(5)} if rank == 2 else {}
    told = told_by(lambda: saved.load_latest(print, misfit)) + told_by(lambda: saved.load_latest(print, more))
    if rank == 0:
        flip(saved.path(1) / "__0_0.distcp")
    dist.barrier()
    return said, told, told_by(lambda: saved.load_latest(print, {}))


def test_damaged_checkpoints_are_passed_over_by_all(tmp_path: Path) -> None:
    found = run_ranks(3, a_bit_flips, tmp_path)
    assert found[0] == found[1] == found[2]
    said, misfits, damaged = found[0]
    assert ["__2_0.distcp is damaged" in said[0], ".metadata is damaged" in said[1], len(said)] == [True, True, 2]
    assert "checkpoint-fits" in misfits[0]
    assert f"has [{ROWS}, 8] for model.weight, of shape [5] here" in misfits[0]
    assert "lacks model.bias" in misfits[1]
    assert [line.split()[0] for line in damaged] == ["checkpoint-whole"] * 3


def nothing_saved(rank: int, folder: Path) -> Any:
    return checkpoints(rank, 2, folder).load_latest(print, {})


def test_no_checkpoint_is_none_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, nothing_saved, tmp_path) == [None, None]


# Retention and background


def saves_go_on(rank: int, folder: Path) -> list[int]:
    """Steps communicate on their own group while a save is under way."""
    saved = checkpoints(rank, 3, folder, keep=2)
    for step in (1, 2, 3, 4):
        saved.save(step, state(rank, 3, step), {"step": step})
        for _ in range(20):
            dist.all_reduce(torch.ones(8))
    saved.finish()
    dist.barrier()
    return saved.steps()


def test_saves_in_the_background_keep_the_newest(tmp_path: Path) -> None:
    assert run_ranks(3, saves_go_on, tmp_path) == [[3, 4]] * 3


# kill -9


def killed_while_writing(rank: int, folder: Path, victim: int, where: str) -> None:
    saved = checkpoints(rank, 2, folder)
    save(saved, rank, 2, 1)
    if rank == victim:

        def die(*args: Any, **more: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "data":
            torch.save = die  # the file is open and empty
        else:
            Path.rename = die  # type: ignore[assignment, method-assign]  # all is written
    save(saved, rank, 2, 2)


def goes_on(rank: int, folder: Path) -> list[int]:
    saved = checkpoints(rank, 3, folder)
    found = [loaded(saved, rank, 3, [])]
    saved.remove_partial()
    save(saved, rank, 3, 2)
    return [*found, loaded(saved, rank, 3, []), *saved.steps()]


@pytest.mark.parametrize(("victim", "where"), [(1, "data"), (0, "data"), (0, "rename")])
def test_a_kill_during_a_save_leaves_the_one_before(victim: int, where: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"rank {victim} failed"):
        run_ranks(2, killed_while_writing, tmp_path, victim, where)
    assert Checkpoints(tmp_path, 9).steps() == [1]
    assert run_ranks(3, goes_on, tmp_path) == [[1, 2, 1, 2]] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_rank_lost_during_a_save_is_no_finding(tmp_path: Path) -> None:
    """A finding would end the run for good; a lost rank makes all of them start again."""
    saved = Checkpoints(tmp_path, 2)
    saved._failure = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40879")
    with pytest.raises(RuntimeError, match="closed by peer"):
        saved.finish()
    saved._failure = RuntimeError("No space left on device")
    with pytest.raises(FindingsError, match="checkpoint-writable"):
        saved.finish()
