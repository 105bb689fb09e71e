"""dots.llm1: DeepSeek-V3's experts with Qwen3's attention, of which late layers may have a window."""

from threefold.spec.family import (
    BALANCED_SIGMOID,
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    decoder,
    published,
    tiny,
)
from threefold.spec.hf_parts import layer_types, num_layers, sliding_window, standard_parts, windowed_pattern
from threefold.spec.model import ModelSpec


def _read(c: Fields, family: Family) -> Parts:
    for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if c[name] is None:
            raise ValueError(f"{name} is missing")
    first = num_layers(c) if (window := sliding_window(c)) is None else c["max_window_layers"]
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers(c))]
    pattern, parts = windowed_pattern(c, default), standard_parts(c, family)
    if "w" not in pattern:
        return parts
    return {**parts, "pattern": pattern, "local_attention": {**parts["attention"], "window": window}}


def _write(spec: ModelSpec) -> Parts:
    window = spec.local_attention.window if spec.local_attention else None
    return {"layer_types": layer_types(spec), "sliding_window": window}


TINY_DOTS1 = tiny(
    "tiny-dots1",
    "dots1",
    num_dense_layers=1,
    dense_dim=256,
    attention={"num_kv_heads": 8, "qk_norm": True},
    moe={"num_shared": 2, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
)
DOTS1 = Family(
    "dots1",
    {"dots1": "Dots1ForCausalLM"},
    HfClass(
        defaults={
            **decoder(10944, 32, 2048),
            "moe_intermediate_size": 1408,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "num_experts_per_tok": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        extra=ROPE_AND_HEADS,
        null_means={"num_key_value_heads": None, "norm_topk_prob": False, "sliding_window": None},
    ),
    facts={**BALANCED_SIGMOID, "attention.qk_norm": True},
    read=_read,
    write=_write,
    models=(
        published(
            "dots.llm1",
            (62, 4096, 32, 152064),
            {"rms_norm_eps": 1e-5, "rope_theta": 1e7, "n_shared_experts": 2, "n_routed_experts": 128},
            {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": True},
            {"routed_scaling_factor": 2.5},
            source="rednote-hilab/dots.llm1.base config.json",
            counts=(142e9, 14e9),
        ),
        TINY_DOTS1,
    ),
)
