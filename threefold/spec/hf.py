"""A ModelSpec from a Hugging Face `config.json`. Add a family by adding a reader to READERS."""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threefold.fields import MAX_LAYERS
from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.spec.model import (
    DeltaSpec,
    GqaSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeScaling,
    VisionSpec,
    check_heads,
    check_sizes,
)

Config = Mapping[str, Any]


def model_from_config(path: Path) -> ModelSpec:
    """Read `config.json` (or the folder that holds one); every failure is a finding."""
    try:
        if path.is_dir():
            path = path / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(f"cannot read {path}: {error}", "give a folder or file with a JSON configuration") from None
    if not isinstance(config, dict):
        raise _refuse(f"{path} holds no JSON object", "give a Hugging Face config.json")
    return model_from_dict(config, name=path.parent.name or path.stem, source=str(path))


def model_from_dict(config: Config, name: str, source: str) -> ModelSpec:
    family = config.get("model_type")
    reader = READERS.get(str(family))
    if reader is None:
        advice = did_you_mean(str(family), READERS) or f"supported: {', '.join(READERS)}"
        raise _refuse(f"model_type {reprlib.repr(family)} is not supported", advice)
    text = config.get("text_config") or config
    vision = config.get("vision_config")
    try:
        parts = reader(text)
        if isinstance(vision, Mapping) and "depth" in vision:
            parts["vision"] = _vision(vision)
        model = ModelSpec(
            name=name,
            source=source,
            dim=text["hidden_size"],
            vocab=text["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            **parts,
        )
        check_sizes(model)
        check_heads(model)
        if not model.dense_dim and any(layer.ffn == "dense" for layer in model.layers):
            raise ValueError("dense layers need an intermediate_size")
        return model
    except KeyError as error:
        raise _refuse(f"{source} lacks {error} for model_type {family}", "complete the configuration") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refuse(f"{source} is no usable {family} configuration: {error}", "correct the configuration") from None


def _refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="model-config", at="model", problem=problem, advice=advice)])


def _theta(c: Config, default: float = 10_000.0) -> float:
    """What stands in `rope_parameters` is what transformers 5 runs, whatever older keys stand beside it."""
    rope = c.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or c.get("rope_theta") or default)


def _scaling(c: Config) -> RopeScaling | None:
    """The scaling in `rope_scaling` (before transformers 5) or `rope_parameters`; its type was once called `type`."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if kind != "yarn":  # read for what it is; only the engine must know more
        original, factor = original or c.get("max_position_embeddings") or 1, factor or 1.0
    original = original or c["max_position_embeddings"]
    optional = {
        name: float(rope[name])
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        if rope.get(name)
    }
    return RopeScaling(
        kind=str(kind),
        factor=float(c["max_position_embeddings"] / original if factor is None else factor),
        original_len=original,
        truncate=bool(rope.get("truncate", True)),
        **optional,
    )


def _gqa(c: Config, **extra: Any) -> GqaSpec:
    heads = c["num_attention_heads"]
    rope = c.get("rope_parameters") or {}
    return GqaSpec(
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        bias=bool(c.get("attention_bias", False)),
        rope_theta=_theta(c),
        rope_fraction=float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0),
        rope_scaling=_scaling(c),
        **extra,
    )


def _mla(c: Config) -> MlaSpec:
    if c.get("attention_bias"):
        raise ValueError("biases on latent attention (attention_bias) are not supported")
    indexer = None
    if c.get("index_topk"):
        indexer = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"])
    return MlaSpec(
        num_heads=c["num_attention_heads"],
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=c["qk_rope_head_dim"],
        v_dim=c["v_head_dim"],
        indexer=indexer,
        rope_theta=_theta(c),
        rope_scaling=_scaling(c),
        rope_pairs=bool(c.get("rope_interleave", True)),
    )


def _activation(c: Config, key: str = "hidden_act", default: str = "silu") -> str:
    """By the name that transformers has for it; swish is its other word for silu."""
    name = str(c.get(key) or default)
    return "silu" if name == "swish" else name


def _eps(c: Config) -> float:
    return float(c.get("rms_norm_eps") or c.get("layer_norm_epsilon") or 1e-6)


def _experts(c: Config) -> Any:
    return c.get("num_experts") or c["num_local_experts"]


def _num_layers(c: Config) -> int:
    """Checked here already, for readers that make a list of so many layers."""
    count = c["num_hidden_layers"]
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {reprlib.repr(count)}, not a whole number from 1 to {MAX_LAYERS}")
    return count


def _pattern(types: Sequence[str], letters: Mapping[str, str], num_layers: int | None = None) -> str:
    unknown = sorted(set(types) - set(letters))
    if unknown:
        raise ValueError(f"unknown layer types {reprlib.repr(unknown)}")
    if num_layers not in (None, len(types)):
        raise ValueError(f"{len(types)} layer types for {num_layers} layers")
    return "".join(letters[kind] for kind in types)


def _llama(c: Config) -> dict[str, Any]:
    if c.get("mlp_bias") or c.get("use_sliding_window"):
        raise ValueError("mlp_bias and use_sliding_window are not supported")
    return {
        "family": "llama",
        "num_layers": c["num_hidden_layers"],
        "dense_dim": c["intermediate_size"],
        "attention": _gqa(c),
        "activation": _activation(c),
        "norm_eps": _eps(c),
    }


def _qwen3(c: Config) -> dict[str, Any]:
    return {**_llama(c), "family": "qwen3", "attention": _gqa(c, qk_norm=True)}


def _mixtral(c: Config) -> dict[str, Any]:
    moe = MoeSpec(_experts(c), c["num_experts_per_tok"], c["intermediate_size"])
    attention = _gqa(c, window=c.get("sliding_window"))
    return {**_llama(c), "family": "mixtral", "dense_dim": 0, "moe": moe, "attention": attention}


def _qwen3_moe(c: Config) -> dict[str, Any]:
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "dense layers between the sparse ones (mlp_only_layers, decoder_sparse_step) are not supported"
        )
    norm_topk = bool(c.get("norm_topk_prob", True))
    moe = MoeSpec(_experts(c), c["num_experts_per_tok"], c["moe_intermediate_size"], norm_topk=norm_topk)
    return {**_qwen3({"intermediate_size": 0, **c}), "family": "qwen3_moe", "moe": moe}


def _qwen3_vl_moe(c: Config) -> dict[str, Any]:
    return {**_qwen3_moe(c), "family": "qwen3_vl_moe"}


def _qwen3_next(c: Config) -> dict[str, Any]:
    count = _num_layers(c)
    interval = c.get("full_attention_interval", 4)
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    letters = {"linear_attention": "d", "full_attention": "t"}
    moe = MoeSpec(
        num_experts=_experts(c),
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=1 if c.get("shared_expert_intermediate_size") else 0,
        shared_dim=c.get("shared_expert_intermediate_size") or 0,
        shared_gate=bool(c.get("shared_expert_intermediate_size")),
        norm_topk=bool(c.get("norm_topk_prob", True)),
    )
    return {
        "family": "qwen3_next",
        "num_layers": count,
        "pattern": _pattern(c.get("layer_types") or default, letters, count),
        "dense_dim": c.get("intermediate_size") or 0,
        "attention": _gqa(c, qk_norm=True, gated=True),
        "delta": DeltaSpec(
            num_k_heads=c["linear_num_key_heads"],
            num_v_heads=c["linear_num_value_heads"],
            k_dim=c["linear_key_head_dim"],
            v_dim=c["linear_value_head_dim"],
            conv=c["linear_conv_kernel_dim"],
        ),
        "moe": moe,
        "activation": _activation(c),
        "norm_eps": _eps(c),
        "mtp_layers": c.get("num_nextn_predict_layers") or c.get("mtp_num_hidden_layers") or 0,
    }


def _qwen3_5_moe(c: Config) -> dict[str, Any]:
    return {**_qwen3_next(c), "family": "qwen3_5_moe"}


def _deepseek(c: Config) -> dict[str, Any]:
    moe = MoeSpec(
        num_experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=c.get("n_shared_experts") or 0,
        score="sigmoid",
        norm_topk=bool(c.get("norm_topk_prob", True)),
        num_groups=c.get("n_group") or 1,
        top_groups=c.get("topk_group") or 1,
        scale=float(c.get("routed_scaling_factor") or 1.0),
        balance_bias=True,
    )
    return {
        "family": "deepseek_v3",
        "num_layers": c["num_hidden_layers"],
        "num_dense_layers": c.get("first_k_dense_replace") or 0,
        "dense_dim": c["intermediate_size"],
        "attention": _mla(c),
        "moe": moe,
        "activation": _activation(c),
        "norm_eps": _eps(c),
        "mtp_layers": c.get("num_nextn_predict_layers") or 0,
    }


def _glm_moe_dsa(c: Config) -> dict[str, Any]:
    return {**_deepseek(c), "family": "glm_moe_dsa"}


def _gpt_oss(c: Config) -> dict[str, Any]:
    count = _num_layers(c)
    letters = {"sliding_attention": "w", "full_attention": "t"}
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(count)]
    biased = {"attention_bias": True, **c}
    if c.get("swiglu_alpha", 1.702) != 1.702 or c.get("swiglu_limit", 7.0) != 7.0:
        raise ValueError("a clamped SwiGLU other than swiglu_alpha 1.702 and swiglu_limit 7 is not supported")
    return {
        "family": "gpt_oss",
        "num_layers": count,
        "pattern": _pattern(c.get("layer_types") or default, letters, count),
        "attention": _gqa(biased, sinks=True),
        "local_attention": _gqa(biased, sinks=True, window=c["sliding_window"]),
        "moe": MoeSpec(_experts(c), c["num_experts_per_tok"], c["intermediate_size"], bias=True),
        "activation": "clamped swiglu",
        "norm_eps": _eps(c),
    }


def _gemma4(c: Config) -> dict[str, Any]:
    if not c.get("enable_moe_block"):
        raise ValueError("only the Mixture-of-Experts members of Gemma 4 are supported")
    if c.get("hidden_size_per_layer_input"):
        raise ValueError("embeddings per layer (hidden_size_per_layer_input) are not supported")
    act = _activation(c, "hidden_activation", "gelu_pytorch_tanh")
    letters = {"sliding_attention": "w", "full_attention": "t"}
    per_layer = c.get("per_layer_config") or {}
    global_dim = next((v["head_dim"] for v in per_layer.values() if "head_dim" in v), c["head_dim"])
    kv_heads = c.get("num_global_key_value_heads") or c["num_key_value_heads"]
    wide = {**c, "head_dim": c.get("global_head_dim") or global_dim, "num_key_value_heads": kv_heads}
    return {
        "family": "gemma4",
        "num_layers": c["num_hidden_layers"],
        "pattern": _pattern(c["layer_types"], letters, c["num_hidden_layers"]),
        "attention": _gqa(wide, qk_norm=True, shared_kv=bool(c.get("attention_k_eq_v"))),
        "local_attention": _gqa(c, qk_norm=True, window=c["sliding_window"]),
        "moe": MoeSpec(
            num_experts=c["num_experts"],
            top_k=c["top_k_experts"],
            expert_dim=c["moe_intermediate_size"],
            num_shared=1,
            shared_dim=c["intermediate_size"],
        ),
        "activation": {"gelu_pytorch_tanh": "gelu_tanh"}.get(act, act),
        "norm_eps": _eps(c),
    }


def _nemotron_h(c: Config) -> dict[str, Any]:
    letters = {"mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-"}
    pattern = "".join(c.get("hybrid_override_pattern") or _pattern(c["layers_block_type"], letters))
    if unknown := sorted(set(pattern) - set(letters.values())):
        raise ValueError(f"unknown layers {reprlib.repr(unknown)} in hybrid_override_pattern")
    moe = MoeSpec(
        num_experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=c.get("n_shared_experts") or 0,
        shared_dim=c.get("moe_shared_expert_intermediate_size") or 0,
        score="sigmoid",
        num_groups=c.get("n_group") or 1,
        top_groups=c.get("topk_group") or 1,
        scale=float(c.get("routed_scaling_factor") or 1.0),
        balance_bias=True,
        latent_dim=c.get("moe_latent_size"),
    )
    return {
        "family": "nemotron_h",
        "num_layers": len(pattern),
        "pattern": pattern,
        "dense_dim": c.get("intermediate_size") or 0,
        "attention": _gqa(c),
        "mamba": MambaSpec(
            num_heads=c["mamba_num_heads"],
            head_dim=c["mamba_head_dim"],
            state_dim=c["ssm_state_size"],
            num_groups=c["n_groups"],
            conv=c.get("conv_kernel", 4),
        ),
        "moe": moe if "E" in pattern else None,
        "glu": False,
        "activation": _activation(c, "mlp_hidden_act", "relu2"),
        "norm_eps": _eps(c),
        "mtp_layers": c.get("num_nextn_predict_layers") or 0,
        "mtp_pattern": "*E",
        "mtp_shared": True,
    }


def _vision(c: Config) -> VisionSpec:
    return VisionSpec(
        depth=c["depth"],
        dim=c["hidden_size"],
        mlp_dim=c["intermediate_size"],
        num_heads=c["num_heads"],
        patch=c["patch_size"],
        temporal_patch=c.get("temporal_patch_size", 1),
        merge=c["spatial_merge_size"],
        num_positions=c["num_position_embeddings"],
        deepstack=tuple(c.get("deepstack_visual_indexes") or ()),
    )


READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek_v3": _deepseek,
    "gemma4": _gemma4,
    "glm_moe_dsa": _glm_moe_dsa,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "qwen3": _qwen3,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
