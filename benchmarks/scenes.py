"""Trains a small Qwen3-VL-MoE on drawn scenes for a few minutes, and asks it about pictures that it has not seen.

python benchmarks/scenes.py [--minutes 5] [--threads 2] [--scenes 256] [--json FILE] [field=value ...]

The data goes the way of every run: tar shards, worker processes, patches, packing (`job.data = "scenes"`). Each picture
that was held out is asked all its questions, one at a time. An answer counts where greedy decoding gives exactly its
tokens and the end of the turn; that is so where every token of it is the most likely one behind those before it.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from threefold.engine.build import Parts, build
from threefold.engine.data.images.scenes import COLOURS, KINDS, PLACES, SEEDS, make_scene, write_records
from threefold.engine.data.loader import Loader
from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.engine.step import train_step
from threefold.plan.file import parse_overrides
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec

HELD_OUT = "scenes-held-out"
GOALS = {"colour": 0.8, "position": 0.7, "count": 0.6}
PLAN = {
    "model": "tiny-qwen3-vl-moe",
    "cluster.chip": "cpu",
    "job.seq_len": 256,  # two conversations; longer ones cost more in attention than they save in padding
    "job.global_batch": 8,
    "job.micro_batch": 8,
    "job.task": "sft",
    "job.data": "scenes",
    "job.packing": True,
    "job.max_pixels": 4_096,  # 16 tokens of a picture
    "job.optimizer": "muon",
    "job.lr": 5e-3,
    "job.weight_decay": 0.05,
    "job.steps": 100_000,
    "knobs.precision": "fp32",
    "knobs.dispatcher": "local",
}
WARMUP_STEPS = 30
ASKED_AT_ONCE = 32
INIT_STD = 0.05  # with the 0.02 of wide models 500 steps learnt nothing of pictures
TOP_K = 2
TABLE_FACTOR = 12.0  # of the encoder's position table, which is added to patches that are some ten times as large


def small_model(model: ModelSpec) -> ModelSpec:
    """The tiny model with fewer experts and a smaller encoder, so that five minutes have more steps."""
    assert model.moe is not None
    assert model.vision is not None
    moe = replace(model.moe, num_experts=8, top_k=TOP_K)
    vision = replace(model.vision, depth=2)
    return replace(model, num_layers=4, moe=moe, vision=vision, init_std=INIT_STD)


def train_for(plan: Plan, parts: Parts, seconds: float) -> tuple[int, float]:
    """Train until the time is over, with a cosine over the time. Returns the steps and the last loss."""
    assert parts.loader is not None
    began, step, loss = time.monotonic(), 0, float("nan")
    while (done := (time.monotonic() - began) / seconds) < 1:
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
        lr = plan.job.lr * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        batches = [parts.loader.batch(step, number) for number in range(plan.num_microbatches)]
        loss = train_step(parts, batches, lr, plan.job).loss
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {done:.0%} of the time  loss {loss:.4f}", flush=True)
    return step, loss


def write_questions(path: Path, num_scenes: int) -> int:
    """Write every question about the held-out pictures as a record of its own. Returns how many there are."""
    records = []
    for number in range(num_scenes):
        scene, picture, _ = make_scene(SEEDS[HELD_OUT], number)
        records += [(scene, picture, {"question": one.text, "answer": one.answer}) for one in scene.questions()]
    write_records(path, records)
    return len(records)


@torch.no_grad()
def answer_questions(plan: Plan, parts: Parts, folder: Path, num_scenes: int) -> tuple[Counter[str], Counter[str]]:
    """How many questions of each kind were asked, and how many answers were right."""
    path = folder / "questions.tar"
    num_questions = write_questions(path, num_scenes)
    alone = {"job.data": str(path), "job.packing": False, "job.dynamic_length": True}
    alone |= {"job.global_batch": ASKED_AT_ONCE, "job.micro_batch": ASKED_AT_ONCE}
    asked, right = Counter[str](), Counter[str]()
    with Loader(change(plan, alone).job, plan.model.vocab, cache=folder, vision=plan.model.vision) as loader:
        for step in range(num_questions // ASKED_AT_ONCE):
            batch = loader.batch(step)
            output = parts.model(batch.tokens_BS, images=batch.images, positions_3BS=batch.positions_3BS)
            best_BS = output.logits.argmax(dim=-1)
            is_right_B = ((best_BS == batch.labels_BS) | (batch.labels_BS < 0)).all(dim=1)
            for labels_S, is_right in zip(batch.labels_BS, is_right_B.tolist(), strict=True):
                kind = kind_of(ByteTokenizer().decode(labels_S[labels_S >= 0].tolist()))
                asked[kind] += 1
                right[kind] += is_right
    return asked, right


def kind_of(answer: str) -> str:
    words = {"colour": COLOURS, "position": PLACES, "kind": KINDS}
    return next((kind for kind, known in words.items() if answer in known), "count")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scenes", type=int, default=256, help="held-out pictures that are asked about")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parsed = parse(PLAN, parse_overrides(args.overrides)[0])
    assert parsed.plan is not None, parsed.findings
    plan = replace(parsed.plan, model=small_model(parsed.plan.model))
    parts = build(plan)
    assert parts.model.vision is not None
    with torch.no_grad():
        parts.model.vision.embed.positions.weight.mul_(TABLE_FACTOR)
    began = time.monotonic()
    try:
        steps, loss = train_for(plan, parts, 60 * args.minutes)
        seconds = time.monotonic() - began
        with tempfile.TemporaryDirectory() as folder:
            asked, right = answer_questions(plan, parts, Path(folder), args.scenes)
    finally:
        parts.close()
    found: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, {args.threads} threads",
        "parameters": sum(p.numel() for p in parts.model.parameters()),
        "steps": steps,
        "seconds": round(seconds, 1),
        "loss": round(loss, 4),
        "questions": dict(asked),
        "accuracy": {kind: round(right[kind] / asked[kind], 4) for kind in sorted(asked)},
        "goals": GOALS,
    }
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
