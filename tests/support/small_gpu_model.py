"""A model that is small and yet has experts of sizes that all of our GPU kernels take, Gluon's among them."""

from dataclasses import replace
from typing import Any

import torch

from threefold.engine.build import Parts, options_of, parts_alone
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MoeSpec
from threefold.spec.models import MODELS

SMALL = replace(
    MODELS["qwen3-30b-a3b"],
    dim=256,
    dense_dim=256,
    vocab=512,
    attention=GqaSpec(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
    moe=MoeSpec(num_experts=8, top_k=2, expert_dim=256),
)


def small_plan(passes: int, more: dict[str, Any]) -> Plan:
    """Two layers, two sequences of 128 tokens in each of `passes` microbatches."""
    fields = {"model": SMALL.name, "model.num_layers": 2, "job.seq_len": 128, "job.micro_batch": 2}
    fields |= {"job.global_batch": 2 * passes, "knobs.expert_fusion": True, "knobs.grad_dtype": "bf16"}
    parsed = parse(fields | more, model=SMALL)
    assert parsed.plan, parsed.findings
    return parsed.plan


def small_parts(plan: Plan) -> Parts:
    torch.manual_seed(0)
    model = build_model(plan.model, 0, torch.bfloat16, torch.device("cuda"), options_of(plan), seed=0)
    return parts_alone(model, AdamW(model.named_parameters(), 0.1))
