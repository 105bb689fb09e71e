"""Estimate and rehearsal of dynamic context parallelism: at full length it is static, and its groups take memory."""

from plans import build
from rehearsal_plans import tiny

from threefold.api.rehearsals import as_the_engine_runs
from threefold.cost.estimate import estimate
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.plan.parse import change
from threefold.units import MIB


def test_rehearsal_at_full_length_is_that_of_a_static_plan() -> None:
    fields = {"layout.cp": 4, "layout.ep": 2, "job.packing": True, "job.micro_batch": 1, "job.seq_len": 64}
    static = change(tiny("tiny-qwen3-moe", 4), fields)
    dynamic, said = as_the_engine_runs(change(static, {"knobs.cp_dynamic": True}))
    assert dynamic.shards_dynamically
    assert any(line.startswith("knobs.cp_dynamic: every sequence has its full length") for line in said)
    ours, theirs = rehearse_rank(dynamic), rehearse_rank(as_the_engine_runs(static)[0])
    assert ours.peak_bytes == theirs.peak_bytes
    assert ours.collectives == theirs.collectives


def test_groups_of_other_degrees_take_memory() -> None:
    """CP 8 x TP 2 has blocks of 2 and of 4 ranks, with and without TP: four communicators of 128 MiB."""
    static = build(
        {
            "model": "qwen3-30b-a3b",
            "target": "threefold",
            "cluster.chip": "h100",
            "cluster.gpus": 64,
            "job.seq_len": 131_072,
            "job.global_batch": 16,
            "layout.cp": 8,
            "layout.tp": 2,
            "layout.ep": 8,
        }
    )
    dynamic = change(static, {"knobs.cp_dynamic": True})
    found = [estimate(plan).memory.worst.device_bytes for plan in (static, dynamic)]
    assert found[1] - found[0] == 4 * 128 * MIB
