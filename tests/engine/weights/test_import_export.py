"""Importing and exporting as a user does: dtypes, weights that transformers drops, tokenizer files, full folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from hf_checkpoints import save_checkpoint
from safetensors.torch import load_file
from tiny_models import config_of
from tiny_runs import TINY, tiny_plan, tiny_shard

from threefold.cli.main import main
from threefold.engine.train import train
from threefold.engine.weights import convert
from threefold.engine.weights.convert import export_hf, import_hf
from threefold.engine.weights.imported_weights import INITIAL
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import parse
from threefold.spec.hf import model_from_dict

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = {name: value for name, value in TINY.items() if not name.startswith("model")}


def imported(folder: Path) -> dict[str, Any]:
    return {name: tensor for path in (folder / INITIAL).iterdir() for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("stored", "asked", "kept", "rounds"),
    [
        (torch.float32, "auto", torch.float32, False),
        (torch.bfloat16, "auto", torch.bfloat16, False),
        (torch.float16, "auto", torch.float32, False),
        (torch.float32, "bf16", torch.bfloat16, True),
        (torch.bfloat16, "fp32", torch.float32, False),
    ],
)
def test_dtypes_are_kept_or_the_rounding_is_said(
    stored: torch.dtype, asked: str, kept: torch.dtype, rounds: bool, tmp_path: Path
) -> None:
    model = save_checkpoint(tmp_path / "hf", "llama", stored)
    said = list(import_hf(tmp_path / "hf", tmp_path / "run", asked))
    tensors = imported(tmp_path / "run")
    assert {tensor.dtype for tensor in tensors.values()} == {kept}
    assert any("rounded" in line for line in said) == rounds
    exact = model.get_input_embeddings().weight.detach()
    assert torch.equal(tensors["embed.weight"].to(torch.float64), exact.to(torch.float64)) != rounds
    plan = read_plan(str(tmp_path / "run" / "plan.draft.toml")).plan
    assert plan is not None
    assert plan.knobs.precision == ("fp32" if kept == torch.float32 else "bf16")


def test_what_import_prints_does_not_train_on_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft has the checkpoint's tokenizer, a length within its positions, and no data of ours."""
    save_checkpoint(tmp_path / "hf", "qwen3_moe")
    assert main(["import-hf", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    assert "job.data=FILE" in capsys.readouterr().out.splitlines()[-1]
    parsed = read_plan(str(tmp_path / "run" / "plan.draft.toml"))
    assert parsed.plan is not None
    job = parsed.plan.job
    assert job.tokenizer == str(tmp_path / "run" / "tokenizer")
    assert (job.seq_len, job.lr) == (128, 1e-5)
    assert "job.data" not in parsed.plan.stated


def test_a_checkpoint_without_its_mtp_weights_is_imported(tmp_path: Path) -> None:
    """transformers drops the weights of DeepSeek-V3's MTP depth when it saves, and keeps the depth in config.json."""
    save_checkpoint(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    list(import_hf(tmp_path / "hf", tmp_path / "run", "auto"))
    plan = read_plan(str(tmp_path / "run" / "plan.draft.toml")).plan
    assert plan is not None
    assert (plan.model.mtp_layers, plan.mtp) == (1, 0)
    assert not any(name.startswith("mtp.") for name in imported(tmp_path / "run"))


def test_router_biases_keep_every_bit_in_a_model_of_bf16(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in fewer bits, with the biases that choose experts in fp32; the engine has them so."""
    model = save_checkpoint(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = torch.nn.Buffer(torch.randn(8) / 3)
    model.save_pretrained(tmp_path / "hf")
    list(import_hf(tmp_path / "hf", tmp_path / "run", "auto"))
    tensors = imported(tmp_path / "run")
    assert torch.equal(tensors["layers.1.ffn.router.balance_bias"], gate.e_score_correction_bias)
    assert tensors["layers.1.ffn.router.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "of_model", "trained"), [("deepseek_v3", 1, 2), ("deepseek_v3", 2, 1)])
def test_the_mtp_depths_that_were_trained_are_exported_and_read_back(
    family: str, of_model: int, trained: int, tmp_path: Path
) -> None:
    export_trained(family, of_model, trained, tmp_path)
    list(import_hf(tmp_path / "out", tmp_path / "again", "auto"))
    depths = {name.split(".")[1] for name in imported(tmp_path / "again") if name.startswith("mtp.")}
    assert len(depths) == trained


def test_a_depth_of_a_hybrid_without_experts_is_exported_and_read_back(tmp_path: Path) -> None:
    layers = ["mamba", "attention", "mlp"]
    export_trained("nemotron_h", 0, 1, tmp_path, layers_block_type=layers, num_hidden_layers=len(layers))
    list(import_hf(tmp_path / "out", tmp_path / "again", "auto"))
    assert any(name.startswith("mtp.0.") for name in imported(tmp_path / "again"))


@pytest.mark.parametrize(
    ("family", "of_model", "trained"), [("mixtral", 0, 1), ("qwen3_next", 0, 2), ("qwen3_5_moe_text", 1, 2)]
)
def test_mtp_depths_that_a_family_cannot_hold_are_left_out_aloud(
    family: str, of_model: int, trained: int, tmp_path: Path
) -> None:
    said = export_trained(family, of_model, trained, tmp_path)
    assert any("without its MTP depths" in line for line in said)
    lines = list(import_hf(tmp_path / "out", tmp_path / "again", "auto"))
    assert not any("not used" in line for line in lines)


@pytest.mark.parametrize(("family", "depths"), [("qwen3_5_moe", 1), ("qwen3_vl_moe", None)])
def test_the_mtp_depths_of_a_model_that_sees_are_those_of_its_text(
    family: str, depths: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_vision.CONFIGS[family]))
    plan = parse({**RUN, "model": f"hf:{tmp_path}", "job.mtp": 1}).plan
    assert plan is not None
    written = convert._with_mtp_depths(tiny_vision.CONFIGS[family], plan)
    assert (None if written is None else model_from_dict(written, "again", "test").mtp_layers) == depths


def export_trained(family: str, of_model: int, trained: int, folder: Path, **changes: Any) -> list[str]:
    """Train a model of so many MTP depths with others, and export it; returns what is said."""
    config = {**config_of(family), "num_nextn_predict_layers": of_model, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    fields: dict[str, Any] = {"model": f"hf:{folder}", "job.mtp": trained, "job.data": "synthetic", "job.steps": 1}
    plan = parse({**RUN, **fields}).plan
    assert plan is not None
    train(plan, folder / "run", lambda text: None)
    return list(export_hf(folder / "run", folder / "out"))


def test_a_link_out_of_a_checkpoint_is_not_copied(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "hf", "llama")
    (tmp_path / "private").write_text("a secret")
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    (tmp_path / "hf" / "chat_template.jinja").symlink_to(tmp_path / "private")
    with pytest.raises(FindingsError, match=r"chat_template\.jinja: is not copied"):
        list(import_hf(tmp_path / "hf", tmp_path / "run", "auto"))
    assert not (tmp_path / "run").exists()


def test_export_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    shard = tiny_shard(tmp_path / "counting.tok")
    train(tiny_plan({"job.data": shard, "job.steps": 1}), tmp_path / "run", lambda text: None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FindingsError, match="not empty"):
        list(export_hf(tmp_path / "run", tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    said = list(export_hf(tmp_path / "run", tmp_path / "new"))
    assert said[-1] == "without a tokenizer: the run has none"
