"""Qwen3: dense, with experts, and with experts and an image encoder."""

from dataclasses import replace

from threefold.spec.families.qwen_vision import ENCODER_CLASS, TINY_ENCODER, read_sections
from threefold.spec.family import (
    NO_DROPOUT,
    NULL_HEADS,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    decoder,
    published,
    tiny,
    tiny_heads,
)
from threefold.spec.hf_parts import check_full_attention, standard_parts
from threefold.spec.model import GqaSpec, MoeSpec, PictureSpec, VisionTokens

# Read with use_sliding_window only, which is refused.
_WINDOW = frozenset({"sliding_window"})
_SPARSE = {**NO_DROPOUT, "decoder_sparse_step": 1, "mlp_only_layers": None}


def _read_qwen3(c: Fields, family: Family) -> Parts:
    if c["layer_types"] is not None:
        check_full_attention(c)
    return standard_parts(c, family)


def _read_qwen3_vl_moe(c: Fields, family: Family) -> Parts:
    parts = standard_parts(c, family)
    parts["attention"]["rope_sections"] = read_sections(c, (24, 20, 20))
    return parts


QWEN3 = Family(
    "qwen3",
    {"qwen3": "Qwen3ForCausalLM"},
    HfClass(
        defaults={**decoder(22016, 32, 32768), "head_dim": 128, "layer_types": None},
        only={**NO_DROPOUT, "use_sliding_window": False},
        unread=_WINDOW | {"max_window_layers"},
        null_means=NULL_HEADS,
    ),
    facts={"attention.qk_norm": True},
    read=_read_qwen3,
    models=(
        published(
            "qwen3-8b",
            (36, 4096, 32, 151936),
            {"intermediate_size": 12288, "num_key_value_heads": 8, "rope_theta": 1e6},
            source="Qwen/Qwen3-8B; Megatron Bridge Qwen3ModelProvider8B",
            counts=(8.19e9, 8.19e9),
        ),
    ),
)

TINY_QWEN3_MOE = tiny("tiny-qwen3-moe", "qwen3_moe", attention={"qk_norm": True})
DEMO_QWEN3_MOE = replace(
    TINY_QWEN3_MOE,
    name="demo-qwen3-moe",
    num_layers=3,
    dim=192,
    vocab=288,  # bytes and specials
    attention=GqaSpec(num_heads=6, num_kv_heads=2, head_dim=32, qk_norm=True),
    moe=MoeSpec(num_experts=8, top_k=2, expert_dim=192),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    {"qwen3_moe": "Qwen3MoeForCausalLM"},
    HfClass(
        defaults={
            **decoder(6144, 4, 32768),
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
        },
        only={**_SPARSE, "use_sliding_window": False},
        unread=_WINDOW,
        aliases={"num_local_experts": "num_experts"},
        extra={**ROPE, "head_dim": None},
    ),
    facts={"attention.qk_norm": True},
    models=(
        published(
            "qwen3-30b-a3b",
            (48, 2048, 32, 151936),
            {"head_dim": 128, "rope_theta": 1e6, "norm_topk_prob": True},
            source="Qwen/Qwen3-30B-A3B; Megatron-LM examples/post_training/modelopt/conf/Qwen",
            counts=(30.5e9, 3.3e9),
        ),
        published(
            "qwen3-235b-a22b",
            (94, 4096, 64, 151936),
            {"intermediate_size": 12288, "head_dim": 128, "rope_theta": 1e6},
            {"moe_intermediate_size": 1536, "norm_topk_prob": True},
            source="Qwen/Qwen3-235B-A22B; Megatron-LM examples/post_training/modelopt/conf/Qwen",
            counts=(235e9, 22e9),
        ),
        TINY_QWEN3_MOE,
        DEMO_QWEN3_MOE,
    ),
)

TINY_QWEN3_VL = replace(
    TINY_QWEN3_MOE,
    name="tiny-qwen3-vl-moe",
    family="qwen3_vl_moe",
    attention=tiny_heads(qk_norm=True, rope_sections=(4, 2, 2)),
    vision=replace(
        TINY_ENCODER,
        deepstack=(0, 1),
        tokens=VisionTokens(start=260, end=261, image=262, video=263),  # behind the byte tokens and their four specials
        pictures=PictureSpec(min_pixels=1_024, max_pixels=16_384, video_min_pixels=1_024, video_max_pixels=65_536),
    ),
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    {"qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"},
    HfClass(
        defaults={
            **decoder(5632, 16, 128000),
            "head_dim": None,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "tie_word_embeddings": True,
        },
        only=_SPARSE,
        aliases={"num_local_experts": "num_experts"},
        theta=500_000.0,
    ),
    facts={"attention.qk_norm": True},
    read=_read_qwen3_vl_moe,
    write=lambda spec: {"norm_topk_prob": True},
    composite_tied=False,
    encoder=replace(ENCODER_CLASS, defaults={**ENCODER_CLASS.defaults, "deepstack_visual_indexes": (8, 16, 24)}),
    names=WeightNames(input_dim_first="published"),  # and written by transformers 5 as here
    models=(
        published(
            "qwen3-vl-30b-a3b",
            (48, 2048, 32, 151936),
            {"intermediate_size": 6144, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6},
            {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
            source="text: qwen3-30b-a3b; vision: transformers Qwen3VLMoeVisionConfig defaults",
            counts=(31e9, 3.3e9),
        ),
        published(
            "qwen3-vl-235b-a22b",
            (94, 4096, 64, 151936),
            {"intermediate_size": 12288, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6},
            {"moe_intermediate_size": 1536, "num_experts_per_tok": 8, "num_experts": 128},
            source="text: qwen3-235b-a22b; vision: transformers Qwen3VLMoeVisionConfig defaults",
            counts=(236e9, 22e9),
        ),
        TINY_QWEN3_VL,
    ),
)
