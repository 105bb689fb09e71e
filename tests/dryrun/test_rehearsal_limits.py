"""What a rehearsal refuses because it would not end, what it says meanwhile, and loops that it does not run."""

from typing import Any

import pytest
from plans import build

from threefold.dryrun import rehearse_plan, rehearse_rank
from threefold.dryrun.simulated import recurrences
from threefold.findings import FindingsError

TINY = {
    "target": "threefold", "model": "tiny-qwen3-moe", "cluster.chip": "h100", "cluster.gpus": 4, "layout.pp": 2,
    "layout.ep": 2, "job.global_batch": 16, "job.seq_len": 128,
}  # fmt: skip


LONG = {"model": "qwen3-30b-a3b", "layout.ep": 1, "job.seq_len": 2**30}
MANY = {"job.global_batch": 2**20}


@pytest.mark.parametrize(
    ("fields", "at", "size"), [(LONG, "job.seq_len", "1,073,741,824"), (MANY, "job.global_batch", "524,288")]
)
def test_what_cannot_end_is_refused_with_its_size(fields: dict[str, Any], at: str, size: str) -> None:
    with pytest.raises(FindingsError) as caught:
        rehearse_plan.rehearse(build({**TINY, **fields}))
    (finding,) = caught.value.findings
    assert (finding.rule, finding.at) == ("rehearsal-ends", at)
    assert size in finding.problem


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_rehearsal_says_where_it_is(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse_rank, "SAY_SECONDS", 0.0)
    lines: list[str] = []
    rehearse_plan.rehearse(build(TINY), say=lines.append, jobs=jobs)
    assert any("backward of microbatch" in line and line.startswith("rank 2") for line in lines)
    assert sum("2 of 2 rehearsed" in line for line in lines) == 1


CHUNKS = {
    "target": "threefold", "cluster.chip": "h100", "cluster.gpus": 8, "job.global_batch": 16, "job.seq_len": 2048,
    "job.mtp": 0, "layout.ep": 8, "model.vocab": 4096, "model.num_experts": 16, "knobs.recompute": ["moe"],
}  # fmt: skip
DELTA = {**CHUNKS, "model": "qwen3-next-80b-a3b", "model.num_layers": 2}
MAMBA = {**CHUNKS, "model": "nemotron-3-nano", "model.num_layers": 3}
CASES = {
    "delta": DELTA,
    "delta over ranks": {**DELTA, "layout.cp": 2},
    "recomputed delta": {**DELTA, "knobs.recompute": ["core_attn", "moe"]},
    "mamba": MAMBA,
    "mamba over ranks": {**MAMBA, "layout.cp": 2},
    "recomputed mamba": {**MAMBA, "knobs.recompute": ["core_attn", "moe"]},
}


@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_at_once_takes_the_memory_of_its_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops free what they saved from chunk to chunk while gradients grow, which is a part of one layer's."""
    plan, seen = build(CASES[name]), []
    for fewest in (1, 10**9):
        monkeypatch.setattr(recurrences, "MIN_CHUNKS", fewest)
        seen.append(rehearse_rank.rehearse_rank(plan))
    once, loop = seen
    assert once.peak_bytes == pytest.approx(loop.peak_bytes, rel=0.01)
    assert once.at == loop.at
    assert once.collectives == loop.collectives
