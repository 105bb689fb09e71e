"""Hunyuan: norms of queries and keys after the rotation, and a shared expert as wide as the routed ones."""

import reprlib

from threefold.spec.family import ROPE, Family, Fields, HfClass, Parts, WeightNames, decoder, published, tiny
from threefold.spec.hf_parts import refuse_others, standard_parts
from threefold.spec.model import RopeScaling


def _read(c: Fields, family: Family) -> Parts:
    only = {"use_qk_norm": True, "use_cla": False, "use_mla": False, "mlp_bias": False, "moe_layer_num_skipped": 0}
    refuse_others(c, {**only, "moe_intermediate_size": c["intermediate_size"], "num_shared_expert": 1})
    top_k = c["moe_topk"]
    if isinstance(top_k, list):
        if len(set(top_k)) != 1:
            raise ValueError(f"moe_topk {reprlib.repr(top_k)} that differs between layers is not supported")
        top_k = top_k[0]
    return standard_parts({**c, "moe_topk": top_k}, family)


TINY_HUNYUAN = tiny(
    "tiny-hunyuan-moe",
    "hunyuan_v1_moe",
    attention={
        "qk_norm": True,
        "norm_after_rope": True,
        "rope_scaling": RopeScaling(factor=1000.0, original_len=32768, kind="ntk_alpha"),
    },
    moe={"num_shared": 1},
    tied=True,
)
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    {"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"},
    HfClass(
        defaults={
            **decoder(11008, None, 2048),
            "rms_norm_eps": 1e-5,
            "head_dim": None,
            "num_experts": 1,
            "moe_topk": 1,
        },
        unread=frozenset({"eod_token_id", "sep_token_id"}),
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        # Those behind the rotary keys are of Tencent's own code; transformers passes them over.
        extra={
            **ROPE,
            "use_qk_norm": True,
            "use_cla": False,
            "use_mla": False,
            "mlp_bias": False,
            "moe_layer_num_skipped": 0,
            "moe_intermediate_size": None,
            "num_shared_expert": 1,
        },
        by_layer=frozenset({"moe_topk"}),
        places={"intermediate_size": "moe.expert_dim", "moe_intermediate_size": "", "moe_topk": "moe.top_k"},
    ),
    facts={"attention.qk_norm": True, "attention.norm_after_rope": True, "moe.num_shared": 1},
    rope={"fixed_alpha": True},
    read=_read,
    names=WeightNames(
        own={
            "mixer.q_norm.weight": "self_attn.query_layernorm.weight",
            "mixer.k_norm.weight": "self_attn.key_layernorm.weight",
        },
        router=("mlp.gate.wg",),
        shared=("mlp.shared_mlp",),
    ),
    models=(
        published(
            "hunyuan-a13b",
            (32, 4096, 32, 128167),
            {"intermediate_size": 3072, "tie_word_embeddings": True, "num_key_value_heads": 8},
            {"max_position_embeddings": 32768, "num_experts": 64, "moe_topk": 8},
            {"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}},
            source="tencent/Hunyuan-A13B-Instruct config.json",
            counts=(80e9, 13e9),
        ),
        TINY_HUNYUAN,
    ),
)
