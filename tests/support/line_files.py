"""The folder in which drawn command lines run: a file of each kind that a verb may be given, sound and broken.

`make_files` writes them once; each line then gets a copy, so that none meets what another has left.
"""

import json
import os
import shutil
from pathlib import Path

from command_line import GARBAGE
from hf_configs import CONFIGS
from repository import ROOT
from tiny_runs import tiny_plan, tiny_shard

from threefold.cli.main import main
from threefold.engine.train import train
from threefold.plan.file import dump_plan

WORK = "work"  # the folder in which a line runs, so that ".." is within the scratch folder too
RECIPES = ("tiny-qwen3-moe-256-1xcpu-fp32", "qwen3-30b-a3b-4k-16xh100-bf16-overlap", "deepseek-v3-4k-1024xh100-fp8")
DRAFT = 'model = "tiny-qwen3-moe"\ncluster = { chip = "cpu", gpus = 2 }\n[job]\nseq_len = 256\n[layout]\nep = "auto"\n'
STEPS = {"job.data": "synthetic", "job.steps": 6, "job.warmup_steps": 1}

# What may be given for each kind of file. A kind that no argument asks for by name is drawn for all of them.
PLANS = ("plan.toml", "other.toml", "draft.toml", *(f"{name}.toml" for name in RECIPES))
RUNS = ("run", "other-run")
FILES = {
    "plan": PLANS,
    "run": RUNS,
    "checkpoint": ("hf", "run/checkpoints/step-6"),
    "trace": ("run/profile/rank-0.json.gz",),
    "data": ("text.txt", "data.jsonl", "shard.tok", "texts"),
    "questions": ("questions.jsonl",),
    "export": ("exported", "exported/overrides.txt"),
    "chip": ("chip.toml", "described.toml"),
    "card": ("card.toml",),
    "config": ("config.json", "hf:config.json", "hf:hf"),
    "tokenizer": ("hf/tokenizer.json", "hf"),
}
BROKEN = (
    *(f"broken/{name}.toml" for name in GARBAGE),
    *("broken/cut.json.gz", "broken/cut.jsonl", "broken/zeros.tok", "broken/random.bin", "broken/list.json"),
    *("empty", "empty-file", "missing", "missing/deeper", "secret", "loop", "fifo", "/dev/null", "/dev/zero", "/"),
    *(".", "..", "~", "~nobody/x", "", " ", "-", "x" * 300, "x/" * 3000, "grün.toml", "a b.toml", "run.toml"),
)
ODD_NAMES = ("grün.toml", "a b.toml")  # of a sound plan


def make_files(root: Path) -> Path:
    """Write every kind of file into a new folder, with a home and a cache of its own."""
    work = root / WORK
    work.mkdir(parents=True)
    (root / "home").mkdir()
    plan = tiny_plan(STEPS)
    (work / "plan.toml").write_text(dump_plan(plan))
    (work / "other.toml").write_text(dump_plan(tiny_plan({**STEPS, "job.micro_batch": 1, "job.lr": 1e-3})))
    (work / "draft.toml").write_text(DRAFT)
    for name in ODD_NAMES:
        (work / name).write_text(dump_plan(plan))
    for name in RECIPES:
        shutil.copy(ROOT / "recipes" / f"{name}.toml", work)
    (work / "chip.toml").write_text('chip = "h100"\n[rates]\ngemm = 0.7\n')
    shutil.copy(min((ROOT / "recipes" / "chips").glob("*.toml")), work / "described.toml")
    shutil.copy(min((ROOT / "cards").glob("*.toml")), work / "card.toml")
    (work / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"]}))
    _make_data(work)
    train(plan, work / "run", lambda text: None, profile="torch")
    train(tiny_plan({**STEPS, "job.lr": 1e-3}), work / "other-run", lambda text: None)
    for words in (
        ["export-hf", str(work / "run"), "--out", str(work / "hf")],
        ["export", str(work / f"{RECIPES[1]}.toml"), "--out", str(work / "exported")],
    ):
        assert main(words) == 0, words
    _make_broken(work)
    return root


def _make_data(work: Path) -> None:
    text = "A sentence of a few words, and another one.\n" * 40
    (work / "text.txt").write_text(text)
    (work / "texts").mkdir()
    (work / "texts" / "a.txt").write_text(text)
    (work / "data.jsonl").write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n in range(9)))
    question = {"question": "Which?", "choices": ["this", "that"], "answer": 0}
    (work / "questions.jsonl").write_text(json.dumps(question) + "\n")
    tiny_shard(work / "shard.tok")


def _make_broken(work: Path) -> None:
    broken = work / "broken"
    broken.mkdir()
    for name, content in GARBAGE.items():
        (broken / f"{name}.toml").write_bytes(content)
    whole = (work / "run" / "profile" / "rank-0.json.gz").read_bytes()
    (broken / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    (broken / "cut.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (broken / "zeros.tok").write_bytes(bytes(4096))
    (broken / "random.bin").write_bytes(bytes((n * n * 31 + n) % 256 for n in range(3000)))
    (broken / "list.json").write_text("[" * 5000 + "]" * 5000)
    (work / "empty").mkdir()
    (work / "empty-file").touch()
    (work / "secret").write_text("model = 1")
    (work / "secret").chmod(0)
    (work / "loop").symlink_to("loop")
    (work / "run.toml").mkdir()
    os.mkfifo(work / "fifo")
