"""Plans of `threefold finetune`: settings that fit, follow the checkpoint and the data, and yield to the user."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import digit_pairs, save_checkpoint, write_chats

from threefold.cost.estimate import estimate
from threefold.engine.data.text.tokenize_files import tokenize_files
from threefold.engine.data.text.tokenizer import open_tokenizer
from threefold.findings import FindingsError
from threefold.machine.finetune import checkpoint_facts as facts_module
from threefold.machine.finetune.checkpoint_facts import (
    CheckpointFacts,
    DataFacts,
    checkpoint_facts,
    data_facts,
    validation_entries,
)
from threefold.machine.finetune.plan_finetune import FinetunePlan, Request, learning_rate, plan_finetune
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS
from threefold.units import GIB

CHATS = DataFacts(("chats.jsonl",), 40_000_000, True, 20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("checkpoints") / "tiny"
    save_checkpoint(found, "deepseek_v3", num_nextn_predict_layers=1)
    return found


def published(name: str, folder: Path) -> CheckpointFacts:
    """A checkpoint of a published shape, of which only the configuration is looked at."""
    return CheckpointFacts(folder, MODELS[name], 40_960, "BF16", has_mtp=True, has_tokenizer=True)


def planned(checkpoint: CheckpointFacts, chip: str = "cpu", gpus: int = 1, **overrides: Any) -> FinetunePlan:
    request = Request(Path("run"), overrides={name.replace("__", "."): value for name, value in overrides.items()})
    memory = 16 * GIB if chip == "cpu" else CHIPS[chip].memory_bytes
    return plan_finetune(checkpoint, CHATS, request, chip, gpus, memory)


def test_facts_of_a_checkpoint_and_of_data(folder: Path, tmp_path: Path) -> None:
    facts = checkpoint_facts(folder)
    assert (facts.max_len, facts.dtype, facts.has_mtp, facts.has_tokenizer) == (128, "F32", False, True)
    train, _ = digit_pairs()
    chats = write_chats(tmp_path / "chats.jsonl", train)
    found = data_facts([f"{chats}:0.5"])
    assert (found.has_answers, found.num_records, found.num_bytes) == (True, len(train), chats.stat().st_size)
    assert found.entries == (f"{chats}:0.5",)
    (tmp_path / "text.txt").write_text("only words")
    assert not data_facts([str(tmp_path / "text.txt")]).has_answers
    assert data_facts([str(tmp_path)]).has_answers, "a folder in which a file has answers"
    with pytest.raises(FindingsError, match="data-exists"):
        data_facts([str(tmp_path / "none.jsonl")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FindingsError, match="no safetensors"):
        checkpoint_facts(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FindingsError, match="convertible"):
        checkpoint_facts(tmp_path / "empty")


def test_facts_of_tokens(folder: Path, tmp_path: Path) -> None:
    """Shards and Megatron's files are counted by their tokens, and a shard of chats has answers."""
    train, _ = digit_pairs()
    chats, tokenizer = write_chats(tmp_path / "chats.jsonl", train), open_tokenizer(str(folder))
    (tmp_path / "plain.txt").write_text("words " * 50)
    (tmp_path / "shards").mkdir()
    of_chats = tokenize_files([str(chats)], tmp_path / "shards" / "chats.tok", tokenizer)
    of_text = tokenize_files([str(tmp_path / "plain.txt")], tmp_path / "plain.bin", tokenizer)
    shards, megatron = data_facts([str(tmp_path / "shards")]), data_facts([str(tmp_path / "plain")])
    assert (shards.has_answers, shards.num_tokens, shards.num_bytes) == (True, of_chats.num_tokens, 0)
    assert (megatron.has_answers, megatron.num_tokens, megatron.num_bytes) == (False, of_text.num_tokens, 0)
    assert megatron.entries == (str(tmp_path / "plain"),)
    both = data_facts([str(tmp_path / "shards" / "chats.tok"), str(tmp_path / "plain.txt")])
    assert (both.num_tokens, both.num_bytes) == (of_chats.num_tokens, 300)


def test_data_that_is_no_file_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    found = data_facts([str(tmp_path / "pipe.jsonl")])
    assert (found.num_bytes, found.has_answers) == (0, False), "it is not opened, which would wait for a writer"
    (tmp_path / "secret.jsonl").write_text("{}")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(facts_module, "open_regular", refuse)
    with pytest.raises(FindingsError, match=r"text-readable.*secret\.jsonl: cannot be read: Permission denied"):
        data_facts([str(tmp_path / "secret.jsonl")])


def test_validation_sets_may_have_names(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("{}")
    path = str(tmp_path / "val.jsonl")
    assert validation_entries([path, f"math={path}"]) == (path, f"math={path}")
    with pytest.raises(FindingsError, match=r"--val: nowhere\.jsonl is not here"):
        validation_entries(["math=nowhere.jsonl"])


def test_what_a_user_should_know_is_noted(folder: Path) -> None:
    facts = checkpoint_facts(folder)
    assert facts.has_template
    assert not any("ChatML" in note or "positions" in note for note in planned(facts).notes)
    notes = planned(replace(facts, has_template=False), job__steps=1).notes
    assert any("ChatML" in note for note in notes)
    with pytest.raises(FindingsError, match="128 positions"):
        planned(facts, job__seq_len=256)
    assert any(note.startswith("1 step of") for note in notes)


def test_text_is_not_read_as_bytes_for_another_vocabulary(tmp_path: Path) -> None:
    """A checkpoint without tokenizer.json wants one; tokens need none."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    bare = replace(published("qwen3-30b-a3b", tmp_path), has_tokenizer=False)
    with pytest.raises(FindingsError, match=r"error\[text-has-a-tokenizer\]"):
        planned(bare, "h100", 8)
    shard = DataFacts((str(tmp_path / "chats.tok"),), 0, True, None, 10_000_000)
    request = Request(Path("run"))
    assert plan_finetune(bare, shard, request, "h100", 8, CHIPS["h100"].memory_bytes).plan.job.tokenizer is None


@pytest.mark.parametrize("column", ["messages", "conversations", "instruction", "completion", "text"])
def test_answers_are_seen_in_every_format(column: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(4000)), column: ["words and words"] * 4000})
    parquet.write_table(table, tmp_path / "data.parquet")
    with pyarrow.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    rows = [{"id": number, column: "words"} for number in range(4000)]
    (tmp_path / "long.json").write_text(json.dumps(rows))
    (tmp_path / "short.json").write_text(json.dumps(rows[:2]))
    (tmp_path / "lines.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    for path in sorted(tmp_path.iterdir()):
        assert data_facts([str(path)]).has_answers == (column != "text"), path.name


def test_a_plan_for_a_cpu_follows_the_checkpoint(folder: Path) -> None:
    found = planned(checkpoint_facts(folder))
    job = found.plan.job
    assert (job.task, job.seq_len, job.mtp, job.bias_rate) == ("sft", 128, 0, 0.0)
    assert job.tokenizer == str(folder)
    assert found.plan.knobs.precision == "fp32", "an fp32 checkpoint stays fp32 on a CPU"
    assert found.plan.cluster.chip == "cpu"
    assert not any("rounded" in note for note in found.notes)
    # 40 MB are about 10 M tokens; three epochs of them in steps of 16 sequences of 128.
    assert job.steps == pytest.approx(3 * 10e6 / (16 * 128), rel=0.01)
    assert 0 < job.lr <= 3e-4


def test_what_the_user_says_is_not_changed(folder: Path) -> None:
    changes: dict[str, Any] = {
        "job__lr": 5e-4,
        "job__seq_len": 64,
        "job__steps": 7,
        "job__global_batch": 2,
        "knobs__precision": "bf16",
    }
    found = planned(checkpoint_facts(folder), **changes)
    job = found.plan.job
    assert (job.lr, job.seq_len, job.steps, job.global_batch) == (5e-4, 64, 7, 2)
    assert any("F32" in note and "rounded to bf16" in note for note in found.notes)


def test_settings_fit_the_gpus(tmp_path: Path) -> None:
    """A 30B model does not fit one H100, fits eight of them with EP, and one H200 with adapters."""
    qwen = published("qwen3-30b-a3b", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    with pytest.raises(FindingsError, match="memory"):
        planned(qwen, "h100")
    found = planned(qwen, "h100", 8)
    assert found.plan.layout.ep == 8
    assert found.plan.knobs.precision == "bf16"
    assert found.plan.job.seq_len == 4096
    assert estimate(found.plan).fits
    lora = Request(Path("run"), lora_rank=16)
    alone = plan_finetune(qwen, CHATS, lora, "h200", 1, CHIPS["h200"].memory_bytes)
    assert alone.plan.job.lora_rank == 16
    assert alone.plan.job.lr >= 1e-4


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
}


def test_learning_rates_follow_the_size() -> None:
    assert learning_rate(30e9, is_lora=False) == 1e-5
    assert learning_rate(3e9 / 4, is_lora=False) == 2e-5
    assert learning_rate(1e6, is_lora=False) == 3e-4
    assert (learning_rate(30e9, is_lora=True), learning_rate(1e6, is_lora=True)) == (1e-4, 1e-3)
