"""Runs verbs on hostile files that were drawn at random, and says what is wrong with how they ended."""

import json
import random
import re
from pathlib import Path

from bounded_verb import MOST_BYTES, Ended, run_bounded
from damaged_files import time_limit
from hostile_files import MAKERS, Case
from tiny_models import config_of, spec_of
from tiny_runs import TINY, tiny_plan
from traces import GEMM, kernel, operator, write_trace

from threefold.engine.models.build import build_model
from threefold.engine.train import train
from threefold.engine.weights.write_hf import write_hf
from threefold.plan.file import dump_fields

LIMIT_SECONDS = 600  # a hang, however busy the machine: a case takes a few seconds of CPU time at most
FIELDS = {**TINY, "job.data": "synthetic", "job.steps": 2, "run.save_every": 2}
IMAGES = {
    "model": "tiny-qwen3-vl-moe",
    "job.seq_len": 256,
    "job.task": "sft",
    "job.global_batch": 1,
    "job.micro_batch": 1,
    "job.steps": 1,
    "knobs.precision": "fp32",
}


def make_sound(root: Path) -> Path:
    """What hostile files are made of and read next to: a run, plans, a checkpoint, records and a trace."""
    train(tiny_plan(FIELDS), root / "run", lambda text: None)
    for name, fields in (("plan", FIELDS), ("longer", {**FIELDS, "job.steps": 3}), ("images", IMAGES)):
        (root / f"{name}.toml").write_text(dump_fields(fields), encoding="utf-8")
    model = build_model(spec_of("qwen3_moe"), seed=1)
    write_hf(model, model.spec, root / "hf", config_of("qwen3_moe"))
    chat = {"messages": [{"role": "user", "content": "aaaa"}, {"role": "assistant", "content": "a"}]}
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for _ in range(50)), encoding="utf-8")
    (root / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "aaa b"}) + "\n" for _ in range(300)), encoding="utf-8"
    )
    write_trace(root / "trace.json", [operator("aten::mm", 0, 10, 1), kernel(GEMM, 20, 10)])
    return root


def fault_of(case: Case, words: list[str], ended: Ended) -> str:
    """What is wrong with how a verb ended; empty where nothing is."""
    found = len(re.findall(r"^\s*error\[", ended.said, re.MULTILINE)) or ended.said.count('"severity": "error"')
    if ended.code not in (0, 1):
        return f"it ended with {ended.code} after {ended.cpu_seconds:.1f} s of CPU time"
    if "Traceback" in ended.said or "panicked" in ended.said:
        return "a traceback"
    if ended.added_bytes > MOST_BYTES:
        return f"it took {ended.added_bytes / 2**20:.0f} MiB"
    # The rules may have several things to say of a plan that can be read, and a report says them on its page.
    enough = found >= (words[0] != "report") if case.is_plan else found == 1
    if ended.code == 1 and not enough:
        return f"{found} errors are said"
    if ended.code == 0 and case.is_bad:
        return "a file that is bad for certain is taken"
    return ""


def kind_of(number: int) -> str:
    """The kind of file that a number draws: all kinds by turns."""
    return sorted(MAKERS)[number % len(MAKERS)]


def faults(number: int, seed: str, folder: Path, sound: Path) -> list[str]:
    """Everything that is wrong with one drawn case."""
    draw = random.Random(f"{seed} {number}")
    case = MAKERS[kind_of(number)](folder, draw, sound)
    told = []
    for words in case.commands:
        with time_limit(LIMIT_SECONDS):
            ended = run_bounded(words, folder)
        if fault := fault_of(case, words, ended):
            told.append(f"{case.what}\n  threefold {' '.join(words)}\n  {fault}\n{ended.said[-1500:]}")
    return told
