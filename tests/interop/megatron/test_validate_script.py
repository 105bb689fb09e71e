"""`validate.py` of an export: three verdicts and their bounds, on a package tree that a test wrote.

The validators of Megatron itself judge the exports in tests/megatron (`make test-megatron`).
"""

import ast
import json
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from fake_megatron import write_fake_megatron
from megatron_exports import recipe

from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, LM, export_plan
from threefold.launch.slurm import Options

pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # children that are forked need not import it

NAME = "qwen3-30b-a3b-4k-16xh100-bf16-overlap"
PLACE = "megatron/core/transformer/transformer_config.py:"
RAISED_AGAIN = """
class Norm(transformer_engine.Quantizer): pass
try:
    Norm().bias
except Exception as error:
    raise type(error)(f"{error} when instantiating Mixer")
"""
GENEROUS = 300.0  # seconds: for verdicts that do not rest on the limit


def validate(folder: Path, fault: str, seconds: float = GENEROUS, gigabytes: float = 16.0) -> dict[str, Any]:
    """The verdict on an export, by a Megatron whose validation executes `fault`."""
    for name, text in export_files(export_plan(recipe(NAME)), NAME, Options(), str(folder)).items():
        (folder / name).write_text(text)
    wheels = write_fake_megatron(folder / "wheels", fault)
    script = runpy.run_path(str(folder / "validate.py"), run_name="validate")
    found: dict[str, Any] = script["validate"](script["JOB"], str(folder), str(wheels), seconds, gigabytes)
    return found


def test_a_plan_that_nothing_refuses_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays in the folder for temporary files, which Megatron's code writes to as well."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    found = validate(tmp_path, "import tempfile; tempfile.mkdtemp()")
    assert list(scratch.iterdir()) == []
    assert (found["verdict"], found["differs"], found["remark"]) == ("accepted", {}, "")
    assert [(rank["rank"], rank["stage"]) for rank in found["ranks"]] == [(0, "model"), (15, "model")]
    values = found["ranks"][0]["values"]
    assert (values["layout.ep"], values["job.global_batch"], values["dp"]) == (16, 1024, 16)
    assert "transformer_engine" in found["stood_in"]
    assert "NVIDIA H100 (its properties)" in found["stood_in"]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ('assert model.expert_model_parallel_size == 1, "EP is too wide"', "AssertionError", "EP is too wide"),
        ("assert model.context_parallel_size > 1", "AssertionError", "assert model.context_parallel_size > 1"),
        ('raise ValueError("needs CUDA graphs")', "ValueError", "needs CUDA graphs"),
        ('raise RuntimeError("CUDA_DEVICE_MAX_CONNECTIONS must be 1")', "RuntimeError", "MAX_CONNECTIONS must be 1"),
        ('Mixer(1, cp_comm_type="p2p")', "TypeError", "unexpected keyword argument 'cp_comm_type'"),
        ("model.no_such_field", "AttributeError", "no_such_field"),
        ("from megatron.core.nowhere import anything", "ModuleNotFoundError", "megatron.core.nowhere"),
        ('assert os.environ["RANK"] == "0", "the last rank"', "AssertionError", "the last rank"),
    ],
)
def test_what_megatron_raises_is_a_refusal_with_its_line(fault: str, error: str, message: str, tmp_path: Path) -> None:
    found = validate(tmp_path, fault)
    refused = [rank for rank in found["ranks"] if rank["kind"] == "refused"]
    assert found["verdict"] == "refused"
    assert len(refused) == (1 if "last rank" in fault else 2)
    assert (refused[-1]["error"], refused[-1]["stage"]) == (error, "config")
    assert message in refused[-1]["message"]
    line = (tmp_path / "wheels" / refused[-1]["where"].partition(":")[0]).read_text().splitlines()
    assert refused[-1]["where"].startswith(PLACE)
    assert line[int(refused[-1]["where"].partition(":")[2]) - 1].strip() == fault


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("transformer_engine.pytorch.Linear().nothing", "nothing"),
        ("transformer_engine.Quantizer() + 1", "stand_in_for_Quantizer"),
        ("transformer_engine.__file_of_the_package__", "__file_of_the_package__"),
        (RAISED_AGAIN, "'Norm' object has no attribute 'bias' when"),
        ("import no_such_package", "no_such_package"),
        ('raise ImportError("Transformer Engine was built without Userbuffers")', "Userbuffers"),
        ('open("/no/such/file")', "/no/such/file"),
        ("import torch; torch.empty(1, device='meta').item()", "meta"),
        ("import torch; torch.empty(1 << 50)", "memory"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_what_the_stand_ins_cannot_do_is_no_verdict(fault: str, message: str, tmp_path: Path) -> None:
    found = validate(tmp_path, fault)
    assert [rank["kind"] for rank in found["ranks"]] == ["not judged", "not judged"]
    assert found["verdict"] == "not judged"
    assert message in found["ranks"][0]["message"]


def test_a_hang_ends_at_the_limit_with_all_its_processes(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    program = f"import pathlib, time\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.01)"
    fault = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}]); time.sleep(10_000)"
    found = validate(tmp_path, fault, seconds=12.0)
    assert (found["verdict"], found["ranks"][0]["message"]) == ("not judged", "no answer within 4 seconds")
    assert mark.exists()
    mark.unlink()
    time.sleep(1)
    assert not mark.exists()  # who touched it has ended


def test_memory_ends_at_the_limit(tmp_path: Path) -> None:
    fault = "held = []\nwhile True: held.append(bytearray(1 << 26))"
    found = validate(tmp_path, fault, gigabytes=4.0)
    assert found["verdict"] == "not judged"
    assert "4 GB of memory" in found["ranks"][0]["message"]


def test_a_refusal_counts_more_than_a_rank_that_was_not_judged(tmp_path: Path) -> None:
    fault = 'if os.environ["RANK"] == "0": import no_such_package\nraise ValueError("no")'
    found = validate(tmp_path, fault)
    assert [rank["kind"] for rank in found["ranks"]] == ["not judged", "refused"]
    assert found["verdict"] == "refused"


def test_values_that_megatron_changes_are_named(tmp_path: Path) -> None:
    found = validate(tmp_path, "model.moe_token_dispatcher_type = 'allgather'; cfg.train.micro_batch_size *= 2")
    assert found["verdict"] == "accepted"
    assert found["differs"] == {"job.micro_batch": [1, 2], "knobs.dispatcher": ["alltoall", "allgather"]}


def test_another_release_is_said(tmp_path: Path) -> None:
    validate(tmp_path, "pass")
    command = [sys.executable, str(tmp_path / "validate.py"), "--megatron", str(tmp_path / "wheels"), "--json"]
    for part, version, remark in (
        ("core", "0.19.2+606983b", ""),  # with the commit of a folder that it runs in
        ("bridge", "0.5.1", "judged by core 0.19.2, bridge 0.5.1"),
    ):
        (tmp_path / "wheels" / "megatron" / part / "package_info.py").write_text(f"__version__ = {version!r}\n")
        done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["remark"].endswith(remark) if remark else not json.loads(done.stdout)["remark"]


@pytest.mark.parametrize(("fault", "code"), [("pass", 0), ("assert False, 'no'", 1), ("import no_such_package", 3)])
def test_the_exit_code_is_the_verdict(
    fault: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = write_fake_megatron(tmp_path / "wheels", fault)
    words = ("--verify", "--megatron", str(wheels), "--out", str(tmp_path / "out"))
    status, out, err = run("export", f"recipes/{NAME}.toml", *words, capsys=capsys)
    assert (status, err) == (code, "")
    assert f"Megatron Bridge 0.6.2: {('accepted', 'refused', '', 'not judged')[code]}" in out
    assert "rank 15" in out
    assert "stood in for: " in out


def test_an_interpreter_that_cannot_judge_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    silent.chmod(0o755)
    for python, reason in ((str(silent), "no such module"), (str(tmp_path / "nowhere"), "No such file")):
        status, out, _ = run("export", f"recipes/{NAME}.toml", "--verify", "--python", python, capsys=capsys)
        assert status == 3
        assert reason in out


def test_a_python_without_megatron_is_told_how_to_name_it(tmp_path: Path) -> None:
    for name, text in export_files(export_plan(recipe(NAME)), NAME, Options(), str(tmp_path)).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, tmp_path / "validate.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "No module named 'megatron'. Name the folder of Megatron's unpacked wheels with --megatron" in done.stdout


def test_an_export_says_that_it_was_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("export", f"recipes/{NAME}.toml", "--out", str(tmp_path), capsys=capsys)
    assert status == 0
    assert out.count("not verified: ") == 1


@pytest.mark.parametrize("to", [BRIDGE, LM])
def test_the_script_is_one_file_without_threefold(to: str, tmp_path: Path) -> None:
    text = export_files(export_plan(recipe(NAME), to), NAME, Options(), str(tmp_path))["validate.py"]
    nodes = ast.parse(text).body
    names = [name for node in nodes for name in _defined(node)]
    assert [name for name, count in Counter(names).items() if count > 1] == []  # modules do not cover each other
    assert "from threefold" not in text
    (tmp_path / "validate.py").write_text(text)
    command = [sys.executable, "-S", "-I", str(tmp_path / "validate.py"), "--help"]
    assert subprocess.run(command, capture_output=True, timeout=GENEROUS).returncode == 0


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return (
        [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
    )


def test_arguments_take_no_modules_of_graphs_back(tmp_path: Path) -> None:
    """Megatron-LM's parser refuses `--cuda-graph-modules` without a module."""
    plan = recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap-wgrad")
    text = export_files(export_plan(plan, LM), "plan", Options(), str(tmp_path))["arguments.sh"]
    assert "--cuda-graph-modules" not in text
