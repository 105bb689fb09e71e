"""Trials in processes that stay alive: results, failures, and a new start after them."""

from pathlib import Path

import pytest

from threefold.launch.plan_session import PlanSession

TINY = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 1,
    "target": "threefold",
    "cluster.chip": "cpu",
    "job.data": "synthetic",
    "job.seq_len": 16,
    "job.global_batch": 2,
    "knobs.precision": "fp32",
    "knobs.recompute": ["layernorm"],
}
LIMIT_SECONDS = 240.0


def test_trials_of_one_session(tmp_path: Path) -> None:
    session = PlanSession(tmp_path, 1, {})
    window = {"warmup": 3, "steps": 2}
    try:
        first = session.measure(TINY, window, LIMIT_SECONDS)
        broken = session.measure({**TINY, "job.data": "no-such-folder"}, window, LIMIT_SECONDS)
        last = session.measure({**TINY, "job.micro_batch": 2}, {**window, "trace": str(tmp_path)}, LIMIT_SECONDS)
    finally:
        session.close()
    assert "no-such-folder" in broken["error"]
    assert len(first["steps"]) == 2
    assert len(first["losses"]) == 5
    # Another order of sums in fp32.
    assert first["losses"] == pytest.approx(last["losses"], rel=1e-4)
    assert first["work"]["useful_tokens"] == last["work"]["useful_tokens"] == 32
    assert {one["knob"]: one["took_effect"] for one in first["effects"]}["recompute.layernorm"]
    assert (tmp_path / "profile" / "rank-0.json.gz").exists()


def test_two_ranks_measure_together(tmp_path: Path) -> None:
    session = PlanSession(tmp_path, 2, {})
    try:
        found = [
            session.measure({**TINY, "cluster.gpus": 2, "layout.ep": ep}, {"warmup": 3, "steps": 2}, LIMIT_SECONDS)
            for ep in (1, 2)
        ]
    finally:
        session.close()
    assert all(len(each["steps"]) == 2 for each in found), found
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-4)


@pytest.mark.slow
def test_speeds_of_two_ranks_have_their_exchanges(tmp_path: Path) -> None:
    with PlanSession(tmp_path, 2, {}) as session:
        found = session.speeds({**TINY, "cluster.gpus": 2, "layout.ep": 2}, LIMIT_SECONDS)
    assert all(speed.rate > 0 for speed in found)
    assert {"gemm fp32", "attention", "copy", "launch", "all-to-all ep", "all-reduce dp"} <= {one.what for one in found}


FAKE = """import json, os, signal, sys, time
done = 0
while True:
    lines = open(sys.argv[1]).read().splitlines()
    for line in lines[done:]:
        name = json.loads(line)["fields"]["name"]
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hangs":
            time.sleep(600)
        if name == "full":
            print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr)
            sys.exit(1)
        print(json.dumps({"steps": [1.0]}), file=open(sys.argv[2], "a"), flush=True)
    done = len(lines)
    time.sleep(0.01)
"""


def test_a_death_or_a_hang_is_a_result_and_the_next_trial_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    session = PlanSession(tmp_path / "work", 1, {}, module=[str(script)])
    names = ("good", "killed", "full", "hangs", "last")
    try:
        found = [session.measure({"name": name}, {}, 5.0).get("error") for name in names]
    finally:
        session.close()
    assert found == [None, "rank 0 was killed by SIGKILL", "out of memory", "no result within 5 s", None]
