"""Mixture-of-Experts families that consist of known parts: a ModelSpec's parts from the fields of their configurations.

`spec/hf.py` calls one of `MIXTURE_READERS` with the fields that `complete` made, so that every one is there.
"""

import reprlib
from collections.abc import Callable
from typing import Any

from threefold.spec.hf_families.mixture_defaults import FROM_ROTARY_DIM
from threefold.spec.hf_fields import Fields, number
from threefold.spec.hf_readers import (
    decoder_parts,
    group_limited_moe,
    grouped_attention,
    layer_pattern,
    num_layers,
    refuse_others,
    sliding_window,
)
from threefold.spec.model import MoeSpec


def read_glm4_moe(c: Fields) -> dict[str, Any]:
    """DeepSeek-V3's experts, with grouped-query attention that rotates a part of each head."""
    attention = grouped_attention(c, partial=True, qk_norm=c["use_qk_norm"], out_bias=False)
    parts = {"num_dense_layers": c["first_k_dense_replace"], "mtp_layers": c["num_mtp_layers"]}
    return decoder_parts(c, "glm4_moe", attention, moe=group_limited_moe(c), **parts)


def read_qwen2_moe(c: Fields) -> dict[str, Any]:
    """Biases on queries, keys and values, and a shared expert behind a gate."""
    if c["layer_types"] is not None:
        layer_pattern(c["layer_types"], {"full_attention": "t"}, num_layers(c))
    shared = c["shared_expert_intermediate_size"]
    moe = MoeSpec(
        num_experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=1 if shared else 0,
        shared_dim=shared,
        shared_gate=bool(shared),
        norm_topk=c["norm_topk_prob"],
    )
    return decoder_parts(c, "qwen2_moe", grouped_attention(c, bias=c["qkv_bias"], out_bias=False), moe=moe)


def read_olmoe(c: Fields) -> dict[str, Any]:
    """Norms over all queries and all keys of a token, which can be clipped."""
    clip = c["clip_qkv"]
    attention = grouped_attention(
        c, qk_norm=True, qk_norm_over="projection", clip_qkv=None if clip is None else float(clip)
    )
    if attention.q_dim != c["hidden_size"]:
        heads = f"{attention.num_heads} heads of head_dim {attention.head_dim}"
        raise ValueError(f"{heads} are not hidden_size {c['hidden_size']}, which the norm of the queries has")
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], c["intermediate_size"], norm_topk=c["norm_topk_prob"])
    return decoder_parts(c, "olmoe", attention, dense_dim=0, moe=moe)


def read_minimax_m2(c: Fields) -> dict[str, Any]:
    """Sigmoid scores with a balancing bias, norms over all queries and all keys, and a partial rotation."""
    refuse_others(
        c,
        {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "attn_type_list": 1,
        },
    )
    fraction = c["partial_rotary_factor"]
    if fraction == FROM_ROTARY_DIM:
        fraction = None if c["rotary_dim"] is None else c["rotary_dim"] / c["head_dim"]
    attention = grouped_attention(
        {**c, "partial_rotary_factor": fraction}, partial=True, qk_norm=True, qk_norm_over="projection"
    )
    moe = MoeSpec(
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["intermediate_size"],
        score="sigmoid",
        balance_bias=True,
    )
    return decoder_parts(c, "minimax_m2", attention, dense_dim=0, moe=moe)


def read_ernie4_5_moe(c: Fields) -> dict[str, Any]:
    """Softmax scores with a balancing bias, and a rotation of neighbouring dimensions."""
    count, first, last = num_layers(c), c["moe_layer_start_index"], c["moe_layer_end_index"]
    if last not in (-1, count - 1):
        raise ValueError(f"moe_layer_end_index {reprlib.repr(last)} is not supported, only the last layer")
    moe = MoeSpec(
        num_experts=c["moe_num_experts"],
        top_k=c["moe_k"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=c["moe_num_shared_experts"],
        balance_bias=True,
    )
    return decoder_parts(c, "ernie4_5_moe", grouped_attention(c, rope_pairs=True), num_dense_layers=first, moe=moe)


def read_dots1(c: Fields) -> dict[str, Any]:
    """DeepSeek-V3's experts with Qwen3's attention, of which late layers may have a window."""
    for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if c[name] is None:
            raise ValueError(f"{name} is missing")
    count, window = num_layers(c), sliding_window(c)
    types, last_full = c["layer_types"], c["max_window_layers"]
    if types is None:
        types = [
            "sliding_attention" if window is not None and i >= last_full else "full_attention" for i in range(count)
        ]
    pattern = layer_pattern(types, {"full_attention": "t", "sliding_attention": "w"}, count)
    if "w" in pattern and window is None:
        raise ValueError("layers of sliding_attention need a sliding_window")
    parts: dict[str, Any] = {"pattern": pattern if "w" in pattern else "t"}
    if "w" in pattern:
        parts["local_attention"] = grouped_attention(c, qk_norm=True, window=window)
    return decoder_parts(
        c,
        "dots1",
        grouped_attention(c, qk_norm=True),
        num_dense_layers=c["first_k_dense_replace"],
        moe=group_limited_moe(c),
        **parts,
    )


def read_hunyuan_v1_moe(c: Fields) -> dict[str, Any]:
    """Norms of queries and keys behind the rotation, and a shared expert as wide as the routed ones."""
    width = c["intermediate_size"]
    refuse_others(
        c,
        {
            "use_qk_norm": True,
            "use_cla": False,
            "use_mla": False,
            "mlp_bias": False,
            "moe_layer_num_skipped": 0,
            "moe_intermediate_size": width,
            "num_shared_expert": 1,
        },
    )
    top_k = c["moe_topk"]
    if isinstance(top_k, list):
        if len(set(top_k)) != 1:
            raise ValueError(f"moe_topk {reprlib.repr(top_k)} that differs between layers is not supported")
        top_k = top_k[0]
    attention = grouped_attention(c, fixed_alpha=True, qk_norm=True, norm_after_rope=True)
    moe = MoeSpec(c["num_experts"], top_k, width, num_shared=1)
    return decoder_parts(c, "hunyuan_v1_moe", attention, dense_dim=0, moe=moe)


def read_granitemoe(c: Fields) -> dict[str, Any]:
    """Mixtral's experts, and multipliers on embeddings, attention logits, residual branches and logits.

    The multiplier of residual branches scales the values of attention and the weights of experts.
    """
    residual = float(c["residual_multiplier"])
    if c["attention_bias"] and residual != 1.0:
        raise ValueError("attention_bias together with a residual_multiplier is not supported")
    return decoder_parts(
        c,
        "granitemoe",
        grouped_attention(c, scale=float(c["attention_multiplier"]), out_scale=residual),
        dense_dim=0,
        moe=MoeSpec(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"], scale=residual),
        embed_scale=float(c["embedding_multiplier"]),
        logit_divisor=float(c["logits_scaling"]),
    )


def read_phimoe(c: Fields) -> dict[str, Any]:
    """LayerNorms with biases, SparseMixer routing, and a bias on the logits.

    Its LongRoPE states the factor on cosines and sines, twice. The engine divides frequencies by the long factors
    beyond the context of training, as Microsoft's code does; transformers 5.22 takes the short ones there too.
    """
    if c["num_experts_per_tok"] != 2:
        raise ValueError(f"num_experts_per_tok {reprlib.repr(c['num_experts_per_tok'])} is not supported, only 2")
    jitter = number("router_jitter_noise", c["router_jitter_noise"])
    if not jitter > 0:
        raise ValueError(f"router_jitter_noise is {jitter}, not a positive number")
    if c["lm_head_bias"] and c["tie_word_embeddings"]:
        raise ValueError("lm_head_bias together with tie_word_embeddings is not supported")
    rope = dict(c["rope_scaling"] or c["rope_parameters"] or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope"):
        raise ValueError(f"the rotary scaling {kind!r} is not supported, only 'longrope'")
    if kind == "longrope":
        if rope.get("short_mscale") is None or rope.get("short_mscale") != rope.get("long_mscale"):
            raise ValueError("short_mscale and long_mscale that differ, or are missing, are not supported")
        rope["attention_factor"] = rope["short_mscale"]
    moe = MoeSpec(
        num_experts=c["num_local_experts"],
        top_k=2,
        expert_dim=c["intermediate_size"],
        score="sparsemixer",
        norm_topk=False,
        jitter=jitter,
    )
    attention = grouped_attention({**c, "rope_scaling": rope or None}, window=sliding_window(c))
    return decoder_parts(c, "phimoe", attention, dense_dim=0, moe=moe, norm="layer", head_bias=c["lm_head_bias"])


MIXTURE_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "dots1": read_dots1,
    "ernie4_5_moe": read_ernie4_5_moe,
    "glm4_moe": read_glm4_moe,
    "granitemoe": read_granitemoe,
    "hunyuan_v1_moe": read_hunyuan_v1_moe,
    "minimax_m2": read_minimax_m2,
    "olmoe": read_olmoe,
    "phimoe": read_phimoe,
    "qwen2_moe": read_qwen2_moe,
}
