"""The split into training and evaluation: by content, without bias, and the validation sets of a job."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.data.held_out import HeldOut, split_stores
from threefold.engine.data.loader import Loader
from threefold.engine.data.packing import IGNORED, DocumentStore
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.token_shard import TokenShard
from threefold.engine.train import train
from threefold.findings import FindingsError
from threefold.plan.data_entries import parse_validation
from threefold.plan.plan import Job

Documents = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


def write(path: Path, documents: Documents, masked: bool = False) -> TokenShard:
    with ShardWriter(path, 1000, "bytes") as writer:
        for document in documents:
            writer.add(document, [n % 2 for n in range(len(document))] if masked else None)
    return TokenShard(path)


def documents_of(stores: list[DocumentStore]) -> Documents:
    return [
        store.read(int(first), int(after)).tolist()
        for store in stores
        for first, after in zip(store.offsets[:-1], store.offsets[1:], strict=True)
    ]


def split(stores: list[TokenShard], share: float, whole: bool, seed: int = 0) -> tuple[Documents, Documents]:
    parts = [split_stores(stores, HeldOut(share, seed, evaluation), whole) for evaluation in (False, True)]
    return documents_of(parts[0]), documents_of(parts[1])


document_lists = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=2, max_size=30)


@settings(max_examples=40)
@given(documents=document_lists, share=st.sampled_from([0.01, 0.1, 0.5]), seed=st.integers(0, 99))
def test_whole_documents_fall_into_one_part(folder: Path, documents: Documents, share: float, seed: int) -> None:
    shard = write(folder / "whole.tok", documents, masked=True)
    training, held = split([shard], share, whole=True, seed=seed)
    assert sorted(training + held) == sorted(documents)
    assert not {tuple(each) for each in training} & {tuple(each) for each in held}  # equal ones stay together
    if len({tuple(each) for each in documents}) > 1:
        assert training
        assert held
    [part] = split_stores([shard], HeldOut(share, seed, False), whole=True) or [shard]
    masks = [part.read_mask(int(a), int(b)).tolist() for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)]
    assert masks == [[n % 2 for n in range(len(document))] for document in documents_of([part])]


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_pieces_of_a_stream_are_all_there(folder: Path, sizes: list[int], seed: int) -> None:
    """Each token falls into one part, in its order, and no document of a part joins what was not joined."""
    numbers = iter(range(10**6))
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    with ShardWriter(folder / "stream.tok", 10**6, "bytes") as writer:
        for document in documents:
            writer.add(document)
    training, held = split([TokenShard(folder / "stream.tok")], 0.2, whole=False, seed=seed)
    assert sorted(token for part in training + held for token in part) == list(range(sum(sizes)))
    owner = {token: number for number, document in enumerate(documents) for token in document}
    for part in training + held:
        assert part == list(range(part[0], part[0] + len(part)))
        assert len({owner[token] for token in part}) == 1
    if sum(-(-size // 32) for size in sizes) > 1:
        assert training
        assert held


def test_the_split_has_no_bias_by_length(tmp_path: Path) -> None:
    """The audit's fault: the last two percent behind best-fit packing were the shortest chats."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(4, 1, 4000)).astype(int) + 2
    shard = write(tmp_path / "a.tok", [[*draw.integers(0, 1000, n)] for n in lengths], masked=True)
    training, held = split([shard], 0.1, whole=True)
    # 5 standard deviations of a binomial count, and of the mean of 400 logarithms with a deviation of 1.
    assert abs(len(held) - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    logs = [float(np.mean([np.log(len(each)) for each in part])) for part in (training, held)]
    assert abs(logs[0] - logs[1]) < 5 / 400**0.5


def test_the_split_is_by_content_and_seed(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    documents = [[*map(int, draw.integers(0, 1000, 20))] for _ in range(300)]
    one = split([write(tmp_path / "a.tok", documents)], 0.1, whole=True)
    halves = [write(tmp_path / "b.tok", documents[150:]), write(tmp_path / "c.tok", documents[:150])]
    again = split(halves, 0.1, whole=True)
    assert [sorted(part) for part in one] == [sorted(part) for part in again]
    assert split([TokenShard(tmp_path / "a.tok")], 0.1, whole=True, seed=1)[1] != one[1]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_held_out_is_never_trained_on(tmp_path: Path, packing: bool, task: str) -> None:
    numbers = iter(range(10**6))
    with ShardWriter(tmp_path / "a.tok", 10**5, "bytes") as writer:
        for size in range(2, 120):
            writer.add([next(numbers) for _ in range(size)], [1] * size)
    seen = []
    job = Job(data=str(tmp_path / "a.tok"), seq_len=64, global_batch=4, packing=packing, task=task)
    for evaluation in (False, True):
        with Loader(job, 10**5, held_out=0.2, evaluation=evaluation, prefetch=0) as loader:
            [source] = loader.mixture.sources
            steps = -(-source.num_samples // 4)
            batches = [loader.batch(step, m) for step in range(steps) for m in range(4)]
        labels = {int(label) for batch in batches for label in batch.labels_BS.flatten() if label != IGNORED}
        seen.append(labels)
    assert not seen[0] & seen[1]
    assert 0.08 < len(seen[1]) / len(seen[0] | seen[1]) < 0.35  # 0.2 of 118 documents, or of some 250 pieces


def test_too_little_to_hold_out_is_a_finding(tmp_path: Path) -> None:
    write(tmp_path / "a.tok", [[1, 2, 3]])
    with pytest.raises(FindingsError) as caught:
        Loader(Job(data=str(tmp_path / "a.tok"), seq_len=8), 1000, held_out=0.1, evaluation=True)
    [finding] = caught.value.findings
    assert finding.rule == "data-empty"
    assert "job.val_data" in finding.fix_text


# Validation sets


def test_names_of_validation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.tok").touch()
    assert parse_validation(None) == {}
    assert parse_validation("data/chat.jsonl") == {"chat": "data/chat.jsonl"}
    assert parse_validation(("math=x/val.tok", "y/val.tok", "z/val.tok", "a=b.tok", "my set/v 1")) == {
        "math": "x/val.tok",
        "val": "y/val.tok",
        "val-2": "z/val.tok",
        "a-b": "a=b.tok",
        "v-1": "my set/v 1",
    }


def run_of(folder: Path, **fields: Any) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    plan = tiny_plan({"job.steps": 2, "run.eval_every": 1, "run.eval_batches": 2, **fields})
    train(plan, folder, said.append)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line], said


def test_each_validation_set_has_a_curve(tmp_path: Path) -> None:
    data = tiny_shard(tmp_path / "counting.tok")
    with ShardWriter(tmp_path / "noise.tok", 512, "bytes") as writer:
        writer.add(np.random.default_rng(0).integers(0, 512, 200))
    sets = [f"same={data}", str(tmp_path / "noise.tok")]
    lines, _ = run_of(tmp_path / "run", **{"job.data": data, "job.val_data": sets})
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        losses = [line["eval/same/loss"], line["eval/noise/loss"]]
        assert line["eval_loss"] == pytest.approx(sum(losses) / 2)
        assert losses[0] != losses[1]
    lines, _ = run_of(tmp_path / "split", **{"job.data": data})
    assert all(line["eval/held-out/loss"] == line["eval_loss"] for line in lines)


def test_validation_data_takes_nothing_from_training_and_may_change(tmp_path: Path) -> None:
    data = tiny_shard(tmp_path / "counting.tok")
    fields = {"job.data": data, "run.save_every": 1}
    plain = tiny_plan({**fields, "job.steps": 1})
    train(plain, tmp_path / "run", lambda text: None)
    lines, _ = run_of(tmp_path / "run", **{**fields, "job.steps": 2, "job.val_data": data})
    assert [line["step"] for line in lines] == [2]


def test_validation_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "other.tok", 512, "hf-0123456789abcdef") as writer:
        writer.add(range(200))
    fields = {"job.data": tiny_shard(tmp_path / "a.tok"), "job.val_data": str(tmp_path / "other.tok")}
    with pytest.raises(FindingsError) as caught:
        run_of(tmp_path / "run", **fields)
    assert [(found.rule, found.at) for found in caught.value.findings] == [("data-one-tokenizer", "job.val_data")]
    with pytest.raises(FindingsError) as caught:
        run_of(tmp_path / "run", **{**fields, "job.val_data": ["no.tok", "nor.jsonl"]})
    assert [found.rule for found in caught.value.findings] == ["shard-readable", "text-readable"]
