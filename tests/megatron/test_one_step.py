"""Further than validation: wrappers, optimizer and schedule of exports, and one step of small models in Megatron.

A step runs Megatron's local layers, in fp32 on one process: without Transformer Engine there is no grouped GEMM, no FP8
and no fused kernel to compare. The wrapper of FSDP is left out, which asks for the index of a GPU.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import GRADIENTS, LOGITS, ours, peer, relative
from megatron_exports import recipe_plans
from megatron_judges import NEEDS_WHEELS, RELEASES, python, wheels, write_export
from repository import ROOT
from safetensors.torch import load_file
from tiny_models import spec_of

from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.hf_names import hf_layouts
from threefold.engine.weights.write_hf import write_hf
from threefold.interop.megatron.export_plan import BRIDGE

pytestmark = NEEDS_WHEELS
PROGRAMS = ROOT / "tests" / "megatron"
RECIPE = "qwen3-30b-a3b-4k-16xh100-bf16-overlap"


def run(program: str, *words: Any) -> str:
    command = [python(), str(PROGRAMS / program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_wrapper_optimizer_and_schedule_take_the_recipe(tmp_path: Path) -> None:
    write_export(recipe_plans()[RECIPE], BRIDGE, RELEASES[-1], tmp_path)
    stages = json.loads(run("wrap.py", tmp_path, wheels(RELEASES[-1])))
    assert stages == dict.fromkeys(("wrap", "optimize", "schedule"), "passed")


# What Megatron takes from elsewhere than the configuration, so that a small one must say the same: Bridge writes the
# YaRN of the published GPT-OSS (gpt_oss_bridge.py), Megatron normalizes MLA's latents with the model's epsilon, where
# the published code has 1e-6, and scores a group of experts by its best top_k / topk_group ones (moe_utils.py), where
# the published code takes two.
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    },
    "deepseek_v3": {"rms_norm_eps": 1e-6, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize("family", OWN)
def test_loss_and_gradients_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    """The same weights, by way of a checkpoint that transformers wrote and Bridge's own import."""
    torch.manual_seed(0)
    compare(ours(peer(family, **OWN[family]), tmp_path / "hf"), tmp_path)


def test_gradients_of_mtp_are_those_of_the_engine(tmp_path: Path) -> None:
    """By way of a checkpoint that the engine wrote, because transformers has no MTP."""
    torch.manual_seed(0)
    spec = spec_of("deepseek_v3", **OWN["deepseek_v3"], num_nextn_predict_layers=1)
    engine = build_model(spec, options=Options(mtp_loss=0.1))  # what Megatron's mtp_loss_scaling_factor is by itself
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    write_hf(engine, spec, tmp_path / "hf")
    compare(engine, tmp_path)


def compare(engine: Decoder, folder: Path) -> None:
    """The step of the checkpoint in `folder/hf`, in Megatron and in the engine that has the same weights."""
    ids = torch.randint(0, engine.spec.vocab, (2, 17))
    write_export(recipe_plans()[RECIPE], BRIDGE, RELEASES[-1], folder)
    out = folder / "gradients.safetensors"
    run("one_step.py", folder / "validate.py", wheels(RELEASES[-1]), folder / "hf", json.dumps(ids.tolist()), out)
    found = load_file(out)

    output = engine(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    output.loss.backward()
    assert relative(found.pop("loss")[0], output.aux["ce"]) < LOGITS
    seen = set()
    for name, parameter in engine.named_parameters():
        options = hf_layouts(name, engine.spec)
        option = next(option for option in options if all(piece.key in found for piece in option))
        for piece in option:
            seen.add(piece.key)
            assert relative(piece.read(parameter.grad), found[piece.key]) < GRADIENTS, piece.key
    assert seen == set(found)
