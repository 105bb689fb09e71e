"""Tests of `run.cores`: sets for all ranks or for each, cores near a rank's GPU, and what is refused."""

import os
from pathlib import Path

import pytest

from threefold.findings import FindingsError
from threefold.launch import cpu_cores as cpu_affinity
from threefold.launch.cpu_cores import auto_core_sets, core_sets, pin_to_cores, visible_gpus

# Two sockets of eight physical cores with two hardware threads each: core n and n + 16 are one.
NEAR = {"0000:1b:00.0": "0-7,16-23", "0000:43:00.0": "0-7,16-23", "0000:9d:00.0": "8-15,24-31", "0000:c3:00.0": ""}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 32 cores and four GPUs, the last of which does not say what it is near to."""
    for core in range(32):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 16},{core % 16 + 16}\n")
    rows = []
    for number, (address, near) in enumerate(NEAR.items()):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(near + "\n")
        rows.append(f"{number}, GPU-{number}abc, 0000{address.upper()}")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(rows) + "\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    return tmp_path / "sys"


def test_written_sets() -> None:
    assert core_sets("0-2,5", 4) == [{0, 1, 2, 5}]
    assert core_sets("0-1;2,3", 2) == [{0, 1}, {2, 3}]


@pytest.mark.parametrize("cores", ["a", "1-", "3-1", "0,,1", "0;;1", "", "0-1;2-3", "-1"])
def test_bad_values_are_one_finding(cores: str) -> None:
    with pytest.raises(FindingsError) as caught:
        pin_to_cores(cores, 0, 3)
    assert [finding.rule for finding in caught.value.findings] == ["cores-exist"]


def test_cores_that_are_not_there_are_one_finding() -> None:
    before = os.sched_getaffinity(0)
    try:
        for cores in ("100000", f"{min(before)},100000"):
            with pytest.raises(FindingsError, match="cores-exist"):
                pin_to_cores(cores)
    finally:
        os.sched_setaffinity(0, before)


def test_each_local_rank_stays_on_its_own_set() -> None:
    before = os.sched_getaffinity(0)
    first, last = min(before), max(before)
    try:
        assert pin_to_cores(f"{first};{last}", 1, 2) == os.sched_getaffinity(0) == {last}
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_get_cores_of_their_gpus_numa_node(machine: Path) -> None:
    """The first two GPUs share a socket, and each rank gets whole physical cores of it."""
    first, second, third = auto_core_sets(3, on_gpu=True, sysfs=machine)
    assert first == {0, 1, 2, 3, 16, 17, 18, 19}
    assert second == {4, 5, 6, 7, 20, 21, 22, 23}
    assert third == {*range(8, 16), *range(24, 32)}


def test_a_gpu_that_is_near_to_nothing_leaves_its_rank_everywhere(machine: Path) -> None:
    assert auto_core_sets(4, on_gpu=True, sysfs=machine)[3] == set(range(32))


def test_only_visible_gpus_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0")
    assert visible_gpus() == ["0000:9d:00.0", "0000:1b:00.0"]
    sets = auto_core_sets(2, on_gpu=True, sysfs=machine)
    assert sets == [{*range(8, 16), *range(24, 32)}, {*range(8), *range(16, 24)}]


def test_a_task_that_sees_its_own_gpu_only_takes_its_node(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(cpu_affinity, "SYSFS", machine)
    assert auto_core_sets(4, on_gpu=True, sysfs=machine) == [{*range(8, 16), *range(24, 32)}]


def test_without_gpus_ranks_divide_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = auto_core_sets(4, on_gpu=False, sysfs=machine)
    assert [len(cores) for cores in sets] == [8] * 4
    assert set().union(*sets) == set(range(32))
    assert sets[0] == {0, 1, 2, 3, 16, 17, 18, 19}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
    assert auto_core_sets(3, on_gpu=False, sysfs=machine) == [{4}, {5}, {4}]
