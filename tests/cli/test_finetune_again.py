"""Finetuning as people type it: the same command again, the base model before it, epochs, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import digit_pairs, load_checkpoint, save_checkpoint, write_chats
from safetensors.torch import load_file, save_file

import threefold
from threefold.cli.main import main
from threefold.engine.run.folder import METRICS, read_run_plan
from threefold.engine.train_state import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
SEQUENCES = 29  # 85 chats of 20 or 21 tokens, three in each sequence of 64
SMALL = ["--max-length", "64", "--batch-size", "4", "--lr", "1e-3", "run.tensorboard=false"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "hf"
    save_checkpoint(folder, "qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chats")
    train, held_back = digit_pairs()
    return write_chats(folder / "train.jsonl", train), write_chats(folder / "val.jsonl", held_back)


def rows(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def test_the_same_command_again_resumes(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--val", str(chats[1]), *SMALL, "--epochs", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*words, "--out", str(whole)]) == 0
    assert f"2 epochs of {SEQUENCES} sequences" in capsys.readouterr().out
    assert main([*words, "--out", str(parts), "--stop-at", "3"]) == 0
    assert main([*words, "--out", str(parts)]) == 0
    steps = math.ceil(2 * SEQUENCES / 4)
    assert "resuming after step 3" in capsys.readouterr().err
    assert rows(parts, "loss") == rows(whole, "loss")
    assert sorted(rows(whole, "loss")) == [*range(1, steps + 1)]

    fields = {"job.lr": 1e-3, "job.seq_len": 64, "job.global_batch": 4, "run.tensorboard": False}
    library = threefold.finetune(checkpoint, chats[0], tmp_path / "api", fields, val=[chats[1]], epochs=2, stop_at=3)
    assert library.num_steps == 3
    threefold.finetune(checkpoint, chats[0], tmp_path / "api", fields, val=[chats[1]], epochs=2)
    assert rows(tmp_path / "api", "loss") == rows(whole, "loss")

    assert main([*words, "--out", str(parts), "--lr", "2e-3"]) == 1
    assert "job.lr was 0.001, now 0.002" in capsys.readouterr().out
    save_checkpoint(tmp_path / "other", "qwen3_moe", num_hidden_layers=1)
    words[1] = str(tmp_path / "other")
    assert main([*words, "--out", str(parts)]) == 1
    assert "the run began with another checkpoint" in capsys.readouterr().out


def test_words_of_other_trainers_set_epochs_batch_and_warmup(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["num_train_epochs=3", "batch_size=2", "--warmup", "0.1", "max_length=64", "learning_rate=2e-5"]
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--out", str(tmp_path / "run"), *given]
    assert main([*words, "--plan-only", "--json"]) == 0
    said = capsys.readouterr().out
    steps = math.ceil(3 * SEQUENCES / 2)
    for line in (f"steps = {steps}", f"warmup_steps = {round(0.1 * steps)}", "global_batch = 2", "lr = 2e-05"):
        assert line in json.loads(said)["plan"].splitlines(), line
    assert main([*words, "--plan-only", "epochs=many"]) == 1


def test_a_checkpoint_is_measured_and_asked_as_it_is(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = load_checkpoint(checkpoint), transformers.AutoTokenizer.from_pretrained(checkpoint)
    nats, count = 0.0, 0
    for line in chats[1].read_text().splitlines():
        prompt, answer = json.loads(line)["messages"]
        asked = tokenizer.apply_chat_template([prompt], tokenize=False, add_generation_prompt=True)
        begin = len(tokenizer(asked, add_special_tokens=False).input_ids)
        text = f"{asked}{answer['content']}<|im_end|>"
        tokens_S = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logits_SV = model(tokens_S[None]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits_SV[begin - 1 : -1], tokens_S[begin:], reduction="none")
        nats, count = nats + float(losses.sum()), count + len(losses)
    assert main(["eval", str(checkpoint), "--data", str(chats[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"][0]
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)

    assert main(["sample", str(checkpoint), "--prompt", "what is", "--max-tokens", "6", "--ignore-end", "--json"]) == 0
    given = tokenizer("what is", return_tensors="pt", add_special_tokens=False).input_ids
    theirs = model.generate(given, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None)[0]
    text = tokenizer.decode(theirs[given.shape[1] :], clean_up_tokenization_spaces=False)
    assert json.loads(capsys.readouterr().out)[0]["text"] == text

    assert main(["import-hf", str(checkpoint), "--out", str(tmp_path / "base")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "base"), "--data", str(chats[1]), "--task", "sft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0] == found
    assert main(["eval", str(tmp_path), "--data", str(chats[1])]) == 1, "a folder with neither"


def test_a_run_stops_early_and_keeps_its_best(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate far too large makes every evaluation but the first ones worse."""
    run = tmp_path / "run"
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--val", str(chats[1]), "--out", str(run)]
    words += ["--max-length", "64", "--batch-size", "4", "--lr", "0.1", "--warmup", "20", "run.tensorboard=false"]
    words += ["job.steps=60", "run.eval_every=2", "run.save_every=1", "run.keep=1", "--early-stopping", "2"]
    assert main(words) == 0
    assert "ending early after step" in capsys.readouterr().err
    losses = rows(run, "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    last = max(losses)
    assert last == best + 4 < 60
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", f"step-{last:08d}"]
    assert main(["eval", str(run), "--data", str(chats[1]), "--json"]) == 0
    said = capsys.readouterr()
    assert f"step {best}, the best" in said.err
    assert json.loads(said.out)["results"][0]["loss"] == pytest.approx(losses[best], rel=1e-4)
    assert main(["eval", str(run), "--data", str(chats[1]), "--newest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["loss"] == pytest.approx(losses[last], rel=1e-4)
    assert main(["export-hf", str(run), "--out", str(tmp_path / "out")]) == 0
    assert f"step {best} of" in capsys.readouterr().out
    assert main(words) == 0, "the same command again finds it ended"
    assert f"stopped at step {last} of 60" in capsys.readouterr().out


def test_stopping_early_needs_evaluations(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--out", str(tmp_path / "run"), *SMALL]
    assert main([*words, "--early-stopping", "2"]) == 1
    assert "error[best-needs-evaluations] run.eval_every" in capsys.readouterr().out


def test_adapters_name_the_checkpoint_they_belong_to(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    cached = tmp_path / "cache" / "models--org--small-moe" / "snapshots" / "abc123"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(checkpoint, target_is_directory=True)
    bases = []
    for name, source in (("local", checkpoint), ("hub", cached)):
        run, out = tmp_path / name, tmp_path / f"{name}-adapter"
        words = ["finetune", str(source), "--data", str(chats[0]), "--out", str(run), "--lora", "4", *SMALL]
        assert main([*words, "job.steps=2"]) == 0
        assert main(["export-hf", str(run), "--out", str(out), "--adapter"]) == 0
        config = json.loads((out / "adapter_config.json").read_text())
        bases.append((config["base_model_name_or_path"], config["revision"]))
    assert bases == [(str(checkpoint), None), ("org/small-moe", "abc123")]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "local-adapter")  # by the name alone
    assert model.peft_config["default"].r == 4
    words = ["--out", str(tmp_path / "named"), "--adapter", "--base", "org/mine"]
    assert main(["export-hf", str(tmp_path / "hub"), *words]) == 0
    assert json.loads((tmp_path / "named" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/mine"


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_quantized_checkpoints_are_one_finding(
    method: str, checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As bitsandbytes and GPTQ store a matrix: packed bytes of another shape, with tensors of scales next to them."""
    source = tmp_path / "quantized"
    source.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        packed = tensors.pop(name)
        tensors[name.replace("weight", "qweight")] = torch.zeros(packed.numel() // 2, 1, dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors")
    for words in (
        ["finetune", str(source), "--data", str(chats[0]), "--out", str(tmp_path / "run")],
        ["import-hf", str(source), "--out", str(tmp_path / "run")],
        ["eval", str(source), "--data", str(chats[1])],
    ):
        assert main([*words, "--json"]) == 1
        [found] = json.loads(capsys.readouterr().out)["findings"]
        assert method in found["problem"], words
        assert "MXFP4" in found["advice"], words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_parquet", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "what is 1 and 2?", "chosen": "1 2", "rejected": "3 4"},
        {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
        {"prompt": "what is 1 and 2?", "completion": "3 4", "label": False},
    ],
)
def test_preferences_are_one_finding(
    record: dict[str, Any], is_parquet: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / ("pairs.parquet" if is_parquet else "pairs.jsonl")
    if is_parquet:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([record] * 3), data)
    else:
        data.write_text((json.dumps(record) + "\n") * 3)
    words = ["finetune", str(checkpoint), "--data", str(data), "--out", str(tmp_path / "run"), *SMALL, "--json"]
    assert main(words) == 1
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert "no objective here learns from" in found["problem"]
    assert "prompt and completion" in found["advice"]


def test_bad_records_name_the_field_that_moves_their_limit(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "some-bad.jsonl"
    good = chats[0].read_text().splitlines()
    data.write_text("\n".join([*good, *['{"question": "?"}'] * 5]) + "\n")
    words = ["finetune", str(checkpoint), "--data", str(data), "--out", str(tmp_path / "run"), *SMALL, "job.steps=1"]
    assert main([*words, "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert "5 of 90 records cannot be used" in found["problem"]
    assert "job.max_bad_records=0.06" in found["advice"]
    assert main([*words, "--max-bad-records", "0.06"]) == 0
    assert read_run_plan(tmp_path / "run").job.max_bad_records == 0.06


def test_a_field_of_text_is_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    data = tmp_path / "questions.parquet"
    table = pyarrow.Table.from_pylist([{"question": f"what is {n} and {n}?"} for n in range(40)])
    pytest.importorskip("pyarrow.parquet").write_table(table, data)
    words = ["finetune", str(checkpoint), "--data", str(data), "--out", str(tmp_path / "run"), *SMALL, "job.steps=1"]
    assert main(words) == 1
    assert "--field NAME" in capsys.readouterr().out
    assert main([*words, "--field", "question"]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["tokens"] > 0


@pytest.mark.parametrize("kind", ["none", "linear", "yarn"])
def test_a_longer_context_is_asked_about(
    kind: str, checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint has 128 positions. transformers must compute from the export what the run computes."""
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--out", str(run), "run.tensorboard=false"]
    words += ["--max-length", "160", "--batch-size", "2", "job.steps=2"]
    assert main([*words, "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert found["rule"] == "context-fits-checkpoint"
    assert "128 positions" in found["problem"]
    assert not run.exists()
    assert main([*words, "--rope-scaling", kind]) == 0
    assert "max_position_embeddings of the run and of its export goes from 128 to 160" in capsys.readouterr().out
    assert main(["export-hf", str(run), "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 160
    rope = config["rope_parameters"]
    assert rope.get("rope_type") == ("default" if kind == "none" else kind)
    assert kind == "none" or (rope["factor"], rope["original_max_position_embeddings"]) == (1.25, 128)
    tokens_BS = torch.randint(0, 380, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = load_checkpoint(out)(tokens_BS).logits, load_run(run, print)(tokens_BS).logits
    assert ours is not None
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_a_run_from_another_one_asks_about_a_longer_context(
    checkpoint: Path, chats: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, longer = tmp_path / "run", tmp_path / "longer"
    words = ["finetune", str(checkpoint), "--data", str(chats[0]), "--out", str(run), *SMALL, "job.steps=1"]
    assert main(words) == 0
    words = [
        "train",
        str(run / "plan.toml"),
        "--from",
        str(run),
        "--run",
        str(longer),
        "job.seq_len=256",
        "job.steps=1",
    ]
    assert main(words) == 1
    assert "error[context-fits-checkpoint] job.seq_len: 256 tokens" in capsys.readouterr().out
    assert main([*words, "--rope-scaling", "yarn"]) == 0
    assert main(["export-hf", str(longer), "--out", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["factor"] == 2
