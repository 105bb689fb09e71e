"""Phi-MoE: LayerNorms with biases, SparseMixer routing, and a bias on the logits.

Its LongRoPE states the factor on cosines and sines, twice. The engine divides frequencies by the long factors beyond
the context of training, as Microsoft's code does; transformers 5.22 takes the short ones there too.
"""

import reprlib

from threefold.spec.family import (
    NO_DROPOUT,
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    decoder,
    published,
    tiny,
)
from threefold.spec.hf_fields import number
from threefold.spec.hf_parts import standard_parts
from threefold.spec.model import GqaSpec, ModelSpec


def _read(c: Fields, family: Family) -> Parts:
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
    return standard_parts({**c, "rope_scaling": rope or None}, family)


def _write(spec: ModelSpec) -> Parts:
    attention = spec.attention
    assert isinstance(attention, GqaSpec)
    scaling = attention.rope_scaling
    if scaling is None:
        return {}
    factors = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    mscales = {"short_mscale": scaling.attention_factor, "long_mscale": scaling.attention_factor}
    lengths = {"original_max_position_embeddings": scaling.original_len, "rope_theta": attention.rope_theta}
    return {"rope_parameters": {"rope_type": "longrope", **factors, **mscales, **lengths}}


TINY_PHIMOE = tiny(
    "tiny-phi-moe",
    "phimoe",
    attention={"bias": True},
    moe={"top_k": 2, "score": "sparsemixer", "norm_topk": False},
    norm="layer",
    head_bias=True,
    norm_eps=1e-5,
)
_PLACES = {
    "intermediate_size": "moe.expert_dim",
    "sliding_window": "attention.window",
    "router_jitter_noise": "moe.jitter",
    "lm_head_bias": "head_bias",
}
PHIMOE = Family(
    "phimoe",
    {"phimoe": "PhimoeForCausalLM"},
    HfClass(
        defaults={
            **decoder(6400, 8, 4096 * 32),
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
            "lm_head_bias": False,
        },
        only={**NO_DROPOUT, "input_jitter_noise": 0.0},
        extra=ROPE_AND_HEADS,
        theta=1_000_000.0,
        places=_PLACES,
    ),
    facts={"norm": "layer", "moe.score": "sparsemixer", "moe.norm_topk": False},
    read=_read,
    write=_write,
    names=WeightNames(
        router=("block_sparse_moe.gate", "mlp.router"),
        experts="block_sparse_moe.experts",
        expert_parts=("w1", "w3", "w2"),
    ),
    models=(
        published(
            "phi-3.5-moe",
            (32, 4096, 32, 32064),
            {"rope_theta": 10_000.0, "attention_bias": True, "lm_head_bias": True},
            source="microsoft/Phi-3.5-MoE-instruct config.json",
            counts=(41.9e9, 6.6e9),
            approximate="the 64 short and 64 long factors of its LongRoPE are left out: read them from its config.json",
        ),
        TINY_PHIMOE,
    ),
)
