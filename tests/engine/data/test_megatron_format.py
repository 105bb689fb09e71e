"""Megatron's .bin and .idx: read and written in every dtype, byte for byte, and refused where they are damaged."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.engine.data.megatron_dataset import CODES, MegatronDataset, MegatronWriter
from threefold.engine.data.open_sources import open_sources
from threefold.engine.data.shard_writer import ShardWriter
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import megatron_prefix
from threefold.plan.plan import Job

# Documents of one or more sequences, each of some tokens.
datasets = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=3), min_size=1, max_size=6)


def write_by_hand(prefix: Path, documents: list[list[list[int]]], dtype: str) -> None:
    """The two files as megatron/core/datasets/indexed_dataset.py lays them out, with struct alone."""
    letter = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float64": "d", "float32": "f"}
    code = letter.get(dtype, "H")
    sequences = [sequence for document in documents for sequence in document]
    pointers, at = [], 0
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * struct.calcsize(code)
    ends = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]) + struct.pack("<QQ", len(sequences), len(ends))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers) + struct.pack(f"<{len(ends)}q", *ends)
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{code}", *tokens))


def documents_of(data: MegatronDataset) -> list[list[int]]:
    bounds = zip(data.offsets[:-1], data.offsets[1:], strict=True)
    return [data.read(int(first), int(after)).tolist() for first, after in bounds]


def refusal(prefix: Path, vocab: int = 1000) -> Finding:
    with pytest.raises(FindingsError) as caught:
        MegatronDataset(str(prefix), vocab)
    [finding] = caught.value.findings
    assert finding.fix_text
    return finding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@settings(max_examples=60)
@given(documents=datasets, dtype=st.sampled_from(sorted(CODES)))
def test_every_dtype_is_read(folder: Path, documents: list[list[list[int]]], dtype: str) -> None:
    write_by_hand(folder / "read", documents, dtype)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert documents_of(MegatronDataset(str(folder / "read"), 128)) == [tokens for tokens in joined if tokens]


@settings(max_examples=16)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=9), min_size=1, max_size=6),
    dtype=st.sampled_from(sorted(CODES)),
)
def test_what_is_written_is_the_format(folder: Path, documents: list[list[int]], dtype: str) -> None:
    with MegatronWriter(folder / "ours.bin", 128, dtype=dtype) as writer:
        for document in documents:
            writer.add(document)
    write_by_hand(folder / "theirs", [[document] for document in documents], dtype)
    for end in (".bin", ".idx"):
        assert (folder / f"ours{end}").read_bytes() == (folder / f"theirs{end}").read_bytes()


@pytest.mark.parametrize(("vocab", "code"), [(65_499, 8), (65_500, 4)])
def test_the_dtype_is_the_one_of_megatron(vocab: int, code: int, tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "a.idx", vocab) as writer:
        writer.add([vocab - 1])
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert documents_of(MegatronDataset(str(tmp_path / "a"), vocab)) == [[vocab - 1]]


def test_a_run_reads_them_as_it_reads_a_shard(tmp_path: Path) -> None:
    documents = [[d * 10 + t for t in range(3 + d)] for d in range(9)]
    with MegatronWriter(tmp_path / "a.bin", 200) as writer, ShardWriter(tmp_path / "a.tok", 200, "bytes") as shard:
        for document in documents:
            writer.add(document)
            shard.add(document)
    for packing in (False, True):
        expected = None
        for name in ("a.tok", "a", "a.bin", "a.idx"):
            job = Job(data=str(tmp_path / name), seq_len=8, packing=packing)
            (source,), _ = open_sources(job, 200, cache=tmp_path)
            rows = [vars_of(source.sample(n)) for n in range(source.num_samples)]
            expected = expected or rows
            assert rows == expected
    with pytest.raises(FindingsError, match="no loss mask"):
        open_sources(Job(data=str(tmp_path / "a.bin"), task="sft", seq_len=8), 200)


def vars_of(sample: Any) -> tuple[Any, ...]:
    rows = (sample.tokens_S, sample.labels_S, sample.documents_S, sample.positions_S)
    return tuple(None if row is None else row.tolist() for row in rows)


def test_tokenize_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two!"}\n')
    code, said, _ = run("tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out.bin"), capsys=capsys)
    assert code == 0
    assert "2 documents, 9 tokens" in said
    assert megatron_prefix(str(tmp_path / "out")) == str(tmp_path / "out")
    assert documents_of(MegatronDataset(str(tmp_path / "out"), 260)) == [[*b"one", 256], [*b"two!", 256]]
    chat = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
    (tmp_path / "b.jsonl").write_text(chat)
    code, said, _ = run("tokenize", str(tmp_path / "b.jsonl"), "--out", str(tmp_path / "no.bin"), capsys=capsys)
    assert code == 1
    assert "error[mask-has-a-place]" in said
    assert not list(tmp_path.glob("no*"))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]]], "uint16")
    index, tokens = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    for length in range(len(index)):
        (tmp_path / "a.idx").write_bytes(index[:length])
        assert refusal(tmp_path / "a").rule == "megatron-readable", length
    for at in range(len(index)):
        (tmp_path / "a.idx").write_bytes(index[:at] + bytes([index[at] ^ 0x81]) + index[at + 1 :])
        assert refusal(tmp_path / "a").rule == "megatron-readable", at
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(tokens[:-1])
    assert "bytes" in refusal(tmp_path / "a").problem
    (tmp_path / "a.bin").write_bytes(tokens)
    assert "vocabulary of 6" in refusal(tmp_path / "a", vocab=6).problem
    write_by_hand(tmp_path / "b", [[[1, -2]]], "int32")
    assert "vocabulary" in refusal(tmp_path / "b").problem
    write_by_hand(tmp_path / "c", [[[1, 2]]], "float32")
    (tmp_path / "c.bin").write_bytes(struct.pack("<2f", 1.5, float("nan")))
    assert "vocabulary" in refusal(tmp_path / "c").problem
    (tmp_path / "d.bin").touch()
    assert refusal(tmp_path / "d").rule == "megatron-readable"
