"""OLMoE: norms over all queries and all keys of a token, which can be clipped."""

from threefold.spec.family import ROPE_AND_HEADS, Family, Fields, HfClass, Parts, decoder, published, tiny
from threefold.spec.hf_parts import standard_parts


def _read(c: Fields, family: Family) -> Parts:
    parts = standard_parts(c, family)
    heads, head_dim = parts["attention"]["num_heads"], parts["attention"]["head_dim"]
    if heads * head_dim != c["hidden_size"]:
        problem = f"{heads} heads of head_dim {head_dim} are not hidden_size {c['hidden_size']}"
        raise ValueError(f"{problem}, which the norm of the queries has")
    return parts


TINY_OLMOE = tiny(
    "tiny-olmoe",
    "olmoe",
    attention={"num_kv_heads": 8, "qk_norm": True, "qk_norm_over": "projection", "clip_qkv": 8.0},
    moe={"norm_topk": False},
    norm_eps=1e-5,
)
OLMOE = Family(
    "olmoe",
    {"olmoe": "OlmoeForCausalLM"},
    HfClass(
        defaults={
            **decoder(2048, None, 4096),
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
        },
        aliases={"num_local_experts": "num_experts"},
        extra=ROPE_AND_HEADS,
        places={"intermediate_size": "moe.expert_dim", "clip_qkv": "attention.clip_qkv"},
    ),
    facts={"attention.qk_norm": True, "attention.qk_norm_over": "projection"},
    read=_read,
    models=(
        published(
            "olmoe-1b-7b",
            (16, 2048, 16, 50304),
            {"intermediate_size": 1024},
            source="allenai/OLMoE-1B-7B-0924 config.json",
            counts=(6.9e9, 1.3e9),
        ),
        TINY_OLMOE,
    ),
)
