"""Gemma 4's text model out of a checkpoint with an image encoder: it is read, and written as a text model."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers
from hf_parity import LOGITS
from tiny_models import config_of
from tiny_runs import TINY

from threefold.engine.models.build import build_model
from threefold.engine.train import train
from threefold.engine.weights.convert import export_hf, import_hf
from threefold.engine.weights.read_hf import read_hf
from threefold.plan.parse import parse
from threefold.spec.hf import model_from_config

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
}


def test_text_model_is_read_and_written(tmp_path: Path) -> None:
    text = {**config_of("gemma4_text"), "pad_token_id": 0}
    del text["model_type"]
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**text),
        vision_config=transformers.Gemma4VisionConfig(**ENCODER),
        tie_word_embeddings=True,
    )
    whole = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for layer in whole.model.language_model.layers:
            layer.layer_scalar.fill_(0.7)
    whole.save_pretrained(tmp_path / "hf")
    engine = build_model(model_from_config(tmp_path / "hf"))
    (unused,) = read_hf(tmp_path / "hf", engine)
    assert "vision" in unused.problem
    tokens = torch.randint(1, engine.spec.vocab, (2, 9))
    with torch.no_grad():
        logits = whole(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        assert (engine(tokens).logits - logits).abs().max() <= LOGITS * logits.abs().max()

    list(import_hf(tmp_path / "hf", tmp_path / "run", "auto"))
    fields = {"model": f"hf:{tmp_path / 'hf'}", "job.data": "synthetic", "job.steps": 1, "job.lr": 1e-30}
    plan = parse({**TINY, "model.num_layers": 2, "model.num_experts": 8}, fields).plan
    assert plan is not None
    train(plan, tmp_path / "run", lambda text: None)
    list(export_hf(tmp_path / "run", tmp_path / "out"))
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Gemma4ForCausalLM"
    for name, tensor in model.model.state_dict().items():  # the step has moved nothing but the zeros of padding
        assert (tensor - whole.model.language_model.state_dict()[name]).abs().max() < 1e-29, name
