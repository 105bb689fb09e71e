"""Rehearsals of one rank against what they predict: real tensors, real ranks, hand counts."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from peak_breakdown import measure_peak_breakdown
from plans import build
from rehearsal_plans import GPU, rehearsal_cpu, tiny
from torch import nn

from threefold.dryrun.optimizer_step import run_step
from threefold.dryrun.rehearse_plan import rehearse
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.dryrun.simulated.expert_load import ExpertLoads
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.build import build as build_parts
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models.block import Block
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import FindingsError
from threefold.plan.plan import Plan

SLOW = {"delta", "sinks", "recompute"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in rehearsal_cpu.CASES]
)
def test_fake_tensors_take_what_real_ones_take(name: str) -> None:
    """They differ by what torch's C++ allocates for a moment, a few kilobytes here."""
    rehearsed, real = rehearsal_cpu.both_peaks(name)
    assert rehearsed == pytest.approx(real, rel=rehearsal_cpu.WANTED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_a_gpu_takes_what_was_rehearsed(sharding: str) -> None:
    """3 %: the bound of docs/log/rehearsal.md; benchmarks/rehearsal.py has larger cases."""
    fields = {**GPU, "cluster.chip": "h200", "cluster.gpus": 64, "job.global_batch": 128, "model.num_layers": 2}
    plan = build({**fields, "knobs.data_parallel": sharding, "job.routing": "forced-balance"})
    seen = measure_peak_breakdown(plan, 0, torch.device("cuda", 0))
    assert rehearse_rank(plan, 0).peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
    assert sum(seen.terms.values()) + seen.workspace_bytes + seen.untracked_bytes == seen.tracked_bytes


@pytest.fixture(scope="module")
def one_layer() -> Any:
    return rehearse_rank(build(GPU), 5)


def test_states_are_what_a_hand_count_gives(one_layer: Any) -> None:
    """Qwen3-30B-A3B: width 2048, 32 and 4 heads of 128, 128 experts of width 768, vocabulary 151936."""
    dense = 2 * 151936 * 2048 + 2048 * 128 * (2 * 32 + 2 * 4) + 3 * 2048 + 2 * 128 + 128 * 2048
    experts = 128 * 3 * 2048 * 768 // 8
    # Buffers are padded to whole parts of 1,024 ranks: far below a thousandth.
    assert one_layer.terms["weights"] == pytest.approx(2 * (dense + experts), rel=1e-3)
    assert one_layer.terms["gradients"] == pytest.approx(4 * (dense + experts), rel=1e-3)
    assert one_layer.terms["optimizer"] == pytest.approx(12 * (dense / 1024 + experts / 128), rel=1e-2)


def test_terms_add_up_to_the_peak(one_layer: Any) -> None:
    assert sum(one_layer.terms.values()) == one_layer.peak_bytes
    assert len(one_layer.top) == 10
    assert max(point["bytes"] for point in one_layer.timeline) == one_layer.peak_bytes


def test_ledger_counts_what_travels_to_experts(one_layer: Any) -> None:
    """4,096 tokens to 8 of 128 experts in bf16, an eighth of which stays; there and back, both ways, twice."""
    rows = [e for e in one_layer.collectives if e.operation == "all_to_all" and e.num_bytes > 1e6]
    assert [(e.axis, e.num_bytes, e.count, e.link) for e in rows] == [("ep", 4096 * 8 * 2048 * 2 * 7 // 8, 8, "domain")]


def calls_of(rank: int, plan: Plan) -> Counter[tuple[str, str, int]]:
    """What a rank of a real job starts in a step."""
    found: Counter[tuple[str, str, int]] = Counter()

    def note(call: CollectiveCall) -> None:
        found[call.group.name, call.operation, call.num_bytes] += 1

    parts = build_parts(plan, Mesh(plan.layout, rank), with_data=False)
    with observe_collectives(note):
        run_step(parts, plan, OriginTracker())
    return found


def test_ledger_is_that_of_real_ranks() -> None:
    plan = tiny("tiny-deepseek-v3", 4, layout__tp=2, layout__ep=4, job__global_batch=4)
    real = run_ranks(4, calls_of, plan)[2]
    seen = {(e.axis, e.operation, e.num_bytes): e.count for e in rehearse_rank(plan, 2).collectives}
    assert seen == dict(real)


def states_and_calls_of(rank: int, plan: Plan) -> tuple[int, Counter[tuple[str, str, int]]]:
    parts = build_parts(plan, Mesh(plan.layout, rank), with_data=False)
    states = [x for x in parts.optimizer.state_dict().values() if x.dim()]  # less the number of steps
    return sum(x.nbytes for x in states), calls_of(rank, plan)


MUON = {"job__optimizer": "muon", "job__seq_len": 16, "job__global_batch": 4}


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("tiny-deepseek-v3", {"layout__tp": 2, "layout__ep": 2, "layout__etp": 2}),
        ("tiny-qwen3-moe", {"layout__tp": 4, "layout__ep": 2}),  # two key heads: neighbors hold the same one
        pytest.param(
            "tiny-qwen3-moe",
            {"layout__tp": 2, "layout__etp": 2, "knobs__data_parallel": "fsdp"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_muon_brings_together_what_it_does_on_real_ranks(model: str, more: dict[str, Any]) -> None:
    plan = tiny(model, 4, **MUON, **more)
    theirs = ("dp x cp", "edp") if plan.knobs.data_parallel == "fsdp" else ()  # what torch sends, unseen on real ranks
    real = run_ranks(4, states_and_calls_of, plan)
    for rank in (0, 3):
        seen = rehearse_rank(plan, rank)
        states, calls = real[rank]
        assert seen.terms["optimizer"] == states
        counted = {(e.axis, e.operation, e.num_bytes): e.count for e in seen.collectives}
        assert {kind: n for kind, n in counted.items() if kind in calls or kind[0] not in theirs} == dict(calls)


def test_muon_takes_what_it_takes_with_real_tensors() -> None:
    """The peak is among its products, where a matrix is whole."""
    plan = tiny("tiny-qwen3-moe", 4, layout__tp=2, layout__etp=2, job__optimizer="muon", job__seq_len=16)
    seen = rehearse_rank(plan, 1)
    assert seen.at == "optimizer"
    assert seen.peak_bytes == pytest.approx(rehearsal_cpu.allocated(plan, 1), rel=rehearsal_cpu.WANTED)


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_sixteen_thousand_ranks(sharding: str) -> None:
    fields = {**GPU, "cluster.gpus": 16384, "job.global_batch": 16384, "job.seq_len": 512}
    plan = build({**fields, "knobs.data_parallel": sharding, "layout.ep": 64})
    assert rehearse_rank(plan, 16383).peak_bytes > 0


def test_copies_of_shards_are_reduced_among_themselves() -> None:
    fields = {**GPU, "cluster.gpus": 64, "job.global_batch": 128, "layout.replicate": 2}
    seen = rehearse_rank(build({**fields, "knobs.data_parallel": "hsdp", "layout.ep": 4}), 0)
    assert ("edp", "all_reduce") in {(entry.axis, entry.operation) for entry in seen.collectives}


def test_two_sequences_cut_over_ranks_keep_what_one_of_twice_the_length_does() -> None:
    """As many tokens: only what products read may be kept, and none of it more than once."""
    cut = {**GPU, "layout.tp": 2, "job.global_batch": 4096}
    short = rehearse_rank(build({**cut, "job.micro_batch": 2}), 0)
    long = rehearse_rank(build({**cut, "job.seq_len": 8192}), 0)
    assert short.terms["attention"] == pytest.approx(long.terms["attention"], rel=1e-3)  # but for positions


def test_nothing_is_compiled_for_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda *args, **options: pytest.fail("compiled"))
    plain = tiny("tiny-qwen3-moe", 2, layout__ep=2, job__seq_len=16)
    compiled = tiny("tiny-qwen3-moe", 2, layout__ep=2, job__seq_len=16, knobs__compile=True)
    assert rehearse_rank(compiled).peak_bytes == rehearse_rank(plain).peak_bytes


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
def test_no_tensor_waits_for_the_garbage_collector(dispatcher: str) -> None:
    """A tensor in a cycle of references lives until Python happens to collect, on a GPU too."""
    fields = {**GPU, "knobs.dispatcher": dispatcher, "knobs.recompute": ["moe"], "knobs.grad_dtype": "bf16"}
    plan = build(fields)  # bf16 gradients: two microbatches are run
    thresholds = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(0)
        never = rehearse_rank(plan, 0)
        gc.set_threshold(50)
        often = rehearse_rank(plan, 0)
    finally:
        gc.set_threshold(*thresholds)
    assert never.timeline == often.timeline


def test_skewed_loads_take_more() -> None:
    plan = build(GPU)
    even = rehearse_rank(plan, 0)
    skewed = rehearse_rank(plan, 0, ExpertLoads((2.0,) * 16 + (6 / 7,) * 112))
    assert skewed.terms["experts"] == pytest.approx(2 * even.terms["experts"], rel=0.01)


def test_a_fault_of_the_engine_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Block, x: torch.Tensor) -> None:
        raise RuntimeError("no such kernel\nat a place deep in torch")

    monkeypatch.setattr(Block, Block.run_ffn.__name__, fail)
    with pytest.raises(FindingsError) as caught:
        rehearse_rank(tiny("tiny-qwen3-moe", 1))
    (finding,) = caught.value.findings
    assert finding.rule == "rehearsal-runs"
    assert "layers.0" in finding.at
    assert finding.problem.endswith("no such kernel")


def test_ranks_that_are_not_there() -> None:
    with pytest.raises(FindingsError, match="rehearsal-has-rank"):
        rehearse(tiny("tiny-qwen3-moe", 1), [7])
