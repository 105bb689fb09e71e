"""Qwen3-Next and Qwen3.5: the gated delta rule in three layers of four, gated attention, and a gated shared expert."""

from dataclasses import replace

from threefold.spec.families.qwen_vision import ENCODER_CLASS, TINY_ENCODER, TOKEN_KEYS, read_sections
from threefold.spec.family import (
    BASE,
    NO_DROPOUT,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
    tiny_heads,
)
from threefold.spec.hf_parts import layer_types, num_layers, standard_parts, typed_pattern
from threefold.spec.model import DeltaSpec, ModelSpec, MoeSpec


def _read(c: Fields, family: Family) -> Parts:
    parts, count, interval = standard_parts(c, family), num_layers(c), c["full_attention_interval"]
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    parts["pattern"] = typed_pattern(c, default, "linear_attention", "full_attention")
    shared = c["shared_expert_intermediate_size"]
    parts["moe"] |= {"num_shared": 1 if shared else 0, "shared_gate": bool(shared)}
    if shared == c["moe_intermediate_size"]:
        parts["moe"]["shared_dim"] = None  # as wide as a routed one
    parts["mtp_layers"] = c["num_nextn_predict_layers"] or c["mtp_num_hidden_layers"] or 0
    if family.name == "qwen3_5_moe":
        parts["attention"]["rope_sections"] = read_sections(c, (11, 11, 10))
    return parts


def _write(spec: ModelSpec) -> Parts:
    # The interval is the published name for it, which Megatron Bridge reads.
    keys: Parts = {"layer_types": layer_types(spec), "full_attention_interval": len(spec.pattern)}
    if spec.moe is not None:
        keys["norm_topk_prob"] = spec.moe.norm_topk
    return {**keys, "num_nextn_predict_layers": spec.mtp_layers} if spec.mtp_layers else keys


_FIELDS = {
    **BASE,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "layer_types": None,
}
_MTP_KEYS = {"num_nextn_predict_layers": None, "mtp_num_hidden_layers": None}
_EXTRA = {**ROPE, "full_attention_interval": 4, "partial_rotary_factor": 0.25, **_MTP_KEYS}
_FACTS = {"attention.qk_norm": True, "attention.gated": True}
_PLACES = {"shared_expert_intermediate_size": "moe.shared_dim"}

_TINY_GATED = tiny_heads(qk_norm=True, gated=True, rope_fraction=0.5)
TINY_QWEN3_NEXT = tiny(
    "tiny-qwen3-next",
    "qwen3_next",
    pattern="dddt",
    attention=_TINY_GATED,
    delta=DeltaSpec(num_k_heads=4, num_v_heads=8, k_dim=16, v_dim=16),
    moe={"num_shared": 1, "shared_gate": True},
    mtp_layers=1,
)
QWEN3_NEXT_FAMILY = Family(
    "qwen3_next",
    {"qwen3_next": "Qwen3NextForCausalLM"},
    HfClass(
        defaults={
            **_FIELDS,
            "intermediate_size": 5632,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        only={**NO_DROPOUT, "decoder_sparse_step": 1, "mlp_only_layers": None},
        extra=_EXTRA,
        places=_PLACES,
    ),
    facts=_FACTS,
    rope={"partial": True},
    read=_read,
    write=_write,
    names=WeightNames(shared=("mlp.shared_expert",), mtp="one"),
    zero_centered_norms=True,
    models=(
        published(
            "qwen3-next-80b-a3b",
            (48, 2048, 16, 151936),
            {"intermediate_size": 5120, "rope_theta": 1e7, "num_nextn_predict_layers": 1},
            source="Qwen/Qwen3-Next-80B-A3B-Instruct; transformers Qwen3NextConfig; "
            "Megatron Bridge runs MTP 1 from 26.06",
            counts=(80e9, 3e9),
        ),
        TINY_QWEN3_NEXT,
    ),
)

TINY_QWEN35_TEXT = replace(
    TINY_QWEN3_NEXT,
    name="tiny-qwen3.5-moe",
    family="qwen3_5_moe",
    attention=replace(_TINY_GATED, rope_fraction=0.25, rope_sections=(1, 1, 0)),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=1, shared_dim=64, shared_gate=True),
    mtp_layers=0,
)
TINY_QWEN35 = replace(
    TINY_QWEN3_NEXT,
    name="tiny-qwen3.5",
    family="qwen3_5_moe",
    attention=replace(_TINY_GATED, rope_sections=(2, 1, 1)),
    mtp_layers=0,
    vision=TINY_ENCODER,
)
QWEN35 = Family(
    "qwen3_5_moe",
    {"qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    HfClass(defaults={**_FIELDS, "num_experts_per_tok": 8, "num_experts": 256}, extra=_EXTRA, places=_PLACES),
    facts=_FACTS,
    rope={"partial": True},
    read=_read,
    write=_write,
    composite_tied=False,
    encoder=replace(ENCODER_CLASS, tokens=dict(zip(TOKEN_KEYS, (248053, 248054, 248056, 248057), strict=True))),
    names=WeightNames(shared=("mlp.shared_expert",), mtp="one", qkvz_by_part=True),
    zero_centered_norms=True,
    models=(
        published(
            "qwen3.5-35b-a3b",
            (40, 2048, 16, 248320),
            {"rope_theta": 1e7, "num_nextn_predict_layers": 1},
            source="transformers Qwen3_5MoeTextConfig and Qwen3_5MoeVisionConfig defaults",
            counts=(35e9, 3e9),
        ),
        published(
            "qwen3.5-397b-a17b",
            (60, 4096, 32, 248320),
            {"rope_theta": 1e7, "linear_num_value_heads": 64, "num_nextn_predict_layers": 1},
            {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts_per_tok": 10},
            {"num_experts": 512},
            source="Megatron Bridge models/qwen_vl/qwen35_vl_provider.py",
            counts=(397e9, 17e9),
            approximate="shared expert width 1024: the docstring's expert width; "
            "4096 in a test fixture overshoots 397B",
        ),
        TINY_QWEN35_TEXT,
        TINY_QWEN35,
    ),
)
