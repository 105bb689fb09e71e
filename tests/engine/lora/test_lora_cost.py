"""What frozen weights and adapters save: estimate, rehearsal and engine agree."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from lora_layouts import ALL, FROZEN_CASES, LORA_CASES
from oracle_layouts import BASE, Case
from plans import build
from rehearsal_plans import GPU
from tiny_models import spec_of

from threefold.cost.local_parameters import whole_parameters
from threefold.cost.memory.by_stack import memory
from threefold.cost.traffic.by_stack import traffic
from threefold.cost.trained_weights import gemms_per_weight
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.engine.build import build as build_parts
from threefold.engine.build import options_of
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models.build import build_model
from threefold.engine.schedule.microbatch_runners import Pipelined
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan

LORA = {"job.lora_rank": 16}
EVERY: dict[str, Any] = {"job.lora_rank": 16, "job.lora_targets": list(ALL)}
EXPERTS = {"job.freeze": ["*.experts.*"]}
FSDP = {"knobs.data_parallel": "fsdp"}
ONE = {"cluster.gpus": 1, "layout.ep": 1, "job.global_batch": 1}
NEAR: dict[str, dict[str, Any]] = {
    "adapters of attention": LORA,
    "adapters of attention, one GPU": {**LORA, **ONE, "knobs.expert_fusion": True},
    "adapters of experts": EVERY,
    "adapters, fsdp": {**LORA, **FSDP, "model.num_layers": 4},
    "frozen experts": EXPERTS,
    "frozen tables": {"job.freeze": ["embed.*", "head.*"]},
}
ALSO_NEAR: dict[str, dict[str, Any]] = {
    "adapters of experts, fsdp": {**EVERY, **FSDP, "model.num_layers": 4},
    "adapters of experts, one GPU": {**EVERY, **ONE},
    "adapters of latents": {
        **EVERY, "model": "deepseek-v3", "layout.ep": 64, "layout.tp": 2, "layout.pp": 4, "model.num_layers": 8,
        "job.mtp": 0,
    },
    "adapters, biases, tp": {**LORA, "model": "gpt-oss-20b", "layout.ep": 4, "layout.tp": 4, "model.num_layers": 4},
    "adapters, full recompute": {**LORA, "knobs.recompute": ["full"]},
    "adapters, recompute by module": {**EVERY, "knobs.recompute": ["moe_act", "layernorm"]},
    "adapters beside FP8": {**LORA, "knobs.precision": "fp8-blockwise"},
    "adapters of experts beside FP8": {**EVERY, "knobs.precision": "fp8-blockwise"},
    "adapters, zero-bubble": {**LORA, "layout.pp": 2, "layout.schedule": "zero-bubble", "model.num_layers": 4},
    "adapters, ep overlap": {**LORA, "knobs.ep_overlap": True},
    "adapters of a dense model": {**LORA, "model": "llama3-8b", "layout.ep": 1, "layout.tp": 2},
    "frozen experts, fsdp": {**EXPERTS, **FSDP},
    "frozen attention": {"job.freeze": ["*.mixer.*"]},
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        *(pytest.param(fields, id=name) for name, fields in NEAR.items()),
        *(pytest.param(fields, id=name, marks=pytest.mark.slow) for name, fields in ALSO_NEAR.items()),
    ],
)
def test_estimate_is_near_the_rehearsal_where_weights_are_frozen(fields: dict[str, Any]) -> None:
    """3 %, as for plans in which everything trains."""
    plan = build({**GPU, "job.global_batch": 4096, "model.num_layers": 2, **fields})
    for stage in {0, plan.layout.pp - 1}:
        seen = rehearse_rank(plan, stage * plan.layout.stride("pp"))
        found = memory(plan).stages[stage]
        assert found.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
        for term in ("weights", "gradients", "optimizer"):
            assert found.terms[term] == pytest.approx(seen.terms.get(term, 0), rel=0.03, abs=2**20), term


@pytest.mark.parametrize("case", [*FROZEN_CASES, *LORA_CASES], ids=lambda case: case.name)
def test_cost_knows_the_engines_parameters(case: Case) -> None:
    """By name, shape and order, and whether each trains."""
    knobs = replace(case.plan.knobs, dispatcher="local")
    plan = replace(case.plan, layout=Layout(), knobs=knobs)
    model = build_model(plan.model, plan.mtp, device="meta", options=options_of(plan))
    wanted = [(name, tuple(p.shape), not p.requires_grad) for name, p in model.named_parameters()]
    assert [(one.name, one.shape, one.is_frozen) for one in whole_parameters(plan)] == wanted


def test_gemms_that_are_left() -> None:
    """Qwen3-30B-A3B with adapters of attention: counted by hand."""
    base = {**GPU, "model.num_layers": 48}
    assert gemms_per_weight(build(base)) == (3, 1)
    assert gemms_per_weight(build({**base, **EXPERTS}), "experts") == (2, 0)
    assert gemms_per_weight(build({**base, **EXPERTS})) == (3, 1)
    passes, wgrads = gemms_per_weight(build({**base, **LORA}))
    # q 4096, k and v 512 each, out: 16 x (2048 + 4096 + 2 x (2048 + 512) + 4096 + 2048) adapter weights a layer, over
    # those weights and the router's 128 x 2048; the means of three GEMMs each.
    adapters = 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    weights = 2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048
    assert passes == pytest.approx(2 + 3 * adapters / weights)
    assert wgrads == 0
    assert gemms_per_weight(build({**base, **LORA}), "head") == (2, 0)


TRAFFIC = {
    "adapters over ep and etp": ("qwen3_moe", 4, {"layout.ep": 2, "layout.etp": 2, **EVERY}),
    "adapters of latents over tp": ("deepseek_v3", 2, {"layout.tp": 2, **EVERY}),
    "adapters over pp": ("qwen3_moe", 2, {"layout.pp": 2, **EVERY}),
    "frozen experts": ("qwen3_moe", 4, {"layout.ep": 2, **EXPERTS}),
}


@pytest.mark.parametrize(
    "name", [name if number == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(TRAFFIC)]
)
def test_only_gradients_of_what_trains_travel(name: str) -> None:
    """Every collective of a step on real ranks, counted and weighed, is the one that is predicted."""
    family, gpus, fields = TRAFFIC[name]
    balanced = {"job.routing": "forced-balance", "cluster.gpus": gpus}
    plan = replace(build({**BASE, **balanced, **fields}), model=spec_of(family))
    seen: Counter[tuple[str, str, int]] = Counter()
    for of_rank in run_ranks(gpus, sent_by_rank, plan, limit=120):
        seen += of_rank
    wanted = {(t.axis, t.operation, int(t.bytes)): round(t.count * gpus) for t in traffic(plan)}
    assert seen == wanted


def sent_by_rank(rank: int, plan: Plan) -> "Counter[tuple[str, str, int]]":
    seen: Counter[tuple[str, str, int]] = Counter()

    def note(call: CollectiveCall) -> None:
        seen[call.group.name, call.operation, call.num_bytes] += 1

    torch.set_num_threads(1)
    mesh = Mesh(plan.layout, rank)
    parts = build_parts(plan, mesh, with_data=False)
    batches = [synthetic_batch(plan, 0, m, mesh.coordinate("dp")) for m in range(plan.num_microbatches)]
    with observe_collectives(note):
        train_step(parts, batches, 1e-3, plan.job)
        parts.data.finish_param_sync()
    if isinstance(parts.runner, Pipelined):
        for num_bytes, count in parts.runner.pipeline.traffic():
            seen["pp", "send", num_bytes] += count
    return seen
