"""Further than validation: wrappers, optimizer and schedule of exports, and one step of small models in Megatron.

A step runs Megatron's local layers, in fp32 on one process: without Transformer Engine there is no grouped GEMM, no FP8
and no fused kernel to compare. MTP is left out, because Bridge builds its layers of Transformer Engine only. So is the
wrapper of FSDP, which asks for the index of a GPU.
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

from threefold.engine.weights.hf_names import hf_layouts
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


# Measured once: a loss of 4.3693 for 4.3569 (GPT-OSS) and 4.3574 for 4.3605 (DeepSeek-V3), with gradients that differ
# throughout. Both have YaRN, which Qwen3-MoE has not.
UNEXPLAINED = pytest.mark.xfail(strict=True, reason="the loss differs by 0.3 % or 0.1 %, and nobody has found out why")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("gpt_oss", marks=UNEXPLAINED), pytest.param("deepseek_v3", marks=UNEXPLAINED)]
)
def test_loss_and_gradients_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    """The same weights, by way of a checkpoint that transformers wrote and Bridge's own import."""
    torch.manual_seed(0)
    engine = ours(peer(family), tmp_path / "hf")
    ids = torch.randint(0, engine.spec.vocab, (2, 17))
    write_export(recipe_plans()[RECIPE], BRIDGE, RELEASES[-1], tmp_path)
    out = tmp_path / "gradients.safetensors"
    run("one_step.py", tmp_path / "validate.py", wheels(RELEASES[-1]), tmp_path / "hf", json.dumps(ids.tolist()), out)
    found = load_file(out)

    loss = engine(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).loss
    loss.backward()
    assert relative(found.pop("loss")[0], loss.detach()) < LOGITS
    seen = set()
    for name, parameter in engine.named_parameters():
        options = hf_layouts(name, engine.spec)
        option = next(option for option in options if all(piece.key in found for piece in option))
        for piece in option:
            seen.add(piece.key)
            assert relative(piece.read(parameter.grad), found[piece.key]) < GRADIENTS, piece.key
    assert seen == set(found)
