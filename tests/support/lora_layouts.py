"""Layouts of plans with LoRA adapters or frozen weights, which must give one rank's gradients of what trains."""

from typing import Any

from oracle_layouts import FOUR, FSDP, HSDP, LATENTS, MTP1, PACKED, TIED, Case, case

ALL = ("attention", "mlp", "shared_experts", "experts")
DENSE = {"lora_rank": 2, "lora_alpha": 3.0}
EVERY: dict[str, Any] = {"lora_rank": 4, "lora_targets": ALL}
MUON = {"optimizer": "muon"}

FROZEN_CASES: list[Case] = [
    case("frozen experts", "qwen3_moe", 2, often=True, ep=2, job={"freeze": ["*.experts.*"]}),
    case("frozen first layer, tp", "gpt_oss", 2, tp=2, job={"freeze": ["layers.0.*", "embed.*"]}),
    case("frozen first stage", "mixtral", 2, pp=2, job={"freeze": ["layers.0.*", "embed.*"]}),
    case("frozen attention, fsdp", "qwen3_moe", 4, often=True, tp=2, knobs=FSDP, job={"freeze": ["*.mixer.*"]}),
    case("frozen tables, tied, pp", "qwen3_moe", 4, pp=2, vpp=2, spec={**FOUR, **TIED}, job={"freeze": ["embed.*"]}),
    case("frozen experts, hsdp", "deepseek_v3", 4, replicate=2, knobs=HSDP, job={"freeze": ["*.experts.*"]}),
    case("frozen latents over cp", "deepseek_v3", 2, cp=2, knobs=LATENTS, job={"freeze": ["*_up.weight"]}),
    case("frozen matrices, muon", "deepseek_v3", 4, tp=2, ep=2, job={**MUON, "freeze": ["*.gate_up", "*.q_up.*"]}),
    case("frozen linears, tp overlap", "qwen3", 2, tp=2, knobs={"tp_overlap": True},
         job={"freeze": ["*.q.weight", "*.down.weight"]}),
    case("frozen experts, fused", "gpt_oss", 2, knobs={"expert_fusion": True}, job={"freeze": ["*.experts.gate_up"]}),
    case("frozen, ep overlap", "qwen3_moe", 2, ep=2, knobs={"ep_overlap": True, "delay_wgrad": True},
         job={"freeze": ["*.experts.*", "layers.0.mixer.*"]}),
    case("frozen, zero-bubble", "qwen3_moe", 2, pp=2, schedule="zero-bubble", job={"freeze": ["*.mixer.q.*"]}),
]  # fmt: skip
LORA_CASES: list[Case] = [
    case("lora dp", "qwen3", 2, job=DENSE),
    case("lora tp", "qwen3_moe", 4, often=True, tp=4, job=EVERY),
    case("lora tp, latents", "deepseek_v3", 2, tp=2, job=EVERY, spec=MTP1),
    case("lora tp, delta rule, biases", "qwen3_next", 2, tp=2, job=EVERY),
    case("lora cp", "gpt_oss", 2, cp=2, job={**EVERY, **PACKED}),
    case("lora cp, expanded latents", "deepseek_v3", 2, cp=2, job=EVERY, knobs={"cp_exchange": "expanded"}),
    case("lora pp vpp", "qwen3_moe", 2, pp=2, vpp=2, spec={**FOUR, **TIED}, job=EVERY),
    case("lora ep etp", "gpt_oss", 4, often=True, ep=2, etp=2, job=EVERY),
    case("lora ep edp, dense", "qwen3_moe", 4, ep=2, job=DENSE),
    case("lora fsdp, ep, tp", "deepseek_v3", 4, often=True, tp=2, ep=2, knobs=FSDP, job=EVERY),
    case("lora fsdp of four", "qwen3_next", 4, knobs=FSDP, job=DENSE),
    case("lora hsdp", "qwen3_moe", 4, replicate=2, knobs=HSDP, job=EVERY),
    case("lora recompute", "deepseek_v3", 2, ep=2, job=EVERY,
         knobs={"recompute": ["layernorm", "mla_up_proj", "moe_act", "mlp"]}),
    case("lora full recompute, pp", "qwen3_next", 4, pp=2, ep=2, job=EVERY, knobs={"recompute": ["full"]}),
    # Nothing before the experts of the first layer trains, so that no gradient of its rows travels.
    case("lora of experts, wgrads during dispatch", "qwen3_moe", 2, often=True, ep=2, knobs={"wgrad_overlap": True},
         job={**EVERY, "lora_targets": ("experts",)}),
    case("lora ep overlap", "qwen3_moe", 2, ep=2, job=EVERY, knobs={"ep_overlap": True, "delay_wgrad": True}),
    case("lora zero-bubble", "qwen3_moe", 2, pp=2, schedule="zero-bubble", job=EVERY),
    case("lora muon", "qwen3_moe", 4, tp=2, ep=2, etp=2, job={**EVERY, **MUON}),
    case("lora beside frozen adapters", "qwen3_moe", 2, tp=2, job={**EVERY, "freeze": ["*.lora_a"]}),
]  # fmt: skip
