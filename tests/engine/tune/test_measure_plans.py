"""Steps measured in processes of their own: results, failures and hangs."""

from pathlib import Path
from typing import Any

import pytest

from threefold.engine.tune import measure_plans as module
from threefold.engine.tune.measure_plans import Measuring, measure_plans

TINY = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 1,
    "target": "threefold",
    "cluster.chip": "cpu",
    "cluster.gpus": 1,
    "job.data": "synthetic",
    "job.seq_len": 16,
    "job.global_batch": 2,
    "knobs.precision": "fp32",
}
HOW = Measuring(steps=2, warmup=1, seconds=60.0, limit_seconds=240.0)


def test_steps_of_plans_and_what_cannot_be_built(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    plans = {"first": TINY, "broken": {**TINY, "job.data": "no-such-folder"}, "last": {**TINY, "job.micro_batch": 2}}
    found = measure_plans(plans, 1, HOW, tmp_path, seen.append)
    assert found == seen
    assert [result["plan"] for result in found] == ["first", "broken", "last"]
    assert "no-such-folder" in found[1]["error"]
    for result in (found[0], found[2]):
        assert result["seconds"] > 0
        assert len(result["steps"]) == 2
        assert len(result["losses"]) == 3


def test_two_ranks_measure_together(tmp_path: Path) -> None:
    fields = {**TINY, "cluster.gpus": 2, "layout.ep": 2}
    (result,) = measure_plans({"ep": fields}, 2, HOW, tmp_path)
    assert result["seconds"] > 0, result


FAKE = """import json, os, signal, sys, time
job = json.load(open(sys.argv[1]))
for name in job["plans"]:
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(600)
    if name == "full":
        print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"plan": name, "seconds": 1.0}), file=open(sys.argv[2], "a"), flush=True)
"""


def test_a_death_or_a_hang_is_a_result_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(module, "RANK_MODULE", [str(script)])
    names = ("good", "killed", "full", "hangs", "last")
    found = measure_plans(dict.fromkeys(names, TINY), 1, Measuring(1, 1, 1.0, 5.0), tmp_path / "work")
    assert {result["plan"]: result.get("error") for result in found} == {
        "good": None,
        "killed": "rank 0 was killed by SIGKILL",
        "full": "out of memory",
        "hangs": "no result within 5 s",
        "last": None,
    }


def test_time_that_is_over_ends_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(module, "RANK_MODULE", [str(script)])
    how = Measuring(1, 1, 1.0, 300.0, total_seconds=0.0)
    assert measure_plans({"good": TINY}, 1, how, tmp_path / "work") == []
