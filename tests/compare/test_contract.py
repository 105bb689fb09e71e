"""Contracts of plans, runs and logs: planted differences are named and classed, and validations end as they should."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_logs import arguments_table, megatron_step
from plans import build
from run_folders import noisy_seconds, run_plan, write_run

import threefold
from threefold.api.comparisons import contract_of, validate
from threefold.cli.main import main
from threefold.compare.comparison import compare_sides
from threefold.compare.contract import Contract, differences, undeclared
from threefold.compare.read_contract import contract_of_plan, write_contract_file
from threefold.compare.sides import open_side
from threefold.findings import FindingsError
from threefold.plan.file import dump_plan
from threefold.plan.parse import change

BASE = build(
    {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16, "layout.ep": 8, "job.global_batch": 64}
)
# A field, another value, and its class as upstream's rows have it: MC-LAYERS, MC-PRECLAYER, MC-MBS and the rest.
PLANTED: list[tuple[str, Any, str]] = [
    ("job.global_batch", 128, "convergence"),
    ("job.seq_len", 2048, "convergence"),
    ("job.data", "corpus.jsonl", "convergence"),
    ("job.seed", 7, "convergence"),
    ("job.packing", True, "convergence"),
    ("job.aux_loss", 0.01, "convergence"),
    ("job.z_loss", 0.001, "convergence"),
    ("job.bias_rate", 0.01, "convergence"),
    ("job.routing", "forced-balance", "convergence"),
    ("job.capacity_factor", 1.5, "convergence"),
    ("job.lr", 1e-4, "convergence"),
    ("job.weight_decay", 0.0, "convergence"),
    ("job.adam_beta2", 0.99, "convergence"),
    ("job.clip_norm", 0.5, "convergence"),
    ("job.optimizer", "muon", "convergence"),
    ("job.lora_rank", 8, "convergence"),
    ("job.freeze", ["layers.0.*"], "convergence"),
    ("knobs.precision", "fp8-cs", "convergence"),
    ("knobs.optimizer_dtype", "bf16", "convergence"),
    ("knobs.grad_dtype", "bf16", "convergence"),
    ("knobs.router_dtype", "bf16", "convergence"),
    ("model.num_layers", 40, "convergence"),
    ("job.micro_batch", 2, "execution"),
    ("layout.ep", 4, "execution"),
    ("layout.tp", 2, "execution"),
    ("layout.pp", 2, "execution"),
    ("cluster.gpus", 32, "execution"),
    ("knobs.recompute", ["moe_act"], "execution"),
    ("knobs.dispatcher", "deepep", "execution"),
    ("knobs.ep_overlap", True, "execution"),
    ("knobs.graphs", ["attn"], "execution"),
    ("knobs.optimizer_offload", 0.5, "execution"),
    ("knobs.max_connections", 32, "execution"),
    ("stack.te", "2.9", "execution"),
    ("run.save_every", 50, "execution"),
]


@pytest.mark.parametrize(("field", "value", "kind"), PLANTED, ids=[field for field, _, _ in PLANTED])
def test_a_planted_difference_of_plans_is_named_and_classed(field: str, value: Any, kind: str) -> None:
    found = differences(contract_of_plan(BASE, "a"), contract_of_plan(change(BASE, {field: value}), "b"))
    own = [each for each in found if each.field == field]
    assert [each.kind for each in own] == [kind]
    rest = [each.field for each in found if each.field != field]
    assert rest == []
    assert not undeclared([each for each in found if each.field == field], [field])


@pytest.mark.parametrize("seed", range(10))
def test_several_planted_differences_are_all_named(seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.sample([row for row in PLANTED if row[0] != "job.routing"], draw.randint(2, 5))
    b = change(BASE, {field: value for field, value, _ in chosen})
    found = differences(contract_of_plan(BASE, "a"), contract_of_plan(b, "b"))
    assert {each.field for each in found} == {field for field, _, _ in chosen}
    declared = chosen[0][0]
    assert {each.field for each in undeclared(found, [declared])} == {field for field, _, _ in chosen[1:]}


# What contract.json of a run states besides its plan, and how two runs may differ in it.
STATED: list[tuple[str, Any, Any, str, str]] = [
    ("torch", "2.12.0", "2.13.0", "software.torch", "execution"),
    ("device", "NVIDIA H100", "NVIDIA H200", "hardware.device", "execution"),
    ("threads", 2, 8, "hardware.threads", "execution"),
    ("environment", {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, "environment.NCCL_ALGO", "execution"),
    ("data", "abc", "abd", "data.fingerprint", "convergence"),
    ("sources", [{"hash": "1"}], [{"hash": "2"}], "data.sources.0.hash", "convergence"),
    ("tokenizer", {"hash": "1"}, {"hash": "2"}, "tokenizer.hash", "convergence"),
]


@pytest.mark.parametrize(("name", "old", "new", "field", "kind"), STATED, ids=[row[0] for row in STATED])
def test_what_hides_outside_of_the_plan_is_named(
    tmp_path: Path, name: str, old: Any, new: Any, field: str, kind: str
) -> None:
    sides = [
        contract_of(write_run(tmp_path / side, run_plan(), [0.1] * 4, contract={name: value}))
        for side, value in (("a", old), ("b", new))
    ]
    assert [(each.field, each.kind) for each in differences(*sides)] == [(field, kind)]


def log_of(path: Path, changes: dict[str, Any], steps: list[str] | None = None, head: str = "") -> Path:
    rows = [line for line in arguments_table() if line.split()[0] not in changes]
    rows[1:1] = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in changes.items()]
    path.write_text("\n".join([head, *rows, *(steps or [])]) + "\n")
    return path


FOREIGN: list[tuple[dict[str, Any], str, str]] = [
    ({"global_batch_size": 128}, "job.global_batch", "convergence"),
    ({"micro_batch_size": 2}, "job.micro_batch", "execution"),
    ({"expert_model_parallel_size": 4}, "layout.ep", "execution"),
    ({"lr": 0.0001}, "job.lr", "convergence"),
    ({"seed": 4321}, "job.seed", "convergence"),
    ({"adam_beta2": 0.99}, "job.adam_beta2", "convergence"),
    ({"recompute_granularity": "full", "recompute_method": "uniform"}, "knobs.recompute", "execution"),
    ({"hidden_dropout": 0.1}, "settings.model.hidden_dropout", "convergence"),
]


@pytest.mark.parametrize(("changes", "field", "kind"), FOREIGN, ids=[row[1] for row in FOREIGN])
def test_logs_of_two_foreign_jobs_are_held_against_each_other(
    tmp_path: Path, changes: dict[str, Any], field: str, kind: str
) -> None:
    same = {"seed": 1234, "lr": 0.0003, "adam_beta2": 0.95}
    a = contract_of(log_of(tmp_path / "a.log", same))
    b = contract_of(log_of(tmp_path / "b.log", same | changes))
    found = {each.field: each.kind for each in differences(a, b)}
    assert found.get(field) == kind, found


def test_environment_that_a_launcher_shows_is_part_of_a_log(tmp_path: Path) -> None:
    sides = [
        contract_of(log_of(tmp_path / f"{name}.log", {}, head=f"+ export NVTE_FUSED_ATTN={name}")) for name in "01"
    ]
    assert [each.field for each in differences(*sides)] == ["environment.NVTE_FUSED_ATTN"]


def test_a_plan_is_held_against_the_log_of_its_job(tmp_path: Path) -> None:
    """A number of GPUs that the log does not say was guessed, and is no fact of it."""
    log = contract_of(log_of(tmp_path / "job.log", {"world_size": 32}))
    plan = contract_of_plan(BASE, "plan")
    found = {each.field: (each.a, each.b) for each in differences(plan, log)}
    assert found["cluster.gpus"] == (16, 32)
    assert found["job.global_batch"] == (64, 256)
    assert "layout.ep" not in found
    assert "hardware.device" not in log.facts


def test_a_contract_file_keeps_its_hash_and_shows_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, file = tmp_path / "plan.toml", tmp_path / "frozen.json"
    plan.write_text(dump_plan(BASE))
    assert main(["contract", str(plan), "--out", str(file)]) == 0
    assert contract_of(file).hash == contract_of(plan).hash
    assert main(["contract", str(plan), "--against", str(file)]) == 0
    plan.write_text(dump_plan(change(BASE, {"layout.ep": 4, "knobs.precision": "mxfp8"})))
    capsys.readouterr()
    assert main(["contract", str(plan), "--against", str(file), "--declare", "layout.ep", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["check"]
    assert [each["field"] for each in told["differences"]] == ["knobs.precision", "layout.ep"]
    assert "a new experiment" in told["verdict"]
    file.write_text(file.read_text().replace('"bf16"', '"fp16"', 1))
    with pytest.raises(FindingsError, match="hash"):
        contract_of(file)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"contract": 1, "facts": 3}', "hello\n", "\x00\x01" * 40])
def test_what_states_no_contract_is_one_finding(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.json", "x.log"):
        (tmp_path / name).write_text(content)
        assert main(["contract", str(tmp_path / name)]) == 1
        assert "Traceback" not in capsys.readouterr().err


def test_compare_refuses_more_than_the_declared_difference(tmp_path: Path) -> None:
    a = open_side(str(write_run(tmp_path / "a", run_plan(), noisy_seconds(0.1, 40, 1))))
    both = run_plan(knobs_recompute=["moe_act"], job_lr=1e-3)
    b = open_side(str(write_run(tmp_path / "b", both, noisy_seconds(0.1, 40, 2))))
    with pytest.raises(FindingsError, match=r"job\.lr \(convergence\)"):
        compare_sides(a, b, declared=["knobs.recompute"])
    found = compare_sides(a, b, declared=["knobs.recompute", "job.lr"])
    assert found.to_json()["label"] == "training-equivalent"
    assert {each["class"] for each in found.to_json()["contract"]} == {"convergence", "execution"}


def answers(found: Any) -> dict[str, str]:
    return {check.name: check.answer for check in found.checks}


def good_run(folder: Path, plan: Any = None, **more: Any) -> Path:
    seconds = noisy_seconds(0.1, 80, 3)
    timing = [{"first_step": 1, "steady_steps": [7, 40]}, {"first_step": 41, "steady_steps": [47, 80]}]
    contract = {"timing": timing, "benchmark_only": False} | more.pop("contract", {})
    write_run(folder, plan or run_plan(), more.pop("seconds", seconds), contract=contract, **more)
    effects = [{"knob": "recompute.moe_act", "took_effect": True, "is_chosen": True, "evidence": "seen"}]
    (folder / "effects.json").write_text(json.dumps({"effects": effects}))
    return folder


def test_a_run_with_all_evidence_is_accepted(tmp_path: Path) -> None:
    found = validate(good_run(tmp_path / "run"), window=(11, 80))
    assert found.verdict == "accepted", [check for check in found.checks if check.answer != "pass"]
    assert set(answers(found).values()) == {"pass"}


def test_a_window_that_nobody_declared_is_no_acceptance(tmp_path: Path) -> None:
    assert validate(good_run(tmp_path / "run")).verdict == "screened"


@pytest.mark.parametrize(
    ("spoil", "check", "verdict"),
    [
        ({"losses": [5.0] * 60 + [None] + [5.0] * 19}, "finite losses", "rejected"),
        ({"skipped_steps": 3}, "no skipped steps", "rejected"),
        ({"contract": {"timing": [{"first_step": 1, "profiled_steps": [20, 22]}]}}, "unprofiled", "rejected"),
        ({"contract": {"timing": [{"first_step": 1}]}}, "checkpoint saved and resumed", "screened"),
        ({"memory_bytes": float("nan")}, "peak memory", "screened"),
        ({"seconds": [0.1] * 30}, "steps to accept by", "screened"),
        ({"seconds": [0.1] * 14}, "steps to reject by", "not enough evidence"),
    ],
)
def test_a_run_that_lacks_something_is_not_accepted(
    tmp_path: Path, spoil: dict[str, Any], check: str, verdict: str
) -> None:
    found = validate(good_run(tmp_path / "run", **spoil), window=(11, 80))
    assert found.verdict == verdict
    assert answers(found)[check] != "pass"


def test_a_setting_without_effect_rejects(tmp_path: Path) -> None:
    folder = good_run(tmp_path / "run")
    effects = [{"knob": "graphs.attn", "took_effect": False, "is_chosen": True, "evidence": "no replay"}]
    (folder / "effects.json").write_text(json.dumps({"effects": effects}))
    assert validate(folder, window=(11, 80)).verdict == "rejected"


def test_a_benchmark_is_never_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = good_run(tmp_path / "run", run_plan(job_data="synthetic"))
    assert validate(folder, window=(11, 80)).verdict == "benchmark-only"
    assert main(["validate", str(folder), "--window", "11:80"]) == 3
    assert "job.data is made up" in capsys.readouterr().out


def test_a_run_that_breaks_its_contract_is_rejected(tmp_path: Path) -> None:
    frozen = tmp_path / "frozen.json"
    folder = good_run(tmp_path / "run")
    write_contract_file(contract_of(folder), frozen)
    assert validate(folder, window=(11, 80), against=frozen).verdict == "accepted"
    other = good_run(tmp_path / "other", run_plan(layout_tp=2, cluster_gpus=2, job_lr=1e-3))
    found = validate(other, window=(11, 80), against=frozen, declared=["layout.tp", "cluster.gpus"])
    assert found.verdict == "rejected"
    assert "job.lr (convergence)" in found.checks[-1].evidence


STEPS: Callable[..., list[str]] = lambda count, **over: [  # noqa: E731
    megatron_step(random.Random(step), step, count, **over) for step in range(1, count + 1)
]
ENDS = [
    " successfully saved checkpoint from iteration 30 to /checkpoints",
    " successfully loaded checkpoint from /checkpoints [ t 1/1, p 1/1 ] at iteration 30",
    "[after training is done] datetime: 2026-03-03 12:00:00",
]
MEMORY = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 52000.0 | reserved: 60000.0"


def test_a_foreign_job_is_accepted_by_its_log(tmp_path: Path) -> None:
    log = log_of(tmp_path / "job.log", {"data_path": "['/data/corpus']"}, [*STEPS(80), MEMORY, *ENDS])
    found = validate(log, window=(20, 80))
    assert found.verdict == "accepted", [check for check in found.checks if check.answer != "pass"]


@pytest.mark.parametrize(
    ("changes", "steps", "check", "verdict"),
    [
        ({}, [*STEPS(80, loss=float("nan")), MEMORY, *ENDS], "finite losses", "rejected"),
        ({}, [*STEPS(80, skipped=1), MEMORY, *ENDS], "no skipped steps", "rejected"),
        ({}, [*STEPS(80), *ENDS], "peak memory", "screened"),
        ({}, [*STEPS(80), MEMORY, ENDS[2]], "checkpoint saved and resumed", "screened"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, [*STEPS(80), MEMORY, *ENDS], "settings ran", "screened"),
        ({}, [*STEPS(30), "torch.OutOfMemoryError: CUDA out of memory."], "came to its end", "rejected"),
    ],
)
def test_a_foreign_job_that_lacks_something_is_not_accepted(
    tmp_path: Path, changes: dict[str, Any], steps: list[str], check: str, verdict: str
) -> None:
    found = validate(log_of(tmp_path / "job.log", changes, steps), window=(20, 80))
    assert (found.verdict, answers(found)[check] != "pass") == (verdict, True)


def test_the_library_has_both(tmp_path: Path) -> None:
    contract = threefold.contract_of(good_run(tmp_path / "run"))
    assert isinstance(contract, Contract)
    assert threefold.validate(tmp_path / "run", window=(11, 80)).verdict == "accepted"
