"""The tokenizer of a run: it encodes the data, is recorded by content and kept, and data of another one is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_templates import MARKED, QWEN3, save_tokenizer
from tiny_runs import tiny_plan

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from threefold.engine.data.loader import Loader
from threefold.engine.data.packing import IGNORED
from threefold.engine.data.text.tokenize_files import tokenize_files
from threefold.engine.data.text.tokenizer import ByteTokenizer, open_tokenizer
from threefold.engine.data.text.tokenizer_files import copy_tokenizer
from threefold.engine.train import train
from threefold.engine.weights import run_files
from threefold.engine.weights.run_files import keep_tokenizer
from threefold.findings import FindingsError
from threefold.plan.plan import Job

CHATS = [
    [
        {"role": "user", "content": f"{n} + {n}?"},
        {"role": "assistant", "content": f"{2 * n}"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    for n in range(40)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), MARKED)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CHATS))
    return path


def refusal(make: Any) -> list[tuple[str, str]]:
    with pytest.raises(FindingsError) as caught:
        make()
    return [(finding.rule, finding.problem) for finding in caught.value.findings]


def test_batches_have_the_tokens_and_masks_of_transformers(tokenizer: Path, data: Path, tmp_path: Path) -> None:
    hf = AutoTokenizer.from_pretrained(tokenizer)
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = set()
    for messages in CHATS:
        found = hf.apply_chat_template(messages, **options)
        learned = zip(found["input_ids"][1:], found["assistant_masks"][1:], strict=True)
        labels = [token if mask else IGNORED for token, mask in learned]
        expected.add((tuple(found["input_ids"]), (*labels, IGNORED)))
    job = Job(data=str(data), tokenizer=str(tokenizer), task="sft", seq_len=128, global_batch=len(CHATS))
    seen = set()
    with Loader(job, 512, cache=tmp_path / "cache", prefetch=0) as loader:
        for m in range(loader.num_microbatches):
            batch = loader.batch(0, m)
            length = batch.lengths[0]
            seen.add((tuple(batch.tokens_BS[0, :length].tolist()), tuple(batch.labels_BS[0, :length].tolist())))
    assert seen == expected


def test_a_template_that_changes_earlier_turns_is_said(data: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", QWEN3)
    job = Job(data=str(data), tokenizer=str(folder), task="sft", seq_len=128)
    for _ in range(2):  # made, and from the cache
        with Loader(job, 512, cache=tmp_path / "cache", prefetch=0) as loader:
            assert [finding.rule for finding in loader.warnings] == ["chats-split-by-turn"]
            assert "in 40 conversations" in loader.warnings[0].problem
            assert loader.mixture.sources[0].num_samples == 80


def test_answers_of_one_conversation_are_held_out_together(data: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", QWEN3)
    job = Job(data=str(data), tokenizer=str(folder), task="sft", seq_len=128, val_fraction=0.3)
    questions = []
    for evaluation in (False, True):
        options = {"held_out": 0.3, "evaluation": evaluation, "cache": tmp_path / "cache", "prefetch": 0}
        with Loader(job, 512, **options) as loader:
            [source] = loader.mixture.sources
            rows = [source.sample(n).tokens_S.tolist() for n in range(source.num_samples)]
        tokenizer = loader.tokenizer
        questions.append([tokenizer.decode(row).split("?")[0] for row in rows])
    assert not set(questions[0]) & set(questions[1])
    assert all(questions[part].count(each) == 2 for part in (0, 1) for each in questions[part])


def test_data_of_another_tokenizer_is_refused(tokenizer: Path, data: Path, tmp_path: Path) -> None:
    ours = open_tokenizer(str(tokenizer))
    tokenize_files([str(data)], tmp_path / "ours.tok", ours)
    tokenize_files([str(data)], tmp_path / "bytes.tok", ByteTokenizer())

    def open_data(*names: str, **fields: Any) -> Loader:
        job = Job(data=tuple(str(tmp_path / name) for name in names), seq_len=64, **fields)
        return Loader(job, 512, cache=tmp_path / "cache", prefetch=0)

    named = {"tokenizer": str(tokenizer)}
    open_data("ours.tok", "chats.jsonl", **named).close()
    open_data("ours.tok").close()  # a shard has its tokenizer with it
    [(rule, problem)] = refusal(lambda: open_data("ours.tok", "bytes.tok", **named))
    assert rule == "data-fits-tokenizer"
    assert f"bytes.tok was made with the tokenizer bytes, job.tokenizer is {ours.label}" in problem
    assert refusal(lambda: open_data("ours.tok", "chats.jsonl"))[0][0] == "data-one-tokenizer"
    [(rule, _)] = refusal(lambda: Loader(Job(data="embedded", **named), 512, cache=tmp_path / "cache"))
    assert rule == "data-fits-tokenizer"
    assert refusal(lambda: open_data("ours.tok", tokenizer="no/such.json"))[0][0] == "tokenizer-readable"


def test_a_run_records_its_tokenizer_and_keeps_it(tokenizer: Path, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(tokenizer, mine)
    fields = {"job.data": str(data), "job.task": "sft", "job.seq_len": 64, "run.save_every": 1}
    run = tmp_path / "run"
    train(tiny_plan({**fields, "job.tokenizer": str(mine), "job.steps": 1}), run, lambda text: None)
    recorded = json.loads((run / "contract.json").read_text())["tokenizer"]
    assert recorded["label"] == open_tokenizer(str(mine)).label
    assert open_tokenizer(str(run / "tokenizer")).settings == open_tokenizer(str(mine)).settings
    mine.rename(tmp_path / "moved")  # by content: the path is no fact
    moved = {**fields, "job.tokenizer": str(tmp_path / "moved")}
    assert train(tiny_plan({**moved, "job.steps": 2}), run, lambda text: None).step == 2
    (tmp_path / "moved" / "chat_template.jinja").write_text(MARKED + "{# another one #}")
    [(rule, problem)] = refusal(lambda: train(tiny_plan({**moved, "job.steps": 3}), run, lambda text: None))
    assert rule == "data-unchanged"
    assert "job.tokenizer.chat_template was" in problem
    plain = {**fields, "job.steps": 3}
    assert "job.tokenizer.label was" in refusal(lambda: train(tiny_plan(plain), run, lambda text: None))[0][1]


def test_copies_of_a_tokenizer_are_whole(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(tokenizer, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    for source in (folder, folder / "tokenizer.json"):
        out = tmp_path / f"copy of {source.name}"
        names = copy_tokenizer(source, out)
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < set(names)
        one, other = open_tokenizer(str(folder)), open_tokenizer(str(out))
        assert (one.label, one.settings, one.end) == (other.label, other.settings, other.end)
    (tmp_path / "file").touch()
    assert refusal(lambda: copy_tokenizer(folder, tmp_path / "file"))[0][0] == "file-writable"


def test_a_start_that_is_killed_while_it_copies_leaves_no_half_tokenizer(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes after tokenizer.json and before the chat template, and nothing is tidied up."""

    def killed(source: Path, out: Path) -> list[str]:
        out.mkdir()
        shutil.copy(source / "tokenizer.json", out)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_files, "copy_model_files", killed)
    monkeypatch.setattr(run_files.shutil, "rmtree", lambda *args, **named: None)
    with pytest.raises(KeyboardInterrupt):
        keep_tokenizer(tmp_path, str(tokenizer))
    assert not (tmp_path / "tokenizer").exists()
    monkeypatch.undo()
    keep_tokenizer(tmp_path, str(tokenizer))
    assert {path.name for path in tokenizer.iterdir()} == {path.name for path in (tmp_path / "tokenizer").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize(
    ("normalizer", "why"),
    [
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_001}, "one character by 10001"),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "ab"}] * 14}, "one character by 16384"),
        ({"type": "Replace", "pattern": {"Regex": "(a|b)" * 2001}, "content": "x"}, "a pattern of more than"),
    ],
)
def test_a_tokenizer_whose_steps_grow_a_text_is_refused(normalizer: object, why: str, tmp_path: Path) -> None:
    """The library has no limits, and a text that grows past the memory ends the process."""
    whole = {"version": "1.0", "normalizer": normalizer, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(FindingsError, match=why):
        open_tokenizer(str(tmp_path))
