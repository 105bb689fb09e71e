"""From a checkpoint of transformers and chats to a checkpoint that transformers loads, by the commands of a user."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import digit_pairs, load_checkpoint, save_checkpoint, save_tokenizer, write_chats
from repository import ROOT
from safetensors import safe_open

from threefold.cli.main import main
from threefold.engine.run.folder import METRICS
from threefold.engine.train_state import load_run
from threefold.engine.weights import convert

LIMIT_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work
LOGITS = 1e-5  # relative, fp32: what parity means here
SMALL = ["job.seq_len=64", "job.global_batch=4", "run.tensorboard=false", "job.lr=1e-3"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chats")
    train, held_back = digit_pairs()
    return write_chats(folder / "train.jsonl", 4 * train), write_chats(folder / "val.jsonl", held_back)


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def threefold(*words: str, **how: Any) -> "subprocess.Popen[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def default_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "threefold", *words], env=env, text=True, preexec_fn=default_signals, **how
    )


def losses(run: Path) -> dict[int, float]:
    lines = (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def evaluations(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def interrupt_behind(process: "subprocess.Popen[str]", run: Path, step: int) -> int:
    end = time.monotonic() + LIMIT_SECONDS
    while not any(done >= step for done in losses(run)):
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    return process.wait(LIMIT_SECONDS)


CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"tie_word_embeddings": False},
    "qwen3_moe tied": {"tie_word_embeddings": True},
    "deepseek_v3": {"num_nextn_predict_layers": 1},  # transformers drops the weights of this depth
    "gpt_oss": {},
}


@pytest.mark.parametrize(
    "case", [name if name == "qwen3_moe" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_finetune_stop_reshard_go_on_and_export(
    case: str, chats: tuple[Path, Path], tmp_path: Path, processes: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    source, run, out = tmp_path / "hf", tmp_path / "run", tmp_path / "exported"
    before = save_checkpoint(source, case.split()[0], **CASES[case])
    data = ["--data", str(chats[0]), "--val", str(chats[1])]
    words = [*SMALL, "job.steps=100000", "run.eval_every=1000"]
    first = threefold("finetune", str(source), *data, "--out", str(run), *words)
    processes.append(first)
    assert interrupt_behind(first, run, 3) == 0
    said = capfd.readouterr()
    assert "starting from the imported weights" in said.err
    stopped = max(losses(run))
    layout = ["cluster.gpus=2", "layout.ep=2", "run.eval_every=1"]
    again = threefold("train", str(run), f"job.steps={stopped + 2}", *layout)
    processes.append(again)
    assert again.wait(LIMIT_SECONDS) == 0
    assert f"resuming after step {stopped} of {stopped + 2}" in capfd.readouterr().err
    assert max(losses(run)) == stopped + 2

    assert main(["export-hf", str(run), "--out", str(out)]) == 0
    tokens_BS = torch.randint(0, 380, (2, 23), generator=torch.Generator().manual_seed(1))
    model = load_checkpoint(out)
    with torch.no_grad():
        theirs, ours = model(tokens_BS).logits, load_run(run, print)(tokens_BS).logits
        changed = before(tokens_BS).logits
    assert model.dtype == torch.float32
    assert float((ours - theirs).norm() / theirs.norm()) < LOGITS
    assert float((changed - theirs).norm() / theirs.norm()) > 100 * LOGITS, "it was trained"
    check_exported_files(source, out)
    capfd.readouterr()
    assert main(["eval", str(run), "--data", str(chats[1]), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["results"][0]
    # Two ranks go through an odd number of sequences, so that the run has counted one of them twice.
    assert found["loss"] == pytest.approx(evaluations(run)[stopped + 2], rel=0.05)
    assert main(["sample", str(run), "--chat", "what is 1 and 2?", "--prompt", "what", "--tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("--- 1\nwhat")


def check_exported_files(source: Path, out: Path) -> None:
    """The keys on disk are those that save_pretrained wrote, and the other files are there as they were."""
    keys = []
    for folder in (source, out):
        found: set[str] = set()
        for path in folder.glob("*.safetensors"):
            with safe_open(str(path), "pt") as file:
                found |= set(file.keys())
        keys.append(found)
    assert keys[0] == keys[1]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert main(["export-hf", str(source.parent / "run"), "--out", str(out)]) == 1, "a folder that is not empty"


def test_the_plan_is_shown_and_nothing_is_written(
    chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = tmp_path / "hf", tmp_path / "run"
    save_checkpoint(source, "qwen3_moe")
    words = ["finetune", str(source), "--data", str(chats[0]), "--out", str(run), "job.lr=2e-5"]
    assert main([*words, "--plan-only"]) == 0
    said = capsys.readouterr().out
    assert "lr = 2e-05" in said
    assert 'task = "sft"' in said
    assert not run.exists()
    assert main([*words, "job.lrr=1"]) == 1
    assert "job.lr" in capsys.readouterr().out
    run.mkdir()
    (run / "plan.toml").write_text("")
    assert main(words) == 1
    assert f"`threefold train {run}` resumes it" in capsys.readouterr().out


def test_a_finetune_that_cannot_start_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = tmp_path / "hf", tmp_path / "run"
    save_checkpoint(source, "qwen3_moe")
    (tmp_path / "bad.jsonl").write_text('{"messages": "no list"}\n' * 20)
    assert main(["finetune", str(source), "--data", str(tmp_path / "bad.jsonl"), "--out", str(run), *SMALL]) == 1
    assert "error[" in capsys.readouterr().out
    assert not run.exists()


WRONG: dict[str, tuple[list[str], int, str]] = {
    "no thread": (["--threads", "0"], 2, "--threads 0 is below 1"),
    "no step": (["--stop-at", "0"], 2, "--stop-at 0 is below 1"),
    "another model": (["model=tiny-qwen3-moe"], 1, "error[convertible] model: the model is that of"),
    "no validation file": (["--val", "none.jsonl"], 1, "error[data-exists] --val: none.jsonl"),
    "empty validation file": (["--val", "empty.jsonl"], 1, "empty.jsonl: there is no text in it"),
    "a file as the folder": (["--out", "empty.jsonl"], 1, "empty.jsonl: this is no folder"),
    "another file of data": (["job.data=none.jsonl"], 1, "error[text-readable] none.jsonl"),
    "a template that is none": (["job.tokenizer=broken"], 1, "error[chat-template-compiles]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_weights_are_imported(
    name: str, chats: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "hf", "qwen3_moe")
    save_tokenizer(tmp_path / "broken")
    (tmp_path / "broken" / "chat_template.jinja").write_text("{% for x in %}")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    words, code, said = WRONG[name]
    assert main(["finetune", "hf", "--data", str(chats[0]), "--out", "run", *SMALL, *words]) == code
    out, err = capfd.readouterr()
    assert said in out + err
    assert "weights of qwen3_moe in" not in out + err, "nothing was imported"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_finetuning_learns_a_task_and_answers_held_back_cases(
    chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer repeats two digits of the question. Pairs of the validation set are in no chat of the training set."""
    source, run = tmp_path / "hf", tmp_path / "run"
    save_checkpoint(source, "qwen3_moe", hidden_size=64)
    words = ["--data", str(chats[0]), "--val", str(chats[1]), "--out", str(run), "job.seq_len=96", "job.global_batch=8"]
    settings = ["job.steps=250", "job.lr=4e-3", "run.eval_every=50", "run.tensorboard=false", "run.log_every=10"]
    assert main(["finetune", str(source), *words, *settings]) == 0
    capsys.readouterr()
    right = 0
    held_back = digit_pairs()[1]
    for a, b in held_back:
        assert main(["sample", str(run), "--chat", f"what is {a} and {b}?", "--tokens", "8"]) == 0
        right += capsys.readouterr().out.strip() == f"{a} {b}"
    assert right >= 0.8 * len(held_back), f"{right} of {len(held_back)}"
    assert main(["eval", str(run), "--data", str(chats[0]), "--data", str(chats[1]), "--json"]) == 0
    train, val = (one["loss"] for one in json.loads(capsys.readouterr().out)["results"])
    assert train < 0.2
    assert abs(val - train) < 0.2


def test_an_import_that_is_interrupted_leaves_no_folder(
    chats: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = tmp_path / "hf", tmp_path / "run"
    save_checkpoint(source, "qwen3_moe")

    def interrupt(*given: Any) -> None:
        assert run.exists(), "it has begun to write"
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(convert, "save_file", interrupt)
    assert main(["finetune", str(source), "--data", str(chats[0]), "--out", str(run), *SMALL]) == 130
    assert not run.exists()
