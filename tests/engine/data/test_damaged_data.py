"""Shards, texts, JSONL and tokenizers of strangers and of bad disks: one finding each, and nothing read elsewhere."""

import json
import os
import random
import shutil
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from damaged_files import ANY_FILE, DEEP, Damage, change_json, grow, time_limit, trap_of

from threefold.engine.data import open_sources as sources_module
from threefold.engine.data import token_shard
from threefold.engine.data.loader import Loader
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.text import tokenizer_files
from threefold.engine.data.text.tokenizer import open_tokenizer
from threefold.engine.data.token_shard import HEADER, TokenShard, content_fingerprint
from threefold.findings import FindingsError
from threefold.plan.plan import Job

SEED = int(os.environ.get("THREEFOLD_SEED", time.time_ns() % 1_000_000))
LIMIT_SECONDS = 600  # a hang, however busy the machine: a case takes a fraction of a second
SECRET = "a line that belongs to the user alone"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, one with a loss mask, texts, JSONL of texts and of chats, and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("sound")
    draw = random.Random(0)
    for name, masked in (("a.tok", False), ("b.tok", True)):
        (root / "shards").mkdir(exist_ok=True)
        with ShardWriter(root / "shards" / name, 512, "bytes") as writer:
            for _ in range(40):
                tokens = [draw.randrange(512) for _ in range(draw.randrange(2, 60))]
                writer.add(tokens, [1] * len(tokens) if masked else None)
    (root / "texts").mkdir()
    for number in range(3):
        (root / "texts" / f"{number}.txt").write_text("the cat sat on the mat\n" * 20)
    chat = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    (root / "texts" / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for _ in range(20)))
    (root / "texts" / "texts.jsonl").write_text("".join(json.dumps({"text": "the mat"}) + "\n" for _ in range(20)))
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    (root / "tokenizer").mkdir()
    made.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    return root


def sign_header(content: bytearray) -> bytes:
    body = bytes(content[: HEADER.size - 4])
    return body + struct.pack("<I", zlib.crc32(body)) + bytes(content[HEADER.size :])


def signed_header(path: Path, draw: random.Random, outside: Path) -> None:
    """Some bytes of the header are others, and its checksum is right."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.randrange(1, 4)):
        content[draw.randrange(8, HEADER.size - 4)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
    path.write_bytes(sign_header(content))


def signed_label(path: Path, draw: random.Random, outside: Path) -> None:
    content = bytearray(path.read_bytes())
    at = HEADER.size - 4 - 12 - 32
    label = draw.choice(("höchst".encode(), b"\xff" * 32, b"\x1b[31m", b"a\nb", b"x" * 32))
    content[at : at + 32] = label.ljust(32, b"\0")
    path.write_bytes(sign_header(content))


def signed_content(path: Path, draw: random.Random, outside: Path) -> None:
    """Tokens past the vocabulary, or offsets that fall, with a fingerprint that is right."""
    shard = TokenShard(path, verify=False)
    head, content = shard.header, bytearray(path.read_bytes())
    if draw.random() < 0.5:
        at = head.tokens_offset + 2 * draw.randrange(head.num_tokens)
        content[at : at + 2] = b"\xff\xff"
    else:
        at = head.offsets_offset + 8 * draw.randrange(1, head.num_documents)
        content[at : at + 8] = struct.pack("<Q", draw.choice((0, 5, 2**63, head.num_tokens, 2**64 - 1)))
    path.write_bytes(content)
    again = TokenShard(path, verify=False)
    digests = [token_shard._digest(part) for part in (again.tokens, again.mask, again.offsets)]
    content[48:80] = bytes.fromhex(content_fingerprint(digests, head.vocab, head.tokenizer))
    path.write_bytes(sign_header(content))


def broken_line(path: Path, draw: random.Random, outside: Path) -> None:
    lines = path.read_bytes().splitlines()
    bad = (
        DEEP,
        b"{",
        b"5",
        b'{"text": 5}',
        b'{"messages": 5}',
        b'{"messages": [{"role": []}]}',
        b"\xff",
        b'{"text": "\\ud800"}',
    )
    lines[draw.randrange(len(lines))] = draw.choice(
        (*bad, b'{"messages": ' + DEEP, b'{"text": ' + b"9" * 10_000 + b"}")
    )
    path.write_bytes(b"\n".join(lines) + b"\n")


def damage_data(folder: Path, draw: random.Random, outside: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Reading a file of 64 GiB of zeros takes its time, as reading so much text would.
    kinds: list[tuple[Path, Damage]] = [(draw.choice(files), draw.choice([one for one in ANY_FILE if one is not grow]))]
    shards = [path for path in files if path.suffix == ".tok"]
    kinds += [(draw.choice(shards), damage) for damage in (signed_header, signed_label, signed_content, grow)]
    kinds += [(draw.choice([path for path in files if path.suffix == ".jsonl"]), broken_line)]
    kinds += [(draw.choice([path for path in files if path.suffix == ".json"]), change_json)]
    path, damage = draw.choice(kinds)
    damage(path, draw, outside)
    return f"{damage.__name__} {path.relative_to(folder)}"


def read_some(folder: Path, data: str, task: str, packing: bool) -> str:
    """Read some batches, as training does. Returns the findings as text, or nothing."""
    job = Job(seq_len=16, global_batch=4, micro_batch=4, data=(data,), task=task, packing=packing)
    try:
        with Loader(job, 512, cache=folder / "cache", prefetch=0) as loader:
            for step in range(12):
                batch = loader.batch(step)
                assert int(batch.tokens_BS.max()) < 512
                assert batch.labels_BS.shape == batch.tokens_BS.shape
    except FindingsError as error:
        return str(error)
    return ""


def one_case(
    sound: Path,
    tmp_path: Path,
    draw: random.Random,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    shutil.copytree(sound, folder)
    outside.mkdir()
    if draw.random() < 0.5:  # as if the shards were too large to be verified when they are opened
        monkeypatch.setattr(token_shard, "VERIFY_BYTES", -1)
        monkeypatch.setattr(sources_module, "VERIFY_BYTES", -1)
    with time_limit(LIMIT_SECONDS):
        what = damage_data(folder, draw, outside)
        for data in ("shards", "shards/a.tok", "shards/b.tok", "texts/chats.jsonl", "texts/texts.jsonl"):
            for task, packing in (("sft", True), ("sft", False), ("pretrain", True), ("pretrain", False)):
                read_some(folder, str(folder / data), task, packing)
        for words in ((), ("--tokenizer", str(folder / "tokenizer"))):
            out = tmp_path / f"made{len(words)}.tok"
            code, said, err = run("tokenize", str(folder / "texts"), "--out", str(out), *words, capsys=capsys)
            where = f"{what}: tokenize gave {code}\n{said[-2000:]}\n{err[-2000:]}"
            assert code in (0, 1), where
            assert "Traceback" not in said + err, where
            assert said.count("error[") == code, where
            assert out.exists() != bool(code), where
            assert not trap_of(outside).exists(), where


@pytest.mark.parametrize("number", range(30))
def test_damaged_data(
    number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_case(sound, tmp_path, random.Random(f"data {number}"), capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(150))
def test_damaged_data_drawn_anew(
    number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"THREEFOLD_SEED={SEED}")
    one_case(sound, tmp_path, random.Random(f"{SEED} {number}"), capsys, monkeypatch)


# What was found by hand


def finding_of(path: Path) -> str:
    with pytest.raises(FindingsError) as caught:
        TokenShard(path)
    [finding] = caught.value.findings
    assert (finding.rule, finding.at) == ("shard-readable", str(path))
    return finding.problem


def test_a_tokenizer_label_that_is_no_ascii(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    shutil.copy(sound / "shards" / "a.tok", path)
    content = bytearray(path.read_bytes())
    content[HEADER.size - 48 : HEADER.size - 16] = "höchst".encode().ljust(32, b"\0")
    path.write_bytes(sign_header(content))
    assert "no ASCII text" in finding_of(path)


@pytest.mark.parametrize("target", ["nothing", "../outside.tok"])
def test_a_link_in_a_folder_of_shards(target: str, sound: Path, tmp_path: Path) -> None:
    """One to nothing is no traceback, and one out of the folder is not followed."""
    shutil.copytree(sound / "shards", tmp_path / "shards")
    shutil.copy(sound / "shards" / "a.tok", tmp_path / "outside.tok")
    (tmp_path / "shards" / "c.tok").symlink_to(target)
    told = read_some(tmp_path, str(tmp_path / "shards"), "pretrain", False)
    assert "c.tok" in told
    assert ("No such file" if target == "nothing" else "link out of") in told


def test_texts_of_a_folder_do_not_come_from_outside(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sound / "texts", tmp_path / "texts")
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "texts" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "texts" / "inside.txt").symlink_to("0.txt")
    os.mkfifo(tmp_path / "texts" / "fifo.txt")
    code, said, _ = run("tokenize", str(tmp_path / "texts"), "--out", str(tmp_path / "out.tok"), capsys=capsys)
    assert code == 0
    assert "skipped" in said
    assert "link.txt: cannot be read: it is a link out of" in said
    assert "fifo.txt: cannot be read: it is a FIFO" in said
    tokens = np.array(TokenShard(tmp_path / "out.tok").tokens, np.uint16)
    assert SECRET.encode() not in bytes(tokens[tokens < 256].astype(np.uint8))


def test_a_deeply_nested_tokenizer_config(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_bytes(b'{"eos_token": ' + DEEP)
    assert open_tokenizer(str(tmp_path / "tokenizer")).end is None  # as where it is missing
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    os.mkfifo(tmp_path / "tokenizer" / "tokenizer_config.json")
    assert open_tokenizer(str(tmp_path / "tokenizer")).end is None


def test_a_tokenizer_that_cannot_encode(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library has no type for its errors, and some come with the first text."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model}))
    words = (
        "tokenize",
        str(sound / "texts"),
        "--out",
        str(tmp_path / "out.tok"),
        "--tokenizer",
        str(tmp_path / "t.json"),
    )
    code, said, _ = run(*words, capsys=capsys)
    assert code == 1
    assert "error[tokenizer-readable]" in said


@pytest.mark.parametrize("table", ["AAAA", "AQAA", "not base64", ""])
def test_a_tokenizer_whose_table_of_characters_is_empty(
    table: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library would panic, and print where in its own source."""
    found = json.loads((sound / "tokenizer" / "tokenizer.json").read_text())
    normalizer = {"type": "Precompiled", "precompiled_charsmap": table}
    found["normalizer"] = {"type": "Sequence", "normalizers": [normalizer]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(FindingsError, match="this is no tokenizer that works"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_of_too_many_entries(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes up to 500 bytes for each: four million took 2 GiB."""
    path = str(sound / "tokenizer")
    assert open_tokenizer(path).vocab > 0
    monkeypatch.setattr(tokenizer_files, "MAX_ENTRIES", 20)
    with pytest.raises(FindingsError, match="it has more than 20 entries"):
        open_tokenizer(path)
