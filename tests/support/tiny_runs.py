"""Runs small enough for a test: a model of one layer on a shard of a few thousand tokens."""

import os
import random
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.token_shard import TokenShard
from threefold.engine.train import train
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

TINY = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 1,
    "model.num_experts": 4,
    "job.seq_len": 32,
    "job.global_batch": 4,
    "job.micro_batch": 2,
    "job.warmup_steps": 2,
    "knobs.precision": "fp32",
    "run.tensorboard": False,
}
DEEPSEEK = {"model": "tiny-deepseek-v3", "model.num_layers": 2, "model.num_experts": 8}


def tiny_plan(fields: dict[str, Any]) -> Plan:
    parsed = parse(TINY, fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def tiny_shard(path: Path) -> str:
    """Write a shard of documents that each count upwards by a step of their own: there is something to learn."""
    draw = random.Random(0)
    with ShardWriter(path, 512, "bytes") as writer:
        for _ in range(60):
            start, step = draw.randrange(512), draw.randrange(1, 5)
            writer.add([(start + step * n) % 512 for n in range(draw.randrange(5, 150))])
    return str(path)


def closed_pipe() -> TextIO:
    """The writing end of a pipe whose reader is gone, as behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def run_to_the_end(fields: dict[str, Any], folder: Path, said: Path) -> None:
    """Train a tiny plan, as the main function of a process; messages go to a file."""
    torch.set_num_threads(1)

    def say(text: str) -> None:
        with said.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    train(tiny_plan(fields), folder, say)


def unigram_entropy(shard: TokenShard) -> float:
    """Nats per token of a model that only knows how frequent each token is: a loss that training must beat."""
    counts = np.zeros(shard.header.vocab, np.int64)
    for start in range(0, len(shard.tokens), 2**20):
        counts += np.bincount(shard.tokens[start : start + 2**20], minlength=shard.header.vocab)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
