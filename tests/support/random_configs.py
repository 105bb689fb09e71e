"""Hugging Face configurations drawn at random: tiny models of every family that the engine trains, with odd settings.

A draw takes a plain configuration with sizes of its own, leaves keys out, adds keys of other families and of older
files, and turns some settings to values that few files have, among them such as no implementation accepts.
"""

import random
from collections.abc import Sequence
from typing import Any

from tiny_models import config_of

from threefold.spec.families import BY_TYPE
from threefold.spec.family import REQUIRED

FAMILIES = ("deepseek_v3", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next")
HYBRIDS = ("deepseek_v32", "glm_moe_dsa", "nemotron_h")
_ACTS = ("silu", "silu", "silu", "swish", "gelu", "relu", "gelu_pytorch_tanh")


def draw_config(seed: int | str, families: Sequence[str] = FAMILIES) -> dict[str, Any]:
    """The configuration of a seed. Everything in it is what `json.loads` could have read."""
    rng = random.Random(f"config {seed}")
    family = rng.choice(families)
    if family in HYBRIDS:
        config = _hybrid(rng, family)
    else:
        config = _plain(rng, family) if family in FAMILIES else _mixture(rng, family)
    # The sizes of hybrids hang together: most changes of one of them are refused by both sides, and show nothing.
    chance, counts = (0.2, (0, 0, 1, 2)) if family in HYBRIDS else (0.5, (0, 1, 2, 3, 5))
    if rng.random() < chance:
        _leave_out(rng, family, config)
    for _ in range(rng.choice(counts)):
        rng.choice((_rope, _rope, _routine, _routine, _foreign, _hostile))(rng, family, config)
    return config


def _plain(rng: random.Random, family: str) -> dict[str, Any]:
    heads = rng.choice((2, 4, 6))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * rng.choice((3, 4, 8)),
        "vocab_size": rng.randint(20, 70),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice((2, 4, 6, 8, 10)),
        "intermediate_size": rng.randint(4, 40),
        "max_position_embeddings": rng.choice((16, 32, 64)),
        "rms_norm_eps": rng.choice((1e-5, 1e-6, 1e-3)),
        "tie_word_embeddings": rng.random() < 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts = rng.choice((2, 4, 6, 8))
    if family in ("mixtral", "gpt_oss"):
        config |= {"num_local_experts": experts, "num_experts_per_tok": rng.randint(1, experts)}
    if family in ("qwen3_moe", "qwen3_next"):
        config |= {"num_experts": experts, "num_experts_per_tok": rng.randint(1, experts)}
        config |= {"moe_intermediate_size": rng.randint(3, 24), "norm_topk_prob": rng.random() < 0.5}
    if family == "gpt_oss":
        config["sliding_window"] = rng.randint(1, 14)
    if family == "qwen3_next":
        keys = rng.randint(1, 3)
        config |= {
            "shared_expert_intermediate_size": rng.randint(2, 24),
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * rng.randint(1, 3),
            "linear_key_head_dim": rng.choice((2, 5, 8)),
            "linear_value_head_dim": rng.choice((2, 5, 8)),
            "linear_conv_kernel_dim": rng.randint(2, 5),
        }
    if family == "deepseek_v3":
        del config["head_dim"]
        config |= _latent(rng, heads)
    return config


def _mixture(rng: random.Random, family: str) -> dict[str, Any]:
    """A family of `tiny_mixtures`: its plain configuration or the odd one, with other sizes."""
    config = config_of(family, odd=rng.random() < 0.5)
    wide = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    config |= {name: rng.randint(3, 24) for name in wide if name in config}
    config |= {"vocab_size": rng.randint(20, 70), "rms_norm_eps": rng.choice((1e-5, 1e-6, 1e-3))}
    config["num_key_value_heads"] = 4 if "kv_lora_rank" in config else rng.choice((1, 2, 4))
    return config | _compressed(rng) if family == "deepseek_v4" else config


def _compressed(rng: random.Random) -> dict[str, Any]:
    """Attention over entries, residual streams and hashed experts of DeepSeek-V4, with sizes of its own."""
    groups, layers = rng.choice((1, 2, 3)), rng.randint(1, 4)
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    hashed = rng.randint(0, layers)
    rates = {"compressed_sparse_attention": rng.randint(1, 6), "heavily_compressed_attention": rng.randint(1, 15)}
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": groups * rng.randint(1, 3),
        "head_dim": rng.choice((4, 8, 10, 16)),
        "partial_rotary_factor": rng.choice((0.5, 0.5, 1.0)),
        "layer_types": [rng.choice(kinds) for _ in range(layers)],
        "compress_rates": rates,
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "q_lora_rank": rng.randint(2, 14),
        "o_groups": groups,
        "o_lora_rank": rng.randint(1, 9),
        "index_n_heads": rng.choice((9, 16)),
        "index_head_dim": rng.choice((8, 16)),
        "index_topk": rng.randint(1, 8),
        "sliding_window": rng.randint(1, 15),
        "hc_mult": rng.randint(1, 5),
        "hc_sinkhorn_iters": rng.randint(1, 20),
        "hc_eps": rng.choice((1e-6, 1e-3)),
        "swiglu_limit": rng.choice((0.1, 0.5, 10.0)),
        "scoring_func": rng.choice(("sqrtsoftplus", "sqrtsoftplus", "sigmoid")),
        "compress_rope_theta": rng.choice((100.0, 160000.0)),
    }


def _hybrid(rng: random.Random, family: str) -> dict[str, Any]:
    """Sparse attention or Mamba-2 layers, with sizes of its own."""
    config, heads = config_of(family, odd=rng.random() < 0.5), rng.choice((1, 3, 4, 5))
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": rng.randint(20, 70)}
    if family != "nemotron_h":
        # So many heads that no two keys have a score of zero, as in `tiny_models`.
        rotated, own = rng.choice((2, 4, 6)), {"index_n_heads": rng.choice((9, 16)), "index_topk": rng.randint(1, 15)}
        drawn = {**_latent(rng, heads), "q_lora_rank": rng.choice((6, 12)), "qk_rope_head_dim": rotated}
        del drawn["rope_interleave"]
        return {**config, **drawn, **own, "index_head_dim": rotated + rng.randint(0, 4), "num_hidden_layers": 3}
    groups, kinds = rng.choice((1, 2, 3, 5)), ("linear_attention", "moe", "full_attention", "mlp")
    return config | {
        "layers_block_type": [rng.choice(kinds) for _ in range(rng.randint(1, 5))],
        "head_dim": rng.choice((2, 3, 8)),
        "n_groups": groups,
        "mamba_num_heads": groups * rng.randint(1, 3),
        "mamba_head_dim": rng.choice((1, 3, 8)),
        "ssm_state_size": rng.choice((1, 5, 8)),
        "conv_kernel": rng.randint(1, 4),
        "time_step_min": rng.choice((1e-3, 0.5)),
        "moe_shared_expert_intermediate_size": rng.randint(3, 24),
    }


def _latent(rng: random.Random, heads: int) -> dict[str, Any]:
    groups, size = rng.randint(1, 4), rng.randint(2, 4)
    top_groups = rng.randint(1, groups)
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice((None, 6, 12)),
        "kv_lora_rank": rng.choice((8, 16)),
        "qk_nope_head_dim": rng.choice((4, 6, 8)),
        "qk_rope_head_dim": rng.choice((2, 4, 6)),
        "v_head_dim": rng.choice((3, 4, 6, 8, 10)),
        "moe_intermediate_size": rng.randint(3, 24),
        "n_routed_experts": groups * size,
        "n_shared_experts": rng.randint(1, 2),
        "num_experts_per_tok": rng.randint(1, top_groups * size),
        "n_group": groups,
        "topk_group": top_groups,
        "first_k_dense_replace": rng.randint(0, 2),
        "num_nextn_predict_layers": rng.randint(0, 1),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "rope_interleave": rng.random() < 0.5,
    }


def _leave_out(rng: random.Random, family: str, config: dict[str, Any]) -> None:
    """Some keys are absent, most of all those whose defaults differ between families."""
    wide = {"intermediate_size", "moe_intermediate_size"} & set(config)  # thousands, by default
    rare = REQUIRED | {"model_type", "pad_token_id", *wide}
    for name in [name for name in config if name not in rare and rng.random() < 0.25]:
        del config[name]
    if rng.random() < 0.1:
        config.pop(rng.choice(sorted(rare - {"model_type"})), None)


def _rope(rng: random.Random, family: str, config: dict[str, Any]) -> None:
    theta = rng.choice((100.0, 10000.0, 500000.0))
    draws: list[dict[str, Any]] = [
        {"rope_theta": theta},
        {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": theta},
        {"rope_scaling": _scaling(rng), "rope_theta": theta},
        {"rope_scaling": _scaling(rng), "rope_parameters": {**_scaling(rng), "rope_theta": 70.0}},
        {"rope_parameters": {**_scaling(rng), "rope_theta": theta}},
        {"rope_scaling": {}, "rope_parameters": None},
        {"partial_rotary_factor": rng.choice((0.25, 0.5, 0.75, 1.0, None))},
        {"rope_parameters": {"rope_theta": theta, "partial_rotary_factor": rng.choice((0.3, 0.5, 1.0))}},
        {"original_max_position_embeddings": rng.choice((4, 8, 32)), "rope_scaling": _scaling(rng)},
    ]
    config.update(rng.choice(draws))


def _scaling(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("yarn", "yarn", "yarn", "linear", "llama3", "default", "dynamic", "longrope"))
    scaling: dict[str, Any] = {
        rng.choice(("rope_type", "rope_type", "type")): kind,
        "factor": rng.choice((1.0, 4.0, 8)),
    }
    if rng.random() < 0.7:
        scaling["original_max_position_embeddings"] = rng.choice((4, 8, 16))
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if kind == "yarn":
        optional = {
            "beta_fast": rng.choice((4.0, 32.0)),
            "beta_slow": rng.choice((0.5, 1.0)),
            "attention_factor": rng.choice((0.7, None)),
            "mscale": rng.choice((0.7, 1.0, 0.0)),
            "mscale_all_dim": rng.choice((0.7, 1.0, 0.0)),
            "truncate": rng.choice((True, False, None)),
            "factor": rng.choice((None, 2.0, 40)),
        }
        scaling |= {name: value for name, value in optional.items() if rng.random() < 0.4}
    return scaling


def _routine(rng: random.Random, family: str, config: dict[str, Any]) -> None:
    """Settings that files do have."""
    count = config.get("num_hidden_layers", 1)
    draws: dict[str, Any] = {
        "hidden_act": rng.choice(_ACTS),
        "attention_bias": rng.random() < 0.5,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "attention_dropout": 0.0,
        "pad_token_id": rng.randint(0, 5),
        "head_dim": rng.choice((2, 4, 12)),
        "use_sliding_window": False,
        "sliding_window": rng.choice((None, 1, 3, 20)),
        "num_key_value_heads": rng.choice((None, 1, config.get("num_attention_heads"))),
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": rng.choice((True, False, None)),
        "rope_interleave": rng.choice((True, False, None)),
        "router_aux_loss_coef": 0.5,
        "scoring_func": "sigmoid",
        "full_attention_interval": rng.randint(1, 3),
        rng.choice(("num_experts", "num_local_experts")): config.get("num_experts_per_tok", 2) + rng.randint(0, 2),
    }
    if family in ("gpt_oss", "qwen3", "qwen3_next"):
        local = {"gpt_oss": "sliding_attention", "qwen3": "full_attention", "qwen3_next": "linear_attention"}[family]
        draws["layer_types"] = [rng.choice(("full_attention", local)) for _ in range(count)]
    for name in rng.sample(sorted(draws), 3):
        config[name] = draws[name]


def _foreign(rng: random.Random, family: str, config: dict[str, Any]) -> None:
    """Keys that the classes of other families read and this one passes over."""
    other = BY_TYPE[rng.choice(FAMILIES)].config
    plain = {name: value for name, value in {**other.defaults, **other.only}.items() if name not in config}
    for name in rng.sample(sorted(plain), min(len(plain), 3)):
        value = plain[name]
        known = name in {**BY_TYPE[family].config.defaults, **BY_TYPE[family].config.only}
        small = value if not isinstance(value, int) or isinstance(value, bool) or value < 65 else 8
        config[name] = value if known else (not value if isinstance(value, bool) else small)


def _hostile(rng: random.Random, family: str, config: dict[str, Any]) -> None:
    """Values that few implementations take."""
    draws: dict[str, Any] = {
        "head_dim": rng.choice((1, 3, 7, 0)),
        "qk_rope_head_dim": rng.choice((1, 3, 5)),
        "v_head_dim": rng.choice((20, 40)),
        "partial_rotary_factor": rng.choice((1.5, 0.0, 0.01, -0.5)),
        "attention_dropout": 0.1,
        "mlp_bias": True,
        "use_sliding_window": True,
        "sliding_window": rng.choice((0, -1)),
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "router_jitter_noise": 0.1,
        "swiglu_limit": 2.0,
        "swiglu_alpha": 1.0,
        "scoring_func": "softmax",
        "num_key_value_heads": rng.choice((3, 5)),
        "num_experts_per_tok": rng.choice((0, 9, 1)),
        "n_group": rng.choice((3, None, 0)),
        "topk_group": rng.choice((9, None)),
        "hidden_act": rng.choice((None, "no such function", "clamped swiglu")),
        "rms_norm_eps": rng.choice((0.0, "1e-6", None)),
        "rope_theta": rng.choice((0.0, None, -1.0)),
        "rope_parameters": rng.choice(({"full_attention": {"rope_theta": 5.0}}, {"rope_type": "yarn"}, {"type": 3})),
        "per_layer_config": {"0": {"intermediate_size": 8}},
        "layer_types": rng.choice((["sliding_attention"], ["full_attention"] * 5, ["chunked_attention"])),
        "attention_bias": rng.choice(("yes", 1, None)),
        "first_k_dense_replace": rng.choice((None, 50, -1)),
    }
    known = [
        name
        for name in draws
        if name in {**BY_TYPE[family].config.defaults, **BY_TYPE[family].config.only, **BY_TYPE[family].config.extra}
    ]
    for name in rng.sample(known, 1):
        config[name] = draws[name]
