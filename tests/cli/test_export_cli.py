"""`threefold export` and `threefold import`: what they print, write and return."""

import io
import json
import sys
from pathlib import Path

import pytest
from command_line import GARBAGE, run
from repository import ROOT

PLAN = str(ROOT / "recipes" / "deepseek-v3-4k-1024xh100-fp8.toml")


def test_export_prints_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("export", PLAN, capsys=capsys)
    names = (
        "train.py",
        "overrides.txt",
        "overrides.yaml",
        "performance.sh",
        "environment.sh",
        "job.sbatch",
        "table.txt",
    )
    assert (code, err) == (0, "")
    assert [name for name in names if f"==> {name} <==" not in out] == []
    code, out, _ = run("export", PLAN, "--to", "megatron-lm", capsys=capsys)
    assert code == 0
    assert "pretrain_gpt.py" in out


def test_export_writes_files_that_import_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("export", PLAN, "--out", str(tmp_path / "a"), "run.tensorboard=false", capsys=capsys)
    assert code == 0
    assert "run.tensorboard" in out  # the table of what is not expressed
    assert (tmp_path / "a" / "table.txt").read_text() in out
    source = str(tmp_path / "a" / "overrides.yaml")
    words = ("--model", "deepseek-v3", "--chip", "h100", "--gpus", "1024")
    code, out, err = run("import", source, *words, "--out", str(tmp_path / "b.toml"), capsys=capsys)
    assert (code, err) == (0, "")
    code, _, _ = run("check", str(tmp_path / "b.toml"), capsys=capsys)
    assert code == 0


def test_json_has_the_table_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("export", PLAN, "run.bad_steps=9", "--json", capsys=capsys)
    said = json.loads(out)
    assert code == 0
    assert (said["bridge"], said["core"]) == ("0.6.2", "0.19.2")
    assert said["recipe"] == "megatron.bridge.recipes.deepseek.deepseek_v3.deepseek_v3_pretrain_config"
    assert said["overrides"]["model.expert_model_parallel_size"] == 64
    assert {"run.bad_steps", "job.data"} == {item["field"] for item in said["inexpressible"] if not item["said"]}
    file = tmp_path / "list.txt"
    file.write_text(said["files"]["overrides.txt"])
    code, out, _ = run("import", str(file), "--model", "deepseek-v3", "--chip", "h100", "--json", capsys=capsys)
    plan = json.loads(out)["plan"]
    assert (code, plan["layout.ep"], plan["knobs.precision"]) == (0, 64, "fp8-blockwise")


def test_import_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"-mr qwen3_30b_a3b -g h100 -ng 16 -c bf16 model.expert_model_parallel_size=16\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code, out, err = run("import", "-", "job.global_batch=64", capsys=capsys)
    assert code == 0
    assert 'model = "qwen3-30b-a3b"' in out
    assert "global_batch = 64" in out
    assert "import-recipe-decides" in err


def test_a_plan_with_errors_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("export", PLAN, "layout.ep=48", capsys=capsys)
    assert (code, out) == (1, "")
    assert "ep-divides-experts" in err
    code, _, _ = run("export", PLAN, "--to", "nemo", capsys=capsys)
    assert code == 2
    for release in ("newest", "26", ""):
        code, _, err = run("export", PLAN, "--release", release, capsys=capsys)
        assert (code, "is no release" in err) == (2, True)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_with_findings(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "garbage"
    file.write_bytes(GARBAGE[name])
    for verb in ("export", "import"):
        code, _, err = run(verb, str(file), capsys=capsys)
        assert code == 1
        assert "error[" in err
    code, _, err = run("import", str(tmp_path / "nosuch"), capsys=capsys)
    assert (code, "error[import-readable]" in err) == (1, True)


def test_out_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("export", PLAN, "--out", str(tmp_path / "file" / "a"), capsys=capsys)
    assert (code, "cannot write" in err) == (1, True)
