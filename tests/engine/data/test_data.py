"""Data: shards, packing, order, batches."""

import errno
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import unigram_entropy

from threefold.cli import tokenize as verb
from threefold.cli.main import main
from threefold.engine.data import loader
from threefold.engine.data.cache_files import cache_folder
from threefold.engine.data.embedded_corpus import corpus_path, embedded_corpus
from threefold.engine.data.mixture import BLOCK, Mixture, block_counts, shuffled_index
from threefold.engine.data.open_sources import DataEntry, open_sources, parse_entries
from threefold.engine.data.packing import (
    IGNORED,
    Sample,
    WholeDocuments,
    concatenated_sample,
    num_stream_samples,
    pack_documents,
    packed_sample,
)
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.sources import LONG, WEB, Lengths, LogNormal, ShardSource, SyntheticSource
from threefold.engine.data.text.chat_template import chat_prompt, encode_chat
from threefold.engine.data.text.chatml import Conversation
from threefold.engine.data.text.tokenize_files import tokenize_files
from threefold.engine.data.text.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from threefold.engine.data.token_shard import HEADER, TokenShard
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Job

Documents = list[list[int]]
# Tokens of one document are neighbors of a multiple of 100, so that a label of another document shows.
SOME = [[100 * d + t for t in range(n)] for d, n in enumerate([5, 1, 9, 2, 16, 3, 7, 30])]
# A folder is made a test and shared by its examples; each writes its own file.
document_lists = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=12)


def write(path: Path, documents: Documents, masks: Documents | None = None, vocab: int = 1000) -> TokenShard:
    with ShardWriter(path, vocab, "bytes") as writer:
        for number, document in enumerate(documents):
            writer.add(document, None if masks is None else masks[number])
    return TokenShard(path)


def refusal(make: Callable[[], Any]) -> Finding:
    with pytest.raises(FindingsError) as caught:
        make()
    [finding] = caught.value.findings
    assert finding.fix_text
    return finding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


# Shards


@given(documents=document_lists, vocab=st.sampled_from([1000, 65536, 65537]))
def test_shard_round_trip(folder: Path, documents: Documents, vocab: int) -> None:
    shard = write(folder / "round.tok", documents, vocab=vocab)
    assert [shard.document(i).tolist() for i in range(len(shard))] == documents
    assert shard.tokens.itemsize == (4 if vocab > 65536 else 2)
    assert shard.mask is None
    assert shard.header.tokenizer == "bytes"


def test_mask_covers_documents_before_and_after(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.tok", 10, "bytes") as writer:
        writer.add([1, 2, 3])
        writer.add([4, 5], [0, 1])
        writer.add([])
        writer.add([6])
    shard = TokenShard(tmp_path / "a.tok")
    assert shard.mask is not None
    assert shard.mask.tolist() == [1, 1, 1, 0, 1, 1]
    assert shard.offsets.tolist() == [0, 3, 5, 6]


def test_header_is_as_documented(tmp_path: Path) -> None:
    write(tmp_path / "a.tok", [[1, 2], [3]])
    raw = (tmp_path / "a.tok").read_bytes()
    assert HEADER.size == 128
    assert raw[:8] == b"3FTOKENS"
    numbers = [int.from_bytes(raw[at : at + 4], "little") for at in (8, 12, 16, 24, 32, 40)]
    assert numbers == [1, 2, 0, 1000, 3, 2]
    assert raw[80:112].rstrip(b"\0") == b"bytes"
    assert raw[128:134] == b"\1\0\2\0\3\0"
    assert raw[136:] == b"".join(n.to_bytes(8, "little") for n in (0, 2, 3))


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write(path, [[1, 2, 3], [4, 5]], [[0, 1, 1], [1, 0]])
    whole = path.read_bytes()
    sections = [*range(128), *range(128, 138), *range(144, 149), *range(152, len(whole))]  # the rest is alignment
    for at in sections:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert refusal(lambda: TokenShard(path)).rule == "shard-readable", at


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write(path, [[1, 2, 3], [4, 5]])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(lambda: TokenShard(path)).rule == "shard-readable", length
    path.write_bytes(whole + b"\0")
    assert "bytes" in refusal(lambda: TokenShard(path)).problem


def test_missing_folder_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.tok").write_text("hello")
    for path in (tmp_path / "none.tok", tmp_path, tmp_path / "text.tok", "a\0b"):
        assert refusal(lambda path=path: TokenShard(path)).rule == "shard-readable"


def test_failed_write_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write(path, [[1, 2]])

    def fail(problem: Exception) -> None:
        with ShardWriter(path, 10, "bytes") as writer:
            writer.add([3])
            raise problem

    with pytest.raises(KeyError):
        fail(KeyError("x"))
    assert refusal(lambda: fail(OSError(errno.ENOSPC, "No space left on device"))).rule == "file-writable"
    assert [file.name for file in tmp_path.iterdir()] == ["a.tok"]
    assert TokenShard(path).document(0).tolist() == [1, 2]
    (tmp_path / "file").touch()
    assert refusal(lambda: ShardWriter(tmp_path / "file" / "a.tok", 10, "bytes")).rule == "file-writable"


def test_writer_refuses_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        write(tmp_path / "a.tok", [[10]], vocab=10)


# Packing


def plain_packed(documents: Documents, seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    """Token, label, document, position of every place, one token at a time."""
    stream = [(d, t) for d, document in enumerate(documents) for t in document]
    rows = []
    for first in range(0, len(stream) - 1, seq_len):
        row: list[tuple[int, int, int, int]] = []
        number, position, last = -1, 0, None
        for at in range(first, first + seq_len):
            owner = stream[at][0] if at < len(stream) else "padding"
            number, position = (number + 1, 0) if owner != last else (number, position + 1)
            last = owner
            same = at + 1 < len(stream) and stream[at + 1][0] == owner
            token = stream[at][1] if at < len(stream) else 0
            row.append((token, stream[at + 1][1] if same else IGNORED, number, position))
        rows.append(row)
    return rows


def places(sample: Sample) -> list[tuple[int, int, int, int]]:
    assert sample.documents_S is not None
    assert sample.positions_S is not None
    columns = (sample.tokens_S, sample.labels_S, sample.documents_S, sample.positions_S)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(documents=document_lists, seq_len=st.integers(1, 40))
def test_packed_equals_plain_loop(folder: Path, documents: Documents, seq_len: int) -> None:
    shard = write(folder / "packed.tok", documents)
    count = num_stream_samples(shard.header.num_tokens, seq_len)
    assert [places(packed_sample(shard, i, seq_len)) for i in range(count)] == plain_packed(documents, seq_len)


@given(documents=document_lists, seq_len=st.integers(1, 40))
def test_concatenated_keeps_every_token_and_label(folder: Path, documents: Documents, seq_len: int) -> None:
    shard = write(folder / "concatenated.tok", documents)
    stream = [token for document in documents for token in document]
    samples = [concatenated_sample(shard, i, seq_len) for i in range(num_stream_samples(len(stream), seq_len))]
    labels = [label for sample in samples for label in sample.labels_S.tolist() if label != IGNORED]
    assert labels == stream[1:]
    assert all(sample.documents_S is None for sample in samples)
    assert [t for s in samples for t in s.tokens_S.tolist()][: len(stream) - 1] == stream[:-1]


@given(sizes=st.lists(st.integers(1, 50), max_size=60), room=st.integers(0, 50), window=st.integers(1, 20))
def test_pack_keeps_every_document_once_and_fits(sizes: list[int], room: int, window: int) -> None:
    seq_len = max(sizes, default=1) + room
    order, starts = pack_documents(np.array(sizes, np.int64), seq_len, window)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    bins = [order[a:b] for a, b in pairwise(starts)]
    assert all(0 < sum(sizes[d] for d in members) <= seq_len for members in bins)


def test_pack_is_tight() -> None:
    chats = Lengths((LogNormal(0.8, 350, 0.9), LogNormal(0.2, 2_000, 0.8)))
    sizes = chats.draw(4000, np.random.default_rng(1)).clip(max=4096)
    _, starts = pack_documents(sizes, 4096)
    assert sizes.sum() / ((len(starts) - 1) * 4096) > 0.97  # a greedy pass in order fills about 0.85


def masks_of(documents: Documents) -> Documents:
    return [[int((token + place) % 3 == 0) for place, token in enumerate(document)] for document in documents]


@given(documents=document_lists, seq_len=st.integers(2, 40), together=st.booleans())
def test_whole_documents_equal_plain_loop(folder: Path, documents: Documents, seq_len: int, together: bool) -> None:
    masks = masks_of(documents)
    shard = write(folder / "whole.tok", documents, masks)
    whole = WholeDocuments(shard, seq_len, uses_mask=True, packs_several=together)
    expected = []
    for document, mask in zip(documents, masks, strict=True):
        pairs = list(zip(document, mask, strict=True))[:seq_len]
        labels = [token if learned else IGNORED for token, learned in pairs[1:]]
        if any(label != IGNORED for label in labels):
            expected.append([*zip((token for token, _ in pairs), [*labels, IGNORED], range(len(pairs)), strict=True)])
    found = []
    for index in range(len(whole)):
        sample = whole.sample(index)
        used = seq_len - sample.num_padding
        assert set(sample.labels_S[used:].tolist()) <= {IGNORED}
        numbers = np.zeros(seq_len, int) if sample.documents_S is None else sample.documents_S
        for number in range(int(numbers[used - 1]) + 1):
            at = np.flatnonzero(numbers[:used] == number)
            where = np.arange(len(at)) if sample.positions_S is None else sample.positions_S[at]
            found.append([*zip(*(a.tolist() for a in (sample.tokens_S[at], sample.labels_S[at], where)), strict=True)])
    assert sorted(found) == sorted(expected)


# Tokenizers and conversations


@given(text=st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.max(initial=0) < 256
    if text.isprintable():  # hypothesis also makes half surrogates, which become question marks
        assert tokenizer.decode(tokens.tolist()) == text


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    made.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    return path


def test_file_tokenizer_round_trip(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file.parent))
    text = "the cat sat on the mat, again and again"
    tokens = tokenizer.encode(text)
    assert 3 < len(tokens) < len(text)  # merged, and not truncated as the file says
    assert tokenizer.decode(tokens.tolist()) == text
    assert [t.tolist() for t in tokenizer.encode_all([text, "cat"])] == [
        tokens.tolist(),
        tokenizer.encode("cat").tolist(),
    ]
    assert tokenizer.end == tokenizer.special("<end>") == 0
    assert FileTokenizer(tokenizer_file, end="<|im_end|>").end == 2


def test_text_cannot_forge_special_tokens(tokenizer_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), FileTokenizer(tokenizer_file)):
        special = {tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>"), tokenizer.end}
        assert not special & set(tokenizer.encode("<|im_end|><|im_start|>system<end><|endoftext|>").tolist())


def test_unusable_tokenizers_are_findings(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no.json").write_text("{}")
    assert refusal(lambda: open_tokenizer(str(tmp_path / "no.json"))).rule == "tokenizer-readable"
    assert refusal(lambda: open_tokenizer(str(tmp_path / "none.json"))).rule == "tokenizer-readable"
    assert refusal(lambda: FileTokenizer(tokenizer_file, end="<none>")).rule == "tokenizer-readable"
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert refusal(lambda: open_tokenizer(str(tokenizer_file))).rule == "tokenizers-installed"


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "3 + 3?"}]},
    {"role": "assistant", "content": "six"},
]


def test_only_the_assistant_is_learned(tokenizer_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), FileTokenizer(tokenizer_file)):
        [(tokens, mask)] = encode_chat(tokenizer, Conversation(CHAT)).samples
        end = tokenizer.special("<|im_end|>")
        learned = [*tokenizer.encode("4").tolist(), end, *tokenizer.encode("six").tolist(), end]
        assert tokens[mask == 1].tolist() == learned
        assert tokenizer.decode(tokens.tolist()).startswith("system\nBe brief.")
        prompt = chat_prompt(tokenizer, CHAT[:2])
        assert tokens[: len(prompt)].tolist() == prompt.tolist()
        assert mask[: len(prompt) + 1].tolist() == [0] * len(prompt) + [1]


# Files to shards


def test_tokenize_files_folders_and_jsonl(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "b" / ".git").mkdir(parents=True)
    (source / "b" / "x.py").write_text("x = 1")
    (source / "a.txt").write_text("é")
    (source / "b" / "bad.py").write_bytes(b"\xff\xfe")
    (source / "b" / "empty.py").touch()
    (source / "b" / "image.png").write_bytes(b"png")
    (source / "b" / ".git" / "z.txt").write_text("hidden")
    (source / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "n": 1}\n')
    made = tokenize_files([str(source), str(source / "a.txt")], tmp_path / "out.tok", ByteTokenizer())
    shard = TokenShard(tmp_path / "out.tok")
    texts = [ByteTokenizer().decode(shard.document(i).tolist()) for i in range(len(shard))]
    assert texts == ["é", "one", "two", "x = 1", "é"]
    assert all(shard.document(i)[-1] == 256 for i in range(5))
    assert made.num_documents == 5
    assert made.num_tokens == shard.header.num_tokens == 2 + 3 + 3 + 5 + 2 + 5
    assert [skipped.split(": ", 1)[1] for skipped in made.skipped] == ["not UTF-8 text (byte 0)"]


@pytest.mark.parametrize(
    ("name", "content", "rule", "at"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": 1}\n', "text-readable", "a.jsonl:2"),
        ("a.jsonl", b"{", "text-readable", "a.jsonl:1"),
        ("a.jsonl", b'{"messages": [{"role": "robot", "content": "x"}]}', "chat-readable", "a.jsonl:1"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', "chat-readable", "a.jsonl:1"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}', "chat-readable", ":1"),
        ("a.txt", b"a\0b", "text-readable", "a.txt"),
        ("a.txt", b"\xff", "text-readable", "a.txt"),
        ("a.txt", b"", "data-empty", "a.txt"),
    ],
)
def test_bad_text_is_a_finding(tmp_path: Path, name: str, content: bytes, rule: str, at: str) -> None:
    (tmp_path / name).write_bytes(content)
    finding = refusal(lambda: tokenize_files([str(tmp_path / name)], tmp_path / "out.tok", ByteTokenizer()))
    assert finding.rule == rule
    assert finding.at.endswith(at)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_tokenize_verb(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    (tmp_path / "a.txt").write_text("the cat sat")
    words = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "a.tok")]
    assert verb.run(parser.parse_args(words)) == 0
    assert "1 documents, 12 tokens, vocabulary 260 (bytes)" in capsys.readouterr().out
    assert verb.run(parser.parse_args([*words, "--json", "--tokenizer", str(tokenizer_file)])) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert said["tokenizer"].startswith("hf-")
    assert said["fingerprint"] == TokenShard(tmp_path / "a.tok").header.fingerprint
    assert main(["tokenize", "--json", "--out", str(tmp_path / "b.tok"), str(tmp_path / "none.txt")]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["rule"] == "text-readable"


# The embedded corpus


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    embedded_corpus(folder)
    return folder


def test_embedded_corpus_is_deterministic_and_made_once(cache: Path, tmp_path: Path) -> None:
    path = corpus_path(cache)
    first, made = embedded_corpus(cache).header, path.stat().st_mtime_ns
    assert 10**6 < first.num_tokens < 5 * 10**6
    assert embedded_corpus(cache).header == first
    assert path.stat().st_mtime_ns == made
    assert embedded_corpus(tmp_path).header == first
    damaged = corpus_path(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert embedded_corpus(tmp_path).header == first


def test_unigram_entropy(cache: Path, tmp_path: Path) -> None:
    assert unigram_entropy(write(tmp_path / "a.tok", [[1, 1, 2, 2], [3, 3, 3, 3]])) == pytest.approx(1.5 * math.log(2))
    # Byte entropy of English text and of source code is between 4 and 5 bits.
    assert 4 * math.log(2) < unigram_entropy(embedded_corpus(cache)) < 5 * math.log(2)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "threefold"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "threefold"
    assert cache_folder("here") == Path("here")


# Order


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40))
def test_shuffle_is_a_bijection(size: int, seed: int) -> None:
    assert sorted(shuffled_index(i, size, seed, "x") for i in range(size)) == list(range(size))


def test_shuffle_shuffles() -> None:
    size = 10_000
    one, other = ([shuffled_index(i, size, seed) for i in range(size)] for seed in (1, 2))
    index = np.arange(size)
    # Rank correlation of a random permutation has a standard deviation of 1 / sqrt(n) = 0.01; 5 of them.
    for pair in ((index, one), (index, other), (one, other)):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.05
    assert 0 <= shuffled_index(2**50 - 3, 2**50 - 1, 5) < 2**50 - 1
    with pytest.raises(IndexError):
        shuffled_index(5, 5)


def test_small_shuffles_reach_every_order() -> None:
    orders = Counter(tuple(shuffled_index(i, 3, seed) for i in range(3)) for seed in range(600))
    assert len(orders) == 6
    assert min(orders.values()) > 50  # 100 expected


class Counted:
    """A source that is nothing but its size."""

    benchmark_only = False

    def __init__(self, num_samples: int) -> None:
        self.name, self.num_samples = "counted", num_samples

    def sample(self, index: int) -> Sample:
        return Sample(np.array([index]), np.array([index]))

    def fingerprint(self) -> str:
        return str(self.num_samples)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_block_counts_follow_weights(weights: list[float]) -> None:
    counts = block_counts(weights)
    assert sum(counts) == BLOCK
    for count, weight in zip(counts, weights, strict=True):
        # At least one each: the others give up as much as that takes.
        assert abs(count - BLOCK * weight / sum(weights)) <= len(weights)
        assert count >= 1


def test_mixing_weights_converge() -> None:
    mix = Mixture([Counted(10), Counted(1000), Counted(77)], [0.5, 0.2, 0.3], seed=3)
    share = np.cumsum([[mix.locate(n)[0] == s for s in range(3)] for n in range(2 * BLOCK)], axis=0)
    assert np.abs(share[-1] / (2 * BLOCK) - [0.5, 0.2, 0.3]).max() < 1 / BLOCK
    # Within a block the order is random: 5 standard deviations of 500 draws at one half.
    assert np.abs(share[499] / 500 - [0.5, 0.2, 0.3]).max() < 5 * 0.5 / 500**0.5


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_every_sample_once_an_epoch_and_epochs_differ(sizes: list[int], seed: int) -> None:
    mix = Mixture([Counted(size) for size in sizes], [1.0] * len(sizes), seed)
    seen: list[list[int]] = [[] for _ in sizes]
    for n in range(400):
        source, index = mix.locate(n)
        seen[source].append(index)
    for size, indices in zip(sizes, seen, strict=True):
        epochs = [indices[at : at + size] for at in range(0, len(indices) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        if size > 10:
            assert epochs[0] != epochs[1]


def test_epochs_go_on_across_blocks() -> None:
    mix = Mixture([Counted(7), Counted(11)], [1, 2], seed=1)
    met: list[list[int]] = [[], []]
    for n in range(3 * BLOCK):
        source, index = mix.locate(n)
        met[source].append(index)
    for size, indices in zip((7, 11), met, strict=True):
        assert all(len(set(indices[at : at + size])) == size for at in range(0, len(indices) - size, size))


# job.data


def test_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:2").touch()
    assert parse_entries("embedded") == [DataEntry("embedded")]
    assert parse_entries(("a.tok:2x", "b.tok:0.5x", "c:x")) == [
        DataEntry("a.tok", epochs=2.0),
        DataEntry("b.tok", epochs=0.5),
        DataEntry("c:x"),
    ]
    assert parse_entries(("a.tok:0.3", "b:c.tok:2", "d:e.tok", "run:2")) == [
        DataEntry("a.tok", 0.3),
        DataEntry("b:c.tok", 2.0),
        DataEntry("d:e.tok"),
        DataEntry("run:2"),
    ]


def job(data: Any, **fields: Any) -> Job:
    fields = {"seq_len": 8, "global_batch": 12, "micro_batch": 1} | fields
    return Job(data=tuple(map(str, data)) if isinstance(data, list | tuple) else str(data), **fields)


def test_text_is_named_as_the_user_knows_it(tmp_path: Path) -> None:
    """Not by its shard in the cache. An answer behind the end of a sequence is none."""
    text, chats = tmp_path / "notes.txt", tmp_path / "chats.jsonl"
    text.write_text("only words")
    chats.write_text('{"prompt": "%s", "completion": "4"}' % ("long " * 20))
    for path, said in ((text, "notes.txt has no loss mask"), (chats, "chats.jsonl holds nothing to learn")):
        finding = refusal(lambda path=path: open_sources(job(path, task="sft"), 1000, cache=tmp_path / "stored"))
        assert said in finding.problem
        assert "stored" not in finding.problem
    assert "first 8 tokens" in finding.fix_text


def test_every_data_problem_at_once(tmp_path: Path) -> None:
    write(tmp_path / "ok.tok", SOME)
    write(tmp_path / "one.tok", [[1]])
    with ShardWriter(tmp_path / "hf.tok", 9000, "hf-0") as writer:
        writer.add([8000, 1])
    (tmp_path / "empty").mkdir()
    names = ["ok.tok:1", "one.tok:0", "hf.tok:1", "none.tok:1", "empty:1"]
    with pytest.raises(FindingsError) as caught:
        open_sources(job([tmp_path / name for name in names]), 1000)
    assert sorted(f.rule for f in caught.value.findings) == [
        "data-empty",
        "data-empty",
        "data-fits-vocab",
        "data-one-tokenizer",
        "data-weights",
        "shard-readable",
    ]
    assert all(finding.fix_text for finding in caught.value.findings)
    refused = (["embedded", "synthetic:1"], ["synthetic:nan"], ["synthetic:inf"], ["synthetic:-1"], ["synthetic:0x"])
    for data in (*refused, ["embedded:2x", "synthetic:1"]):
        assert refusal(lambda data=data: open_sources(job(data), 1000, cache=tmp_path)).rule == "data-weights"
    assert refusal(lambda: open_sources(job([]), 1000)).rule == "data-empty"
    for data in ("embedded", tmp_path / "ok.tok"):
        assert refusal(lambda data=data: open_sources(job(data, task="sft"), 1000)).rule == "data-fits-task"
    assert refusal(lambda: open_sources(job(tmp_path / "no.jsonl", task="sft"), 1000)).rule == "text-readable"


def test_sizes_are_the_weights_where_none_are_written(tmp_path: Path) -> None:
    write(tmp_path / "a.tok", [list(range(81))])
    write(tmp_path / "b.tok", [list(range(241))])
    _, weights = open_sources(job([tmp_path / "a.tok", tmp_path / "b.tok"]), 1000)
    assert weights == [10, 30]
    _, weights = open_sources(job([f"{tmp_path}/a.tok:2x", f"{tmp_path}/b.tok"]), 1000)
    assert weights == [20, 30]
    [joined], _ = open_sources(job(tmp_path), 1000)
    assert joined.num_samples == 40
    assert joined.sample(10).tokens_S.tolist() == list(range(8))


# Batches


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    write(folder / "a.tok", SOME)
    write(folder / "b.tok", [[50 + t for t in range(40)], [200 + t for t in range(90)]])
    return [folder / "a.tok", folder / "b.tok"]


def open_loader(data: Any, **fields: Any) -> Any:
    ours = {"dp_rank", "dp_size", "seed", "prefetch", "cache", "held_out", "evaluation", "length_multiple"}
    keywords = {name: fields.pop(name) for name in ours & set(fields)}
    vocab = fields.pop("vocab", 1000)
    return loader.Loader(job(data, **fields), vocab, **({"prefetch": 0} | keywords))


def step_rows(data: Any, step: int, dp_size: int, **fields: Any) -> list[list[int]]:
    """The sequences of one step in global order: by microbatch, then rank, then row."""
    loaders = [open_loader(data, dp_rank=rank, dp_size=dp_size, **fields) for rank in range(dp_size)]
    batches = [one.batch(step, m) for m in range(loaders[0].num_microbatches) for one in loaders]
    rows: list[list[int]] = torch.cat([torch.cat([b.tokens_BS, b.labels_BS], 1) for b in batches]).tolist()
    return rows


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_do_not_change_the_data(shards: list[Path], packing: bool, micro_batch: int) -> None:
    for step in (0, 1, 1000):
        one = step_rows(shards, step, 1, packing=packing, micro_batch=micro_batch)
        assert len(one) == 12
        for dp_size in (2, 3, 6) if micro_batch == 2 else (2, 3, 4, 6):
            assert step_rows(shards, step, dp_size, packing=packing, micro_batch=micro_batch) == one


def test_batch_has_the_promised_tensors(shards: list[Path]) -> None:
    plain = open_loader(shards, micro_batch=3).batch(0, 0)
    assert plain.tokens_BS.shape == plain.labels_BS.shape == (3, 8)
    assert plain.tokens_BS.dtype == plain.labels_BS.dtype == torch.int64
    assert plain.documents_BS is None
    assert plain.positions_BS is None
    boundaries = open_loader(shards, micro_batch=3, packing=True).batch(0, 0)
    assert boundaries.documents_BS.shape == boundaries.positions_BS.shape == (3, 8)
    assert boundaries.documents_BS.dtype == boundaries.positions_BS.dtype == torch.int64


@settings(max_examples=30)
@given(taken=st.integers(0, 30), dp_size=st.sampled_from([1, 2, 3]), batch=st.sampled_from([6, 12, 18]))
def test_resume_is_exact_at_any_point(shards: list[Path], taken: int, dp_size: int, batch: int) -> None:
    data = [f"{shards[0]}:1", f"{shards[1]}:3"]
    whole = open_loader(data, global_batch=6)
    stream = [row for step in range(20) for m in range(6) for row in whole.batch(step, m).tokens_BS.tolist()]
    first = open_loader(data, global_batch=6)
    for number in range(taken):
        first.batch(*divmod(number, 6))
    state = json.loads(json.dumps(first.state()))
    assert state["sample"] == taken // 6 * 6  # an unfinished step is done again
    found = []
    loaders = [open_loader(data, global_batch=batch, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
    for one in loaders:
        one.load_state(state)
    for step in range(state["step"], state["step"] + 2):
        for m in range(loaders[0].num_microbatches):
            found += [row for one in loaders for row in one.batch(step, m).tokens_BS.tolist()]
    assert found == stream[state["sample"] : state["sample"] + 2 * batch]


def test_resume_with_other_data_is_refused(shards: list[Path]) -> None:
    state = open_loader(shards).state()
    for other in (
        open_loader(shards[:1]),
        open_loader(shards, seed=1),
        open_loader(shards, packing=True),
        open_loader(shards, seq_len=4),
        open_loader([f"{shards[0]}:1", f"{shards[1]}:1"]),
    ):
        assert refusal(lambda other=other: other.load_state(state)).rule == "data-unchanged"
    open_loader(shards, global_batch=24, micro_batch=2, dp_size=2).load_state(state)


def test_fingerprint_is_of_content_not_of_place(shards: list[Path], tmp_path: Path) -> None:
    write(tmp_path / "copy.tok", SOME)
    assert open_loader(tmp_path / "copy.tok").fingerprint() == open_loader(shards[0]).fingerprint()
    write(tmp_path / "copy.tok", [*SOME, [1, 2]])
    assert open_loader(tmp_path / "copy.tok").fingerprint() != open_loader(shards[0]).fingerprint()


def test_tiny_corpus_wraps_around(tmp_path: Path) -> None:
    write(tmp_path / "tiny.tok", [[1, 2, 3]])
    batch = open_loader(tmp_path / "tiny.tok", micro_batch=12).batch(5, 0)
    assert batch.tokens_BS.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]] * 12
    assert batch.labels_BS.tolist() == [[2, 3, *[IGNORED] * 6]] * 12


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [[{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}] for n in range(1, 30)]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    return path


@pytest.mark.parametrize("packing", [False, True])
def test_sft_learns_answers_only(chats: Path, cache: Path, packing: bool) -> None:
    one = open_loader(chats, task="sft", seq_len=96, packing=packing, micro_batch=4, cache=cache)
    end = ByteTokenizer().special("<|im_end|>")
    for step in range(10):
        for m in range(3):
            batch = one.batch(step, m)
            learned = batch.labels_BS[batch.labels_BS != IGNORED]
            assert set(learned.tolist()) <= {ord("a"), end}
            assert (batch.labels_BS != IGNORED).any(1).all()
            if packing:
                crossing = batch.documents_BS.diff(dim=1) != 0
                assert (batch.labels_BS[:, :-1][crossing] == IGNORED).all()


def test_sft_answers_all_arrive(chats: Path, cache: Path) -> None:
    source, _ = open_sources(job(chats, task="sft", seq_len=128), 1000, cache=cache)
    learned = sum(int((source[0].sample(i).labels_S != IGNORED).sum()) for i in range(source[0].num_samples))
    assert learned == sum(n + 1 for n in range(1, 30))
    assert source[0].num_samples == 29


def test_dynamic_length_cuts_shared_padding(chats: Path, cache: Path) -> None:
    fields = {"task": "sft", "seq_len": 256, "micro_batch": 4, "cache": cache}
    whole, cut = open_loader(chats, **fields), open_loader(chats, dynamic_length=True, length_multiple=16, **fields)
    one, other = whole.batch(0, 0), cut.batch(0, 0)
    length = other.tokens_BS.shape[1]
    assert length < 256
    assert length % 16 == 0
    assert torch.equal(one.tokens_BS[:, :length], other.tokens_BS)
    assert (one.labels_BS[:, length:] == IGNORED).all()


# Synthetic data and lengths


@pytest.mark.parametrize("name", ["synthetic", "synthetic-zipf"])
def test_synthetic_is_benchmark_only_and_repeats(name: str, shards: list[Path]) -> None:
    one, again, other = (open_loader(name, seq_len=512, packing=True, vocab=50, seed=s) for s in (1, 1, 2))
    assert one.benchmark_only
    assert torch.equal(one.batch(3, 2).tokens_BS, again.batch(3, 2).tokens_BS)
    assert not torch.equal(one.batch(3, 2).tokens_BS, other.batch(3, 2).tokens_BS)
    assert not open_loader(shards).benchmark_only
    assert open_loader([f"{shards[0]}:1", f"{name}:1"]).benchmark_only


def test_synthetic_distributions() -> None:
    uniform, zipf = (SyntheticSource(20, 20_000, zipf=z).sample(0).tokens_S for z in (False, True))
    # 5 standard deviations of a count of 1000 among 20000.
    assert np.abs(np.bincount(uniform, minlength=20) - 1000).max() < 5 * 1000**0.5
    harmonic = sum(1 / k for k in range(1, 21))
    expected = 20_000 / harmonic / np.arange(1, 21)
    assert (np.abs(np.bincount(zipf, minlength=20) - expected) < 5 * expected**0.5).all()


def test_synthetic_documents_have_boundaries() -> None:
    sample = SyntheticSource(50, 4096, packing=True).sample(7)
    assert sample.documents_S is not None
    ends = np.append(np.diff(sample.documents_S) == 1, True)
    assert ((sample.labels_S == IGNORED) == ends).all()
    assert sample.documents_S[-1] > 0


@pytest.mark.parametrize("mix", [WEB, LONG])
def test_lengths_follow_their_parameters(mix: Lengths) -> None:
    drawn, same = (mix.draw(20_000, np.random.default_rng(5)) for _ in range(2))
    assert (drawn == same).all()
    assert mix.least <= drawn.min()
    assert drawn.max() <= mix.most
    share = np.array([p.weight for p in mix.parts])
    below = [
        share @ [0.5 * (1 + math.erf(math.log(at / p.median) / p.sigma / 2**0.5)) for p in mix.parts]
        for at in np.quantile(drawn, [0.25, 0.5, 0.9])
    ]
    assert below == pytest.approx([0.25, 0.5, 0.9], abs=0.015)  # 4 standard deviations of a share of 20000


def test_most_documents_are_short_and_most_tokens_long() -> None:
    drawn = LONG.draw(20_000, np.random.default_rng(0))
    assert (drawn < 4096).mean() > 0.7
    assert drawn[drawn >= 32_768].sum() / drawn.sum() > 0.5
    assert LONG.mean > 5 * WEB.mean


@given(seq_len=st.integers(1, 5000), seed=st.integers(0, 999))
def test_fill_is_exact(seq_len: int, seed: int) -> None:
    filled = WEB.fill(seq_len, np.random.default_rng(seed))
    assert filled.sum() == seq_len
    assert filled.min() > 0


# Prefetch


def alive() -> int:
    return sum(thread.name == "threefold-prefetch" for thread in threading.enumerate())


def test_prefetch_equals_direct(shards: list[Path]) -> None:
    direct = open_loader(shards, packing=True)
    order = [(0, 0), (0, 1), *((s, m) for s in range(2, 5) for m in range(12)), (1, 3), (1, 4)]
    with open_loader(shards, packing=True, prefetch=3) as ahead:
        for place in order:
            one, other = direct.batch(*place), ahead.batch(*place)
            assert torch.equal(one.tokens_BS, other.tokens_BS)
            assert torch.equal(one.labels_BS, other.labels_BS)
            assert torch.equal(one.documents_BS, other.documents_BS)
            assert ahead.state() == direct.state()
        state = {**direct.state(), "step": 100, "sample": 55}
        ahead.load_state(state)
        direct.load_state(state)
        assert torch.equal(direct.batch(101, 0).tokens_BS, ahead.batch(101, 0).tokens_BS)
        assert alive() == 1
    assert alive() == 0


def test_prefetch_ends_when_its_loader_is_dropped(shards: list[Path]) -> None:
    dropped = open_loader(shards, prefetch=2)
    dropped.batch(0, 0)
    [thread] = [t for t in threading.enumerate() if t.name == "threefold-prefetch"]
    del dropped
    thread.join(timeout=600)
    assert not thread.is_alive()


def test_prefetch_surfaces_exceptions_in_their_place(shards: list[Path]) -> None:
    class Broken(ShardSource):
        def sample(self, index: int) -> Sample:
            nonlocal count
            count += 1
            if count > 3:
                raise OSError("the disk is gone")
            return super().sample(index)

    count = 0
    ahead = open_loader(shards[0], prefetch=2)
    ahead._maker = replace(ahead._maker, mixture=Mixture([Broken(TokenShard(shards[0]), 8, False)], [1]))
    for microbatch in range(3):
        ahead.batch(0, microbatch)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.batch(0, 3)
    assert alive() == 0
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.batch(0, 3)


def test_batches_outside_a_step_are_refused(shards: list[Path]) -> None:
    one = open_loader(shards)
    for place in ((0, 12), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            one.batch(*place)
    with pytest.raises(ValueError, match="batch 12"):
        open_loader(shards, dp_size=5)


def test_a_shard_takes_no_device_or_pipe_for_its_file(tmp_path: Path) -> None:
    """A finished shard is moved to its place: as root that would put a file where /dev/null is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FindingsError, match="it is a device or a pipe"):
        ShardWriter(pipe, 512, "bytes")
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()
