"""Attention in blocks of queries: its memory grows with the length, and a rehearsal needs a few of its blocks only."""

from typing import Any

import pytest
from plans import build

from threefold.cost.memory.by_stack import memory
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.engine.attention import query_blocks

SMALL = {
    "target": "threefold", "cluster.chip": "h100", "cluster.gpus": 64, "job.global_batch": 64, "job.mtp": 0,
    "model.num_layers": 2, "model.num_dense_layers": 0, "model.num_experts": 8, "model.vocab": 4096, "layout.ep": 8,
    "knobs.recompute": ["moe", "layernorm"],
}  # fmt: skip
WIDE = {**SMALL, "model": "gemma-4-26b-a4b", "model.num_layers": 6}
GATHERED = {"layout.cp": 16, "knobs.cp_comm": "all_gather"}
CHOSEN = {**SMALL, "model": "glm-5.2"}
FP32 = {**SMALL, "model": "qwen3-30b-a3b", "knobs.precision": "fp32"}
CASES: dict[str, dict[str, Any]] = {
    "wide heads of all keys": {**WIDE, **GATHERED, "job.seq_len": 131072},
    "wide heads round a ring": {**WIDE, "layout.cp": 16, "job.seq_len": 131072},
    "wide heads of rows": {**WIDE, "job.seq_len": 16384, "job.micro_batch": 2, "job.global_batch": 128},
    "chosen keys": {**CHOSEN, "job.seq_len": 65536},
    "recomputed chosen keys": {**CHOSEN, "job.seq_len": 16384, "knobs.recompute": ["core_attn", "moe"]},
    "fp32 of all keys": {**FP32, "job.seq_len": 65536, "layout.cp": 4, "knobs.cp_comm": "all_gather"},
    "fp32, sequence for heads": {**FP32, "job.seq_len": 65536, "layout.cp": 4, "knobs.cp_comm": "a2a"},
    "sinks in fp32": {**FP32, "model": "gpt-oss-20b", "job.seq_len": 16384, "layout.ep": 4, "job.global_batch": 128},
    "latent heads in fp32": {**FP32, "model": "moonlight-16b-a3b", "job.seq_len": 65536, "layout.cp": 4},
    "windows on a CPU": {
        "target": "threefold", "model": "tiny-gpt-oss", "cluster.chip": "cpu", "cluster.gpus": 2,
        "job.seq_len": 4096, "job.global_batch": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_path_of_attention_has_all_scores_in_memory(name: str) -> None:
    """The estimate knows of blocks only, so that a whole matrix of scores would be far off."""
    plan = build(CASES[name])
    guess = memory(plan).worst
    seen = rehearse_rank(plan, guess.stage * plan.layout.stride("pp"))
    assert guess.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)


@pytest.mark.parametrize("fields", [CHOSEN, FP32, {**WIDE, **GATHERED}], ids=["chosen keys", "fp32", "wide heads"])
def test_the_last_blocks_take_the_memory_of_all(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8K tokens a rank attends in dozens of blocks."""
    plan = build({**fields, "job.seq_len": 8192 * fields.get("layout.cp", 1)})
    few = rehearse_rank(plan)
    monkeypatch.setattr(query_blocks, "SIMULATED_BLOCKS", 10**9)
    every = rehearse_rank(plan)
    assert (few.peak_bytes, few.terms, few.at) == (every.peak_bytes, every.terms, every.at)
    assert few.top == every.top
    assert few.collectives == every.collectives
