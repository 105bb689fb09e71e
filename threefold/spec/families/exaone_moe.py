"""K-EXAONE: DeepSeek-V3's experts; three layers of four have a window, and the global ones no rotary positions."""

from threefold.spec.family import (
    BALANCED_SIGMOID,
    BASE,
    NO_DROPOUT,
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    tiny,
    tiny_heads,
)
from threefold.spec.hf_parts import first_dense, layer_types, num_layers, standard_parts, windowed_pattern
from threefold.spec.model import ModelSpec


def _read(c: Fields, family: Family) -> Parts:
    interval, default = c["sliding_window_pattern"], []
    if c["layer_types"] is None:
        if type(interval) is not int or interval < 1 or c["sliding_window"] is None:
            raise ValueError("sliding_window_pattern is not a number of layers, and there are no layer_types")
        default = ["full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(num_layers(c))]
    pattern, parts = windowed_pattern(c, default), standard_parts(c, family)
    parts |= {"pattern": pattern, "num_dense_layers": first_dense(c, default=c["first_k_dense_replace"])}
    if c["sliding_window"] is None:
        return parts
    local = {**parts["attention"], "window": c["sliding_window"]}
    return {**parts, "attention": {**parts["attention"], "use_rope": False}, "local_attention": local}


def _write(spec: ModelSpec) -> Parts:
    window = spec.local_attention.window if spec.local_attention else None
    dense = ["dense" if layer.ffn == "dense" else "sparse" for layer in spec.layers]
    return {"layer_types": layer_types(spec), "sliding_window": window, "mlp_layer_types": dense}


_LOCAL = tiny_heads(qk_norm=True, window=32)
EXAONE_MOE = Family(
    "exaone_moe",
    {"exaone_moe": "ExaoneMoeForCausalLM"},
    HfClass(
        defaults={
            **BASE,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        only=NO_DROPOUT,
        extra=ROPE_AND_HEADS,
        places={"num_shared_experts": "moe.num_shared"},
    ),
    facts={**BALANCED_SIGMOID, "attention.qk_norm": True},
    read=_read,
    write=_write,
    names=WeightNames(balance_bias=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")),
    models=(
        tiny(
            "tiny-exaone-moe",
            "exaone_moe",
            pattern="wwwt",
            num_dense_layers=1,
            dense_dim=256,
            attention={"qk_norm": True, "use_rope": False},
            local_attention=_LOCAL,
            moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
            norm_eps=1e-5,
        ),
    ),
)
