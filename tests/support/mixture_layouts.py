"""Layouts of the families in `spec/families`, which must give one rank's gradients: TP, EP, PP and CP for each."""

from typing import Any

from oracle_layouts import FOUR, FSDP, HSDP, MTP1, MUON, ODD, PACKED, PADDED, TIED, Case, case

A2A: dict[str, Any] = {"cp_comm": "a2a"}
GEMMA_FOUR = {**FOUR, "layer_types": ["sliding_attention", "full_attention"] * 2}

V4_ODD: dict[str, Any] = {"o_groups": 2, "num_attention_heads": 4, "tie_word_embeddings": True, "hc_mult": 3}
OVERLAPPED: dict[str, Any] = {"shared_expert_overlap": True}
STREAMS: dict[str, Any] = {"recompute": ["layernorm", "moe_act", "core_attn", "shared_experts"]}

MIXTURE_CASES: list[Case] = [
    case("deepseek v4 tp ep", "deepseek_v4", 4, often=True, tp=2, ep=2, job=PACKED),
    case("deepseek v4 pp vpp ep", "deepseek_v4", 4, pp=2, vpp=2, ep=2, job=PACKED, knobs=STREAMS),
    case("deepseek v4 fsdp, recompute", "deepseek_v4", 4, tp=2, ep=2, knobs={**FSDP, "recompute": ["full"]}),
    case("deepseek v4 tp pp, tied", "deepseek_v4", 4, tp=2, pp=2, spec=V4_ODD, job=MUON),
    case("deepseek v4 hsdp", "deepseek_v4", 4, replicate=2, knobs={**HSDP, "recompute": ["moe"]}),
    case("deepseek v4 ep etp, padded", "deepseek_v4", 4, ep=2, etp=2, job=PADDED, knobs=OVERLAPPED),
    case("glm tp ep, mtp", "glm4_moe", 4, tp=2, ep=2, spec=MTP1),
    case("glm pp vpp ep, mtp", "glm4_moe", 4, pp=2, vpp=2, ep=2, spec={**FOUR, **MTP1}),
    case("glm cp, yarn", "glm4_moe", 4, cp=4, ep=2, spec=ODD, job=PACKED),
    case("glm fsdp", "glm4_moe", 4, tp=2, knobs=FSDP, job=MUON),
    case("qwen2 tp ep", "qwen2_moe", 4, tp=2, ep=2, knobs={"shared_expert_overlap": True}),
    case("qwen2 pp", "qwen2_moe", 2, pp=2, spec=TIED),
    case("qwen2 cp beyond the context", "qwen2_moe", 2, often=True, cp=2, spec=ODD),
    case("qwen2 tp of one key head", "qwen2_moe", 4, tp=4, ep=4, spec=ODD, job=PACKED),
    case("olmoe tp ep", "olmoe", 4, often=True, tp=2, ep=2, job=PACKED),
    case("olmoe tp of copied key heads", "olmoe", 4, tp=4, job=MUON),
    case("olmoe tp overlap", "olmoe", 4, tp=2, ep=4, knobs={"tp_overlap": True}),
    case("olmoe pp vpp etp", "olmoe", 4, pp=2, vpp=2, etp=2, spec=FOUR),
    case("olmoe fsdp, recompute", "olmoe", 4, tp=2, knobs={**FSDP, "recompute": ["full"]}),
    case("minimax tp of copied key heads", "minimax_m2", 4, often=True, tp=4, ep=2),
    case("minimax tp cp", "minimax_m2", 4, tp=2, cp=2, job=PACKED),
    case("minimax longrope cp", "minimax_m2", 4, cp=4, ep=4, spec=ODD),
    case("minimax tp of one key head", "minimax_m2", 2, tp=2, spec=ODD, job=PACKED),
    case("minimax pp ep overlap", "minimax_m2", 4, pp=2, vpp=2, ep=2, spec=FOUR,
         knobs={"ep_overlap": True, "delay_wgrad": True}),
    case("minimax hsdp", "minimax_m2", 4, replicate=2, knobs=HSDP),
    case("ernie tp pp ep, tied", "ernie4_5_moe", 4, often=True, tp=2, pp=2, ep=2),
    case("ernie cp a2a", "ernie4_5_moe", 4, cp=2, ep=4, knobs=A2A, job=PACKED),
    case("dots ep cp, windows", "dots1", 4, cp=2, ep=2, spec=ODD, job=PACKED),
    case("dots tp pp", "dots1", 4, tp=2, pp=2, ep=2),
    case("hunyuan tp cp ep", "hunyuan_v1_moe", 4, tp=2, cp=2, ep=2),
    case("hunyuan pp, tied", "hunyuan_v1_moe", 2, pp=2, spec={"tie_word_embeddings": True}),
    case("granite tp pp ep", "granitemoe", 4, tp=2, pp=2, ep=2, spec=TIED),
    case("granite cp beyond the context", "granitemoe", 4, cp=4, ep=2, spec=ODD),
    case("granite ep etp", "granitemoe", 4, ep=2, etp=2, knobs=FSDP),
    case("phi tp ep", "phimoe", 4, often=True, tp=2, ep=2, job={"mtp": 0}),
    case("phi tp of four, vocabulary of 67", "phimoe", 4, tp=4, ep=4, knobs=FSDP),
    case("phi pp cp", "phimoe", 4, pp=2, cp=2, ep=2, job=PACKED),
    case("phi windows, tied", "phimoe", 4, tp=2, pp=2, spec=ODD),
    case("gemma tp ep", "gemma4_text", 4, often=True, tp=2, ep=2, job=PACKED),
    case("gemma pp vpp ep overlap", "gemma4_text", 4, pp=2, vpp=2, ep=2, spec=GEMMA_FOUR,
         knobs={"ep_overlap": True, "delay_wgrad": True}),
    case("gemma ep overlap, fsdp", "gemma4_text", 4, ep=2, job={"global_batch": 8},
         knobs={**FSDP, "ep_overlap": True}),
    case("gemma cp, recompute", "gemma4_text", 4, cp=2, ep=2, spec=ODD, job=PACKED,
         knobs={"recompute": ["layernorm", "shared_experts", "core_attn", "moe_act"]}),
    case("gemma cp a2a, untied", "gemma4_text", 4, cp=2, ep=4, spec=ODD, knobs=A2A),
    case("gemma tp of copied key heads", "gemma4_text", 4, tp=4, ep=2, job=MUON),
    case("gemma pp tp, tied", "gemma4_text", 4, pp=2, tp=2, knobs={"recompute": ["full"]}),
    case("gemma fsdp etp", "gemma4_text", 4, etp=2, ep=2, knobs={**FSDP, "shared_expert_overlap": True}),
    case("solar tp ep", "solar_open", 4, tp=2, ep=2, job=PACKED),
    case("solar pp cp", "solar_open", 4, pp=2, cp=2, ep=2, spec=ODD),
    case("hy tp pp, tied", "hy_v3", 4, tp=2, pp=2, ep=2, spec=TIED),
    case("hy cp etp", "hy_v3", 4, cp=2, etp=2, ep=2, job=PACKED, knobs=FSDP),
    case("exaone tp cp", "exaone_moe", 4, often=True, tp=2, cp=2, ep=2, job=PACKED),
    case("exaone pp vpp", "exaone_moe", 4, pp=2, vpp=2, ep=2, job=MUON),
    case("exaone cp a2a", "exaone_moe", 4, cp=2, ep=4, spec=ODD, knobs=A2A),
    case("glm lite tp ep", "glm4_moe_lite", 4, tp=2, ep=2, job=PACKED),
    case("glm lite pp cp", "glm4_moe_lite", 4, pp=2, cp=2, spec=ODD),
    case("qwen3.5 text tp ep", "qwen3_5_moe_text", 4, tp=2, ep=2, job=PACKED),
    case("qwen3.5 text cp pp", "qwen3_5_moe_text", 4, cp=2, pp=2, spec=ODD),
]  # fmt: skip
