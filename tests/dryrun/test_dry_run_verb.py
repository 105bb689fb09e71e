"""`threefold dry-run`, `check --rehearse` and `plan --rehearse` on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import build
from rehearsal_plans import GPU
from repository import ROOT

from threefold.api.rehearsals import as_the_engine_runs
from threefold.cli.main import main
from threefold.plan.file import read_plan
from threefold.units import GIB

TINY = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"


SMALL = ["model.num_layers=1", "job.seq_len=32"]


def test_what_the_engine_lacks_is_left_out_in_words() -> None:
    plan, said = as_the_engine_runs(build({**GPU, "target": "megatron-bridge", "job.packing": True}))
    assert (plan.target, plan.job.packing) == ("threefold", False)
    assert [text.partition(":")[0] for text in said] == ["target", "job.packing"]


def test_a_plan_for_another_stack_gets_the_exchange_that_our_engine_would_choose() -> None:
    """Only our engine exchanges latents under CP, so a plan for another stack leaves the choice open."""
    given = read_plan(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml", []).plan
    assert given is not None
    assert (given.target, given.knobs.cp_exchange, given.exchanges_latents) == ("megatron-bridge", None, False)
    plan, _ = as_the_engine_runs(given)
    assert (plan.knobs.cp_exchange, plan.exchanges_latents) == ("latents", True)


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
    assert "  suggestion: " in said  # with a change that `check` offers too
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
        without.delitem(sys.modules, "threefold.report.plots", raising=False)
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


def test_whose_engine_is_rehearsed_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", str(TINY), *SMALL, "--target", "megatron-bridge", "job.packing=true"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "Threefold's own engine is rehearsed, not megatron-bridge" in first
    assert "left out of the rehearsal:" in rest
    assert not any("megatron-bridge" in line for line in rest)


def test_all_ranks_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dry-run", str(TINY), *SMALL, "cluster.gpus=2", "layout.ep=2", "--ranks", "all"]
    assert main(words) == 0
    assert " ranks compared: all of them match" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in said["ranks"]] == [0, 1]
    assert said["compared_calls"] > 0


def test_all_ranks_of_a_plan_where_forks_cannot_run_a_backward(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU is, autograd refuses to run in forks of a process that has run a backward. Elsewhere torch is made to
    refuse."""
    if torch.cuda.is_available():
        torch.ones((), device="cuda", requires_grad=True).backward()
    else:
        plain, parent = torch.Tensor.backward, os.getpid()

        def refuse_in_forks(self: torch.Tensor, *args: Any, **named: Any) -> None:
            if os.getpid() != parent:
                raise RuntimeError("Unable to handle autograd's threading in combination with fork")
            plain(self, *args, **named)

        monkeypatch.setattr(torch.Tensor, "backward", refuse_in_forks)
    assert main(["dry-run", str(TINY), *SMALL, "cluster.gpus=2", "layout.ep=2", "--ranks", "all"]) == 0
    assert " ranks compared: all of them match" in capsys.readouterr().out


def test_all_ranks_of_a_large_plan_are_those_of_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster.gpus=64", "layout.ep=4", "layout.tp=4", "job.global_batch=128", "model.num_layers=8"]
    assert main(["dry-run", str(TINY), "--ranks", "all", *words, "job.seq_len=128"]) == 0
    said = capsys.readouterr().out
    assert "scaled down, so that every rank can be rehearsed:" in said
    assert "  TP 4 by 2" in said
    assert "peak, GiB" not in said
    assert ": all of them match" in said


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
    assert "applied fix: " in out
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
