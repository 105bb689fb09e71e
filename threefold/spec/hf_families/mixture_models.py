"""Published models of the families here, and small ones for work on a CPU. `spec/models.py` adds them to `MODELS`."""

from dataclasses import replace

from threefold.spec.hf_families.tiny_models import TINY_MIXTURES
from threefold.spec.model import GqaSpec, ModelSpec, MoeSpec, RopeScaling

GLM_45 = ModelSpec(
    name="glm-4.5",
    family="glm4_moe",
    num_layers=92,
    num_dense_layers=3,
    dim=5120,
    dense_dim=12288,
    vocab=151552,
    attention=GqaSpec(
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        bias=True,
        out_bias=False,
        rope_theta=1e6,
        rope_fraction=0.5,
    ),
    moe=MoeSpec(num_experts=160, top_k=8, expert_dim=1536, num_shared=1, score="sigmoid", balance_bias=True, scale=2.5),
    mtp_layers=1,
    norm_eps=1e-5,
    published_total=355e9,
    published_active=32e9,
    source="zai-org/GLM-4.5 config.json",
)
GLM_45_AIR = replace(
    GLM_45,
    name="glm-4.5-air",
    num_layers=46,
    num_dense_layers=1,
    dim=4096,
    dense_dim=10944,
    attention=GqaSpec(
        num_heads=96, num_kv_heads=8, head_dim=128, bias=True, out_bias=False, rope_theta=1e6, rope_fraction=0.5
    ),
    moe=MoeSpec(num_experts=128, top_k=8, expert_dim=1408, num_shared=1, score="sigmoid", balance_bias=True),
    published_total=106e9,
    published_active=12e9,
    source="zai-org/GLM-4.5-Air config.json",
)
QWEN2_57B = ModelSpec(
    name="qwen2-57b-a14b",
    family="qwen2_moe",
    num_layers=28,
    dim=3584,
    dense_dim=18944,
    vocab=151936,
    attention=GqaSpec(num_heads=28, num_kv_heads=4, head_dim=128, bias=True, out_bias=False, rope_theta=1e6),
    moe=MoeSpec(
        num_experts=64,
        top_k=8,
        expert_dim=2560,
        num_shared=1,
        shared_dim=20480,
        shared_gate=True,
        norm_topk=False,
    ),
    published_total=57.4e9,
    published_active=14.2e9,
    source="Qwen/Qwen2-57B-A14B config.json",
)
OLMOE_7B = ModelSpec(
    name="olmoe-1b-7b",
    family="olmoe",
    num_layers=16,
    dim=2048,
    vocab=50304,
    attention=GqaSpec(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm=True, qk_norm_over="projection"),
    moe=MoeSpec(num_experts=64, top_k=8, expert_dim=1024, norm_topk=False),
    norm_eps=1e-5,
    published_total=6.9e9,
    published_active=1.3e9,
    source="allenai/OLMoE-1B-7B-0924 config.json",
)
MINIMAX_M2 = ModelSpec(
    name="minimax-m2",
    family="minimax_m2",
    num_layers=62,
    dim=3072,
    vocab=200064,
    attention=GqaSpec(
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        qk_norm_over="projection",
        rope_theta=5e6,
        rope_fraction=0.5,
    ),
    moe=MoeSpec(num_experts=256, top_k=8, expert_dim=1536, score="sigmoid", balance_bias=True),
    published_total=229e9,  # as the Hub counts its tensors; MiniMax rounds to 230B
    published_active=10e9,
    source="MiniMaxAI/MiniMax-M2 config.json, without its MTP modules, which transformers leaves out too",
)
ERNIE_45_21B = ModelSpec(
    name="ernie-4.5-21b-a3b",
    family="ernie4_5_moe",
    num_layers=28,
    num_dense_layers=1,
    dim=2560,
    dense_dim=12288,
    vocab=103424,
    attention=GqaSpec(num_heads=20, num_kv_heads=4, head_dim=128, rope_theta=500_000.0, rope_pairs=True),
    moe=MoeSpec(num_experts=64, top_k=6, expert_dim=1536, num_shared=2, balance_bias=True),
    tied=True,
    norm_eps=1e-5,
    published_total=21e9,
    published_active=3e9,
    source="baidu/ERNIE-4.5-21B-A3B-PT config.json",
)
ERNIE_45_300B = replace(
    ERNIE_45_21B,
    name="ernie-4.5-300b-a47b",
    num_layers=54,
    num_dense_layers=3,
    dim=8192,
    dense_dim=28672,
    attention=GqaSpec(num_heads=64, num_kv_heads=8, head_dim=128, rope_theta=500_000.0, rope_pairs=True),
    moe=MoeSpec(num_experts=64, top_k=8, expert_dim=3584, balance_bias=True),
    tied=False,
    published_total=300e9,
    published_active=47e9,
    source="baidu/ERNIE-4.5-300B-A47B-PT config.json",
)
DOTS_LLM1 = ModelSpec(
    name="dots.llm1",
    family="dots1",
    num_layers=62,
    num_dense_layers=1,
    dim=4096,
    dense_dim=10944,
    vocab=152064,
    attention=GqaSpec(num_heads=32, num_kv_heads=32, head_dim=128, qk_norm=True, rope_theta=1e7),
    moe=MoeSpec(num_experts=128, top_k=6, expert_dim=1408, num_shared=2, score="sigmoid", balance_bias=True, scale=2.5),
    norm_eps=1e-5,
    published_total=142e9,
    published_active=14e9,
    source="rednote-hilab/dots.llm1.base config.json",
)
HUNYUAN_A13B = ModelSpec(
    name="hunyuan-a13b",
    family="hunyuan_v1_moe",
    num_layers=32,
    dim=4096,
    vocab=128167,
    attention=GqaSpec(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        norm_after_rope=True,
        rope_scaling=RopeScaling(factor=1000.0, original_len=32768, kind="ntk_alpha"),
    ),
    moe=MoeSpec(num_experts=64, top_k=8, expert_dim=3072, num_shared=1),
    tied=True,
    norm_eps=1e-5,
    published_total=80e9,
    published_active=13e9,
    source="tencent/Hunyuan-A13B-Instruct config.json",
)
_GRANITE_SCALE = 0.22  # residual_multiplier
GRANITE_3B = ModelSpec(
    name="granite-3.1-3b-a800m",
    family="granitemoe",
    num_layers=32,
    dim=1536,
    vocab=49155,
    attention=GqaSpec(num_heads=24, num_kv_heads=8, head_dim=64, scale=0.015625, out_scale=_GRANITE_SCALE),
    moe=MoeSpec(num_experts=40, top_k=8, expert_dim=512, scale=_GRANITE_SCALE),
    tied=True,
    embed_scale=12.0,
    logit_divisor=6.0,
    published_total=3.3e9,
    published_active=0.8e9,
    source="ibm-granite/granite-3.1-3b-a800m-base config.json",
)
GRANITE_1B = replace(
    GRANITE_3B,
    name="granite-3.1-1b-a400m",
    num_layers=24,
    dim=1024,
    attention=GqaSpec(num_heads=16, num_kv_heads=8, head_dim=64, scale=0.015625, out_scale=_GRANITE_SCALE),
    moe=MoeSpec(num_experts=32, top_k=8, expert_dim=512, scale=_GRANITE_SCALE),
    published_total=1.3e9,
    published_active=0.4e9,
    source="ibm-granite/granite-3.1-1b-a400m-base config.json",
)
PHI_35_MOE = ModelSpec(
    name="phi-3.5-moe",
    family="phimoe",
    num_layers=32,
    dim=4096,
    vocab=32064,
    attention=GqaSpec(num_heads=32, num_kv_heads=8, head_dim=128, bias=True),
    moe=MoeSpec(num_experts=16, top_k=2, expert_dim=6400, score="sparsemixer", norm_topk=False),
    norm="layer",
    head_bias=True,
    norm_eps=1e-5,
    published_total=41.9e9,
    published_active=6.6e9,
    approximate="the 64 short and 64 long factors of its LongRoPE are left out: read them from its config.json",
    source="microsoft/Phi-3.5-MoE-instruct config.json",
)

_MADE_HERE = "made here, for work on a CPU"
TINY_GLM4_MOE = ModelSpec(
    name="tiny-glm4-moe",
    family="glm4_moe",
    num_layers=4,
    num_dense_layers=1,
    dim=128,
    dense_dim=256,
    vocab=512,
    attention=GqaSpec(
        num_heads=8, num_kv_heads=4, head_dim=16, qk_norm=True, bias=True, out_bias=False, rope_fraction=0.5
    ),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, num_shared=1, score="sigmoid", balance_bias=True, scale=2.5),
    mtp_layers=1,
    source=_MADE_HERE,
)
TINY_MINIMAX_M2 = ModelSpec(
    name="tiny-minimax-m2",
    family="minimax_m2",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(
        num_heads=8, num_kv_heads=4, head_dim=16, qk_norm=True, qk_norm_over="projection", rope_fraction=0.5
    ),
    moe=MoeSpec(num_experts=16, top_k=4, expert_dim=64, score="sigmoid", balance_bias=True),
    source=_MADE_HERE,
)
TINY_QWEN2_MOE = ModelSpec(
    name="tiny-qwen2-moe",
    family="qwen2_moe",
    num_layers=4,
    dim=128,
    vocab=512,
    attention=GqaSpec(num_heads=8, num_kv_heads=4, head_dim=16, bias=True, out_bias=False),
    moe=MoeSpec(
        num_experts=16, top_k=4, expert_dim=64, num_shared=1, shared_dim=128, shared_gate=True, norm_topk=False
    ),
    source=_MADE_HERE,
)
_TINY_GEMMA = GqaSpec(num_heads=8, num_kv_heads=4, head_dim=16, qk_norm=True, v_norm=True, out_norm=True, scale=1.0)
TINY_GEMMA4 = ModelSpec(
    name="tiny-gemma4",
    family="gemma4",
    num_layers=4,
    pattern="wt",
    dim=128,
    vocab=512,
    attention=replace(
        _TINY_GEMMA,
        num_kv_heads=2,
        head_dim=32,
        shared_kv=True,
        rope_theta=1e6,
        rope_scaling=RopeScaling(1.0, 1, "proportional", turning_fraction=0.25),
    ),
    local_attention=replace(_TINY_GEMMA, window=32),
    moe=MoeSpec(
        num_experts=16, top_k=4, expert_dim=64, num_shared=1, shared_dim=128, own_norms=True, expert_scale=True
    ),
    activation="gelu_tanh",
    tied=True,
    embed_scale=128**0.5,
    logit_softcap=30.0,
    layer_scale=True,
    source=_MADE_HERE,
)

MIXTURE_MODELS = (
    GLM_45,
    GLM_45_AIR,
    QWEN2_57B,
    OLMOE_7B,
    MINIMAX_M2,
    ERNIE_45_21B,
    ERNIE_45_300B,
    DOTS_LLM1,
    HUNYUAN_A13B,
    GRANITE_3B,
    GRANITE_1B,
    PHI_35_MOE,
    TINY_GEMMA4,
    TINY_GLM4_MOE,
    TINY_MINIMAX_M2,
    TINY_QWEN2_MOE,
    *TINY_MIXTURES,
)
