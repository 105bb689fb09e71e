"""DeepSeek-V3 and its relatives: latent attention, experts in groups, and an indexer in V3.2 and GLM-5."""

from dataclasses import replace

from threefold.spec.family import (
    BALANCED_SIGMOID,
    BASE,
    MLA_NAMES,
    NO_DROPOUT,
    NULL_HEADS,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
)
from threefold.spec.hf_parts import check_whole_rotation, first_dense, refuse_others, standard_parts
from threefold.spec.model import IndexerSpec, MlaSpec, ModelSpec

# Keys of DeepSeek's own code, which transformers passes over.
_OWN_CODE = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _read_deepseek(c: Fields, family: Family) -> Parts:
    refuse_others(c, _OWN_CODE)
    return standard_parts(c, family)


def _write_deepseek(spec: ModelSpec) -> Parts:
    # transformers 5 takes the first two for granted, Megatron Bridge 0.3 does not.
    keys = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": spec.mtp_layers}
    if spec.family != "glm_moe_dsa":
        return keys
    assert spec.moe is not None
    # transformers gives this family a second number of experts, which Megatron Bridge 0.5 reads, as it does the other.
    return {**keys, "num_experts": spec.moe.num_experts, "indexer_rope_interleave": True}


def _read_deepseek_v32(c: Fields, family: Family) -> Parts:
    refuse_others(c, {"rope_interleave": True})
    changed = {"first_k_dense_replace": first_dense(c, c["first_k_dense_replace"]), "rope_interleave": True}
    parts = _read_deepseek({**c, **changed}, family)
    if c["index_head_dim"] < c["qk_rope_head_dim"]:
        raise ValueError(f"index_head_dim {c['index_head_dim']} is less than the dims that turn, qk_rope_head_dim")
    return {**parts, "mtp_layers": c["num_nextn_predict_layers"] or 0}


def _read_glm_moe_dsa(c: Fields, family: Family) -> Parts:
    refuse_others(c, {"indexer_rope_interleave": True})
    parts = _read_deepseek_v32(c, family)
    types, pattern, freq = c["indexer_types"], c["index_topk_pattern"], c["index_topk_freq"]
    is_reused = any(kind in ("S", "shared") for kind in types or pattern or ()) or (
        types is None and pattern is None and (freq or 1) > 1
    )
    parts["attention"]["indexer"] |= {"rope_pairs": True, "is_reused": is_reused}
    return parts


def _read_glm4_moe_lite(c: Fields, family: Family) -> Parts:
    check_whole_rotation(c)
    return {**standard_parts(c, family), "num_dense_layers": first_dense(c, default=1)}


def _write_glm4_moe_lite(spec: ModelSpec) -> Parts:
    return {"mlp_layer_types": ["dense" if layer.ffn == "dense" else "sparse" for layer in spec.layers]}


_YARN = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
_V3 = {"initializer_range": 0.006, "rope_scaling": {**_YARN, "factor": 40.0}}  # DeepSeek-V3 technical report, 4.2
_NAMES = WeightNames(attention=MLA_NAMES)

TINY_DEEPSEEK_V3 = tiny(
    "tiny-deepseek-v3",
    "deepseek_v3",
    init_std=0.006,
    num_layers=5,
    num_dense_layers=1,
    dense_dim=256,
    attention=MlaSpec(num_heads=8, q_rank=64, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
    moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "num_groups": 4, "top_groups": 2, "scale": 2.5},
    mtp_layers=1,
)
DEEPSEEK_V3_CLASS = HfClass(
    defaults={
        **BASE,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "num_mtp_layers": 1,
    },
    only={**NO_DROPOUT, "attention_bias": False},
    aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    extra={**ROPE, "head_dim": None, **_OWN_CODE},
    null_means={**NULL_HEADS, "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False},
)
DEEPSEEK_V3_FAMILY = Family(
    "deepseek_v3",
    {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": None},  # the code of the latter is a copy
    DEEPSEEK_V3_CLASS,
    facts=BALANCED_SIGMOID,
    attention="latent",
    read=_read_deepseek,
    write=_write_deepseek,
    names=_NAMES,
    models=(
        published(
            "deepseek-v3",
            (61, 7168, 128, 129280),
            _V3,
            source="deepseek-ai/DeepSeek-V3 config.json; transformers DeepseekV3Config defaults",
            counts=(671e9, 37e9),
            vocab_multiple=1280,
        ),
        published(
            "deepseek-v3-no-mtp",
            (61, 7168, 128, 129280),
            _V3,
            {"num_nextn_predict_layers": 0},
            source="deepseek-ai/DeepSeek-V3 config.json; transformers DeepseekV3Config defaults",
            counts=(671e9, 37e9),
            vocab_multiple=1280,
        ),
        published(
            "deepseek-v3-proxy-14l-64e",
            (14, 7168, 128, 256000),
            _V3,
            {"n_routed_experts": 64, "n_group": 1, "topk_group": 1},
            source="Megatron-LM functional test deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release",
            vocab_multiple=3232,
            approximate="vocabulary: the source names a 256k tokenizer without its exact size",
        ),
        published(
            "kimi-k2",
            (61, 7168, 64, 163840),
            {"initializer_range": 0.006, "num_key_value_heads": 64, "rope_theta": 50_000.0},
            {"num_nextn_predict_layers": 0, "n_routed_experts": 384, "routed_scaling_factor": 2.827, "n_group": 1},
            {"topk_group": 1, "first_k_dense_replace": 1},
            {"rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0}},
            # The 0905 release has a factor of 64, for 256K.
            source="moonshotai/Kimi-K2-Instruct config.json; "
            "Megatron-LM examples/post_training/modelopt/conf/moonshotai",
            counts=(1.04e12, 32e9),
            vocab_multiple=1280,
        ),
        published(
            "moonlight-16b-a3b",
            (27, 2048, 16, 163840),
            {"intermediate_size": 11264, "initializer_range": 0.006, "num_key_value_heads": 16},
            {"rope_theta": 50_000.0, "q_lora_rank": None, "num_nextn_predict_layers": 0},
            {"moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64},
            {"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
            {"first_k_dense_replace": 1},
            source="moonshotai/Moonlight-16B-A3B; Megatron Bridge MoonlightModelProvider16B (which says vocab 163842)",
            counts=(16e9, 3e9),
            vocab_multiple=1280,
        ),
        TINY_DEEPSEEK_V3,
    ),
)

TINY_GLM5 = tiny(
    "tiny-glm-5",
    "glm_moe_dsa",
    num_dense_layers=1,
    dense_dim=256,
    attention=MlaSpec(
        num_heads=8,
        q_rank=48,
        kv_rank=32,
        nope_dim=16,
        rope_dim=16,
        v_dim=32,
        indexer=IndexerSpec(num_heads=8, head_dim=32, top_k=64, rope_pairs=True),
    ),
    moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
    norm_eps=1e-5,
)
GLM_MOE_DSA_CLASS = HfClass(
    defaults={
        **{
            name: value
            for name, value in DEEPSEEK_V3_CLASS.defaults.items()
            if name not in ("rope_interleave", "num_mtp_layers")
        },
        "rms_norm_eps": 1e-5,
        "intermediate_size": 12288,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 202752,
        "mlp_layer_types": None,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "indexer_types": None,
    },
    only={**NO_DROPOUT, "attention_bias": False, "mlp_bias": False},
    unread=frozenset({"head_dim", "layer_types"}),  # head_dim is overwritten; all layers are of one type
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    extra={
        **ROPE,
        "num_nextn_predict_layers": None,
        "index_topk_pattern": None,
        "index_topk_freq": None,
        # Published files have them; transformers rotates neighboring dimensions whatever they say.
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        **_OWN_CODE,
    },
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    {"glm_moe_dsa": "GlmMoeDsaForCausalLM"},
    GLM_MOE_DSA_CLASS,
    facts=BALANCED_SIGMOID,
    attention="latent",
    read=_read_glm_moe_dsa,
    write=_write_deepseek,
    names=_NAMES,
    models=(
        published(
            "glm-5.2",
            (78, 6144, 64, 154880),
            {"num_nextn_predict_layers": 1},
            source="Megatron Bridge tests/unit_tests/models/glm_moe_dsa; transformers GlmMoeDsaConfig defaults",
            counts=(744e9, 40e9),
            approximate="ranks, heads and vocabulary are GLM-5 class defaults; the counts quoted are GLM-5's",
        ),
        TINY_GLM5,
    ),
)

DEEPSEEK_V32 = Family(
    "deepseek_v32",
    {"deepseek_v32": "DeepseekV32ForCausalLM"},
    HfClass(
        defaults={
            **{name: value for name, value in GLM_MOE_DSA_CLASS.defaults.items() if name != "indexer_types"},
            **{name: value for name, value in DEEPSEEK_V3_CLASS.defaults.items() if name in GLM_MOE_DSA_CLASS.defaults},
            "max_position_embeddings": 163840,
            "index_n_heads": 64,
        },
        only=GLM_MOE_DSA_CLASS.only,
        unread=GLM_MOE_DSA_CLASS.unread,
        aliases=GLM_MOE_DSA_CLASS.aliases,
        extra={name: value for name, value in GLM_MOE_DSA_CLASS.extra.items() if name != "indexer_rope_interleave"},
    ),
    facts=BALANCED_SIGMOID,
    attention="latent",
    read=_read_deepseek_v32,
    write=_write_deepseek,
    names=_NAMES,
    models=(
        replace(
            TINY_DEEPSEEK_V3,
            name="tiny-deepseek-v3.2",
            family="deepseek_v32",
            attention=MlaSpec(
                num_heads=8,
                q_rank=48,
                kv_rank=32,
                nope_dim=16,
                rope_dim=16,
                v_dim=16,
                indexer=IndexerSpec(num_heads=8, head_dim=32, top_k=64),
            ),
            mtp_layers=0,
        ),
    ),
)

_TINY_LITE = MlaSpec(num_heads=8, q_rank=48, kv_rank=32, nope_dim=16, rope_dim=16, v_dim=32)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    {"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    HfClass(
        defaults={
            **{
                name: value
                for name, value in DEEPSEEK_V3_CLASS.defaults.items()
                if name not in ("first_k_dense_replace", "num_mtp_layers")
            },
            "rms_norm_eps": 1e-5,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_key_value_heads": 20,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 202752,
            "mlp_layer_types": None,
        },
        only={**NO_DROPOUT, "attention_bias": False},
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        null_means={"q_lora_rank": None},
    ),
    facts=BALANCED_SIGMOID,
    attention="latent",
    read=_read_glm4_moe_lite,
    write=_write_glm4_moe_lite,
    names=_NAMES,
    models=(
        published(
            "glm-4.7-flash",
            (47, 2048, 20, 154880),
            source="transformers Glm4MoeLiteConfig defaults, without the MTP layer, which transformers leaves out too",
        ),
        replace(TINY_GLM5, name="tiny-glm4-moe-lite", family="glm4_moe_lite", attention=_TINY_LITE),
    ),
)
