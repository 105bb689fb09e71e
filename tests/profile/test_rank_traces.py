"""Traces of several ranks with known answers: a late rank, wrong clocks, missing ranks; and real ranks over gloo."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from traces import GEMM, NCCL, Event, NsightExport, annotation, kernel, write_trace

from threefold.layout.degrees import Layout
from threefold.profile.analyze import profile_traces
from threefold.profile.ranks.fingerprints import missing
from threefold.profile.ranks.job import JobTrace

STEP, TRANSFER, LATE = 1000.0, 100.0, 150.0  # microseconds: of a step, of a collective, that the late rank comes later
NUM_STEPS, WORLD = 4, 4
EPOCH = 1_800_000_000_000_000_000


def rank_events(rank: int, late: int | None, own: float = 400.0) -> list[Event]:
    """Steps of one rank: compute, then a collective that everybody leaves together, then an exchange nobody is late to.

    The late rank computes longer, enters last and spends the transfer alone; the others wait for it.
    """
    events = []
    for number in range(NUM_STEPS):
        at = STEP * number
        work = own + (LATE if rank == late else 0.0)
        left = own + (LATE if late is not None else 0.0) + TRANSFER
        events += [annotation(f"ProfilerStep#{number + 3}", at, STEP), kernel(GEMM, at, work)]
        said = {"stream": 20, "group": "5", "ranks": str(list(range(WORLD)))}
        events.append(kernel(NCCL, at + work, left - work, operation="allreduce", **said))
        events.append(kernel(NCCL, at + left, TRANSFER, operation="all_to_all", **said))
        events.append(kernel(GEMM, at + left + TRANSFER, 100))
    return events


def moved(events: Sequence[Event], by: float, drift: float = 0.0) -> list[Event]:
    """The same events by another clock."""
    return [{**event, "ts": event["ts"] * (1 + drift) + by} for event in events]


def write_ranks(
    folder: Path, late: int | None = 2, ranks: Sequence[int] = range(WORLD), clocks: Sequence[float] = (0, 0, 0, 0)
) -> Path:
    for rank in ranks:
        info = {"rank": rank, "world_size": WORLD, "backend": "nccl"}
        events = moved(rank_events(rank, late), clocks[rank])
        write_trace(folder / f"r{rank}.json", events, distributedInfo=info, baseTimeNanoseconds=EPOCH)
    return folder


def job_of(folder: Path, **options: Any) -> JobTrace:
    return profile_traces([folder], **options).job


def test_transfer_and_wait_add_up_to_the_collectives(tmp_path: Path) -> None:
    """Three ranks spend 250 us in the collective, of which 150 are waiting; the late one spends 100."""
    job = job_of(write_ranks(tmp_path))
    reduce = next(one for one in job.jitter if one.kind == "allreduce")
    assert (reduce.num_matched, reduce.num_unmatched, reduce.is_complete) == (NUM_STEPS, 0, True)
    assert reduce.transfer_seconds == pytest.approx(TRANSFER * 1e-6, rel=1e-3)
    waits = {name: pytest.approx(LATE * 1e-6, rel=1e-3) for name in ("rank 0", "rank 1", "rank 3")}
    assert reduce.wait_seconds == {**waits, "rank 2": 0.0}
    assert (reduce.late_rank, reduce.start_skew_seconds) == ("rank 2", pytest.approx(LATE * 1e-6, rel=1e-3))
    exchange = next(one for one in job.jitter if one.kind == "alltoall")
    assert exchange.late_rank is None
    assert exchange.transfer_seconds == pytest.approx(TRANSFER * 1e-6, rel=1e-3)
    assert max(exchange.wait_seconds.values()) == pytest.approx(0, abs=1e-9)
    assert ("rank 2 is late in allreduce of unknown", "trace-verified") in [
        (one.text, one.status) for one in job.claims()
    ]


def test_nobody_is_late_where_all_come_together(tmp_path: Path) -> None:
    assert [one.late_rank for one in job_of(write_ranks(tmp_path, late=None)).jitter] == [None, None]


def test_clocks_that_differ_are_joined_by_ends(tmp_path: Path) -> None:
    """Clocks are wrong by up to 40 ms, forty times the step, and the answer is the same."""
    job = job_of(write_ranks(tmp_path, clocks=(0, 40_000, -7_000, 3_000)))
    reference = next(clock for clock in job.clocks if clock.source == "reference")
    skews = [clock.skew for clock in job.clocks]
    base = job.clocks.index(reference)
    wrong = (0, 40e-3, -7e-3, 3e-3)
    assert skews == [pytest.approx(wrong[base] - one, abs=1e-8) for one in wrong]
    assert job.residual == pytest.approx(0, abs=1e-9)
    reduce = next(one for one in job.jitter if one.kind == "allreduce")
    assert (reduce.late_rank, reduce.start_skew_seconds) == ("rank 2", pytest.approx(LATE * 1e-6, rel=1e-3))


def test_a_clock_that_drifts(tmp_path: Path) -> None:
    """Thirty collectives over three seconds, one clock 50 parts in a million fast: the fit leaves no residual."""
    for rank, drift in ((0, 0.0), (1, 50e-6)):
        said = {"stream": 20, "ranks": "[0, 1]", "operation": "allreduce", "group": "1"}
        events = [kernel(NCCL, 100_000 * number, 50, **said) for number in range(30)]
        events += [kernel(GEMM, 100_000 * number + 60, 50) for number in range(30)]
        info = {"rank": rank, "world_size": 2}
        write_trace(tmp_path / f"r{rank}.json", moved(events, 0, drift), distributedInfo=info)
    job = job_of(tmp_path)
    moving = next(clock for clock in job.clocks if clock.source == "collectives")
    assert abs(moving.drift) == pytest.approx(50e-6, rel=1e-2)
    assert job.residual == pytest.approx(0, abs=1e-7)


def test_an_instance_that_one_rank_lacks_spoils_its_step_alone(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    info = {"rank": 1, "world_size": WORLD}
    events = rank_events(1, 2)
    first = next(event for event in events if event["args"].get("Collective name") == "allreduce")
    events.remove(first)
    write_trace(tmp_path / "r1.json", events, distributedInfo=info, baseTimeNanoseconds=EPOCH)
    reduce = next(one for one in job_of(tmp_path).jitter if one.kind == "allreduce")
    assert (reduce.num_matched, reduce.num_unmatched, reduce.late_rank) == (3, 3, "rank 2")
    assert reduce.transfer_seconds * NUM_STEPS / 3 == pytest.approx(TRANSFER * 1e-6, rel=1e-3)


def test_ranks_without_a_trace_stay_open(tmp_path: Path) -> None:
    """One of two sampled ranks is late against the other; the two missing ones may be later still."""
    job = job_of(write_ranks(tmp_path, ranks=(0, 2)))
    assert job.missing == ["unknown ranks 1, 3: whether one of them is late stays open"]
    status = {one.text: one.status for one in job.claims()}
    assert status["rank 2 is late in allreduce of unknown"] == "inferred"
    assert status["rank 2 is the slowest rank of the job"] == "unverified"


def test_the_slowest_rank_is_first_and_every_fingerprint_has_one(tmp_path: Path) -> None:
    """Ranks 0 to 2 are alike; rank 3 spends its step idle, and has no exchange."""
    write_ranks(tmp_path, late=1, ranks=(0, 1, 2))
    events = [annotation(f"ProfilerStep#{number + 3}", STEP * number, STEP) for number in range(NUM_STEPS)]
    events += [kernel(GEMM, STEP * number, 30) for number in range(NUM_STEPS)]
    write_trace(tmp_path / "r3.json", events, distributedInfo={"rank": 3, "world_size": WORLD})
    job = job_of(tmp_path)
    assert job.slowest.name == "rank 3"  # 970 us of it are its own
    assert len(job.order) == len(job.classes)
    assert [3] in [[job.ranks[number].rank for number in members] for members in job.classes]


def test_a_stage_without_a_trace_is_missing(tmp_path: Path) -> None:
    job = job_of(write_ranks(tmp_path, ranks=(0, 1)))
    said = missing(job.ranks, [], Layout(pp=2, gpus=WORLD))
    assert said[0] == "one rank of stage 1: their share of the step is unknown"


def test_several_gpus_of_one_export_are_matched_by_order(tmp_path: Path) -> None:
    """No rank is stated: kernels of equal number are matched, and the claim says so."""
    export = NsightExport(tmp_path / "a.sqlite")
    for device in range(2):
        for number in range(8):
            at = 1_000_000 * number
            late = 200_000 * device
            export.kernel(GEMM, at, at + 300_000 + late, device=device, pid=20 + device)
            name = "ncclDevKernel_AllGather_RING_LL"
            export.kernel(name, at + 300_000 + late, at + 600_000, stream=20, device=device, pid=20 + device)
    job = profile_traces([export.close()]).job
    [gather] = job.jitter
    assert (gather.num_matched, gather.is_stated) == (7, False)
    assert gather.late_rank == "a.sqlite gpu 1 of process 21"
    assert gather.transfer_seconds == pytest.approx(100e-6, rel=1e-3)
    assert "no trace says which rank it is" in job.missing[0]


def test_diagnose_names_the_late_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ranks(tmp_path)
    code, out, _ = run("diagnose", *map(str, sorted(tmp_path.iterdir())), capsys=capsys)
    assert code == 0
    assert "rank 2 is late in allreduce of unknown, 4 matched: others wait up to 0.15 ms a step for it" in out


def record(rank: int, folder: str) -> None:
    """Steps of real ranks over gloo: rank 1 sleeps 10 ms before every collective."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    x = torch.randn(64, 64)
    dist.all_reduce(x)  # connects
    with profile(activities=[ProfilerActivity.CPU]) as kept:
        for number in range(6):
            with record_function(f"ProfilerStep#{number}"):
                x = torch.softmax(x @ x, -1)
                time.sleep(0.01 * rank)
                dist.all_reduce(x)
    kept.export_chrome_trace(f"{folder}/rank-{rank}.json")


def test_a_late_rank_over_gloo(tmp_path: Path) -> None:
    """The other rank waits 10 ms a step for it, and the clocks of one host agree within the residual or 1 ms."""
    pytest.importorskip("torch")
    from threefold.engine.verify.forked_ranks import run_ranks

    run_ranks(2, record, str(tmp_path))
    job = job_of(tmp_path)
    [reduce] = job.jitter
    assert reduce.is_complete
    assert reduce.late_rank == "rank 1"
    assert reduce.wait_seconds["rank 0"] > 0.008
    assert reduce.wait_seconds["rank 1"] < 0.002
    assert all(clock.skew is not None and abs(clock.skew) < 1e-3 for clock in job.clocks)
    for rank in job.ranks:
        assert all(budget.disorder() == [] for budget in rank.steps.budgets)
