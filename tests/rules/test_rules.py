"""Each rule: one plan it refuses, one it accepts, and its fix clears it."""

from typing import Any

import pytest
from hypothesis import given, settings
from megatron_cases import CASES as MEGATRON_CASES
from plans import CLEAN, build
from random_plans import random_fields
from repository import ROOT

from threefold.plan.parse import change
from threefold.rules.all import RULES, check, errors, explain, judge, known_slugs, raised_by, repair
from threefold.rules.base import blockers
from threefold.rules.stacks import promoted

PACKED_WITHOUT_PP = {
    "job.packing": True,
    "layout.pp": 1,
    "layout.vpp": 1,
    "layout.stages": None,
    "knobs.ep_overlap": False,
    "knobs.delay_wgrad": False,
    "knobs.graphs": [],
}
# Four layers on one GPU, recomputed whole.
LONG_ALONE = {
    "model": "qwen3-30b-a3b",
    "model.num_layers": 4,
    "target": "threefold",
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "job.seq_len": 262144,
    "job.micro_batch": 1,
    "job.global_batch": 1,
    "job.mtp": 0,
    **dict.fromkeys(("layout.pp", "layout.vpp", "layout.ep", "layout.cp", "layout.tp", "layout.etp"), 1),
    "layout.stages": None,
    "knobs.precision": "bf16",
    "knobs.recompute": ["full"],
    "knobs.graphs": [],
    "knobs.ep_overlap": False,
    "knobs.delay_wgrad": False,
    "knobs.dispatcher": "local",
}
# For each rule: changes to CLEAN that it refuses, and changes it accepts ({} is CLEAN itself).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **MEGATRON_CASES,
    "stack-runs-chip": (
        {"cluster.chip": f"file:{ROOT}/recipes/chips/mi300x.toml", "knobs.precision": "bf16"},
        {"cluster.chip": f"file:{ROOT}/recipes/chips/h20.toml"},
    ),
    "data-exists": ({"job.data": "no/such/shard"}, {"job.data": "synthetic"}),
    "text-has-a-tokenizer": (
        {"job.data": "no/such.jsonl", "target": "threefold"},
        {"job.data": "no/such.jsonl", "job.tokenizer": "no/such.json", "target": "threefold"},
    ),
    "validation-data-is-used": (
        {"job.val_data": "no/such.jsonl", "target": "threefold"},
        {"job.val_data": "no/such.jsonl", "run.eval_every": 10, "target": "threefold"},
    ),
    "best-needs-evaluations": (
        {"run.early_stop": 3, "target": "threefold"},
        {"run.early_stop": 3, "run.eval_every": 10, "target": "threefold"},
    ),
    "sequence-has-context": ({"job.seq_len": 4}, {"job.seq_len": 64}),
    # shape
    "grids-divide-ranks": ({"cluster.gpus": 1000}, {"cluster.gpus": 512}),
    "tp-divides-model": ({"layout.tp": 3, "job.seq_len": 4098, "cluster.gpus": 1536}, {"layout.tp": 4}),
    "ep-divides-experts": ({"layout.ep": 48, "cluster.gpus": 768}, {"layout.ep": 32}),
    "etp-divides-expert": ({"layout.etp": 3, "cluster.gpus": 1536}, {"layout.etp": 2}),
    "expert-axes-need-experts": ({"model": "llama3-8b", "knobs.ep_overlap": False}, {}),
    "experts-fit-routing": ({"model.num_experts": 12}, {"model.num_experts": 64}),
    "dense-layers-exist": ({"model.num_layers": 3}, {"model.num_layers": 30}),
    "chunks-hold-layers": ({"layout.vpp": 16}, {"layout.vpp": 8}),
    "chunk-is-empty": ({"layout.stages": "Et||(tt|)*29tmL"}, {"layout.stages": "Et|(tt|)*30mL"}),
    "ends-are-at-the-ends": ({"layout.stages": "|Et|(tt|)*29ttmL"}, {"layout.stages": "Et|(tt|)*30mL"}),
    "stages-match-model": ({"layout.stages": "Et*4|(t*4|)*14tmL"}, {"layout.stages": "Et|(tt|)*30mL"}),
    "vpp-needs-pp": ({"layout.pp": 1, "layout.vpp": 4}, {"layout.pp": 1, "layout.vpp": 1}),
    "schedule-fits-chunks": ({"layout.schedule": "1f1b"}, {"layout.schedule": "interleaved"}),
    "schedule-on-target": (
        {"layout.schedule": "zero-bubble"},
        {"layout.schedule": "zero-bubble", "target": "threefold"},
    ),
    "replicate-divides-dp": ({"layout.replicate": 2}, {"layout.replicate": 2, "knobs.data_parallel": "hsdp"}),
    "seq-divides-cp": ({"job.seq_len": 4097}, {"job.seq_len": 6144}),
    "cp-a2a-divides-heads": (
        {"model": "qwen3-30b-a3b", "layout.cp": 4, "knobs.cp_comm": "a2a"},
        {"model": "qwen3-30b-a3b", "layout.cp": 2, "knobs.cp_comm": "a2a"},
    ),
    "sparse-attention-on-whole-sequences": (
        {"model": "glm-5.2", "target": "threefold", "layout.cp": 2},
        {"model": "glm-5.2", "target": "threefold"},
    ),
    "mtp-with-one-residual-stream": (
        {"model": "tiny-deepseek-v4", "target": "threefold", "knobs.ep_overlap": False, "job.mtp": 1},
        {"model": "tiny-deepseek-v4", "target": "threefold", "knobs.ep_overlap": False, "job.mtp": 0},
    ),
    "ep-overlap-excludes-streams": (
        {"model": "deepseek-v4-flash", "target": "threefold", "job.mtp": 0},
        {"model": "deepseek-v4-flash", "target": "threefold", "job.mtp": 0, "knobs.ep_overlap": False},
    ),
    "cp-inner-divides-cp": (
        {"layout.cp": 8, "job.seq_len": 32768, "knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 3},
        {"layout.cp": 8, "job.seq_len": 32768, "knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 4},
    ),
    "cp-exchange-has-latents": (
        {"layout.cp": 2, "knobs.cp_exchange": "latents"},
        {"layout.cp": 2, "knobs.cp_exchange": "latents", "target": "threefold"},
    ),
    "cp-comm-per-layer": (
        {"layout.cp": 2, "knobs.cp_comm": ["p2p", "a2a"]},
        {"layout.cp": 2, "knobs.cp_comm": ["p2p"] * 61},
    ),
    "cp-dynamic-halves-groups": (
        {"layout.cp": 6, "job.seq_len": 12288, "cluster.gpus": 3072, "knobs.cp_dynamic": True, **PACKED_WITHOUT_PP},
        {"layout.cp": 4, "job.seq_len": 16384, "knobs.cp_dynamic": True, **PACKED_WITHOUT_PP},
    ),
    "cp-dynamic-without-pipeline": (
        {"layout.cp": 2, "job.seq_len": 8192, "job.packing": True, "knobs.cp_dynamic": True},
        {"layout.cp": 2, "job.seq_len": 8192, "knobs.cp_dynamic": True, **PACKED_WITHOUT_PP},
    ),
    "cp-dynamic-runs-with": (
        {
            "layout.cp": 2,
            "job.seq_len": 8192,
            "knobs.cp_dynamic": True,
            "target": "threefold",
            **PACKED_WITHOUT_PP,
            "knobs.ep_overlap": True,
        },
        {
            "layout.cp": 2,
            "job.seq_len": 8192,
            "knobs.cp_dynamic": True,
            "target": "threefold",
            **PACKED_WITHOUT_PP,
            "knobs.dispatcher": "alltoall",
        },
    ),
    "cp-dynamic-without-latents": (
        {"layout.cp": 2, "job.seq_len": 8192, "knobs.cp_dynamic": True, **PACKED_WITHOUT_PP},
        {
            "model": "qwen3-30b-a3b",
            "layout.cp": 2,
            "job.seq_len": 8192,
            "knobs.cp_dynamic": True,
            **PACKED_WITHOUT_PP,
            "knobs.recompute": ["mlp"],
        },
    ),
    "cp-dynamic-takes-effect": (
        {"knobs.cp_dynamic": True},
        {"layout.cp": 2, "job.seq_len": 8192, "job.packing": True, "knobs.cp_dynamic": True},
    ),
    "mtp-in-model": ({"job.mtp": 2, "knobs.ep_overlap": False, "knobs.delay_wgrad": False}, {"job.mtp": 0}),
    "cores-exist": ({"run.cores": "a-b"}, {"run.cores": "0-7,16"}),
    # batch
    "batch-divides-dp": ({"job.global_batch": 8190}, {"job.global_batch": 512}),
    "interleaved-fills-pipeline": ({"job.global_batch": 256}, {"job.global_batch": 512}),
    "pipeline-bubble-small": ({"job.global_batch": 512, "layout.vpp": 2}, {"job.global_batch": 2048}),
    "pipeline-needs-static-lengths": ({"job.dynamic_length": True}, {"job.packing": True}),
    "load-needs-a-router": ({"job.load": "zipf", "job.routing": "forced-balance"}, {"job.load": "zipf"}),
    "load-is-readable": ({"job.load": "file:no/such/run"}, {"job.load": "burst"}),
    "forced-balance-is-benchmark": ({"job.routing": "forced-balance"}, {"job.routing": "learned"}),
    "synthetic-data-is-benchmark": ({"job.data": "synthetic"}, {"job.data": ["a.bin", "b.bin"]}),
    "capacity-is-used": ({"job.capacity_scope": "rank"}, {"job.capacity_scope": "rank", "job.capacity_factor": 1.5}),
    # context
    "cp-from-shard-target": ({"job.seq_len": 131072, "job.global_batch": 512}, {"job.seq_len": 16384}),
    "cp-only-when-long": ({"layout.cp": 4}, {"layout.cp": 2}),
    "tp-for-cp-on-rack": (
        {
            "cluster.chip": "gb200",
            "layout.tp": 1,
            "layout.cp": 8,
            "job.seq_len": 65536,
            "job.global_batch": 512,
            "knobs.dispatcher": "hybridep",
        },
        {"cluster.chip": "gb200", "layout.tp": 2, "layout.cp": 4, "job.seq_len": 32768, "knobs.dispatcher": "hybridep"},
    ),
    "dp-at-floor": (
        {"layout.cp": 64, "job.seq_len": 262144, "job.global_batch": 64},
        {"layout.cp": 32, "job.seq_len": 262144, "job.global_batch": 64},
    ),
    "batch-against-length": (
        {"layout.cp": 8, "job.seq_len": 65536},
        {"layout.cp": 8, "job.seq_len": 65536, "job.global_batch": 512},
    ),
    "sdpa-recompute-at-length": (
        {"job.seq_len": 32768, "layout.cp": 4, "knobs.recompute": ["core_attn", "mlp"]},
        {"knobs.recompute": ["core_attn", "mlp"]},
    ),
    "short-baseline-at-length": (
        {"job.seq_len": 32768, "layout.cp": 4, "knobs.recompute": []},
        {"job.seq_len": 32768, "layout.cp": 4},
    ),
    "kernels-at-length": (
        {"job.seq_len": 131072, "layout.cp": 16, "stack.torch": "2.8.0"},
        {"job.seq_len": 131072, "layout.cp": 16, "stack.torch": "2.11.0"},
    ),
    # recompute
    "full-recompute-alone": ({"knobs.recompute": ["full", "mlp"]}, {"knobs.recompute": ["mlp"]}),
    "recompute-method-needs-full": (
        {"knobs.recompute_method": "uniform"},
        {"knobs.recompute": ["full"], "knobs.recompute_method": "uniform", "knobs.recompute_layers": 1},
    ),
    "recompute-save-has-use": (
        {"knobs.recompute_save": ["core_attn"]},
        {**LONG_ALONE, "knobs.recompute_save": ["core_attn"]},
    ),
    "full-recompute-saves-attention": (LONG_ALONE, {**LONG_ALONE, "job.seq_len": 4096}),
    "recompute-module-exists": (
        {"knobs.recompute": ["mlp", "gdn_norm_out"], "target": "threefold"},
        {"knobs.recompute": ["mla_up_proj"], "target": "threefold"},
    ),
    "shared-recompute-or-overlap": (
        {"knobs.recompute": ["shared_experts"], "knobs.shared_expert_overlap": True},
        {"knobs.recompute": ["shared_experts"]},
    ),
    "recompute-fp8-scaling": (
        {"knobs.recompute": ["moe_act"], "knobs.precision": "fp8-tensor"},
        {"knobs.recompute": ["moe_act"], "knobs.precision": "fp8-cs"},
    ),
    "selective-before-full": ({"knobs.recompute": ["full"]}, {}),
    "optimizer-offload-needs-adamw": (
        {"target": "threefold", "job.optimizer": "muon", "knobs.optimizer_offload": 0.5},
        {"target": "threefold", "knobs.optimizer_offload": 0.5},
    ),
    "activation-offload-without-ep-overlap": (
        {"target": "threefold", "knobs.activation_offload": ["attn_norm"]},
        {"target": "threefold", "knobs.activation_offload": ["attn_norm"], "knobs.ep_overlap": False},
    ),
    "offload-of-what-is-kept": (
        {"knobs.activation_offload": ["expert_fc1", "attn_norm"], "knobs.recompute": ["moe"], "target": "threefold"},
        {"knobs.activation_offload": ["expert_fc1", "attn_norm"], "knobs.recompute": ["mlp"], "target": "threefold"},
    ),
    "offload-comes-last": ({"knobs.optimizer_offload": 0.5, "knobs.recompute": []}, {"knobs.optimizer_offload": 0.5}),
    # fold
    "etp-only-when-ep-insufficient": ({"layout.ep": 32, "layout.etp": 2}, {"layout.ep": 256, "layout.etp": 2}),
    "ep-before-tp": ({"model": "mixtral-8x7b", "layout.ep": 1}, {"model": "mixtral-8x7b", "layout.ep": 8}),
    "tp-inside-domain": ({"layout.tp": 16}, {"layout.tp": 8}),
    "ep-traffic-hidden-or-inside": (
        {"knobs.dispatcher": "alltoall", "knobs.ep_overlap": False},
        {"knobs.dispatcher": "alltoall"},
    ),
    "cp-ring-leaves-domain": (
        {"layout.tp": 1, "layout.cp": 16, "job.seq_len": 65536},
        {"layout.tp": 1, "layout.cp": 8, "job.seq_len": 32768},
    ),
    "hierarchical-cp-has-a-case": (
        {"layout.tp": 2, "layout.cp": 4, "job.seq_len": 16384, "knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 2},
        {"layout.tp": 2, "layout.cp": 8, "job.seq_len": 32768, "knobs.cp_comm": "a2a+p2p"},  # over nodes, and faster
    ),
    "axis-knobs-have-an-axis": ({"layout.tp": 1, "knobs.tp_overlap": True}, {"knobs.tp_overlap": True}),
    # dispatch
    "flex-dispatch-on-gpus": ({"cluster.chip": "cpu"}, {"cluster.chip": "gb200"}),
    "dispatcher-supports-chip": (
        {"cluster.chip": "gb200"},
        {"cluster.chip": "gb200", "stack.measured": ["dispatcher"]},
    ),
    "local-dispatch-needs-local-experts": ({"knobs.dispatcher": "local"}, {"knobs.dispatcher": "alltoall"}),
    "shared-overlap-needs-alltoall": (
        {"knobs.shared_expert_overlap": True},
        {"knobs.shared_expert_overlap": True, "knobs.dispatcher": "alltoall"},
    ),
    "shared-overlap-needs-shared-experts": (
        {"model": "qwen3-30b-a3b", "knobs.shared_expert_overlap": True},
        {"knobs.shared_expert_overlap": True},
    ),
    "router-in-fp32": ({"knobs.router_dtype": "bf16"}, {"knobs.router_dtype": "fp32"}),
    "experts-see-enough-tokens": (
        {"layout.ep": 1, "model": "qwen3-30b-a3b", "layout.tp": 4},
        {"model": "qwen3-30b-a3b"},
    ),
    "fusions-stay-on": ({"knobs.permute_fusion": False}, {"knobs.permute_fusion": True}),
    "expert-kernels-have-use": (
        {"target": "threefold", "knobs.expert_kernels": "cute"},
        {"target": "threefold", "knobs.expert_kernels": "cute", "knobs.expert_fusion": True},
    ),
    "delta-kernels-have-use": (
        {"target": "threefold", "knobs.delta_kernels": "fla"},
        {"target": "threefold", "knobs.delta_kernels": "fla", "model": "qwen3-next-80b-a3b"},
    ),
    # overlap
    "ep-overlap-needs-ep": ({"layout.ep": 1}, {"layout.ep": 8}),
    "ep-overlap-needs-experts": ({"model": "llama3-8b"}, {}),
    "ep-overlap-dispatcher": ({"knobs.dispatcher": "local"}, {"knobs.dispatcher": "hybridep"}),
    "ep-overlap-excludes-shared-overlap": (
        {"knobs.shared_expert_overlap": True},
        {"knobs.shared_expert_overlap": True, "knobs.ep_overlap": False},
    ),
    "ep-overlap-base-dtype": ({"knobs.precision": "fp32"}, {"knobs.precision": "fp16"}),
    "ep-overlap-torch": ({"stack.torch": "2.5.1"}, {"stack.torch": "2.6.0"}),
    "ep-overlap-needs-vpp": ({"layout.vpp": 1}, {"layout.vpp": 2}),
    "ep-overlap-excludes-full-recompute": ({"knobs.recompute": ["full"]}, {"knobs.recompute": ["layernorm"]}),
    "ep-overlap-recompute-method": (
        {"knobs.recompute_method": "block"},
        {"knobs.recompute_method": "block", "knobs.ep_overlap": False},
    ),
    "ep-overlap-recompute-layers": (
        {"knobs.recompute_layers": 2},
        {"knobs.recompute_layers": 2, "knobs.ep_overlap": False},
    ),
    "ep-overlap-mtp": ({"job.mtp": 2}, {"job.mtp": 1}),
    "ep-overlap-excludes-moe-recompute": ({"knobs.recompute": ["moe"]}, {"knobs.recompute": ["moe_act"]}),
    "ep-overlap-needs-microbatches": (
        {"layout.pp": 1, "layout.vpp": 1, "job.global_batch": 512},
        {"layout.pp": 1, "layout.vpp": 1, "job.global_batch": 1024},
    ),
    "overlap-needs-connections": ({"knobs.max_connections": 1}, {"knobs.max_connections": 8}),
    "tp-and-cp-need-one-connection": (
        {"knobs.ep_overlap": False, "knobs.delay_wgrad": False},
        {"knobs.ep_overlap": False, "knobs.delay_wgrad": False, "knobs.max_connections": 1},
    ),
    "delay-wgrad-needs-ep-overlap": ({"knobs.ep_overlap": False}, {"knobs.delay_wgrad": False}),
    "delay-wgrad-grad-reduce-te": ({"stack.te": "2.6.0"}, {"stack.te": "2.7.0"}),
    "delay-wgrad-fusion-te": ({"stack.te": "2.6.0"}, {"stack.te": "2.6.0", "knobs.grad_accum_fusion": False}),
    "delay-wgrad-graph-te": (
        {"stack.te": "2.11.0", "knobs.graphs": ["moe_router"]},
        {"stack.te": "2.12.0", "knobs.graphs": ["attn"]},
    ),
    "delay-wgrad-scoped-graph-te": (
        {"model": "qwen3-235b-a22b", "job.mtp": 0, "stack.te": "2.9.0", "knobs.graphs": ["moe_router"]},
        {"model": "qwen3-235b-a22b", "job.mtp": 0, "stack.te": "2.10.0", "knobs.graphs": ["moe_router"]},
    ),
    "dispatch-sms-have-use": (
        {"knobs.dispatcher": "alltoall", "knobs.dispatch_sms": 20},
        {"knobs.dispatcher": "deepep", "knobs.dispatch_sms": 20},
    ),
    "delay-wgrad-graph-fusion": (
        {"knobs.graphs": ["attn"], "knobs.grad_accum_fusion": False},
        {"knobs.graphs": ["attn"]},
    ),
    "delay-wgrad-graph-bias": ({"model": "gpt-oss-120b", "knobs.graphs": ["attn"]}, {"knobs.graphs": ["attn"]}),
    "ep-overlap-schedule": (
        {"target": "threefold", "layout.schedule": "zero-bubble"},
        {"target": "threefold", "layout.schedule": "interleaved"},
    ),
    "delay-wgrad-needs-whole-gradients": (
        {"target": "threefold", "knobs.data_parallel": "fsdp"},
        {"target": "threefold", "knobs.data_parallel": "zero1"},
    ),
    # precision
    "precision-runs-on-chip": ({"knobs.precision": "mxfp8"}, {"knobs.precision": "fp8-cs"}),
    "precision-is-emulated": (
        {"knobs.precision": "mxfp8", "target": "threefold"},
        {"knobs.precision": "fp8-blockwise", "target": "threefold"},
    ),
    "nvfp4-after-stable": (
        {"knobs.precision": "nvfp4", "cluster.chip": "b200"},
        {"knobs.precision": "mxfp8", "cluster.chip": "b200"},
    ),
    "mfu-with-its-peak": ({"job.data": "synthetic"}, {"job.data": "synthetic", "knobs.precision": "bf16"}),
    "cuts-hold-whole-blocks": (
        {"target": "threefold", "layout.etp": 32, "layout.ep": 2},
        {"target": "threefold", "layout.etp": 2, "layout.ep": 32},
    ),
    "tp-overlap-in-sixteen-bits": (
        {"target": "threefold", "knobs.tp_overlap": True},
        {"target": "threefold", "knobs.tp_overlap": True, "knobs.precision": "bf16"},
    ),
    "fp8-dispatch-by-alltoall": (
        {"target": "threefold", "knobs.fp8_dispatch": True},
        {"target": "threefold", "knobs.fp8_dispatch": True, "knobs.dispatcher": "alltoall"},
    ),
    "expert-copies-by-alltoall": (
        {"target": "threefold", "knobs.expert_balance": "replicate", "knobs.dispatcher": "deepep"},
        {"target": "threefold", "knobs.expert_balance": "replicate", "knobs.dispatcher": "alltoall"},
    ),
    "expert-copies-have-use": ({"knobs.expert_copies": 2}, {}),
    "megatron-copies-no-experts": (
        {"target": "megatron-bridge", "knobs.expert_balance": "replicate"},
        {"target": "threefold", "knobs.expert_balance": "replicate"},
    ),
    "fp8-output-fits-head": (
        {"target": "threefold", "knobs.fp8_output": True, "layout.tp": 64},
        {"target": "threefold", "knobs.fp8_output": True},
    ),
    "megatron-has-precision": ({"knobs.precision": "fp8-rowwise"}, {"knobs.precision": "fp8-cs"}),
    "fp8-knobs-need-fp8": ({"knobs.fp8_params": True, "knobs.precision": "bf16"}, {"knobs.fp8_params": True}),
    # graphs
    "graph-needs-static-experts": (
        {"knobs.graphs": ["full_iteration"]},
        {"knobs.graphs": ["full_iteration"], "job.capacity_factor": 1.5, "job.capacity_scope": "rank"},
    ),
    "graph-of-experts-by-alltoall": (
        {"knobs.graphs": ["moe"], "job.capacity_factor": 1.0, "knobs.ep_overlap": False, "knobs.delay_wgrad": False},
        {"knobs.graphs": ["attn"]},
    ),
    "graph-full-iteration-alone": (
        {"knobs.graphs": ["full_iteration", "attn"], "job.capacity_factor": 1.5},
        {"knobs.graphs": ["attn"]},
    ),
    "graph-preprocess-needs-router": (
        {"knobs.graphs": ["moe_preprocess"]},
        {"knobs.graphs": ["moe_router", "moe_preprocess"]},
    ),
    "graph-excludes-full-recompute": (
        {"knobs.graphs": ["attn"], "knobs.recompute": ["full"]},
        {"knobs.graphs": ["attn"], "knobs.recompute": ["layernorm"]},
    ),
    "graph-router-excludes-moe-recompute": (
        {"knobs.graphs": ["moe_router"], "knobs.recompute": ["moe"]},
        {"knobs.graphs": ["attn"], "knobs.recompute": ["moe"]},
    ),
    "graph-preprocess-without-sync": (
        {
            "knobs.graphs": ["moe_router", "moe_preprocess"],
            "knobs.dispatcher": "alltoall",
            "knobs.router_padding": True,
        },
        {"knobs.graphs": ["moe_router", "moe_preprocess"], "knobs.router_padding": True},
    ),
    "graph-needs-static-lengths": (
        {"knobs.graphs": ["attn"], "job.dynamic_length": True},
        {"knobs.graphs": [], "job.dynamic_length": True},
    ),
    "graph-attention-with-packing": (
        {"knobs.graphs": ["attn", "moe_router"], "job.packing": True, "target": "threefold"},
        {"knobs.graphs": ["moe_router"], "job.packing": True, "target": "threefold"},
    ),
    "graph-leaves-exchange-free": (
        {"knobs.graphs": ["moe"], "job.capacity_factor": 1.0},
        {"knobs.graphs": ["moe"], "job.capacity_factor": 1.0, "knobs.ep_overlap": False},
    ),
    "graph-widen-after-stable": (
        {"knobs.graphs": ["full_iteration"], "job.capacity_factor": 1.5},
        {"knobs.graphs": ["attn"]},
    ),
    "graph-scope-exists": ({"knobs.graphs": ["mamba"]}, {"model": "nemotron-3-nano", "knobs.graphs": ["mamba"]}),
    "graph-excludes-offload": (
        {"knobs.graphs": ["attn"], "knobs.activation_offload_layers": 2},
        {"knobs.graphs": ["attn"], "knobs.activation_offload": ["core_attn"]},
    ),
    "compile-excludes-graphs": (
        {"knobs.compile": True, "knobs.graphs": ["attn"]},
        {"knobs.compile": True},
    ),
    "compile-finds-parts": (
        {"target": "threefold", "knobs.compile": True},
        {"target": "threefold", "knobs.compile": True, "model": "qwen3-next-80b-a3b"},
    ),
    "wgrad-overlap-alone": (
        {"knobs.wgrad_overlap": True, "knobs.ep_overlap": True},
        {"knobs.wgrad_overlap": True, "knobs.ep_overlap": False, "knobs.delay_wgrad": False},
    ),
    "engine-has-graphs": (
        {"target": "threefold", "knobs.graphs": ["attn", "moe_router", "moe_preprocess"]},
        {
            "target": "threefold",
            "knobs.dispatcher": "alltoall",
            "knobs.graphs": ["attn", "moe_router", "moe_preprocess"],
        },
    ),
    "graphs-fit-their-budget": (
        {"target": "threefold", "knobs.graphs": ["attn"], "knobs.graph_memory_gb": 1.0},
        {"target": "threefold", "knobs.graphs": ["attn"], "knobs.graph_memory_gb": 1000.0},
    ),
    # memory
    "master-weights-are-a-choice": (
        {"knobs.master_weights": False},
        {"knobs.master_weights": False, "target": "threefold"},
    ),
    "remainders-need-bf16": (
        {"knobs.store_param_remainders": True, "knobs.precision": "fp16"},
        {"knobs.store_param_remainders": True},
    ),
    "muon-dtype-takes-effect": (
        {"target": "threefold", "knobs.muon_dtype": "bf16"},
        {"target": "threefold", "knobs.muon_dtype": "bf16", "job.optimizer": "muon"},
    ),
    "updates-need-bits": ({"knobs.master_weights": False, "target": "threefold"}, {"target": "threefold"}),
    "states-fit-memory": ({"layout.ep": 1, "layout.pp": 1, "layout.vpp": 1}, {}),
    "peak-fits-memory": (
        {"job.micro_batch": 8, "knobs.recompute": [], "job.global_batch": 16384},
        {},
    ),
    "peak-near-memory": ({"job.seq_len": 7168}, {}),
    # vision
    "vlm-fsdp-before-pipeline": (
        {"model": "qwen3-vl-235b-a22b"},
        {"model": "qwen3-vl-235b-a22b", "layout.stages": "Ett|(t*3|)*30ttL"},
    ),
    "vlm-benchmark-has-images": (
        {"model": "qwen3-vl-30b-a3b", "job.images": 0, "job.data": "/data/chats"},
        {"model": "qwen3-vl-30b-a3b", "job.data": "synthetic", "job.images": 2},
    ),
    "vlm-3d-cuts-experts-first": (
        {"model": "qwen3-vl-235b-a22b", "layout.stages": "Ett|(t*3|)*30ttL", "layout.tp": 8},
        {"model": "qwen3-vl-235b-a22b", "layout.stages": "Ett|(t*3|)*30ttL", "layout.tp": 1},
    ),
    "vlm-sweep-microbatch": ({"model": "qwen3-vl-30b-a3b"}, {"model": "qwen3-vl-30b-a3b", "job.micro_batch": 2}),
    "vlm-in-bf16-without-cp": (
        {"model": "qwen3-vl-30b-a3b", "layout.cp": 2, "knobs.precision": "bf16"},
        {"model": "qwen3-vl-30b-a3b", "knobs.precision": "bf16"},
    ),
    "freeze-parts-exist": ({"job.freeze": ["vision"]}, {"model": "qwen3-vl-30b-a3b", "job.freeze": ["vision"]}),
    "something-trains": ({"job.freeze": ["language"]}, {"model": "qwen3-vl-30b-a3b", "job.freeze": ["language"]}),
    # what trains
    "freeze-patterns-match": (
        {"target": "threefold", "job.freeze": ["layers.0.atn.*"]},
        {"target": "threefold", "job.freeze": ["layers.0.*", "embed.weight"]},
    ),
    "freeze-leaves-something": (
        {"target": "threefold", "job.freeze": ["*"]},
        {"target": "threefold", "job.freeze": ["*.weight"]},
    ),
    "lora-needs-rank": ({"job.lora_alpha": 16}, {"target": "threefold", "job.lora_alpha": 16, "job.lora_rank": 8}),
    "lora-targets-exist": (
        {"target": "threefold", "model": "qwen3-30b-a3b", "job.lora_rank": 8, "job.lora_targets": ["experts", "mlp"]},
        {"target": "threefold", "job.lora_rank": 8, "job.lora_targets": ["experts", "mlp"]},
    ),
    "adapters-need-our-engine": ({"job.lora_rank": 8}, {"target": "threefold", "job.lora_rank": 8}),
    "lora-excludes-tp-overlap": (
        {"target": "threefold", "job.lora_rank": 8, "knobs.tp_overlap": True},
        {"target": "threefold", "job.lora_rank": 8},
    ),
    "lora-excludes-latents": (
        {"target": "threefold", "job.lora_rank": 8, "layout.cp": 2, "knobs.cp_exchange": "latents"},
        {"target": "threefold", "job.lora_rank": 8, "layout.cp": 2, "knobs.cp_exchange": "expanded"},
    ),
    "lora-experts-unfused": (
        {"target": "threefold", "job.lora_rank": 8, "job.lora_targets": ["experts"], "knobs.expert_fusion": True},
        {"target": "threefold", "job.lora_rank": 8, "knobs.expert_fusion": True},
    ),
    "images-need-vision": ({"job.images": 1}, {"model": "qwen3-vl-30b-a3b", "job.images": 1}),
    "vision-recompute-needs-vision": (
        {"knobs.vision_recompute": ["attn"]},
        {"model": "qwen3-vl-30b-a3b", "knobs.vision_recompute": ["attn"]},
    ),
    # stacks
    "engine-has-capacity": (
        {"target": "threefold", "job.capacity_factor": 1.5, "job.capacity_scope": "rank"},
        {
            "target": "threefold",
            "job.capacity_factor": 1.5,
            "job.capacity_scope": "rank",
            "knobs.graphs": ["full_iteration"],
        },
    ),
    "flex-dispatch-in-bf16": ({"knobs.precision": "fp16"}, {"knobs.precision": "bf16"}),
    "grad-accum-fusion-takes-effect": (
        {"target": "threefold", "knobs.grad_accum_fusion": True, "knobs.data_parallel": "fsdp"},
        {"target": "threefold", "knobs.grad_accum_fusion": True, "knobs.graphs": ["attn"]},
    ),
    "engine-has-a-choice": ({"target": "threefold", "knobs.permute_fusion": False}, {}),
    "engine-has-knob": ({"target": "threefold", "knobs.fp8_attention": True}, {}),
    "stack-runs-family": ({"target": "threefold", "model": "nemotron-3-super"}, {"model": "nemotron-3-super"}),
}

# Ids of the mission that `check` must cover: every row of kind rule or diagnosis.
ROWS = [
    "LC-CP-SIZE",
    "LC-DP-ALIVE",
    "LC-GBS",
    "LC-MINGPU",
    "LC-TPxCP",
    "LC-SDPA",
    "LC-4KBASE",
    "LC-NOREPL",
    "LC-KERNEL",
    "RC-SHEXP",
    "RC-ALIAS",
    "RC-FP8",
    "RC-ORDER",
    "PF-ETPWARN",
    "PF-SAMEPP",
    "PP-STATIC",
    "TOPO",
    "EP-OVER-TP",
    "CP-WHEN",
    "DI-GATE-DE",
    "DI-GATE-HE",
    "DI-APPLY",
    "DI-MAP",
    "RT-FP32",
    "RT-FORCE",
    "EO-V1",
    "EO-V2",
    "EO-V3",
    "EO-V4",
    "EO-V5",
    "EO-V6",
    "EO-V7",
    "EO-V8",
    "EO-V9",
    "EO-V10",
    "EO-V11",
    "EO-V12",
    "WG-V1",
    "WG-V2",
    "WG-V3",
    "WG-V4",
    "WG-V5",
    "WG-V6",
    "WG-V7",
    "EO-D1",
    "EO-D2",
    "EO-D3",
    "EO-D4",
    "EO-D5",
    "EO-D6",
    "EO-D7",
    "EO-D8",
    "EO-D9",
    "EO-D10",
    "EO-D11",
    "EO-MAXCONN",
    "FP-MAP",
    "FP-MFU",
    "CG-DROP",
    "CG-RECOMP",
    "CG-STATIC",
    "CG-EAGER",
    "CG-WIDEN",
    "CG-EP",
    "CG-PREPSYNC",
    "OF-RULE",
    "PW-MEMSIG",
    "PW-COMMSIG",
    "PW-HOSTSIG",
    "PW-COMPSIG",
    "VL-GUIDE",
    "VL-MOCK",
    "VL-MBS",
    "VL-COMPAT",
    "CF-ONE",
    "CF-FIX",
]


def fired(fields: dict[str, Any]) -> set[str]:
    return {finding.rule for finding in check(build(fields))}


def test_the_starting_plan_is_clean() -> None:
    assert judge(build(CLEAN)) == []


def test_every_rule_has_a_case() -> None:
    """Notes are in `test_audited_cases.py`: nearly every plan has one."""
    assert set(CASES) == {slug for slug, rule in RULES.items() if rule.severity != "note"}


@pytest.mark.parametrize("slug", CASES)
def test_rule_refuses_accepts_and_cures(slug: str) -> None:
    bad, good = CASES[slug]
    assert slug not in fired({**CLEAN, **good})
    plan = build({**CLEAN, **bad})
    findings = [finding for finding in check(plan) if finding.rule == slug]
    assert findings, f"{slug} did not fire"
    for finding in findings:
        assert finding.fix_text
        assert finding.problem
        assert finding.at
        if finding.fix_data:
            plan = change(plan, finding.fix_data)
    if findings[0].fix_data:
        assert slug not in {finding.rule for finding in check(plan)}


def test_rows_of_the_mission_are_covered() -> None:
    covered = {row for rule in RULES.values() for row in rule.rows}
    # EO-AB is the parser's overlap-switch-couples; CF-ALL is shown by test_all_findings_at_once.
    assert set(ROWS) - covered == set()
    assert raised_by("overlap-switch-couples") == "reading a plan"


def test_all_findings_at_once() -> None:
    plan = build({**CLEAN, "layout.ep": 48, "layout.tp": 3, "knobs.precision": "mxfp8", "job.global_batch": 7})
    slugs = [finding.rule for finding in errors(check(plan))]
    assert {"ep-divides-experts", "tp-divides-model", "precision-runs-on-chip", "grids-divide-ranks"} <= set(slugs)
    assert slugs == [finding.rule for finding in errors(check(plan))]  # and in a stable order


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"job.capacity_factor": 32.0}, None),  # 256 experts, 8 of a token: at 32 each takes all
        ({"job.capacity_factor": 65_536.0}, {"job.capacity_factor": None}),
        ({"job.capacity_factor": 65_536.0, "knobs.graphs": ["moe"]}, {"job.capacity_factor": 32.0}),
    ],
    ids=["at the limit", "above", "above, with graphs that need it"],
)
def test_a_capacity_that_can_drop_nothing_is_named(fields: dict[str, Any], fix: dict[str, Any] | None) -> None:
    off = {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}
    found = [one for one in check(build({**CLEAN, **off, **fields})) if one.rule == "capacity-is-used"]
    assert [one.fix_data for one in found] == ([fix] if fix else [])


@pytest.mark.parametrize("cores", ["a-b", "3-1", "0-1;2-3", "0-9999999999", "", "\u0661"])
def test_cores_that_are_none_are_refused_before_a_run(cores: str) -> None:
    """With one set for each of eight ranks of a node; a range of ten thousand million cores takes no time."""
    assert "cores-exist" in {one.rule for one in errors(check(build({**CLEAN, "run.cores": cores})))}


def test_adapters_at_their_defaults_are_no_settings_of_adapters() -> None:
    plan = build({**CLEAN, "job.lora_targets": ["attention", "mlp", "shared_experts"]})
    assert "job.lora_targets" in plan.stated  # as in the complete plan of a run
    assert "lora-needs-rank" not in {finding.rule for finding in check(plan)}


def test_fix_text_offers_the_valid_values() -> None:
    finding = next(f for f in check(build({**CLEAN, "layout.ep": 48})) if f.rule == "ep-divides-experts")
    assert str(finding) == (
        "error[ep-divides-experts] layout.ep: 48 ranks cannot share 256 experts evenly\n"
        "  fix: layout.ep=64\n"
        "  advice: divisors of 256: 1, 2, 4, 8, 16, 32, 64, 128, 256"
    )
    assert finding.fix_data == {"layout.ep": 64}  # with 32 the memory is nearly full


@pytest.mark.parametrize(
    ("knob", "value"),
    [("optimizer_offload", 1.0), ("activation_offload", ["moe_act"]), ("activation_offload_layers", 2)],
)
def test_offload_is_found_where_it_is_set(knob: str, value: Any) -> None:
    plan = build({**CLEAN, f"knobs.{knob}": value, "knobs.recompute": []})
    assert [finding.at for finding in check(plan) if finding.rule == "offload-comes-last"] == [f"knobs.{knob}"]


def test_repair_keeps_the_gpus_and_the_batch() -> None:
    fixed, applied = repair(build({**CLEAN, "layout.ep": 48}))
    assert [finding.rule for finding in applied] == ["ep-divides-experts"]
    assert (fixed.layout.ep, fixed.cluster.gpus, fixed.job.global_batch) == (64, 1024, 8192)


def test_every_slug_explains_itself() -> None:
    for slug in known_slugs():
        said = explain(slug)
        assert said
        assert said.what
        assert said.why
        assert said.confirm
        assert said.fix
    assert explain("no-such-rule") is None


def test_versions_unstated_are_not_judged() -> None:
    assert not {rule for rule in fired({**CLEAN, "knobs.graphs": ["attn"]}) if rule.endswith("-te")}


def test_megatron_rules_bind_only_megatron() -> None:
    fields = {**CLEAN, "knobs.precision": "fp32", "stack.te": "1.0"}
    assert "ep-overlap-base-dtype" in fired(fields)
    assert "ep-overlap-base-dtype" not in fired({**fields, "target": "threefold"})
    plan = build(fields)
    assert "ep-overlap-base-dtype" not in {finding.rule for finding in check(plan, target="threefold")}


@pytest.mark.parametrize(
    ("knob", "value"),
    [("permute_fusion", False), ("loss_fusion", False), ("router_dtype", "bf16"), ("router_padding", True)],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8-blockwise"])
def test_what_the_engine_does_in_one_way_is_said_once(knob: str, value: Any, precision: str) -> None:
    """And no rule speaks of it as if the engine had turned it."""
    graphs = {"knobs.graphs": ["moe_router", "moe_preprocess"], "knobs.dispatcher": "alltoall"}
    fields = {**CLEAN, **graphs, "target": "threefold", "knobs.precision": precision}
    plan = build({**fields, f"knobs.{knob}": value})
    before = check(build(fields))
    [finding] = [one for one in check(plan) if one not in before]
    assert (finding.rule, finding.at) == ("engine-has-a-choice", f"knobs.{knob}")
    assert not blockers(promoted([finding]))
    assert finding.problem.startswith(f"the engine has no choice of {knob}: ")
    assert check(change(plan, finding.fix_data)) == before


def test_the_documents_counts_of_gpus() -> None:
    """256 GPUs for DeepSeek-V3 at 128K, 512 at 256K, 128 for Qwen3-235B at 128K; one node less is refused."""
    for model, gpus, degrees in (
        ("deepseek-v3", 256, {"pp": 8, "cp": 32, "ep": 32}),
        ("deepseek-v3", 512, {"pp": 8, "cp": 64, "ep": 32}),
        ("qwen3-235b-a22b", 128, {"tp": 4, "pp": 4, "cp": 4, "ep": 32}),
    ):
        layout = {"layout.tp": 1, "layout.vpp": 1, **{f"layout.{axis}": d for axis, d in degrees.items()}}
        fields = {**CLEAN, **layout, "model": model, "knobs.ep_overlap": False, "knobs.delay_wgrad": False}
        assert "grids-divide-ranks" not in fired({**fields, "cluster.gpus": gpus})
        assert "grids-divide-ranks" in fired({**fields, "cluster.gpus": gpus - 8})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "rule"),
    [
        ("dualpipev", 2, 1, "schedule-fits-chunks"),
        ("dualpipev", 4, 3, "schedule-fits-chunks"),
        ("dualpipev", 1, 2, "schedule-fits-chunks"),
        (None, 1, 2, "vpp-needs-pp"),
    ],
)
def test_chunks_that_no_schedule_places_are_a_finding(
    schedule: str | None, pp: int, vpp: int, rule: str, overlap: bool
) -> None:
    """And nothing else: where they would lie in memory is not asked."""
    cluster = {"target": "threefold", "model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 256}
    layout = {"layout.pp": pp, "layout.vpp": vpp, "layout.ep": 32, "layout.schedule": schedule}
    found = check(build({**cluster, **layout, "job.global_batch": 64, "knobs.ep_overlap": overlap}))
    assert rule in {finding.rule for finding in errors(found)}
    assert "peak-fits-memory" not in {finding.rule for finding in found}


@pytest.mark.parametrize(("model", "absent"), [("qwen3-30b-a3b", True), ("deepseek-v3", False), ("llama3-8b", False)])
def test_a_graph_of_dense_layers_needs_one(model: str, absent: bool) -> None:
    fields = {"model": model, "target": "threefold", "cluster.chip": "h100", "knobs.graphs": ["attn", "mlp"]}
    fixes = [finding.fix for finding in check(build(fields)) if finding.rule == "graph-scope-exists"]
    assert fixes == ([{"knobs.graphs": ["attn"]}] if absent else [])


def test_dense_layers_need_a_width() -> None:
    """Not every MoE has one; the estimate of delayed weight gradients once divided by the size of such layers."""
    fields = {"model": "demo-qwen3-moe", "model.num_dense_layers": 1, "job.lora_rank": 1}
    found = check(build({**fields, "layout.schedule": "zero-bubble"}))
    assert {"model.num_dense_layers": 0} in [one.fix for one in found if one.rule == "dense-layers-exist"]
    assert "dense-layers-exist" not in fired({**fields, "model.num_dense_layers": 0})
    assert "dense-layers-exist" not in fired({**fields, "model": "qwen3-30b-a3b"})


def no_rule_breaks(fields: dict[str, Any]) -> None:
    for finding in check(build(fields)):
        assert finding.rule in RULES
        assert finding.to_json()["severity"] in ("error", "warning", "note")
        assert finding.fix_text


@settings(max_examples=100, deadline=None)
@given(random_fields())
def test_random_plans_never_break_a_rule(fields: dict[str, Any]) -> None:
    no_rule_breaks(fields)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(random_fields())
def test_many_random_plans_never_break_a_rule(fields: dict[str, Any]) -> None:
    no_rule_breaks(fields)


@pytest.mark.parametrize(("dtype", "refused"), [("fp32", False), ("bf16", False), ("fp16", True), ("fp8", True)])
def test_moments_that_need_scales_are_refused_for_our_engine(dtype: str, refused: bool) -> None:
    """Megatron's precision-aware optimizer has such scales."""
    fields = {**CLEAN, "knobs.optimizer_dtype": dtype}
    found = [f.fix_data for f in check(build({**fields, "target": "threefold"})) if f.at == "knobs.optimizer_dtype"]
    assert found == ([{"knobs.optimizer_dtype": "bf16"}] if refused else [])
    assert not any(f.at == "knobs.optimizer_dtype" for f in check(build(fields)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, None),
        ({"knobs.grad_accum_fusion": True}, None),
        ({"knobs.data_parallel": "fsdp"}, None),  # it was not asked for in so many words
        ({"knobs.data_parallel": "fsdp", "knobs.grad_accum_fusion": True}, "fsdp"),
        ({"knobs.graphs": ["attn"], "knobs.grad_accum_fusion": True}, None),
    ],
)
def test_a_fusion_that_is_stated_and_off_is_named(fields: dict[str, Any], named: str | None) -> None:
    plan = build({**CLEAN, "target": "threefold", **fields})
    for one in (plan, change(plan, {"job.steps": 7})):  # what a plan states is kept when it changes
        found = [f.problem for f in check(one) if f.rule == "grad-accum-fusion-takes-effect"]
        assert found == ([] if named is None else [f"the fusion is off with {named}"])
