"""The planner's side of the command line on a machine without torch: every verb answers, in text and in JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from traces import GEMM, annotation, kernel, write_trace

from threefold.cli.main import VERBS
from threefold.spec.hf import hf_config_of
from threefold.spec.models import MODELS

LARGE = "recipes/deepseek-v3-128k-256xh100-fp8.toml"
SMALL = "recipes/tiny-qwen3-moe-256-1xcpu-fp32.toml"
PLAN = ["plan", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "8", "--seq-len", "4096", "--top", "1"]
# A command of each verb that plans, judges, predicts or reads. {work} stands for a folder to write to.
PLANNER: dict[str, list[str]] = {
    "plan": [*PLAN, "--global-batch", "64", "--out", "{work}/plan.toml"],
    "fit": ["fit", "olmoe-1b-7b", "--gpus", "8"],
    "check": ["check", LARGE],
    "show": ["show", LARGE],
    "estimate": ["estimate", LARGE, "--tokens", "1T"],
    "sweep": ["sweep", SMALL, "--over", "job.seq_len=64,128"],
    "launch": ["launch", LARGE, "--target", "threefold", "--slurm"],
    "export": ["export", LARGE],
    "import": ["import", "{work}/overrides.txt", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "8"],
    "compare": ["compare", SMALL, SMALL],
    "contract": ["contract", LARGE],
    "profile": ["profile", "{work}/trace.json.gz"],
    "diagnose": ["diagnose", "{work}/job.log"],
    "load": ["load", "{work}/loads.json"],
    "card": ["card", "list"],
    "find": ["find", "ulysses"],
    "skills": ["skills"],
    "rules": ["rules"],
    "models": ["models"],
    "chips": ["chips"],
    "schema": ["schema"],
    "env": ["env", "--no-kernels"],
    "completion": ["completion", "bash"],
    "report": ["report", SMALL, "--out", "{work}/report.html"],
}
# Verbs that train or rehearse: they say what is missing.
ENGINE: dict[str, list[str]] = {
    "dry-run": ["dry-run", SMALL],
    "train": ["train", SMALL, "--run", "{work}/run"],
    "verify": ["verify", SMALL],
    "overlap-ab": ["overlap-ab", "recipes/tiny-deepseek-v3-256-8xcpu-fp32-folded.toml"],
    "calibrate": ["calibrate"],
    "tune": ["tune", SMALL, "--out", "{work}/tuning"],
    "finetune": ["finetune", "{work}/hf", "--data", "{work}/chats.jsonl", "--out", "{work}/run"],
    "eval": ["eval", "{work}", "--data", "x.jsonl"],
    "sample": ["sample", "{work}"],
    "import-hf": ["import-hf", "{work}", "--out", "{work}/run"],
    "export-hf": ["export-hf", "{work}", "--out", "{work}/hf"],
}
ELSEWHERE = {
    "regress": "starts a command of the user's",
    "tokenize": "tests/cli/test_finetune_cli.py",
    "explore": "serves a page until it is stopped",
    "mcp": "tests/mcp",
    "validate": "tests/compare/test_contract.py",
}
RUN_ALL = """
import contextlib, io, json, sys
from threefold.cli.main import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    found.append([code, out.getvalue(), err.getvalue(), [name for name in ("torch", "triton") if name in sys.modules]])
json.dump(found, sys.stdout)
"""


def without_torch(commands: list[list[str]], work: Path) -> list[tuple[int, str, str, list[str]]]:
    """Exit code, both outputs and what was loaded, of commands in one process in which torch cannot be imported."""
    for name in ("torch", "safetensors", "triton"):
        (work / "blocked" / name).mkdir(parents=True, exist_ok=True)
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (work / "blocked" / name / "__init__.py").write_text(missing)
    filled = [[word.replace("{work}", str(work)) for word in words] for words in commands]
    environment = {**os.environ, "PYTHONPATH": f"{work / 'blocked'}:{ROOT}", "XDG_CACHE_HOME": str(work / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(filled),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "overrides.txt").write_text("model.tensor_model_parallel_size=2\n")
    (folder / "job.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    (folder / "loads.json").write_text(json.dumps([[4, 2, 1, 1], [2, 2, 2, 2]]))
    (folder / "chats.jsonl").write_text('{"text": "a few words"}\n')
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(hf_config_of(MODELS["tiny-qwen3-moe"])))
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "hf" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    events = [annotation("ProfilerStep#1", 0, 1000), kernel(GEMM, 100, 500), annotation("ProfilerStep#2", 1000, 1000)]
    write_trace(folder / "trace.json.gz", [*events, kernel(GEMM, 1100, 500)])
    return folder


def test_every_verb_is_planner_or_engine() -> None:
    assert set(VERBS) <= {*PLANNER, *ENGINE, *ELSEWHERE}


def test_every_planner_verb_works_without_torch(work: Path) -> None:
    commands = [words for verb, words in PLANNER.items() if verb in VERBS]
    both = without_torch([*commands, *([*words, "--json"] for words in commands)], work)
    for words, (code, out, err, loaded) in zip(commands, both[: len(commands)], strict=True):
        assert (words[0], code, loaded) == (words[0], 0, []), err
        assert out or err
    for words, (code, out, err, _) in zip(commands, both[len(commands) :], strict=True):
        assert (words[0], code) == (words[0], 0), err
        json.loads(out)


def test_every_engine_verb_names_the_missing_package(work: Path) -> None:
    for words, (code, out, err, _) in zip(ENGINE.values(), without_torch(list(ENGINE.values()), work), strict=True):
        assert (words[0], code) == (words[0], 1), out + err
        assert "Traceback" not in out + err
        assert "pip install 'threefold[train]'" in out + err, words
