"""Models of types that nothing here knows: their shape is that of transformers' class, to the last parameter.

conftest.py leaves this file out where transformers is not installed.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from threefold.cli.main import main
from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.rules.all import judge
from threefold.spec.derived import SHAPE_FILE, DerivedModel
from threefold.spec.hf import model_from_config
from threefold.spec.params import count_params

_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"vocab_size": 96, "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": None}
CONFIGS: dict[str, dict[str, Any]] = {
    # Two dense layers, a gate on attention, four norms a layer.
    "afmoe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 2},
    # Experts in each layer, norms after the branches.
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    # Keys wider than values, windows.
    "mimo_v2_flash": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
EXPERTS = {
    "afmoe": 2 * 8 * 3 * 64 * 24,
    "flex_olmo": 4 * 6 * 3 * 64 * 40,
    "mimo_v2_flash": 3 * 8 * 3 * 64 * 32,
}  # by hand


def write(folder: Path, model_type: str, **changes: Any) -> Path:
    config = {"model_type": model_type, **_SIZES, **CONFIGS[model_type], **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def show(folder: Path) -> int:
    return main(["models", f"hf:{folder}", "--json"])


# Each starts a process that imports transformers: one in the default suite.
@pytest.mark.parametrize(
    "model_type", [next(iter(CONFIGS)), *(pytest.param(each, marks=pytest.mark.slow) for each in [*CONFIGS][1:])]
)
def test_counts_are_those_of_the_class(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(write(tmp_path, model_type)) == 0
    facts = json.loads(capsys.readouterr().out)[0]
    config = CONFIG_MAPPING[model_type](**_SIZES, **CONFIGS[model_type])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert facts["total_params"] == sum(p.numel() for p in theirs.parameters())
    model = model_from_config(tmp_path)
    assert count_params(model).experts == EXPERTS[model_type]
    chosen = CONFIGS[model_type]["num_experts_per_tok"]
    assert model.moe is not None
    unused = EXPERTS[model_type] // model.num_experts * (model.num_experts - chosen)
    assert facts["active_params"] == facts["total_params"] - unused


def test_the_engine_names_what_it_lacks(tmp_path: Path) -> None:
    folder = write(tmp_path, "afmoe")
    with pytest.raises(FindingsError, match="threefold models hf:PATH"):
        model_from_config(folder)
    assert show(folder) == 0
    for target, rule in (("threefold", "stack-runs-family"), ("megatron-bridge", "bridge-trains-family")):
        plan = parse({"model": f"hf:{folder}", "target": target, "cluster": {"chip": "h100", "gpus": 8}}).plan
        assert plan is not None
        assert isinstance(plan.model, DerivedModel)
        (finding,) = [one for one in judge(plan) if one.rule == rule]
        assert ("AfmoeAttention" in finding.problem) == (target == "threefold")


def test_it_is_priced_where_bridge_has_its_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(write(tmp_path, "mimo_v2_flash")) == 0
    file = tmp_path / "plan.toml"
    text = f'model = "hf:{tmp_path}"\ntarget = "megatron-bridge"\ncluster = {{ chip = "h100", gpus = 8 }}\n'
    file.write_text(f"{text}job = {{ seq_len = 4096, global_batch = 8 }}\nlayout = {{ ep = 4 }}\n")
    capsys.readouterr()
    assert main(["estimate", str(file)]) == 0
    said = capsys.readouterr().out
    assert "TFLOP/s" in said
    assert "bridge-trains-family" not in said


def test_a_shape_is_that_of_its_configuration(tmp_path: Path) -> None:
    assert show(write(tmp_path, "flex_olmo")) == 0
    before = model_from_config(tmp_path)
    write(tmp_path, "flex_olmo", num_experts=5)
    with pytest.raises(FindingsError):
        model_from_config(tmp_path)
    assert show(tmp_path) == 0
    assert model_from_config(tmp_path).num_experts == 5 != before.num_experts
    (tmp_path / SHAPE_FILE).write_text('{"config": 3}')
    with pytest.raises(FindingsError):
        model_from_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"model_type": "no_such_type"}, "knows no model_type"), ({"num_attention_heads": 0}, "makes no model of it")],
)
def test_what_transformers_refuses_is_a_finding(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "flex_olmo", **_SIZES, **CONFIGS["flex_olmo"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["models", f"hf:{tmp_path}"]) == 1
    assert says in capsys.readouterr().out


def test_without_transformers_a_finding_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "path"
    absent.mkdir()
    (absent / "transformers.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{absent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "model"
    folder.mkdir()
    assert show(write(folder, "afmoe")) == 1
    assert "which are missing" in capsys.readouterr().out
