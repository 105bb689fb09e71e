"""Small models of families that `mixture_models.py` has in their published sizes only, for work on a CPU.

Each has the settings in which its family differs from others, so that a small recipe trains all parts of it.
"""

from threefold.spec.model import DeltaSpec, GqaSpec, IndexerSpec, MlaSpec, ModelSpec, MoeSpec, RopeScaling

_MADE_HERE = "made here, for work on a CPU"
TINY_DOTS1 = ModelSpec(
    name="tiny-dots1",
    family="dots1",
    num_layers=4,
    num_dense_layers=1,
    dim=128,
    dense_dim=256,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=8, head_dim=16, qk_norm=True),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=2, score="sigmoid", balance_bias=True, scale=2.5),
    source=_MADE_HERE,
)
TINY_ERNIE45 = ModelSpec(
    name="tiny-ernie-4.5",
    family="ernie4_5_moe",
    num_layers=4,
    num_dense_layers=1,
    dim=128,
    dense_dim=256,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=4, head_dim=16, rope_theta=500_000.0, rope_pairs=True),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=2, balance_bias=True),
    tied=True,
    source=_MADE_HERE,
)
TINY_GLM5 = ModelSpec(
    name="tiny-glm-5",
    family="glm_moe_dsa",
    num_layers=4,
    num_dense_layers=1,
    dim=128,
    dense_dim=256,
    vocab=512,
    attention=MlaSpec(
        num_heads=8,
        q_rank=48,
        kv_rank=32,
        nope_dim=16,
        rope_dim=16,
        v_dim=32,
        indexer=IndexerSpec(num_heads=8, head_dim=32, top_k=64, rope_pairs=True),
    ),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=1, score="sigmoid", balance_bias=True, scale=2.5),
    norm_eps=1e-5,
    source=_MADE_HERE,
)
TINY_GRANITE = ModelSpec(
    name="tiny-granite-moe",
    family="granitemoe",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=4, head_dim=16, scale=0.0625, out_scale=0.22),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, scale=0.22),
    tied=True,
    embed_scale=12.0,
    logit_divisor=6.0,
    source=_MADE_HERE,
)
TINY_HUNYUAN = ModelSpec(
    name="tiny-hunyuan-moe",
    family="hunyuan_v1_moe",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        qk_norm=True,
        norm_after_rope=True,
        rope_scaling=RopeScaling(factor=1000.0, original_len=32768, kind="ntk_alpha"),
    ),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=1),
    tied=True,
    source=_MADE_HERE,
)
TINY_OLMOE = ModelSpec(
    name="tiny-olmoe",
    family="olmoe",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=8, head_dim=16, qk_norm=True, qk_norm_over="projection", clip_qkv=8.0),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, norm_topk=False),
    norm_eps=1e-5,
    source=_MADE_HERE,
)
TINY_PHIMOE = ModelSpec(
    name="tiny-phi-moe",
    family="phimoe",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=4, head_dim=16, bias=True),
    moe=MoeSpec(num_experts=16, top_k=2, expert_dim=64, score="sparsemixer", norm_topk=False),
    norm="layer",
    head_bias=True,
    norm_eps=1e-5,
    source=_MADE_HERE,
)
TINY_QWEN35 = ModelSpec(
    name="tiny-qwen3.5-moe",
    family="qwen3_5_moe",
    num_layers=4,
    pattern="dddt",
    dim=128,
    vocab=512,
    attention=GqaSpec(
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        qk_norm=True,
        gated=True,
        rope_fraction=0.25,
        rope_sections=(1, 1, 0),
    ),
    delta=DeltaSpec(num_k_heads=4, num_v_heads=8, k_dim=16, v_dim=16),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=1, shared_dim=64, shared_gate=True),
    source=_MADE_HERE,
)

TINY_MIXTURES = (
    TINY_DOTS1,
    TINY_ERNIE45,
    TINY_GLM5,
    TINY_GRANITE,
    TINY_HUNYUAN,
    TINY_OLMOE,
    TINY_PHIMOE,
    TINY_QWEN35,
)
