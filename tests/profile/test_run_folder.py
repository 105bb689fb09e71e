"""Run folders: traces of ranks, the run's own plan, steps, peak memory and expert loads."""

import json
import pickle
from pathlib import Path

import pytest
from repository import ROOT
from traces import GEMM, NCCL, annotation, kernel, write_trace

from threefold.findings import FindingsError
from threefold.profile.analyze import profile_traces

RECIPE = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"


def run_folder(folder: Path, own_microseconds: tuple[float, ...] = (100, 100)) -> Path:
    """A folder as `threefold train --profile` leaves it, one trace a rank; all wait for each other until 200 us."""
    (folder / "profile").mkdir(parents=True)
    (folder / "plan.toml").write_bytes(RECIPE.read_bytes())
    for rank, own in enumerate(own_microseconds):
        events = [kernel(GEMM, 0, own), kernel(NCCL, own, 200 - own, stream=20, operation="all_to_all")]
        write_trace(folder / "profile" / f"rank-{rank}.json.gz", events)
    lines = [
        {"step": step, "loss": 1.0, "seconds": 2.0 + step / 10, "memory_bytes": step * 1000} for step in range(1, 12)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "secon'
    (folder / "metrics.jsonl").write_text(text)
    (folder / "loads.json").write_text(json.dumps([[1] * 128, [5] + [1] * 127]))
    return folder


def test_the_run_is_read_with_its_own_plan(tmp_path: Path) -> None:
    found = profile_traces([run_folder(tmp_path)])
    assert found.plan is not None
    assert found.plan.model_name == "qwen3-30b-a3b"
    assert [device.rank for device in found.devices] == [0, 1]
    assert found.log.num_steps == 11
    assert found.log.step_seconds == pytest.approx(2.9)  # the median of steps 6 to 11
    assert found.log.peak_bytes == 11_000
    assert found.advice


def test_expert_imbalance_of_the_worst_layer(tmp_path: Path) -> None:
    """One expert of 128 has 5 of 132 tokens; with 16 expert ranks the busiest has 12 of 132, the mean is 8.25."""
    found = profile_traces([run_folder(tmp_path)])
    assert found.plan is not None
    assert found.plan.layout.ep == 16
    assert found.to_json()["walls"]["compute"]["expert_imbalance"] == pytest.approx(12 / 8.25)


def test_slow_ranks_are_named(tmp_path: Path) -> None:
    """Rank 2 computes longer, and the others wait for it in the exchange."""
    found = profile_traces([run_folder(tmp_path, (100, 102, 150, 98))])
    (slow,) = found.slow_ranks
    assert slow.device.startswith("rank 2")
    assert slow.over_median == pytest.approx(150 / 101)
    said = found.to_json()["walls"]["communication"]["stragglers"]
    assert [one["device"] for one in said] == [slow.device]


@pytest.mark.parametrize(("step", "is_slow"), [(15e3, False), (150e3, True)])
def test_short_steps_prove_nothing_about_slow_ranks(step: float, is_slow: bool, tmp_path: Path) -> None:
    """Rank 1 works half as long again as rank 0: noise of a host where a step takes 15 ms."""
    for rank, own in enumerate((0.5, 0.75)):
        events = [annotation("threefold.step", 0, step), kernel(GEMM, 0, own * step)]
        events.append(kernel(NCCL, own * step, (1 - own) * step, stream=20, operation="all_to_all"))
        write_trace(tmp_path / f"rank-{rank}.json", events)
    found = profile_traces([tmp_path])
    assert bool(found.slow_ranks) == is_slow
    assert (found.advice[0].remedy.name == "slow-rank") == is_slow


def test_a_router_that_collapsed_comes_first(tmp_path: Path) -> None:
    """127 tokens choose 8 of 128 experts each: one expert is chosen by all, and the others evenly; then all evenly."""
    for number, (busiest, has_collapsed) in enumerate([(127, True), (7, False)]):
        folder = run_folder(tmp_path / str(number))
        (folder / "loads.json").write_text(json.dumps([[busiest] + [7] * 127]))
        assert (profile_traces([folder]).advice[0].remedy.name == "balance-router") == has_collapsed


def test_memory_snapshots_are_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (tmp_path.joinpath("sprung").touch, ())

    folder = run_folder(tmp_path / "run")
    for name in ("memory-0.pickle", "memory-0.json.gz"):
        (folder / "profile" / name).write_bytes(pickle.dumps(Trap()))
    assert len(profile_traces([folder]).devices) == 2
    assert not (tmp_path / "sprung").exists()


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    outside = write_trace(tmp_path / "outside.json", [kernel(GEMM, 0, 10)])
    (folder / "profile" / "rank-9.json").symlink_to(outside)
    with pytest.raises(FindingsError, match="link out of"):
        profile_traces([folder])


def test_a_run_without_traces_says_how_to_record_one(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(RECIPE.read_bytes())
    (tmp_path / "contract.json").write_text("{}")
    (tmp_path / "loads.json").write_text("[]")
    (tmp_path / "effects.json").write_text("{}")
    (tmp_path / "base.json").write_text("{}")  # these two beside a checkpoint that was finetuned
    (tmp_path / "hf_config.json").write_text("{}")
    with pytest.raises(FindingsError, match="threefold train PLAN --profile"):
        profile_traces([tmp_path])


def test_damaged_logs_leave_the_trace_readable(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "plan.toml").write_text("model = ")
    (folder / "metrics.jsonl").write_bytes(b'\xff\n[1]\n{"seconds": "x", "memory_bytes": -1}\n' + b"[" * 50_000)
    (folder / "loads.json").write_text('[[1, "x"], [], 3]')
    found = profile_traces([folder])
    assert found.plan is None
    assert (found.log.step_seconds, found.log.peak_bytes, found.log.expert_imbalance) == (None, None, None)


def test_a_folder_of_traces_alone(tmp_path: Path) -> None:
    for rank in (10, 2):
        write_trace(tmp_path / f"rank{rank}.json", [kernel(GEMM, 0, 10)])
    assert [device.rank for device in profile_traces([tmp_path]).devices] == [2, 10]
