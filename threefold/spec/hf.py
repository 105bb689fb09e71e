"""A ModelSpec from a Hugging Face `config.json`, read as transformers reads it.

Add a family by adding a reader to READERS (or `MIXTURE_READERS`) and the defaults of its configuration class to
`hf_defaults.CLASSES` (or `MIXTURE_CLASSES`).
"""

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.safe_files import read_json
from threefold.spec import hf_planned, hf_readers
from threefold.spec.hf_defaults import CLASSES, COMPOSITE_TIED, VISION_FIELDS, VISION_TOKENS
from threefold.spec.hf_families.check_spec import check_heads, check_routing, check_sizes, check_vision
from threefold.spec.hf_families.gemma4 import read_gemma4
from threefold.spec.hf_families.mixture_readers import MIXTURE_READERS
from threefold.spec.hf_fields import Fields, complete
from threefold.spec.model import ModelSpec


def model_from_config(path: Path) -> ModelSpec:
    """Read `config.json` (or the folder that holds one); every failure is a finding."""
    try:
        if path.is_dir():
            path = path / "config.json"
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise _refuse(f"cannot read {path}: {error}", "give a folder or file with a JSON configuration") from None
    if not isinstance(config, dict):
        raise _refuse(f"{path} holds no JSON object", "give a Hugging Face config.json")
    return model_from_dict(config, name=path.parent.name or path.stem, source=str(path))


def model_from_dict(config: Fields, name: str, source: str) -> ModelSpec:
    family = config.get("model_type")
    reader = READERS.get(str(family))
    if reader is None:
        advice = did_you_mean(str(family), READERS) or f"supported: {', '.join(READERS)}"
        raise _refuse(f"model_type {reprlib.repr(family)} is not supported", advice)
    try:
        model = _read(config, str(family), reader, name, source)
        check_sizes(model)
        check_heads(model)
        check_routing(model)
        check_vision(model)
        if not model.dense_dim and any(layer.ffn == "dense" for layer in model.layers):
            raise ValueError("dense layers need an intermediate_size")
        return model
    except KeyError as error:
        raise _refuse(f"{source} lacks {error} for model_type {family}", "complete the configuration") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refuse(f"{source} is no usable {family} configuration: {error}", "correct the configuration") from None


def _read(config: Fields, family: str, reader: "Reader", name: str, source: str) -> ModelSpec:
    composite = family in COMPOSITE_TIED
    text = config.get("text_config") or {} if composite else config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {reprlib.repr(text)}, not a table")
    fields = complete(text, CLASSES[family])
    parts = reader(fields)
    if family in VISION_FIELDS:
        encoder = {**VISION_FIELDS[family], **(config.get("vision_config") or {})}
        parts["vision"] = hf_planned.read_vision(encoder, {**VISION_TOKENS[family], **config})
    tied = config.get("tie_word_embeddings", COMPOSITE_TIED[family]) if composite else fields["tie_word_embeddings"]
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {reprlib.repr(tied)}, not true or false")
    return ModelSpec(
        name=name,
        source=source,
        dim=fields["hidden_size"],
        vocab=fields["vocab_size"],
        tied=tied,
        init_std=float(fields["initializer_range"]),
        **parts,
    )


def _refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="model-config", at="model", problem=problem, advice=advice)])


Reader = Callable[[Fields], dict[str, Any]]
READERS: dict[str, Reader] = {
    **MIXTURE_READERS,
    "deepseek_v3": hf_readers.read_deepseek,
    "deepseek_v32": hf_planned.read_deepseek_v32,
    "gemma4": read_gemma4,
    "gemma4_text": read_gemma4,
    "glm_moe_dsa": hf_planned.read_glm_moe_dsa,
    "gpt_oss": hf_readers.read_gpt_oss,
    "kimi_k2": hf_readers.read_deepseek,
    "llama": hf_readers.read_llama,
    "mixtral": hf_readers.read_mixtral,
    "nemotron_h": hf_planned.read_nemotron_h,
    "qwen3": hf_readers.read_qwen3,
    "qwen3_5_moe": hf_planned.read_qwen3_5_moe,
    "qwen3_5_moe_text": hf_planned.read_qwen3_5_moe,
    "qwen3_moe": hf_readers.read_qwen3_moe,
    "qwen3_next": hf_readers.read_qwen3_next,
    "qwen3_vl_moe": hf_planned.read_qwen3_vl_moe,
}
