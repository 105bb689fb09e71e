"""Adapters in PEFT's files: PEFT on transformers' model gives the engine's logits and gradients, merged or not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import spec_of
from torch import Tensor

from threefold.engine.lora import LoraSettings, is_adapter
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.peft import (
    CONFIG,
    WEIGHTS,
    MergedTensors,
    open_adapter,
    refused_targets,
    write_adapter,
)
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.plan.plan import LORA_TARGETS
from threefold.spec.model import ModelSpec

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SETTINGS = LoraSettings(rank=4, scale=1.5, targets=LORA_TARGETS, draws_b=True)
FAMILIES = ("qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoe")
# Rounding of fp32 through two layers, in another order of sums.
FP32 = 1e-5


def engine_model(family: str, settings: LoraSettings = SETTINGS) -> tuple[ModelSpec, Decoder]:
    spec = spec_of(family)
    return spec, build_model(spec, mtp=0, options=Options(lora=settings), seed=3)


def base_folder(model: Decoder, spec: ModelSpec, folder: Path) -> Path:
    """The frozen weights as a checkpoint of transformers."""
    write_hf({name: value for name, value in model.state_dict().items() if not is_adapter(name)}, spec, folder)
    return folder


def load_hf(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def tokens_of(spec: ModelSpec) -> Tensor:
    return torch.randint(spec.vocab, (2, 16), generator=torch.Generator().manual_seed(5))


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_gives_the_engines_logits_unmerged_and_merged(family: str, tmp_path: Path) -> None:
    spec, model = engine_model(family)
    tokens = tokens_of(spec)
    with torch.no_grad():
        logits = model(tokens).logits
        assert logits is not None
        hf = load_hf(base_folder(model, spec, tmp_path / "base"))
        assert gap(hf(tokens).logits, logits) > 100 * FP32  # the adapters matter
        write_adapter(model.state_dict(), spec, SETTINGS, tmp_path / "adapter")
        unmerged = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
        assert gap(unmerged(tokens).logits, logits) <= FP32
        write_hf(MergedTensors(model.state_dict(), SETTINGS), spec, tmp_path / "merged")
        assert gap(load_hf(tmp_path / "merged")(tokens).logits, logits) <= FP32
        assert gap(unmerged.merge_and_unload()(tokens).logits, logits) <= FP32


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_gradients_of_adapters_are_pefts(family: str, tmp_path: Path) -> None:
    """Read back through the same files: the gradient of each of PEFT's tensors, in the engine's layout."""
    spec, model = engine_model(family)
    tokens = tokens_of(spec)
    logits = model(tokens).logits
    assert logits is not None
    logits.square().sum().backward()
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path / "adapter")
    hf = load_hf(base_folder(model, spec, tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter", is_trainable=True)
    theirs(tokens).logits.square().sum().backward()
    stored = open_adapter(tmp_path / "adapter", spec)
    of_peft = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert of_peft.keys() == {part.key for parts in stored.parts.values() for part in parts}
    for name, grad in grads.items():
        [part] = stored.parts[name]
        assert grad is not None
        assert gap(part.read(grad), of_peft[part.key]) <= 1e-4, name  # sums over tokens that cancel in part
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_back(family: str, tmp_path: Path) -> None:
    spec, model = engine_model(family)
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path)
    found = open_adapter(tmp_path, spec)
    assert (found.settings.rank, found.settings.scale, found.absent) == (4, 1.5, [])
    read, state = dict(found), model.state_dict()
    assert read.keys() == {name for name in state if is_adapter(name)}
    assert all(torch.equal(read[name], state[name]) for name in read)


def test_what_peft_refuses_is_named(tmp_path: Path) -> None:
    """Models with Mamba layers: PEFT itself says no to adapters of their output projections, and takes the others."""
    spec, model = engine_model("nemotron_h")
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path / "adapter")
    assert refused_targets(tmp_path / "adapter", spec) == {"mixer.out_proj"}
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        peft.PeftModel.from_pretrained(load_hf(base_folder(model, spec, tmp_path / "base")), tmp_path / "adapter")
    spec, model = engine_model("qwen3_next")  # whose output projections have the same name
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path / "other")
    assert refused_targets(tmp_path / "other", spec) == set()


def test_an_adapter_of_peft_is_read(tmp_path: Path) -> None:
    """As most are published: of queries and values alone. The other adapters of attention begin anew."""
    spec, model = engine_model("qwen3_moe")
    hf = load_hf(base_folder(model, spec, tmp_path / "base"))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(hf, config).save_pretrained(tmp_path / "adapter")
    found = open_adapter(tmp_path / "adapter", spec)
    assert (found.settings.rank, found.settings.scale, found.settings.targets) == (2, 3.0, ("attention",))
    assert {name.split(".")[3] for name in found.parts} == {"q", "v"}
    assert {name.split(".")[3] for name in found.absent} == {"k", "out"}
    assert found.plan_fields == {"job.lora_rank": 2, "job.lora_alpha": 6.0, "job.lora_targets": ["attention"]}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("use_dora", True, "use_dora"),
        ("rank_pattern", {"q_proj": 8}, "rank_pattern"),
        ("peft_type", "IA3", "IA3"),
        ("r", 0, "r is 0"),
        ("r", 8, "has shape"),
        ("lora_alpha", "much", "lora_alpha"),
    ],
)
def test_adapters_that_the_engine_cannot_run_are_refused(field: str, value: Any, said: str, tmp_path: Path) -> None:
    spec, model = engine_model("qwen3")
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(FindingsError) as error:
        open_adapter(tmp_path, spec)
    [finding] = error.value.findings
    assert said in finding.problem
    assert finding.advice


@pytest.mark.parametrize("damage", ["truncated", "another model", "no file"])
def test_damaged_adapters_are_one_finding(damage: str, tmp_path: Path) -> None:
    spec, model = engine_model("qwen3")
    write_adapter(model.state_dict(), spec, SETTINGS, tmp_path)
    weights = tmp_path / WEIGHTS
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no file":
        weights.unlink()
    else:
        spec = spec_of("deepseek_v3")
    with pytest.raises(FindingsError) as error:
        open_adapter(tmp_path, spec)
    assert len(error.value.findings) == 1
