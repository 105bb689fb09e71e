"""Rehearsals against what they stand for: real tensors, real ranks, hand counts."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plans import build
from repository import ROOT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from threefold.cli.main import main
from threefold.cli.rehearse import as_the_engine_runs, shares_from
from threefold.cost.memory.by_stack import memory
from threefold.dryrun.measured.peak_breakdown import measure_peak_breakdown
from threefold.dryrun.optimizer_step import run_step
from threefold.dryrun.rehearse_plan import rehearse
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.dryrun.representatives import distinct_stages, reduce_microbatches
from threefold.dryrun.simulated.deepep_package import fake_deepep_package, rank_visit_probability
from threefold.dryrun.simulated.expert_load import ExpertLoads, split_total
from threefold.dryrun.simulated.gpu_operators import WORKSPACES, use_gpu_operators
from threefold.dryrun.simulated.meta_operators import MetaOperators
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.memory_tracker import MemoryTracker
from threefold.engine.build import build as build_parts
from threefold.engine.dispatch.flex_packages import PACKAGE
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models.decoder import Block
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.units import GIB

sys.path.insert(0, str(ROOT / "benchmarks"))
import rehearsal_cpu

torch.set_num_threads(1)


def tiny(model: str, gpus: int, **changes: Any) -> Plan:
    return rehearsal_cpu.plan_of(model, gpus, {name.replace("__", "."): value for name, value in changes.items()})


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
    """3 %: the bound of docs/rehearsal.md; benchmarks/rehearsal.py has larger cases."""
    fields = {**GPU, "cluster.chip": "h200", "cluster.gpus": 64, "job.global_batch": 128, "model.num_layers": 2}
    plan = build({**fields, "knobs.data_parallel": sharding, "job.routing": "forced-balance"})
    seen = measure_peak_breakdown(plan, 0, torch.device("cuda", 0))
    assert rehearse_rank(plan, 0).peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
    assert sum(seen.terms.values()) + seen.workspace_bytes + seen.untracked_bytes == seen.tracked_bytes


def test_tracker_counts_storages_once() -> None:
    tracker = MemoryTracker(OriginTracker())
    with tracker:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a.view(10, 100)[:5]  # nothing
        c = a + 1  # 4,000
        del a, c
        d = torch.zeros(250)  # 1,000: a lives on in b
        del b, d
    assert (tracker.peak_bytes, tracker.live_bytes) == (8000, 0)
    assert sum(size for _, size in tracker.live_at_peak()) == 8000


def test_a_product_that_is_viewed_takes_no_more() -> None:
    """A stack of products ends in a view that torch's schema calls a new tensor."""
    tracker = MemoryTracker(OriginTracker(), run_operator=MetaOperators({}), ignored_device="cpu")
    with tracker:
        a = torch.zeros(3, 10, 10, device="meta")  # 1,200 bytes
        kept = [a @ a, a @ a]  # the second time what is known of the operator answers
        del a, kept
    assert tracker.peak_bytes == 3 * 1200


def test_peak_is_named_by_module_phase_and_microbatch() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.repeat(8, 1).sigmoid() ** 2).sum()

    origins = OriginTracker()
    tracker = MemoryTracker(origins, run_operator=MetaOperators({}), ignored_device="cpu")
    with tracker, origins.module_hooks(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), Wide())
        origins.register_modules({0: model})
        x = torch.zeros(4, 64, requires_grad=True)
        with origins.in_phase("forward"):
            for _ in range(2):
                model(x).backward()
    # The backward of a power holds its input, its gradient and products of both, all eight times as wide.
    assert (tracker.peak_origin.phase, tracker.peak_origin.module) == ("backward", "1")
    assert tracker.peak_origin.microbatch in (0, 1)


def test_a_norm_keeps_its_input_and_one_number_a_row_as_the_gpu_kernel() -> None:
    tracker = MemoryTracker(OriginTracker())
    with FakeTensorMode(), tracker, use_gpu_operators():
        x = torch.zeros(256, 1024, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(1024, dtype=torch.bfloat16)
        given = tracker.live_bytes
        node = nn.functional.rms_norm(x, (1024,), weight).grad_fn  # the result itself is gone
        assert tracker.live_bytes - given == 256 * 4
        del node


def test_attention_keeps_output_and_log_sum_exp_and_widens_query_gradients() -> None:
    tracker = MemoryTracker(OriginTracker(), workspaces=WORKSPACES)
    shape, heads = (1, 8, 512, 64), 8
    with FakeTensorMode(), tracker, use_gpu_operators():
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        base = tracker.live_bytes
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        size = q.numel() * 2
        assert tracker.live_bytes - base == pytest.approx(size + 4 * heads * 512, abs=64)  # fp32, one a query and head
        grad = torch.zeros(shape, dtype=torch.bfloat16)
        at = tracker.live_bytes
        tracker.peak_bytes = at
        out.backward(grad)
        # dq, dk, dv and, while the kernel runs, dq in fp32 with a correction a query.
        assert tracker.peak_bytes - at == pytest.approx(3 * size + 2 * size + 4 * heads * 512, abs=64)


GPU = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 1024,
    "job.seq_len": 4096,
    "job.global_batch": 2048,
    "layout.ep": 8,
    "model.num_layers": 1,
}


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
        ("tiny-qwen3-moe", {"layout__tp": 4, "layout__ep": 2}),  # two key heads: neighbours hold the same one
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


def test_fewer_microbatches_reach_the_same_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny("tiny-qwen3-moe", 2, layout__pp=2, job__global_batch=6, job__seq_len=32)
    small = reduce_microbatches(plan, 0)
    assert small.num_microbatches < plan.num_microbatches == 6
    few = rehearse_rank(plan, 0)
    monkeypatch.setattr("threefold.dryrun.rehearse_rank.reduce_microbatches", lambda plan, stage: plan)
    assert few.peak_bytes == rehearse_rank(plan, 0).peak_bytes


def test_fewer_microbatches_have_as_many_weights_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"layout__pp": 3, "layout__schedule": "zero-bubble", "model__num_layers": 3, "job__seq_len": 32}
    plan = tiny("tiny-qwen3-moe", 3, job__global_batch=9, **changes)
    assert reduce_microbatches(plan, 2).num_microbatches < 9
    few = [rehearse_rank(plan, rank).peak_bytes for rank in range(3)]
    monkeypatch.setattr("threefold.dryrun.rehearse_rank.reduce_microbatches", lambda plan, stage: plan)
    # With more of them one more message between stages may not be asked about yet: 16 KiB of 9 MiB.
    assert few == pytest.approx([rehearse_rank(plan, rank).peak_bytes for rank in range(3)], rel=2e-3)


def test_stages_that_are_alike_are_rehearsed_once() -> None:
    plan = build({**GPU, "layout.pp": 4, "model.num_layers": 8, "job.global_batch": 256, "cluster.gpus": 1024})
    assert plan.num_microbatches == 1  # one microbatch in flight everywhere: only the ends differ
    assert distinct_stages(plan) == {0: [0], 1: [1, 2], 3: [3]}


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


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_flex_dispatchers_send_a_token_once_to_a_rank(name: str) -> None:
    """Of 8 of 128 experts a token has any on one of 8 ranks with 1 - C(112, 8) / C(128, 8) = 67 %."""
    chance = 1 - math.comb(112, 8) / math.comb(128, 8)
    assert rank_visit_probability(128, 8, 8) == pytest.approx(chance)
    sent = [e for e in rehearse_rank(build({**GPU, "knobs.dispatcher": name}), 0).collectives if e.axis == "ep"]
    assert {(e.operation, e.count) for e in sent} == {("dispatch", 4), ("combine", 4)}  # both ways, two microbatches
    assert sent[0].num_bytes == pytest.approx(4096 * 8 * chance * 7 / 8 * 2048 * 2, rel=1e-3)


def test_what_was_imported_beside_a_stand_in_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's backend is imported when first asked for, and cannot be imported twice."""
    mine, other = ModuleType(PACKAGE), "imported_in_a_rehearsal"
    monkeypatch.setitem(sys.modules, PACKAGE, mine)
    monkeypatch.delitem(sys.modules, other, raising=False)
    with fake_deepep_package(ExpertLoads().size_source(), 2, lambda *call: None):
        assert sys.modules[PACKAGE] is not mine
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    assert sys.modules[PACKAGE] is mine
    assert other in sys.modules
    monkeypatch.delitem(sys.modules, PACKAGE)
    with fake_deepep_package(ExpertLoads().size_source(), 2, lambda *call: None):
        pass
    assert PACKAGE not in sys.modules


def test_nothing_is_compiled_for_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda *args, **options: pytest.fail("compiled"))
    plain = tiny("tiny-qwen3-moe", 2, layout__ep=2, job__seq_len=16)
    compiled = tiny("tiny-qwen3-moe", 2, layout__ep=2, job__seq_len=16, knobs__compile=True)
    assert rehearse_rank(compiled).peak_bytes == rehearse_rank(plain).peak_bytes


def test_loads_split_by_share() -> None:
    assert split_total(10, [1, 1, 1]) == [3, 4, 3]
    loads = ExpertLoads((3.0, 1.0, 1.0, 1.0), ep_rank=0)
    assert loads.size_source()(2, 60, True) == [40, 20]
    # Two ranks send 60 rows each; two thirds of all come here.
    assert loads.size_source()(2, 60, False) == [40, 40]
    assert loads.skew(2) == pytest.approx(4 / 3)


def test_loads_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    """Two layers of four experts, of which two ranks hold two each: 10 of 16 tokens come to the first rank."""
    (tmp_path / "loads.json").write_text("[[4, 2, 1, 1], [3, 1, 2, 2]]")
    assert shares_from(str(tmp_path), 4) == ((7.0, 3.0, 3.0, 3.0), "")
    assert "has no 8 loads" in shares_from(str(tmp_path), 8)[1]
    assert "No such file" in shares_from(str(tmp_path / "nothing"), 4)[1]


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


def test_what_the_engine_lacks_is_left_out_in_words() -> None:
    plan, said = as_the_engine_runs(build({**GPU, "target": "megatron-bridge", "job.packing": True}))
    assert (plan.target, plan.job.packing) == ("threefold", False)
    assert [text.partition(":")[0] for text in said] == ["target", "job.packing"]


def test_ranks_that_are_not_there() -> None:
    with pytest.raises(FindingsError, match="rehearsal-has-rank"):
        rehearse(tiny("tiny-qwen3-moe", 1), [7])


TINY = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
SMALL = ["model.num_layers=1", "job.seq_len=32"]


def test_json_of_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = tmp_path / "line.json"
    assert main(["dry-run", str(TINY), *SMALL, "--json", "--timeline", str(line)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["level"] == "rehearsed"
    (rank,) = said["ranks"]
    assert {"rank", "stage", "peak_bytes", "terms", "at"} <= set(rank)
    assert rank["peak_bytes"] == sum(rank["terms"].values())
    assert said["collectives"] == []
    assert said["seconds"] > 0
    assert json.loads(line.read_text())[0]["peak_bytes"] == rank["peak_bytes"]


def test_text_of_the_verb_and_a_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'model = "qwen3-30b-a3b"\ntarget = "threefold"\ncluster = { chip = "h100", gpus = 8 }\n'
        "[job]\nseq_len = 65536\nmicro_batch = 2\nglobal_batch = 16\n[layout]\nep = 8\n"
    )
    assert main(["dry-run", str(plan), "model.num_layers=8"]) == 1
    said = capsys.readouterr().out
    assert "error[rehearsal-fits-memory] rank 0, stage 0:" in said
    assert "short:" in said
    assert "largest tensors of rank 0" in said


def test_a_plan_whose_states_alone_are_too_large_is_rehearsed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where the memory goes is asked of such plans first of all."""
    path = tmp_path / "plan.toml"
    path.write_text(
        'model = "deepseek-v3"\ntarget = "threefold"\ncluster = { chip = "h200", gpus = 1 }\n'
        "[job]\nseq_len = 64\nglobal_batch = 1\nmtp = 0\n"
    )
    assert main(["dry-run", str(path), "model.num_layers=6"]) == 1
    said = capsys.readouterr().out
    assert "error[rehearsal-fits-memory] rank 0, stage 0:" in said
    assert "weights" in said


def test_a_picture_that_cannot_be_drawn_loses_no_rehearsal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["dry-run", str(TINY), *SMALL, "--json"]
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "threefold.report.rehearsal_plot", raising=False)
        for name in ("matplotlib", "matplotlib.figure"):
            without.setitem(sys.modules, name, None)
        assert main([*words, "--plot", str(tmp_path / "x.png")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ranks"]
    assert "threefold[report]" in err
    assert main([*words, "--plot", str(tmp_path / "no" / "x.png"), "--timeline", str(tmp_path / "no" / "x.json")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ranks"]
    assert "x.json" in err


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", str(TINY), "--ranks", "first"]) == 2
    assert main(["dry-run", str(TINY), "--skew", "3"]) == 2  # EP 1: nobody to take less
    assert main(["dry-run", str(TINY), *SMALL, "--device", "cuda"]) in (0, 1)  # 1 where there is none
    capsys.readouterr()


def test_check_adds_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY), *SMALL, "--rehearse", "job.packing=true"]) == 0
    assert "warning[rehearsal-is-whole] job.packing" in capsys.readouterr().out


def test_a_fixed_plan_is_rehearsed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = [*SMALL, "layout.ep=3", "job.packing=true"]
    assert main(["check", str(TINY), *wrong, "--rehearse", "--fix", str(tmp_path / "fixed.toml")]) == 0
    out = capsys.readouterr().out
    assert "applied: " in out
    assert "warning[rehearsal-is-whole] job.packing" in out


@pytest.mark.slow
def test_plan_rehearses_its_first_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny-qwen3-moe", "--chip", "h100", "--gpus", "8", "--seq-len", "256", "--target", "threefold"]
    assert main(["plan", *words, "--precision", "bf16", "--global-batch", "16", "--rehearse", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rehearsed"][0]["fits"] is True
    assert 0 < said["rehearsed"][0]["device_bytes"] < 80 * GIB


def test_fused_experts_are_rehearsed_for_a_cpu_too(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
    assert main(["dry-run", str(recipe), "knobs.expert_fusion=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["peak_bytes"] > 0


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from threefold.cli.main import main\ntry: main(['dry-run', '--help'])\nexcept SystemExit: pass\n"
    )
    program += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600, stdout=subprocess.DEVNULL)


NEAR = {
    "loss": {**GPU, "model.num_layers": 4},
    "mla": {
        "model": "deepseek-v3",
        "layout.ep": 64,
        "layout.tp": 2,
        "layout.pp": 4,
        "model.num_layers": 8,
        "job.mtp": 0,
    },
    "recompute": {"layout.ep": 8, "layout.pp": 4, "model.num_layers": 8, "knobs.recompute": ["moe_act"]},
    "bias": {"model": "gpt-oss-20b", "layout.ep": 4, "layout.tp": 4, "model.num_layers": 4},
    "narrow": {"layout.ep": 8, "model.num_layers": 2, "knobs.precision": "fp8-blockwise"},
    "sharded": {"layout.ep": 8, "model.num_layers": 2, "knobs.data_parallel": "fsdp"},
    "weights that wait": {"layout.pp": 2, "layout.schedule": "zero-bubble", "model.num_layers": 4},
    "full recompute of some layers": {
        "layout.ep": 8,
        "model.num_layers": 4,
        "knobs.recompute": ["full"],
        "knobs.recompute_method": "block",
        "knobs.recompute_layers": 2,
    },
    "muon on one GPU": {
        "cluster.gpus": 1,
        "layout.ep": 1,
        "job.global_batch": 1,
        "model.num_layers": 2,
        "job.optimizer": "muon",
    },
    "padded parts": {"layout.cp": 2, "layout.ep": 4, "model.num_layers": 2, "knobs.data_parallel": "fsdp"},
}


# Each is a moment of its own: a weight gathered while another is reduced, gradients that wait, heads some at a time.
ALSO_NEAR = {
    "dense layers gathered in a pipeline": {
        "model": "llama3-8b", "layout.pp": 4, "model.num_layers": 8, "job.micro_batch": 2,
        "knobs.data_parallel": "fsdp",
    },
    "multi-token prediction, sharded, in a pipeline": {
        "model": "deepseek-v3", "layout.pp": 4, "layout.ep": 16, "model.num_layers": 4, "knobs.data_parallel": "fsdp",
        "knobs.recompute": ["moe"],
    },
    "interleaved, gathered twice": {
        "model": "llama3-8b", "layout.pp": 2, "layout.vpp": 2, "model.num_layers": 8, "knobs.data_parallel": "fsdp",
    },
    "no more microbatches than are in flight": {
        "model": "mixtral-8x7b", "cluster.gpus": 8, "layout.pp": 2, "layout.vpp": 2, "layout.cp": 2, "layout.ep": 4,
        "model.num_layers": 8, "job.global_batch": 4, "knobs.data_parallel": "fsdp",
    },
    "only experts are sharded": {
        "cluster.gpus": 8, "layout.tp": 4, "layout.pp": 2, "layout.ep": 2, "model.num_layers": 8,
        "job.global_batch": 16, "knobs.data_parallel": "fsdp", "knobs.recompute": ["moe"],
    },
    "weights that wait, in chunks": {
        "model": "qwen3-next-80b-a3b", "layout.tp": 2, "layout.pp": 4, "layout.vpp": 2,
        "layout.schedule": "zero-bubble", "model.num_layers": 8, "job.micro_batch": 2,
    },
    "recomputed weights that wait": {
        "model": "mixtral-8x7b", "layout.pp": 4, "layout.schedule": "zero-bubble", "model.num_layers": 8,
        "job.seq_len": 16384, "knobs.recompute": ["full"],
    },
    "layers recomputed together": {
        "model": "deepseek-v3", "layout.pp": 2, "layout.ep": 32, "job.mtp": 0, "model.num_layers": 8,
        "knobs.recompute": ["full"], "knobs.recompute_method": "uniform", "knobs.recompute_layers": 2,
    },
    "gathered layers recomputed together": {
        "model": "deepseek-v3", "layout.ep": 16, "job.mtp": 0, "model.num_layers": 8, "knobs.data_parallel": "fsdp",
        "knobs.recompute": ["full"], "knobs.recompute_method": "uniform", "knobs.recompute_layers": 4,
    },
    "every score in fp32": {"layout.ep": 8, "model.num_layers": 4, "job.seq_len": 16384, "knobs.precision": "fp32"},
    "late weights beside a forward": {
        "model": "mixtral-8x7b", "layout.ep": 4, "model.num_layers": 4, "knobs.ep_overlap": True,
        "knobs.delay_wgrad": True,
    },
    "overlap with one microbatch": {
        "model": "gpt-oss-20b", "layout.tp": 4, "layout.ep": 8, "model.num_layers": 4, "job.global_batch": 256,
        "job.seq_len": 16384, "knobs.ep_overlap": True,
    },
    "a long sequence on one GPU": {
        "cluster.gpus": 1, "layout.ep": 1, "model.num_layers": 4, "job.global_batch": 1, "job.seq_len": 1048576,
        "knobs.recompute": ["moe"],
    },
    "latent heads some at a time": {
        "model": "deepseek-v3", "job.mtp": 0, "layout.ep": 64, "model.num_layers": 4, "job.seq_len": 65536,
        "knobs.recompute": ["full"], "knobs.recompute_method": "uniform", "knobs.recompute_layers": 1,
    },
    "delta rule over ranks": {
        "model": "qwen3-next-80b-a3b", "layout.cp": 2, "layout.pp": 2, "layout.vpp": 2, "layout.ep": 8,
        "model.num_layers": 8, "job.micro_batch": 2, "knobs.recompute": ["layernorm", "mlp"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_estimate_is_near_the_rehearsal(name: str) -> None:
    is_near({**GPU, "job.global_batch": 4096, **NEAR[name]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_NEAR)
def test_estimate_is_near_the_rehearsal_elsewhere(name: str) -> None:
    is_near({**GPU, "job.global_batch": 4096, **ALSO_NEAR[name]})


def is_near(fields: dict[str, Any]) -> None:
    """3 %: the bound of docs/rehearsal.md; benchmarks/rehearsal.py has fifty plans."""
    plan = build(fields)
    for stage in {0, plan.layout.pp - 1}:
        seen = rehearse_rank(plan, stage * plan.layout.stride("pp"))
        assert memory(plan).stages[stage].peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
