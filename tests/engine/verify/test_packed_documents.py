"""Packed documents give what the same documents give one a sequence: losses and gradients in fp64, for every CP form.

Each case draws documents with masks. One rank trains on them unpacked, one document in a sequence, so that neither
boundaries nor context parallelism can be wrong there; the ranks of a layout train on them packed. Balancing losses are
off: they count padding, of which unpacked sequences have more.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import build
from tiny_models import config_of

from threefold.engine.build import options_of
from threefold.engine.data.loader import Loader
from threefold.engine.data.packing import WholeDocuments
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.token_shard import TokenShard
from threefold.engine.verify.compare import Comparison, compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import on_one_rank, run_rank
from threefold.plan.plan import Job, Plan

LENGTH = 32
TOLERANCE = 1e-10  # fp64: sums in another order differ by 1e-15, and AdamW divides by the gradient's size

pytestmark = pytest.mark.usefixtures("one_thread")

RING = {"layout.cp": 2, "cluster.gpus": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("qwen3_moe", {"cluster.gpus": 1}),
    "p2p": ("qwen3_moe", {"layout.cp": 4, "cluster.gpus": 4, "knobs.cp_comm": "p2p"}),
    "all_gather": ("gpt_oss", {**RING, "knobs.cp_comm": "all_gather"}),
    "a2a": ("qwen3_moe", {**RING, "knobs.cp_comm": "a2a", "layout.ep": 2}),
    "a2a+p2p": ("qwen3_moe", {"layout.cp": 4, "cluster.gpus": 4, "knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 2}),
    "with TP": ("qwen3_moe", {"layout.cp": 2, "layout.tp": 2, "cluster.gpus": 4}),
    "dynamic": ("qwen3_moe", {**RING, "knobs.cp_dynamic": True}),
    "latents, MTP": ("deepseek_v3", {**RING, "knobs.cp_exchange": "latents", "job.mtp": 1}),
    "expanded, MTP, PP": (
        "deepseek_v3",
        {"layout.cp": 2, "layout.pp": 2, "cluster.gpus": 4, "knobs.cp_exchange": "expanded", "job.mtp": 1},
    ),
    "gated delta rule": ("qwen3_next", {**RING, "knobs.cp_comm": "a2a"}),
}


def write_documents(path: Path, seed: str, vocab: int) -> TokenShard:
    """Conversations of uneven lengths; of some only the last token is learned, and none is longer than a sequence."""
    draw = random.Random(seed)
    with ShardWriter(path, vocab, "drawn") as writer:
        for length in [LENGTH, 2, *(draw.randrange(2, LENGTH) for _ in range(9))]:
            mask = [int(draw.random() < 0.7) for _ in range(length)]
            writer.add([draw.randrange(vocab) for _ in range(length)], [0, *mask[1:-1], 1])
    return TokenShard(path)


def packed_and_unpacked(config: dict[str, Any], fields: dict[str, Any], shard: TokenShard) -> tuple[Plan, Plan]:
    """Both plans train on all documents in one step, and evaluate on all of them."""
    packed, alone = (len(WholeDocuments(shard, LENGTH, True, several)) for several in (True, False))
    assert packed < alone == 11
    file = shard.path.with_name("config.json")
    file.write_text(json.dumps(config))
    common = {
        "model": f"hf:{file}",
        "target": "threefold",
        "cluster.chip": "cpu",
        "job.seq_len": LENGTH,
        "job.task": "sft",
        "job.data": str(shard.path),
        "job.val_data": str(shard.path),
        "job.micro_batch": 1,
        "job.steps": 2,
        **dict.fromkeys(("job.aux_loss", "job.seq_aux_loss", "job.z_loss", "job.bias_rate"), 0.0),
        "run.eval_every": 1,
        "run.eval_batches": 64,
        "knobs.precision": "fp32",
    }
    plans = [
        build({**common, **more})
        for more in (
            {**fields, "job.packing": True, "job.global_batch": packed},
            {"job.mtp": fields.get("job.mtp"), "job.global_batch": alone},
        )
    ]
    return plans[0], plans[1]


def compare(name: str, seed: str, folder: Path) -> Comparison:
    family, fields = CASES[name]
    config = {**config_of(family), "num_nextn_predict_layers": fields.get("job.mtp", 0)}
    shard = write_documents(folder / "documents.tok", seed, config["vocab_size"])
    packed, unpacked = packed_and_unpacked(config, fields, shard)
    options = replace(options_of(packed), expert_backend="loop")
    plain_plan, plain = on_one_rank(unpacked, options)
    words = (1, torch.float64)
    (one_rank,) = run_ranks(1, run_rank, plain_plan, *words, plain, None, None, (), True)
    ranks = run_ranks(packed.layout.gpus, run_rank, packed, *words, options, None, None, (), True)
    return compare_results(packed, one_rank, ranks)


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_are_unpacked_ones(name: str, tmp_path: Path) -> None:
    found = compare(name, f"packed {name}", tmp_path)
    assert not found.problems
    assert found.largest <= TOLERANCE or found.near_ties, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", CASES)
def test_more_packed_documents_are_unpacked_ones(name: str, seed: int, tmp_path: Path) -> None:
    found = compare(name, f"{seed}", tmp_path)
    assert not found.problems
    assert found.largest <= TOLERANCE or found.near_ties, found


def test_packing_says_how_full_it_is(tmp_path: Path) -> None:
    """The tokens of all documents over the slots of the sequences that hold them."""
    shard = write_documents(tmp_path / "documents.tok", "full", 40)
    job = Job(data=str(shard.path), task="sft", packing=True, seq_len=LENGTH)
    with Loader(job, 40, prefetch=0) as loader:
        sequences = loader.mixture.sources[0].num_samples
        slots, tokens = sequences * LENGTH, shard.num_tokens
        full = f"{tokens} tokens in {sequences} sequences, {tokens / slots:.1%} of their {slots} slots"
        assert loader.packing_summary() == f"packing: {full}"
        lengths = [loader.batch(step).lengths or (0,) for step in range(sequences)]
        assert sum(length for (length,) in lengths) == tokens
    with Loader(replace(job, packing=False), 40, prefetch=0) as loader:
        assert loader.packing_summary() is None
