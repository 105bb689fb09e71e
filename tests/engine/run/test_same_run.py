"""A run folder is gone on with by the model and the data it was started with: by their content, not by their paths."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import config_of
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.data import token_shard
from threefold.engine.data.text.tokenize_files import tokenize_files
from threefold.engine.data.text.tokenizer import open_tokenizer
from threefold.engine.run.folder import CONTRACT, PLAN, read_run_plan
from threefold.engine.train import train
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.plan.same_run import data_differences, model_differences, model_facts

pytestmark = pytest.mark.usefixtures("one_thread")


def quiet(text: str) -> None:
    pass


def write_config(folder: Path, **changes: Any) -> dict[str, Any]:
    config = {**config_of("qwen3_moe"), "vocab_size": 512, "rope_theta": 10000.0, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model")
    model = {"model": f"hf:{tmp_path / 'model'}", "model.num_layers": None, "model.num_experts": None}
    return {**model, "job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 1, "run.save_every": 1}


def plan_of(fields: dict[str, Any]) -> Plan:
    return tiny_plan({name: value for name, value in fields.items() if value is not None})


def refusal(call: Any, rule: str = "run-is-this-plan") -> str:
    with pytest.raises(FindingsError) as caught:
        call()
    [finding] = caught.value.findings
    assert finding.rule == rule
    assert finding.advice
    return finding.problem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 500000.0}, "model.attention.rope_theta was 10000.0, now 500000.0"),
        ({"num_experts_per_tok": 2}, "model.moe.top_k was 3, now 2"),
        ({"norm_topk_prob": False}, "model.moe.norm_topk was True, now False"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "model.attention.rope_scaling was None, now there"),
    ],
    ids=["rope_theta", "top_k", "norm_topk", "rope_scaling"],
)
def test_another_model_at_the_same_path_is_named(
    changes: dict[str, Any], said: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(plan_of(fields), run, quiet)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    write_config(tmp_path / "model", **changes)
    changed = plan_of({**fields, "job.steps": 2})
    assert said in refusal(lambda: train(changed, run, quiet))
    assert said in refusal(lambda: read_run_plan(run))  # sample and export-hf
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before

    write_config(tmp_path / "model", transformers_version="5.0", use_cache=False)  # another file, the same model
    train(plan_of({**fields, "job.steps": 2}), run, quiet)


def test_a_field_of_the_plan_is_named(fields: dict[str, Any], tmp_path: Path) -> None:
    train(plan_of(fields), tmp_path / "run", quiet)
    changed = plan_of({**fields, "job.lr": 0.5, "job.global_batch": 2})
    problem = refusal(lambda: train(changed, tmp_path / "run", quiet))
    assert "job.lr was 0.0003 (the default), now 0.5" in problem
    assert "job.global_batch was 4, now 2" in problem


def test_a_contract_of_an_older_version_has_no_model_to_compare(fields: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(plan_of(fields), run, quiet)
    contract = json.loads((run / CONTRACT).read_text(encoding="utf-8"))
    del contract["model"]
    (run / CONTRACT).write_text(json.dumps(contract), encoding="utf-8")
    train(plan_of({**fields, "job.steps": 2}), run, quiet)


@pytest.mark.parametrize("facts", [None, [], 3, {}, {"moe": 3}, {"attention": {"a": {"b": {"c": {"d": {"e": {}}}}}}}])
def test_facts_of_a_stranger_are_compared_without_fault(facts: Any, fields: dict[str, Any]) -> None:
    differences = model_differences(facts, plan_of(fields))
    assert differences == (["model.moe was 3, now there"] if facts == {"moe": 3} else [])


def test_facts_know_the_content_and_not_the_place(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_config(tmp_path / "elsewhere", initializer_range=0.1)
    here, there = plan_of(fields), plan_of({**fields, "model": f"hf:{tmp_path / 'elsewhere'}"})
    assert model_facts(here) == model_facts(there)


def test_a_model_that_moved_is_the_same_model(fields: dict[str, Any], tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    train(plan_of(fields), run, quiet)
    (tmp_path / "model").rename(moved)
    longer = {**fields, "job.steps": 2, "model": f"hf:{moved}"}
    assert train(plan_of(longer), run, quiet).step == 2
    assert read_run_plan(run).model_name == f"hf:{moved}"  # where sample and export-hf look from now on
    write_config(moved, num_experts_per_tok=2)
    assert "model.moe.top_k was 3, now 2" in refusal(lambda: train(plan_of(longer), run, quiet))


# Data


def write_words(folder: Path, seed: int, name: str = "words.txt") -> Path:
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    path = folder / name
    path.write_text(" ".join(draw.choice(["one", "two", "three"]) for _ in range(2000)), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, *words: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(exist_ok=True)
    vocab = {word: number for number, word in enumerate(["?", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder


def tokenized(text: Path, tokenizer: str, out: Path) -> Path:
    out.parent.mkdir(exist_ok=True)
    tokenize_files([str(text)], out, open_tokenizer(tokenizer))
    return out


def test_data_that_moved_is_the_same_data(fields: dict[str, Any], tmp_path: Path) -> None:
    """A folder of shards, and a shard that was renamed beside a JSONL file, with their weights."""
    run, here, there = tmp_path / "run", tmp_path / "here", tmp_path / "there"
    for number in range(2):
        tokenized(write_words(tmp_path, number), "bytes", here / f"{number}.tok")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(200)), encoding="utf-8")
    train(plan_of({**fields, "job.data": [f"{here}:0.5", f"{chats}:0.5"]}), run, quiet)
    here.rename(there)
    chats = chats.rename(tmp_path / "talks.jsonl")
    moved = {**fields, "job.steps": 2, "job.data": [f"{there}:0.5", f"{chats}:0.5"]}
    assert train(plan_of(moved), run, quiet).step == 2
    recorded = read_plan(str(run / PLAN)).plan
    assert recorded is not None
    assert recorded.job.data == tuple(moved["job.data"])

    before = (run / PLAN).read_bytes(), (run / CONTRACT).read_bytes()
    other = {**moved, "job.data": [f"{there}:0.6", f"{chats}:0.4"]}
    said = refusal(lambda: train(plan_of(other), run, quiet), "data-unchanged")
    assert "job.data[0].samples_of_4096 was 2048, now 2458" in said  # 0.6 of 4096
    shutil.copy(there / "0.tok", there / "2.tok")
    said = refusal(lambda: train(plan_of(moved), run, quiet), "data-unchanged")
    assert "job.data[0].num_shards was 2, now 3" in said
    said = refusal(lambda: train(plan_of({**moved, "job.data": str(there)}), run, quiet), "data-unchanged")
    assert "job.data had 2 sources, now 1" in said
    assert ((run / PLAN).read_bytes(), (run / CONTRACT).read_bytes()) == before


def test_a_tokenizer_that_moved_is_the_same_and_one_byte_is_not(fields: dict[str, Any], tmp_path: Path) -> None:
    run, text = tmp_path / "run", write_words(tmp_path, 0)
    words = write_tokenizer(tmp_path / "words", "one", "two", "three")
    shard = tokenized(text, str(words), tmp_path / "a.tok")
    train(plan_of({**fields, "job.data": str(shard)}), run, quiet)
    moved = words.rename(tmp_path / "elsewhere")
    again = tokenized(text, str(moved), tmp_path / "b.tok")
    assert train(plan_of({**fields, "job.steps": 2, "job.data": str(again)}), run, quiet).step == 2
    file = moved / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")  # no token changes, but nobody can know without reading it
    other = tokenized(text, str(moved), tmp_path / "c.tok")
    changed = plan_of({**fields, "job.steps": 3, "job.data": str(other)})
    said = refusal(lambda: train(changed, run, quiet), "data-unchanged")
    assert "job.data[0].tokenizer was 'hf-" in said


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        (lambda text, shard: tokenized(text.parent / "other.txt", "bytes", shard), "data-unchanged", "[0].sha256 was"),
        (lambda text, shard: flip(shard, 1000), "shard-readable", "does not have the fingerprint of its header"),
    ],
    ids=["made anew from other text", "a byte on disk"],
)
def test_one_changed_byte_of_data_is_named(
    change: Callable[[Path, Path], None], rule: str, said: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    run, text = tmp_path / "run", write_words(tmp_path, 0)
    shard = tokenized(text, "bytes", tmp_path / "a.tok")
    train(plan_of({**fields, "job.data": str(shard)}), run, quiet)
    (tmp_path / "other.txt").write_text(text.read_text(encoding="utf-8").replace("one", "two", 1), encoding="utf-8")
    change(text, shard)
    longer = plan_of({**fields, "job.steps": 2, "job.data": str(shard)})
    assert said in refusal(lambda: train(longer, run, quiet), rule)


@pytest.mark.parametrize("end", [200, -200], ids=["near its start", "near its end"])
def test_the_ends_of_a_large_shard_are_compared(
    end: int, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too large to be read as a whole when a run starts. Its header still has the old fingerprint."""
    monkeypatch.setattr(token_shard, "VERIFY_BYTES", 1000)
    shard = tokenized(write_words(tmp_path, 0), "bytes", tmp_path / "a.tok")
    train(plan_of({**fields, "job.data": str(shard)}), tmp_path / "run", quiet)
    content = bytearray(shard.read_bytes())
    first, after = (end, end + 2) if end > 0 else (len(content) + end, len(content) + end + 2)
    content[first:after] = content[after : after + 2] if content[first:after] != content[after : after + 2] else b"zz"
    shard.write_bytes(content)
    longer = plan_of({**fields, "job.steps": 2, "job.data": str(shard)})
    assert "job.data[0].sha256_of_ends was" in refusal(lambda: train(longer, tmp_path / "run", quiet), "data-unchanged")


def test_an_older_contract_has_data_by_its_path(fields: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(plan_of(fields), run, quiet)
    contract = json.loads((run / CONTRACT).read_text(encoding="utf-8"))
    del contract["sources"]
    (run / CONTRACT).write_text(json.dumps(contract), encoding="utf-8")
    assert train(plan_of({**fields, "job.steps": 2}), run, quiet).step == 2
    moved = Path(fields["job.data"]).rename(tmp_path / "moved.tok")
    changed = plan_of({**fields, "job.steps": 3, "job.data": str(moved)})
    assert "job.data was" in refusal(lambda: train(changed, run, quiet))


@pytest.mark.parametrize("content", [None, 3, {}, [3], [{"sha256": {"a": 1}}], [{}]])
def test_data_facts_of_a_stranger_are_compared_without_fault(content: Any) -> None:
    differences = data_differences(content, [{"sha256": "a"}])
    assert differences == (["job.data[0].sha256 was there, now 'a'"] if content == [{"sha256": {"a": 1}}] else [])
