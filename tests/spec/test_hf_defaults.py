"""`spec/families` against the configuration classes of the installed transformers, field by field.

conftest.py leaves this file out where transformers is not installed: the planner runs without it.
"""

import os
from dataclasses import MISSING, fields
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers
from hf_configs import CONFIGS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from threefold.findings import FindingsError
from threefold.spec.families import BY_TYPE
from threefold.spec.families.gemma4 import ROPE_BY_TYPE
from threefold.spec.families.qwen_vision import UNREAD as VISION_UNREAD
from threefold.spec.family import REQUIRED, UNREAD
from threefold.spec.hf import model_from_dict
from threefold.spec.model import ModelSpec

BASE = {f.name for f in fields(transformers.PreTrainedConfig)}
CLASSES = {name: family.config for name, family in BY_TYPE.items()}
# By model_type: whether embeddings are tied in a configuration with a text_config, where it does not say.
COMPOSITE_TIED = {
    name: f.composite_tied for name, f in BY_TYPE.items() if f.name == name and f.composite_tied is not None
}
ENCODERS = {name: family.encoder for name, family in BY_TYPE.items() if family.name == name and family.encoder}
WALKED = [name for name in BY_TYPE if name != "kimi_k2"]  # which transformers has no class for
# Named by the class itself, or by its code for older files.
BY_CODE = {
    "deepseek_v3": {"num_nextn_predict_layers": "num_mtp_layers"},
    "deepseek_v32": {"num_experts": "n_routed_experts"},
    "glm_moe_dsa": {"num_experts": "n_routed_experts"},
    "nemotron_h": {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
}


def text_class(model_type: str) -> Any:
    whole = CONFIG_MAPPING[model_type]
    return whole.sub_configs["text_config"] if model_type in COMPOSITE_TIED else whole


def defaults_of(cls: Any) -> dict[str, Any]:
    return {
        f.name: f.default if f.default is not MISSING else f.default_factory()
        for f in fields(cls)
        if f.default is not MISSING or f.default_factory is not MISSING
    }


@pytest.mark.parametrize("model_type", WALKED)
def test_every_field_of_transformers_is_decided_on(model_type: str) -> None:
    kind, theirs = CLASSES[model_type], defaults_of(text_class(model_type))
    read, only = set(kind.defaults), set(kind.only)
    named = set(theirs) - (UNREAD | kind.unread) - (REQUIRED & set(theirs))
    assert read | only == named, "read, accept with one value or list as unread what differs"
    assert not read & only
    assert not (read | only) & (UNREAD | kind.unread | REQUIRED)
    assert kind.unread <= set(theirs)
    assert not set(kind.extra) & set(theirs)


def test_unread_fields_of_all_classes_exist() -> None:
    assert BASE <= UNREAD
    assert set().union(*(defaults_of(text_class(name)) for name in WALKED)) >= UNREAD


@pytest.mark.parametrize("model_type", WALKED)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    kind, cls = CLASSES[model_type], text_class(model_type)
    theirs = defaults_of(cls)
    for name, value in {**kind.defaults, **kind.only}.items():
        if model_type == "gpt_oss" and name == "rope_parameters":
            assert cls().rope_parameters == {**value, "rope_theta": kind.theta}
            continue
        assert value == theirs[name], name
        assert type(value) is type(theirs[name]), name
    assert kind.theta == cls.default_theta
    by_map = {alias: name for pair in cls.attribute_map.items() for alias, name in (pair, pair[::-1])}
    expected = {alias: name for alias, name in by_map.items() if alias not in theirs} | BY_CODE.get(model_type, {})
    assert dict(kind.aliases) == expected


@pytest.mark.parametrize("model_type", WALKED)
def test_null_is_taken_where_transformers_takes_it(model_type: str) -> None:
    kind = CLASSES[model_type]
    nullable = {f.name for f in fields(text_class(model_type)) if "None" in str(f.type)}
    assert set(kind.null_means) <= nullable
    for name, default in kind.defaults.items():
        if default is not None and name not in nullable and name != "tie_word_embeddings":
            assert f"{name} is null" in str(read(model_type, {name: None})), name


def test_defaults_that_transformers_makes_in_code() -> None:
    for model_type, tied in COMPOSITE_TIED.items():
        assert defaults_of(CONFIG_MAPPING[model_type])["tie_word_embeddings"] is tied
    gemma = text_class("gemma4")()
    assert gemma.rope_parameters == ROPE_BY_TYPE
    assert gemma.per_layer_config[5].head_dim == CLASSES["gemma4"].extra["global_head_dim"]
    for model_type in ("qwen3_next", "qwen3_5_moe"):
        config = text_class(model_type)(num_hidden_layers=8)
        extra = CLASSES[model_type].extra
        assert config.rope_parameters["partial_rotary_factor"] == extra["partial_rotary_factor"]
        assert config.layer_types.index("full_attention") + 1 == extra["full_attention_interval"]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_defaults_of_image_encoders(model_type: str) -> None:
    theirs = defaults_of(CONFIG_MAPPING[model_type].sub_configs["vision_config"])
    assert set(theirs) - BASE == set(ENCODERS[model_type].defaults) | VISION_UNREAD
    assert {name: theirs[name] for name in ENCODERS[model_type].defaults} == ENCODERS[model_type].defaults
    around = defaults_of(CONFIG_MAPPING[model_type])
    assert {name: around[name] for name in ENCODERS[model_type].tokens} == ENCODERS[model_type].tokens


def read(model_type: str, changes: dict[str, Any], absent: str | None = None) -> ModelSpec | str:
    """The spec, or why there is none."""
    config = {"model_type": model_type, **CONFIGS[model_type]}
    text = dict(config["text_config"] if model_type in COMPOSITE_TIED else config)
    for alias, name in CLASSES[model_type].aliases.items():  # which would go before the field
        if name in changes or name == absent:
            text.pop(alias, None)
    text = {name: value for name, value in {**text, **changes}.items() if name != absent}
    config = {**config, "text_config": text} if model_type in COMPOSITE_TIED else text
    try:
        return model_from_dict(config, "m", "here")
    except FindingsError as error:
        return str(error.findings[0].problem)


@pytest.mark.parametrize("model_type", WALKED)
def test_an_absent_field_is_its_default(model_type: str) -> None:
    kind = CLASSES[model_type]
    for name, value in {**kind.defaults, **kind.only}.items():
        assert read(model_type, {name: value}) == read(model_type, {}, absent=name), name
        for alias in [alias for alias, field in kind.aliases.items() if field == name]:
            assert read(model_type, {alias: value}) == read(model_type, {name: value}), alias


# Fields that change a model only together with another one, which the configurations here do not have.
TOGETHER: dict[str, dict[str, Any]] = {
    "max_position_embeddings": {"rope_scaling": {"rope_type": "yarn", "factor": None}},
    "rope_parameters": {"rope_scaling": None},
    "max_window_layers": {"num_hidden_layers": 64},
}


# Phi-MoE has one rotary scaling only.
TOGETHER_PHI: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
TOGETHER_PHI |= {"short_mscale": 1.2, "long_mscale": 1.2}
TOGETHER_PHI |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


def other(value: Any, name: str) -> Any:
    """Another value of a field."""
    if name == "rope_parameters":
        return {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 7.0}}
    if name in ("layer_types", "layers_block_type", "mlp_layer_types", "mtp_layers_block_type"):
        return ["no such layer"]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "quick_gelu"
    if value is None:
        return 2
    if value == -1:
        return 0
    return value * 2 + (1 if isinstance(value, int) else 0.1)


@pytest.mark.parametrize("model_type", WALKED)
def test_no_field_is_ignored(model_type: str) -> None:
    """Another value of a field gives another model or a refusal."""
    kind = CLASSES[model_type]
    for name, default in {**kind.defaults, **kind.only}.items():
        if name == "tie_word_embeddings" and model_type in COMPOSITE_TIED:
            continue  # that of the whole configuration counts
        before, changed = TOGETHER.get(name, {}), other(default, name)
        if (model_type, name) == ("phimoe", "max_position_embeddings"):
            before = {"rope_scaling": TOGETHER_PHI}
        found = read(model_type, {**before, name: changed})
        assert name in str(found) or name not in kind.only, name
        assert found != read(model_type, {**before, name: default}) or (isinstance(found, str) and name in found), name
