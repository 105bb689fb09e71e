"""Memory of CUDA graphs in a rehearsal: against pools that an H200 held, and near the estimate."""

from typing import Any

import pytest
from plans import build
from rehearsal_plans import GPU

from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.threefold.graphs.torch_pool import GraphPool
from threefold.dryrun.rehearse_rank import RankRehearsal, rehearse_rank
from threefold.units import GIB, MIB

THREE = ["attn", "moe_router", "moe_preprocess"]
# The step of benchmarks/graphs.py.
MEASURED = {
    "model": "qwen3-30b-a3b", "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1, "model.num_layers": 8,
    "job.seq_len": 4096, "job.global_batch": 1, "job.aux_loss": 0.0, "knobs.precision": "bf16",
    "knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16", "knobs.master_weights": False,
    "knobs.expert_fusion": True,
}  # fmt: skip


def rehearsed(fields: dict[str, Any]) -> RankRehearsal:
    return rehearse_rank(build(fields), 0)


# benchmarks/results/graphs-h200.json, graphs-company-h200.json and, for the last two, graphs-h200-2026-11-18.json: 1.84
# to 1.95, 11.76 and 12.79 GiB.
@pytest.mark.parametrize(
    ("scopes", "least_gib", "most_gib"),
    [(THREE, 1.84, 1.95), (["attn", "moe"], 11.7, 11.9), (["full_iteration"], 12.75, 12.9)],
)
def test_graphs_hold_what_they_held_on_a_gpu(scopes: list[str], least_gib: float, most_gib: float) -> None:
    terms = rehearsed({**MEASURED, "knobs.graphs": scopes}).terms
    assert least_gib <= terms["graphs"] / GIB <= most_gib
    assert "attention" not in terms  # its activations lie in the graphs


ADAPTERS = {
    "job.lora_rank": 64, "job.lora_targets": ["mlp", "experts", "shared_experts", "attention"], "job.aux_loss": 0.0,
}  # fmt: skip
NEAR = {
    "one GPU": {**MEASURED, "knobs.graphs": THREE},
    "experts in graphs": {**MEASURED, "knobs.graphs": ["attn", "moe"]},
    "a whole microbatch": {**MEASURED, "knobs.graphs": ["full_iteration"]},
    "several whole microbatches": {**MEASURED, "knobs.graphs": ["full_iteration"], "job.global_batch": 4},
    "EP": {**GPU, "model.num_layers": 4, "knobs.graphs": THREE},
    "TP": {**GPU, "layout.tp": 2, "model.num_layers": 4, "knobs.graphs": THREE},
    "CP": {**GPU, "layout.cp": 4, "job.seq_len": 16384, "model.num_layers": 2, "knobs.graphs": THREE},
    "FP8": {**GPU, "knobs.precision": "fp8-blockwise", "model.num_layers": 2, "knobs.graphs": THREE},
    "a slot for each microbatch in flight": {**GPU, "layout.pp": 4, "model.num_layers": 8, "knobs.graphs": THREE},
    "a budget": {
        **GPU, "layout.pp": 4, "model.num_layers": 8, "knobs.graphs": THREE, "knobs.graph_memory_gb": 1.0,
    },
    "delayed weight gradients": {
        **GPU, "layout.pp": 2, "layout.schedule": "zero-bubble", "model.num_layers": 4, "knobs.graphs": THREE,
    },
    "EP overlap": {
        **GPU, "model.num_layers": 4, "knobs.ep_overlap": True, "knobs.delay_wgrad": True, "knobs.graphs": THREE,
    },
    "MLA": {
        **GPU, "model": "deepseek-v3", "layout.ep": 64, "layout.tp": 2, "layout.pp": 4, "model.num_layers": 8,
        "job.mtp": 0, "knobs.graphs": ["attn", "mlp", "moe_router", "moe_preprocess"],
    },
    "dense, whole microbatches": {
        "model": "llama3-8b", "target": "threefold", "cluster.chip": "h100", "cluster.gpus": 64, "job.seq_len": 4096,
        "job.global_batch": 128, "model.num_layers": 4, "knobs.graphs": ["full_iteration"],
    },
    "recompute": {
        **GPU, "model.num_layers": 4, "knobs.recompute": ["layernorm", "moe_act"], "knobs.graphs": THREE,
    },
    "whole MoE layers in a pipeline": {
        **GPU, "model": "moonlight-16b-a3b", "cluster.gpus": 4, "layout.ep": 1, "layout.pp": 4, "model.num_layers": 8,
        "model.num_dense_layers": 1, "model.num_experts": 8, "job.seq_len": 16384, "job.global_batch": 8,
        "knobs.precision": "fp16", "knobs.expert_fusion": True, "knobs.grad_accum_fusion": False,
        "knobs.graphs": ["moe"],
    },
    "whole MoE layers with biases, recomputed": {
        **GPU, "model": "gpt-oss-120b", "cluster.chip": "a100", "cluster.gpus": 4, "layout.ep": 1, "layout.pp": 4,
        "layout.vpp": 2, "model.num_layers": 8, "model.num_experts": 8, "job.global_batch": 8, "job.micro_batch": 2,
        "knobs.precision": "fp16", "knobs.recompute": ["moe_act", "layernorm"], "knobs.graphs": ["moe"],
    },
    "whole MoE layers in chunks of tokens": {
        **GPU, "model": "deepseek-v3", "cluster.gpus": 4, "layout.ep": 1, "layout.pp": 4, "model.num_layers": 4,
        "model.num_dense_layers": 0, "model.num_experts": 64, "job.seq_len": 65536, "job.global_batch": 4,
        "job.mtp": 0, "knobs.graphs": ["moe"],
    },
    "routers alone": {
        **GPU, "layout.pp": 4, "model.num_layers": 8, "job.seq_len": 16384, "knobs.graphs": ["moe_router"],
    },
    "recomputed dense layers": {
        **GPU, "model": "llama3-8b", "cluster.gpus": 8, "layout.ep": 1, "job.global_batch": 8, "model.num_layers": 3,
        "job.seq_len": 16384, "knobs.recompute": ["mlp", "layernorm"], "knobs.graphs": ["mlp"],
    },
    "frozen experts": {
        **GPU, "cluster.gpus": 4, "layout.ep": 1, "layout.pp": 2, "model.num_layers": 4, "model.num_experts": 8,
        "job.seq_len": 16384, "job.global_batch": 8, "job.freeze": ["*.experts.*"], "knobs.graphs": ["moe"],
    },
    "adapters of all modules": {**GPU, **ADAPTERS, "model.num_layers": 3, "knobs.graphs": THREE},
    "adapters behind a norm of attention": {
        **GPU, **ADAPTERS, "model": "gemma-4-26b-a4b", "model.num_layers": 4, "model.num_dense_layers": 0,
        "model.num_experts": 8, "layout.ep": 8, "layout.pp": 2, "layout.vpp": 2, "job.seq_len": 8192,
        "knobs.grad_dtype": "bf16", "knobs.expert_fusion": True, "knobs.graphs": THREE,
    },
    "adapters of latent attention": {
        **GPU, **ADAPTERS, "model": "moonlight-16b-a3b", "model.num_layers": 3, "model.num_dense_layers": 0,
        "job.mtp": 0, "knobs.graphs": ["attn"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_the_estimate_is_near_the_rehearsal(name: str) -> None:
    plan = build(NEAR[name])
    rank, estimated = rehearse_rank(plan, 0), memory(plan).stages[0]
    assert estimated.peak_bytes == pytest.approx(rank.peak_bytes, rel=0.03)
    # Blocks of a pool are of other sizes than the tensors in them.
    assert estimated.terms["graphs"] == pytest.approx(rank.terms["graphs"], rel=0.07)
    if plan.knobs.graph_memory_gb is not None:
        assert rank.terms["graphs"] <= plan.knobs.graph_memory_gb * GIB


@pytest.mark.parametrize("fields", [{"layout.tp": 2}, {"layout.pp": 2}], ids=str)
def test_the_collectives_are_those_without_graphs(fields: dict[str, Any]) -> None:
    eager, graphed = (rehearsed({**GPU, "model.num_layers": 2, **fields, "knobs.graphs": on}) for on in ([], THREE))
    assert eager.collectives
    assert eager.collectives == graphed.collectives


def test_a_pool_gives_nothing_back_and_joins_no_segments() -> None:
    pool = GraphPool()
    assert [pool.resize(key, 16 * MIB) for key in (1, 2)] == [16 * MIB, 16 * MIB]
    assert [pool.resize(key, 0) for key in (1, 2)] == [0, 0]
    assert pool.resize(3, 12 * MIB) == 0  # in the first of them
    assert pool.resize(4, 4 * MIB) == 0  # in its rest
    assert pool.resize(5, 24 * MIB) == 24 * MIB  # no block is as large
    assert [pool.resize(key, 0) for key in (3, 4)] == [0, 0]
    assert pool.resize(6, 16 * MIB) == 0  # both parts are one block again
    assert pool.resize(7, 100) == 2 * MIB  # small ones have segments of their own
    assert pool.resize(8, 100) == 0
    assert pool.num_bytes == 58 * MIB
