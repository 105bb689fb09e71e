"""Context parallelism that exchanges MLA's latents: every kind equals one rank, and sends what a hand count says.

Gloo ranks in fp64 run a small DeepSeek-V3 of two layers whose sequence is sharded.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import plans
import pytest
import torch
from tiny_models import spec_of

from threefold.engine.attention.mla import MlaAttention
from threefold.engine.dist.collectives import CollectiveCall, all_reduce, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers.positions import Positions
from threefold.engine.model_options import Options
from threefold.engine.models.activation_memory import apply_activation_memory
from threefold.engine.models.build import build_model
from threefold.engine.shard.context_parallel import shard_context
from threefold.engine.shard.sequence_layout import shard_sequence
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.plan.plan import Plan

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LENGTH = 32
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 16 + [2] * 11, [3] * 32])


def latent_plan(kind: Any, cp: int, exchange: str = "latents", **fields: Any) -> Plan:
    fixed = {"cluster.chip": "h100", "cluster.gpus": cp, "layout.cp": cp, "job.seq_len": LENGTH}
    knobs = {"knobs.cp_comm": kind, "knobs.cp_exchange": exchange, **fields}
    return replace(plans.build({"model": "deepseek-v3", **fixed, **knobs}), model=spec_of("deepseek_v3"))


def model_errors(rank: int, plan: Plan, recompute: tuple[str, ...]) -> float:
    mesh = Mesh(plan.layout, rank)
    group = mesh.group("cp")
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 67
    slope = torch.randn(2, LENGTH, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = build_model(plan.model, dtype=torch.float64)
    weights = list(model.parameters())
    expected = model(tokens, documents_BS=DOCUMENTS).logits
    wholes = torch.autograd.grad(expected, weights, slope, materialize_grads=True)
    shard_context(model, mesh, plan)
    apply_activation_memory(model, Options(recompute=recompute))
    found = model(tokens, documents_BS=DOCUMENTS).logits
    parts = torch.autograd.grad(found, weights, shard_sequence(slope, group, 1), materialize_grads=True)
    worst = relative(found, shard_sequence(expected, group, 1))
    for whole, part in zip(wholes, parts, strict=True):
        total = part.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group).wait()
        worst = max(worst, relative(total, whole))
    return worst


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(
    "recompute",
    [(), ("mla_up_proj", "layernorm"), pytest.param(("core_attn",), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_latents_equal_one_rank(kind: str, recompute: tuple[str, ...]) -> None:
    """Packed documents, which cross the shards of ranks, with and without recompute."""
    plan = latent_plan(kind, 4, **{"knobs.cp_inner": 2 if kind == "a2a+p2p" else None})
    assert all(error < 1e-10 for error in run_ranks(4, model_errors, plan, recompute))


def test_inner_size_of_the_plan_is_kept() -> None:
    """Four ranks that trade heads by four: the ring has one member, and nothing is sent round it."""
    plan = latent_plan("a2a+p2p", 4, **{"knobs.cp_inner": 4})
    for sent in run_ranks(4, bytes_of, plan):
        assert {name.rpartition(" ")[2] for name in (*sent[0], *sent[1])} == {"inner"}


def bytes_of(rank: int, plan: Plan) -> tuple[Counter[str], Counter[str]]:
    mesh = Mesh(plan.layout, rank)
    model = build_model(plan.model, dtype=torch.float32)
    shard_context(model, mesh, plan)
    mla = next(module for module in model.modules() if isinstance(module, MlaAttention))
    tokens = LENGTH // plan.layout.cp
    x = torch.randn(2, tokens, plan.model.dim, requires_grad=True)
    sent: list[Counter[str]] = [Counter(), Counter()]

    def watch(into: Counter[str]) -> Any:
        def see(call: CollectiveCall) -> None:
            into[f"{call.operation} {call.group.name}"] += call.num_bytes

        return see

    positions = torch.arange(LENGTH).expand(2, LENGTH)
    group = mesh.group("cp")
    with observe_collectives(watch(sent[0])):
        out = mla(x, Positions(shard_sequence(positions, group, 1), whole_BS=positions))
    with observe_collectives(watch(sent[1])):
        out.sum().backward()
    return sent[0], sent[1]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_hand_count(kind: str) -> None:
    """fp32 on four ranks with 2 x 8 tokens each: latents of queries and of keys, and the output of all heads."""
    plan = latent_plan(kind, 4, **{"knobs.cp_inner": 2 if kind == "a2a+p2p" else None})
    spec: Any = plan.model.attention
    token = 2 * LENGTH // 4 * 4  # bytes of one column
    queries, keys, out = (token * n for n in (spec.q_rank, spec.kv_rank + spec.rope_dim, spec.num_heads * spec.v_dim))
    forward, backward = {
        "p2p": ({"send cp": 3 * keys}, {"send cp": 6 * keys}),
        "all_gather": ({"all_gather cp": 3 * keys}, {"all_gather cp": 3 * keys, "reduce_scatter cp": 3 * keys}),
        "a2a": (
            {"all_gather cp": 3 * (queries + keys), "all_to_all cp": out * 3 // 4},
            {
                "all_gather cp": 3 * (queries + keys),
                "all_to_all cp": 2 * out * 3 // 4,
                "reduce_scatter cp": 3 * (queries + keys),
            },
        ),
        # Two inner ranks gather their own latents and those that arrived from the other pair.
        "a2a+p2p": (
            {"all_gather cp inner": queries + 2 * keys, "all_to_all cp inner": out // 2, "send cp outer": keys},
            {
                "all_gather cp inner": queries + 2 * keys,
                "all_to_all cp inner": out,
                "reduce_scatter cp inner": queries + 2 * keys,
                "send cp outer": 2 * keys,
            },
        ),
    }[kind]
    for found in run_ranks(4, bytes_of, plan):
        assert found == (Counter(forward), Counter(backward))
