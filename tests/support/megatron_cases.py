"""For each rule of `rules/megatron`: changes to CLEAN that it refuses, and changes that it accepts."""

from typing import Any

_WITHOUT_PP: dict[str, Any] = {
    "layout.pp": 1,
    "layout.vpp": 1,
    "layout.stages": None,
    "knobs.ep_overlap": False,
    "knobs.delay_wgrad": False,
}
_FSDP = {**_WITHOUT_PP, "knobs.data_parallel": "fsdp"}
_RINGS = {"layout.cp": 8, "job.seq_len": 32768, "knobs.cp_comm": "a2a+p2p"}
_DROPS = {**_WITHOUT_PP, "knobs.graphs": ["moe"], "job.capacity_factor": 1.0}
_MXFP8 = {"cluster.chip": "gb200", "knobs.precision": "mxfp8"}
_HYBRIDEP = {"knobs.dispatcher": "hybridep", "job.capacity_factor": 1.5, "job.capacity_scope": "rank"}
_STASH = {**_WITHOUT_PP, **_HYBRIDEP, "knobs.expert_fusion": True, "knobs.graphs": ["full_iteration"]}
_GEMMA: dict[str, Any] = {
    **_WITHOUT_PP,
    "model": "gemma-4-26b-a4b",
    "job.mtp": 0,
    "layout.ep": 8,
    "knobs.precision": "bf16",
    "knobs.recompute": [],
    "knobs.graphs": [],
}
_PACKED = {"job.packing": True, "job.task": "sft", "job.micro_batch": 1, "job.mtp": 0}
_QWEN_NEXT: dict[str, Any] = {
    **_WITHOUT_PP,
    "model": "qwen3-next-80b-a3b",
    "job.mtp": 1,
    "layout.pp": 4,
    "layout.ep": 8,
}
_NEMOTRON: dict[str, Any] = {**_WITHOUT_PP, "model": "nemotron-3-nano", "job.mtp": 0, "job.seq_len": 131072}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed-microbatch-is-one": ({**_PACKED, "job.micro_batch": 2}, _PACKED),
    "packing-needs-its-family": (
        {**_WITHOUT_PP, **_PACKED, "model": "qwen3-next-80b-a3b", "knobs.recompute": []},
        {**_WITHOUT_PP, **_PACKED, "model": "qwen3-30b-a3b", "knobs.recompute": []},
    ),
    "packing-with-mtp": ({**_PACKED, "job.mtp": 1}, _PACKED),
    "bridge-trains-family": ({"model": "mixtral-8x7b", "job.mtp": 0}, {}),
    "layer-offload-without-pipeline": (
        {"knobs.activation_offload_layers": 2, "knobs.recompute": []},
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 2, "knobs.recompute": []},
    ),
    "layer-offload-without-recompute": (
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 2, "knobs.recompute": ["moe_act"]},
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 2, "knobs.recompute": []},
    ),
    "layer-offload-leaves-a-layer": (
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 61, "knobs.recompute": []},
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 60, "knobs.recompute": []},
    ),
    "offload-by-layer-or-module": (
        {**_WITHOUT_PP, "knobs.activation_offload_layers": 2, "knobs.activation_offload": ["moe_act"]},
        {"knobs.activation_offload": ["moe_act"]},
    ),
    "offload-projection-with-attention": (
        {"knobs.activation_offload": ["attn_proj"]},
        {"knobs.activation_offload": ["attn_proj", "core_attn"]},
    ),
    "offload-outside-recomputed-moe": (
        {"knobs.activation_offload": ["moe_act"], "knobs.recompute": ["moe"]},
        {"knobs.activation_offload": ["core_attn"], "knobs.recompute": ["moe"]},
    ),
    "offload-of-fused-experts": (
        {"knobs.activation_offload": ["fused_group_mlp"]},
        {"knobs.activation_offload": ["fused_group_mlp"], "knobs.expert_fusion": True},
    ),
    "narrow-states-need-adamw": (
        {"job.optimizer": "muon", "knobs.optimizer_dtype": "bf16"},
        {"knobs.optimizer_dtype": "bf16"},
    ),
    "recompute-mla-up-proj-needs-mla": (
        {"model": "qwen3-30b-a3b", "job.mtp": 0, "knobs.recompute": ["mla_up_proj", "layernorm"]},
        {"knobs.recompute": ["mla_up_proj"]},
    ),
    "recompute-gdn-norm-needs-gdn": (
        {"knobs.recompute": ["gdn_norm_out", "layernorm"]},
        {"model": "qwen3-next-80b-a3b", "knobs.recompute": ["gdn_norm_out"]},
    ),
    "recompute-moe-act-needs-experts": (
        {"model": "llama3-8b", "job.mtp": 0, "knobs.recompute": ["moe_act", "layernorm"]},
        {"knobs.recompute": ["moe_act"]},
    ),
    "rank-capacity-needs-hybridep": (
        {"job.capacity_factor": 1.5, "job.capacity_scope": "rank"},
        {**_HYBRIDEP, "knobs.expert_fusion": True},
    ),
    "rank-capacity-needs-expert-fusion": (_HYBRIDEP, {**_HYBRIDEP, "knobs.expert_fusion": True}),
    "capacity-without-deepep": (
        {"knobs.dispatcher": "deepep", "job.capacity_factor": 1.5},
        {"knobs.dispatcher": "hybridep", "job.capacity_factor": 1.5},
    ),
    "deepep-has-somewhere-to-send": (
        {"knobs.dispatcher": "deepep", "layout.ep": 1, "knobs.ep_overlap": False, "knobs.delay_wgrad": False},
        {"knobs.dispatcher": "deepep"},
    ),
    "deepep-on-its-chips": (
        {**_MXFP8, "knobs.dispatcher": "deepep", "stack.release": "26.06"},
        {**_MXFP8, "knobs.dispatcher": "deepep"},
    ),
    "ep-overlap-with-mtp-needs-pipeline": (
        {**_WITHOUT_PP, "knobs.ep_overlap": True, "stack.release": "26.02"},
        {**_WITHOUT_PP, "knobs.ep_overlap": True, "stack.release": "26.06"},
    ),
    "mamba-models-without-vpp": (
        {
            "model": "nemotron-3-nano",
            "job.mtp": 0,
            "layout.pp": 2,
            "layout.vpp": 2,
            "layout.stages": None,
            "stack.release": "26.06",
        },
        {"model": "nemotron-3-nano", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 1, "layout.stages": None},
    ),
    "expert-bias-without-etp": (
        {"model": "gpt-oss-120b", "job.mtp": 0, "layout.ep": 8, "layout.etp": 2},
        {"layout.etp": 2},
    ),
    "expert-fusion-on-target": ({"knobs.expert_fusion": True, "layout.etp": 2}, {"knobs.expert_fusion": True}),
    "router-padding-needs-quantization": (
        {"knobs.precision": "bf16", "knobs.router_padding": True},
        {"knobs.precision": "fp8-blockwise", "knobs.router_padding": True},
    ),
    "fp8-output-needs-mxfp8": (
        {"knobs.precision": "fp8-blockwise", "knobs.fp8_output": True},
        {**_MXFP8, "knobs.fp8_output": True},
    ),
    "delta-heads-divide": (
        {"model": "qwen3-next-80b-a3b", "job.seq_len": 131072, "layout.cp": 16},
        {"model": "qwen3-next-80b-a3b", "job.seq_len": 131072, "layout.cp": 8},
    ),
    "delta-rule-without-cp": (
        {"model": "qwen3-next-80b-a3b", "job.seq_len": 131072, "layout.cp": 4, "stack.release": "26.04"},
        {"model": "qwen3-next-80b-a3b", "job.seq_len": 131072, "layout.cp": 4},
    ),
    "delta-rule-by-p2p": (
        {
            "model": "qwen3-next-80b-a3b",
            "job.seq_len": 131072,
            "layout.cp": 4,
            "knobs.cp_comm": "all_gather",
            "stack.release": "26.06",
        },
        {"model": "qwen3-next-80b-a3b", "job.seq_len": 131072, "layout.cp": 4, "stack.release": "26.06"},
    ),
    "tp-overlap-has-buffers": (
        {"knobs.tp_overlap": True},
        {"knobs.tp_overlap": True, "knobs.precision": "bf16"},
    ),
    "tp-overlap-stays-on": (
        {"knobs.tp_overlap": True, "knobs.precision": "bf16"},
        {"model": "qwen3-30b-a3b", "job.mtp": 0, "knobs.tp_overlap": True, "knobs.precision": "bf16"},
    ),
    "hybrid-stages-are-equal": (
        {**_NEMOTRON, "model.num_layers": 50, "layout.pp": 4},
        {**_NEMOTRON, "model.num_layers": 52, "layout.pp": 4},
    ),
    "chunks-next-to-mtp-have-layers": (
        {**_QWEN_NEXT, "layout.stages": "E" + "t" * 12 + "|" + "t" * 18 + "|" + "t" * 18 + "m|L"},
        {**_QWEN_NEXT, "layout.stages": "E" + "t" * 12 + "|" + "t" * 18 + "|" + "t" * 17 + "|tmL"},
    ),
    "mamba-heads-divide": (
        {**_NEMOTRON, "layout.tp": 2, "layout.cp": 64},
        {**_NEMOTRON, "layout.tp": 2, "layout.cp": 8},
    ),
    "sparse-attention-without-cp": (
        {"model": "glm-5.2", "job.seq_len": 131072, "layout.cp": 4, "stack.release": "26.06"},
        {"model": "glm-5.2", "job.seq_len": 131072, "layout.cp": 4, "knobs.cp_comm": "all_gather"},
    ),
    "sparse-attention-gathers": (
        {"model": "glm-5.2", "job.seq_len": 131072, "layout.cp": 4, "knobs.cp_comm": "p2p"},
        {"model": "glm-5.2", "job.seq_len": 131072, "layout.cp": 4, "knobs.cp_comm": "all_gather"},
    ),
    "hybrid-models-without-vpp": (
        {"model": "nemotron-3-nano", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 2, "layout.stages": None},
        {"model": "nemotron-3-nano", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 1, "layout.stages": None},
    ),
    "bridge-model-without-vpp": (
        {"model": "qwen3-vl-30b-a3b", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 4},
        {"model": "qwen3-vl-30b-a3b", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 1},
    ),
    "first-stage-takes-image-features": (
        {"model": "tiny-qwen3-vl-moe", "job.mtp": 0, "layout.pp": 4, "layout.vpp": 1, "layout.ep": 8},
        {"model": "tiny-qwen3-vl-moe", "job.mtp": 0, "layout.pp": 2, "layout.vpp": 1, "layout.ep": 8},
    ),
    "fsdp-overlap-without-scoped-graphs": (
        {**_FSDP, "knobs.ep_overlap": True, "knobs.graphs": ["attn"]},
        {**_FSDP, "knobs.graphs": ["attn"]},
    ),
    "fsdp-pipeline-is-untried": (
        {"knobs.data_parallel": "fsdp"},
        {"knobs.data_parallel": "fsdp", "layout.pp": 1, "layout.vpp": 1},
    ),
    "fsdp-features": (
        {**_FSDP, "knobs.optimizer_offload": 1.0},
        {**_FSDP, "knobs.activation_offload": ["core_attn"], "knobs.fp8_params": True},
    ),
    "fsdp-excludes-full-graph": (
        {**_FSDP, "knobs.graphs": ["full_iteration"], "stack.release": "0.4.2"},
        {**_FSDP, "knobs.graphs": ["full_iteration"], "stack.release": "0.5.1"},
    ),
    "fsdp-needs-connections": ({**_FSDP, "knobs.max_connections": 1}, {**_FSDP, "knobs.max_connections": 8}),
    "fsdp-needs-adam": ({**_FSDP, "job.optimizer": "muon"}, {"job.optimizer": "muon"}),
    "fsdp-with-small-tp": ({**_FSDP, "layout.tp": 4}, {**_FSDP, "layout.tp": 4, "cluster.chip": "gb200"}),
    "hierarchical-cp-needs-te": ({**_RINGS, "stack.te": "1.11"}, {**_RINGS, "stack.te": "1.12"}),
    "hybrid-cp-on-target": (
        {**_WITHOUT_PP, "layout.cp": 4, "knobs.cp_dynamic": True, "knobs.data_parallel": "fsdp"},
        {**_WITHOUT_PP, "layout.cp": 4, "knobs.cp_dynamic": True},
    ),
    "warmup-ends-before-training": (
        {"job.steps": 50, "job.warmup_steps": 50},
        {"job.steps": 50, "job.warmup_steps": 49},
    ),
    "fsdp-fusion-te": ({**_FSDP, "stack.te": "2.9"}, {**_FSDP, "stack.te": "2.10"}),
    "hybridep-inside-rack": (
        {**_MXFP8, "knobs.dispatcher": "hybridep", "layout.ep": 128},
        {**_MXFP8, "knobs.dispatcher": "alltoall", "layout.ep": 128},
    ),
    "hybridep-takes-whole-chunks": (
        {"knobs.dispatcher": "hybridep", "job.seq_len": 4104, "layout.cp": 2},
        {"knobs.dispatcher": "hybridep", "job.seq_len": 4352, "layout.cp": 2},
    ),
    "graph-of-experts-without-offload": (
        {**_DROPS, "knobs.activation_offload": ["core_attn"]},
        {**_DROPS, "knobs.graphs": ["attn"], "knobs.activation_offload": ["core_attn"]},
    ),
    "paged-stash-holds-experts": (
        {**_STASH, "knobs.activation_offload": ["fused_group_mlp", "core_attn"]},
        {**_STASH, "knobs.activation_offload": ["core_attn"]},
    ),
    "paged-stash-keeps-layers": (
        {**_STASH, "knobs.activation_offload_layers": 2, "knobs.recompute": []},
        {**_STASH, "knobs.recompute": []},
    ),
    "packed-attention-in-no-scoped-graph": (
        {"knobs.graphs": ["attn", "moe_router"], "job.packing": True},
        {"knobs.graphs": ["moe_router"], "job.packing": True},
    ),
    "mlp-graph-needs-dense-layers": (
        {"model": "qwen3-30b-a3b", "job.mtp": 0, "knobs.graphs": ["attn", "mlp"]},
        {"knobs.graphs": ["attn"]},
    ),
    "moe-graph-needs-experts": (
        {"model": "llama3-8b", "job.mtp": 0, "knobs.graphs": ["attn", "moe_router"]},
        {"knobs.graphs": ["attn", "moe_router"]},
    ),
    "ernie-has-shared-experts": (
        {**_WITHOUT_PP, "model": "ernie-4.5-300b-a47b", "job.mtp": 0},
        {**_WITHOUT_PP, "model": "ernie-4.5-21b-a3b", "job.mtp": 0},
    ),
    "gemma4-on-target": ({**_GEMMA, "knobs.recompute": ["layernorm", "moe_act"]}, _GEMMA),
}
