"""Formats of records: each is exact to the token, and a corrupt file of each gives one finding."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import TOOL, save_tokenizer
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.engine.data.open_sources import open_sources
from threefold.engine.data.text.read_documents import ReadSummary, read_documents
from threefold.engine.data.text.records import parse_record
from threefold.engine.data.text.tokenize_files import Tokenized, cached_shard, tokenize_files
from threefold.engine.data.text.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from threefold.engine.data.token_shard import TokenShard
from threefold.findings import FindingsError
from threefold.plan.plan import Job

IM_START, IM_END, END = 258, 259, 256  # of byte tokens
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found = open_tokenizer(str(folder))
    assert isinstance(found, FileTokenizer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


def chatml(*turns: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Tokens and mask of a chat in byte tokens, written down by hand."""
    tokens: list[int] = []
    mask: list[int] = []
    for role, content in turns:
        head, said = [IM_START, *f"{role}\n".encode()], [*content.encode(), IM_END]
        tokens += [*head, *said, ord("\n")]
        mask += [0] * len(head) + [int(role == "assistant")] * len(said) + [0]
    return tokens, mask


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def documents(path: str, out: Path, **options: Any) -> tuple[list[list[int]], list[list[int]], Tokenized]:
    made = tokenize_files([path], out, ByteTokenizer(), **options)
    shard = TokenShard(out)
    bounds = [slice(int(a), int(b)) for a, b in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)]
    mask = np.ones(shard.num_tokens, np.uint8) if shard.mask is None else shard.mask
    return [shard.tokens[b].tolist() for b in bounds], [mask[b].tolist() for b in bounds], made


@settings(max_examples=30)
@given(question=texts, answer=texts, system=texts, form=st.integers(0, 8))
def test_every_form_of_a_chat_has_the_same_tokens(
    folder: Path, question: str, answer: str, system: str, form: int
) -> None:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    sharegpt = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    record: dict[str, Any] = [
        {"messages": messages},
        {"messages": messages, "tools": None, "text": "other"},
        {"conversations": [{"from": "system", "value": system}, *sharegpt]},
        {"conversations": sharegpt, "system": system},
        {"conversations": messages},
        {"instruction": question, "output": answer, "system": system},
        {"instruction": question, "input": "", "output": answer, "system": system},
        {"prompt": messages[:2], "completion": messages[2:]},
        {"prompt": messages[:2], "response": messages[2:]},
    ][form]
    found = documents(write_jsonl(folder / "chat.jsonl", [record]), folder / "chat.tok")
    tokens, mask = chatml(("system", system), ("user", question), ("assistant", answer))
    assert found[:2] == ([tokens], [mask])


def test_instruction_with_input_and_history(tmp_path: Path) -> None:
    record = {"instruction": "Add.", "input": "2 2", "output": "4", "history": [["hi", "ho"]]}
    found = documents(write_jsonl(tmp_path / "a.jsonl", [record]), tmp_path / "a.tok")
    tokens, mask = chatml(("user", "hi"), ("assistant", "ho"), ("user", "Add.\n\n2 2"), ("assistant", "4"))
    assert found[:2] == ([tokens], [mask])


@settings(max_examples=30)
@given(prompt=texts, completion=texts, text=texts)
def test_completions_and_texts(folder: Path, prompt: str, completion: str, text: str) -> None:
    records = [{"prompt": prompt, "completion": completion}, {"text": text}]
    tokens, masks, _ = documents(write_jsonl(folder / "texts.jsonl", records), folder / "texts.tok")
    said = [*prompt.encode(), *completion.encode(), END]
    assert tokens == [said, [*text.encode(), END]]
    assert masks == [[0] * len(prompt.encode()) + [1] * (len(completion.encode()) + 1), [1] * (len(text.encode()) + 1)]


@settings(max_examples=40)
@given(prompt=st.text("the cat so\n<>|", max_size=12), completion=st.text("the cat so\n<>|", min_size=1, max_size=12))
def test_completions_of_a_file_tokenizer(tokenizer: FileTokenizer, prompt: str, completion: str) -> None:
    """The tokens are those of the whole text; what has a character of the completion is learned."""
    tokens, mask = tokenizer.encode_completion(prompt, completion)
    assert tokens.tolist() == tokenizer.encode(prompt + completion).tolist()
    before = tokenizer.decode(tokens[mask == 0].tolist())
    assert prompt.startswith(before)
    assert sorted(mask.tolist()) == mask.tolist()
    assert len(prompt) - len(before) < len(tokenizer.decode(tokens[mask == 1][:1].tolist()))


def test_function_calls_of_sharegpt() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "It is 4."},
        ],
        "tools": json.dumps([TOOL]),
    }
    chat = parse_record("x", record).chat
    assert chat is not None
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert chat.tools == [TOOL]


def test_a_json_file_and_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("one")
    write_jsonl(source / "b.jsonl", [{"text": "two"}])
    (source / "config.json").write_text("{}")  # of a folder only the usual suffixes are read
    assert documents(str(source), tmp_path / "a.tok")[0] == [[*b"one", END], [*b"two", END]]
    (tmp_path / "list.json").write_text(json.dumps([{"text": "x"}, {"instruction": "q", "output": "a"}]))
    tokens, _ = chatml(("user", "q"), ("assistant", "a"))
    assert documents(str(tmp_path / "list.json"), tmp_path / "b.tok")[0] == [[ord("x"), END], tokens]


# Parquet and saved datasets


CHATS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}], "score": n}
    for n in range(700)
]
CALLED = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
}


def save_dataset(folder: Path, records: list[Any], num_files: int = 2) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes, as far as it is read."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    size = -(-len(records) // num_files)
    names = [f"data-{n:05}-of-{num_files:05}.arrow" for n in range(num_files)]
    for number, name in enumerate(names):
        table = pyarrow.Table.from_pylist(records[number * size : (number + 1) * size])
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("records", [CHATS, [CALLED, *CHATS[:3]], [{"text": "größe"}, {"text": "x"}]])
def test_tables_have_the_tokens_of_jsonl(records: list[Any], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    expected = documents(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "a.tok")[:2]
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    saved = save_dataset(tmp_path / "splits" / "train", records)
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow", saved, tmp_path / "splits"):
        assert documents(str(path), tmp_path / "b.tok")[:2] == expected


# Bad records and files


def test_bad_records_are_counted_named_and_skipped(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {n}"}) for n in range(300)]
    lines[6], lines[70] = "{", '{"messages": [{"role": "user", "content": "no answer"}]}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokens, _, made = documents(str(tmp_path / "a.jsonl"), tmp_path / "a.tok")
    assert len(tokens) == 298
    assert made.num_bad_records == 2
    assert [said.split(": ")[0] for said in made.bad_records] == [f"{tmp_path}/a.jsonl:{n}" for n in (7, 71)]
    assert [finding.rule for finding in made.warnings()] == ["records-skipped"]
    (tmp_path / "out").mkdir()
    with pytest.raises(FindingsError) as caught:
        documents(str(tmp_path / "a.jsonl"), tmp_path / "out" / "a.tok", max_bad_records=0.005)
    [finding] = caught.value.findings
    assert (finding.rule, finding.at) == ("text-readable", f"{tmp_path}/a.jsonl:7")
    assert "2 of 300 records" in finding.problem
    assert not list((tmp_path / "out").iterdir())


def test_a_file_of_another_form_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, *[{"title": "x"}] * 3000])
    with pytest.raises(FindingsError, match="1000 of 1001 records"):
        documents(path, tmp_path / "a.tok", max_bad_records=0.2)
    assert documents(path, tmp_path / "a.tok", max_bad_records=1.0)[2].num_bad_records == 3000


def test_the_limit_is_a_field_and_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine, and long enough"}, 5])
    job = Job(data=path, seq_len=8)
    with pytest.raises(FindingsError):
        open_sources(job, 512, cache=tmp_path)
    (source,), _ = open_sources(Job(data=path, seq_len=8, max_bad_records=0.5), 512, cache=tmp_path)
    assert source.num_samples == 3
    words = ("tokenize", path, "--out", str(tmp_path / "a.tok"))
    assert run(*words, capsys=capsys)[0] == 1
    code, said, _ = run(*words, "--max-bad-records", "0.5", capsys=capsys)
    assert code == 0
    assert "warning[records-skipped]" in said


def broken_parquet(path: Path) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(CHATS), path)
    content = bytearray(path.read_bytes())
    content[100:3000] = b"\xff" * 2900
    path.write_bytes(content)


def broken_stream(path: Path) -> None:
    save_dataset(path.parent / "saved", CHATS, 1)
    path.write_bytes((path.parent / "saved" / "data-00000-of-00001.arrow").read_bytes()[:-2000])


CORRUPT: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "jsonl": ("a.jsonl", lambda path: path.write_text('{"text": "x"}\n{"text": ')),
    "binary jsonl": ("a.jsonl", lambda path: path.write_bytes(b"\xff\x00" * 100)),
    "json": ("a.json", lambda path: path.write_text('[{"text": "x"}, {"te')),
    "messages": ("a.jsonl", lambda path: path.write_text('{"messages": {"role": "user"}}')),
    "sharegpt": ("a.jsonl", lambda path: path.write_text('{"conversations": [{"from": "someone", "value": "x"}]}')),
    "completion": ("a.jsonl", lambda path: path.write_text('{"prompt": "x", "completion": ["y"]}')),
    "instruction": ("a.jsonl", lambda path: path.write_text('{"instruction": 5, "output": "y"}')),
    "tools": ("a.jsonl", lambda path: path.write_text('{"messages": [{"role": "user"}], "tools": "{"}')),
    "text": ("a.txt", lambda path: path.write_bytes(b"\xff\xfe\xfd")),
    "parquet": ("a.parquet", broken_parquet),
    "cut parquet": ("a.parquet", lambda path: path.write_bytes(b"PAR1" + bytes(100))),
    "no parquet": ("a.parquet", lambda path: path.write_bytes(b"")),
    "columns": ("a.arrow", lambda path: save_dataset(path, [{"number": 1}], 1)),
    "arrow": ("a.arrow", broken_stream),
    "state": ("saved", lambda path: (path.mkdir(), (path / "state.json").write_text("{"))),
    "no files": ("saved", lambda path: (path.mkdir(), (path / "state.json").write_text("{}"))),
    "outside": (
        "saved",
        lambda path: (path.mkdir(), (path / "state.json").write_text('{"_data_files": [{"filename": "../x"}]}')),
    ),
    "splits": ("saved", lambda path: (path.mkdir(), (path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}'))),
    "empty folder": ("saved", lambda path: path.mkdir()),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_file_gives_one_finding(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    name, damage = CORRUPT[kind]
    damage(tmp_path / name)
    for make in (
        lambda: tokenize_files([str(tmp_path / name)], tmp_path / "out.tok", ByteTokenizer()),
        lambda: open_sources(Job(data=str(tmp_path / name), seq_len=8), 512, cache=tmp_path / "cache"),
    ):
        with pytest.raises(FindingsError) as caught:
            make()
        [finding] = caught.value.findings
        assert finding.rule in ("text-readable", "chat-readable", "data-empty")
        assert str(tmp_path) in finding.at
        assert finding.fix_text
    assert not (tmp_path / "out.tok").exists()


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_damaged_tables(kind: str, tmp_path: Path) -> None:
    """Some bytes are others: one finding, or other text, and never a read of foreign memory."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([CALLED, *CHATS[:40]])
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=20)
    else:
        make = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    whole = path.read_bytes()
    num_findings = []
    for number in range(40):
        draw = random.Random(f"{kind} {number}")
        content = bytearray(whole)
        at = draw.randrange(len(content))
        content[at : at + draw.randrange(1, 200)] = draw.randbytes(draw.randrange(200))
        path.write_bytes(content)
        try:
            tokenize_files([str(path)], tmp_path / "out.tok", ByteTokenizer())
        except FindingsError as error:
            num_findings.append(len(error.findings))
    assert len(num_findings) > 20
    assert set(num_findings) == {1}


def test_pyarrow_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(FindingsError) as caught:
        list(read_documents([str(tmp_path / "a.parquet")], summary=ReadSummary()))
    assert [finding.rule for finding in caught.value.findings] == ["pyarrow-installed"]


# The token cache


def test_the_cache_is_by_content_tokenizer_and_template(tmp_path: Path, tokenizer: FileTokenizer) -> None:
    pytest.importorskip("jinja2")
    cache = tmp_path / "cache"
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    one = write_jsonl(tmp_path / "one.jsonl", [record])
    shard, _ = cached_shard(one, ByteTokenizer(), cache)
    made = shard.path.stat().st_mtime_ns
    moved = write_jsonl(tmp_path / "moved.jsonl", [record])
    again, _ = cached_shard(moved, ByteTokenizer(), cache)
    assert (again.path, again.path.stat().st_mtime_ns) == (shard.path, made)
    paths = {shard.path, cached_shard(one, tokenizer, cache)[0].path}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    marked = open_tokenizer(str(save_tokenizer(tmp_path / "t", template)))
    assert marked.label == tokenizer.label  # another template, the same tokenizer
    paths.add(cached_shard(one, marked, cache)[0].path)
    write_jsonl(tmp_path / "one.jsonl", [record, record])
    paths.add(cached_shard(one, ByteTokenizer(), cache)[0].path)
    assert len(paths) == 4
    shard.path.write_bytes(b"damaged")
    assert cached_shard(moved, ByteTokenizer(), cache)[0].fingerprint == again.fingerprint


def test_what_was_said_is_said_again_from_the_cache(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x"})] * 200
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    first, second = (cached_shard(str(tmp_path / "a.jsonl"), ByteTokenizer(), tmp_path)[1] for _ in range(2))
    assert first == second
    assert [finding.rule for finding in second] == ["records-skipped"]
    assert "a.jsonl:201" in second[0].problem
