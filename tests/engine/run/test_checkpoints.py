"""Checkpoints: complete or absent, reported when damaged, and nothing lost when a save fails."""

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_plan
from torch import Tensor

from threefold.engine.build import build
from threefold.engine.dist.join import join
from threefold.engine.run.checkpoints import MANIFEST, Checkpoints, read_checkpoint, write_checkpoint
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train import train
from threefold.engine.train_state import TrainState
from threefold.findings import Finding, FindingsError
from threefold.units import KIB, MIB

FACTS = {"step": 1, "bad_steps": 0, "loader": {"step": 1, "sample": 4, "fingerprint": "f"}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state(seed: float) -> dict[str, Tensor]:
    """Every dtype a run saves, and the shapes that are easy to get wrong."""
    return {
        "model.weight": torch.arange(1000.0).view(20, 50) + seed,
        "model.narrow": torch.full((7, 3), seed, dtype=torch.bfloat16),
        "model.scalar": torch.tensor(seed),
        "model.empty": torch.empty(0, 4),
        "optimizer.steps": torch.tensor(int(seed)),
        "rng.cpu": torch.get_rng_state(),
    }


def filled(folder: Path, steps: list[int], keep: int = 9) -> Checkpoints:
    kept = Checkpoints(folder, keep)
    for step in steps:
        kept.save(step, state(step), {**FACTS, "step": step})
    kept.finish()
    return kept


def check(found: tuple[dict[str, Tensor], dict] | None, step: int) -> None:
    assert found is not None
    tensors, facts = found
    wanted = state(step)
    assert facts == {**FACTS, "step": step}
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def finding_of(action: Callable[[], object]) -> Finding:
    with pytest.raises(FindingsError) as caught:
        action()
    [finding] = caught.value.findings
    assert finding.fix_text
    return finding


# Whole or refused


def test_round_trip(tmp_path: Path) -> None:
    kept = filled(tmp_path, [3])
    check(read_checkpoint(kept.path(3)), 3)
    assert kept.load_latest(print) is not None
    assert Checkpoints(tmp_path / "none", 2).load_latest(print) is None


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damage_to_any_file_is_named_and_the_one_before_is_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    filled(tmp_path / "sound", [1, 2])
    names = [path.name for path in files_of(tmp_path / "sound" / "step-00000002")]
    assert {".metadata", "facts.json", MANIFEST} < set(names)
    for name in names:
        folder = tmp_path / f"damaged {name}"
        shutil.copytree(tmp_path / "sound", folder)
        kept = Checkpoints(folder, 9)
        damage(kept.path(2) / name)
        said: list[str] = []
        check(kept.load_latest(said.append), 1)
        [line] = said
        assert "step-00000002" in line
        assert "manifest" in line if name == MANIFEST else name in line
        finding = finding_of(lambda kept=kept: read_checkpoint(kept.path(2)))
        assert finding.rule == "checkpoint-whole"
        assert finding.at == str(kept.path(2) / name)


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    """The manifest has no other file to vouch for it."""
    kept = filled(tmp_path, [1])
    path = kept.path(1) / MANIFEST
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        for bit in (0, 4, 7):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            assert finding_of(lambda: read_checkpoint(kept.path(1))).rule == "checkpoint-whole"


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1, 2])
    for step in kept.steps():
        cut(kept.path(step) / "facts.json")
    with pytest.raises(FindingsError) as caught:
        kept.load_latest(print)
    assert [finding.rule for finding in caught.value.findings] == ["checkpoint-whole"] * 2
    assert all(f"step-0000000{step}" in str(caught.value) for step in (1, 2))


def test_what_a_killed_save_left_is_never_loaded(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1, 2])
    kept.path(2).rename(tmp_path / "step-00000002.partial")  # killed just before the rename
    assert kept.steps() == [1]
    check(kept.load_latest(print), 1)
    assert (tmp_path / "step-00000002.partial").exists()  # a reader removes nothing: the save may be under way
    kept.remove_partial()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    kept.save(2, state(2), {**FACTS, "step": 2}, wait=True)
    check(kept.load_latest(print), 2)


def test_a_run_sweeps_what_a_killed_save_left(tmp_path: Path) -> None:
    left = tmp_path / CHECKPOINTS / "step-00000001.partial"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    train(tiny_plan({"job.data": "synthetic", "job.steps": 1}), tmp_path, print)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000001"]


# Retention


def test_the_newest_are_kept(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1, 2, 10, 3], keep=2)
    assert kept.steps() == [2, 3, 10]  # a later step is no reason to lose the one just written
    kept.save(11, state(11), FACTS, wait=True)
    assert kept.steps() == [10, 11]


def test_damaged_ones_take_no_place_from_sound_ones(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1, 3], keep=2)
    cut(kept.path(3) / "facts.json")
    kept = Checkpoints(tmp_path, 1)
    check(kept.load_latest(print), 1)
    kept.save(2, state(2), {**FACTS, "step": 2}, wait=True)
    check(kept.load_latest(print), 2)
    kept.save(3, state(3), {**FACTS, "step": 3}, wait=True)  # reached again: the damaged one is replaced
    check(kept.load_latest(print), 3)
    assert kept.steps() == [3]


def test_a_sound_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    """Replacing it would leave a moment without it."""
    kept = filled(tmp_path, [1], keep=1)
    before = [(path, path.stat().st_ino) for path in files_of(tmp_path)]
    kept.save(1, state(1), FACTS, wait=True)
    fresh = Checkpoints(tmp_path, 1)
    fresh.load_latest(print)
    fresh.save(1, state(1), FACTS, wait=True)
    assert [(path, path.stat().st_ino) for path in files_of(tmp_path)] == before


# While training goes on


def test_a_snapshot_is_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 9)
    tensors = {"weight": torch.zeros(MIB), "count": torch.tensor(0)}
    for step in (1, 2, 3):
        for value in tensors.values():
            value.fill_(step)
        kept.save(step, tensors, {"step": step})
        for value in tensors.values():
            value.fill_(-1)
    kept.finish()
    for step in (1, 2, 3):
        found, facts = read_checkpoint(kept.path(step))
        assert facts == {"step": step}
        assert all(bool((value == step).all()) for value in found.values())


# A disk that is full


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("a small disk cannot be mounted here; the file-size limit below stands for it")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def trained_on(folder: Path) -> TrainState:
    plan = tiny_plan({"job.data": "synthetic"})
    return TrainState(plan, folder, build(plan), Checkpoints(folder / CHECKPOINTS, 2), join(plan))


def flat(value: Tensor | CheckpointShard) -> Tensor:
    """On one rank a shard holds every element."""
    return (value.memory if isinstance(value, CheckpointShard) else value).detach().flatten()


def save_fails_and_nothing_is_lost(trainer: TrainState, reason: int) -> None:
    """Behind a first save that fits and one that does not."""
    folder = trainer.checkpoints.folder
    before = {name: flat(value).clone() for name, value in trainer.tensors().items()}
    sound = [(path, path.read_bytes()) for path in files_of(folder)]
    trainer.step += 1
    finding = finding_of(lambda: trainer.save(wait=True))
    assert finding.rule == "checkpoint-writable"
    assert finding.at == str(folder)
    assert os.strerror(reason) in finding.problem
    assert [(path, path.read_bytes()) for path in files_of(folder)] == sound  # no leftovers either
    assert all(torch.equal(flat(value), before[name]) for name, value in trainer.tensors().items())
    found = trainer.checkpoints.load_latest(print)
    assert found is not None
    assert all(torch.equal(flat(value), before[name]) for name, value in found[0].items())


def test_a_full_disk_stops_the_save_and_loses_nothing(tmp_path: Path) -> None:
    size = 6 * MIB  # a checkpoint of this model has some 3.5 MiB
    with small_disk(tmp_path / "disk", size):
        trainer = trained_on(tmp_path / "disk")
        trainer.save(wait=True)
        save_fails_and_nothing_is_lost(trainer, errno.ENOSPC)
        trainer.checkpoints.keep = 1
        shutil.rmtree(trainer.checkpoints.path(0))  # room again: the same trainer goes on saving
        trainer.save(wait=True)
        assert trainer.checkpoints.steps() == [1]


def test_a_file_that_may_not_grow_stops_the_save_and_loses_nothing(tmp_path: Path) -> None:
    trainer = trained_on(tmp_path)
    trainer.save(wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, hard))
        save_fails_and_nothing_is_lost(trainer, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_background_save_is_told_by_the_next_call(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1])
    (tmp_path / "step-00000002.partial").write_text("a file where a folder must be made")
    kept.save(2, state(2), FACTS)
    assert finding_of(lambda: kept.save(3, state(3), FACTS)).rule == "checkpoint-writable"
    (tmp_path / "step-00000002.partial").unlink()
    kept.save(3, state(3), {**FACTS, "step": 3}, wait=True)  # told once
    check(kept.load_latest(print), 3)


def test_manifest_lists_every_file_and_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-00000001", state(1), FACTS)
    manifest = json.loads((tmp_path / "step-00000001" / MANIFEST).read_text(encoding="utf-8"))
    names = {path.name for path in files_of(tmp_path)} - {MANIFEST}
    assert manifest["files"].keys() == names
    assert manifest["tensors"].keys() == state(1).keys()
