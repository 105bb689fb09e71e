"""Requests for a plan of every shipped model, on six chips, at three lengths, for both stacks, and their answers."""

import itertools
import random
from typing import Any

from threefold.api.searches import with_defaults
from threefold.cost.estimate import estimate
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, export_plan
from threefold.launch.slurm import Options
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors, promoted
from threefold.search.search import search
from threefold.spec.models import MODELS
from threefold.spec.stacks import TARGETS

SHIPPED = [name for name in MODELS if not name.startswith("tiny-")]
CHIPS = ("a100", "h100", "h200", "b200", "gb200", "gb300")
CLUSTERS = {4096: 64, 32_768: 128, 131_072: 256}  # GPUs by tokens of a sequence


def requests(seed: str) -> list[dict[str, Any]]:
    """All requests, in the random order of a seed: any first part of them is a sample."""
    every = itertools.product(SHIPPED, TARGETS, CHIPS, CLUSTERS)
    drafts = [draft(*request) for request in every]
    random.Random(f"requests {seed}").shuffle(drafts)
    return drafts


def draft(model: str, target: str, chip: str, seq_len: int) -> dict[str, Any]:
    cluster = {"cluster.chip": chip, "cluster.gpus": CLUSTERS[seq_len]}
    return {"model": model, "target": target, "job.seq_len": seq_len, **cluster}


def answer_to(fields: dict[str, Any]) -> tuple[str, str]:
    """Whether a draft has a plan, a finding that says why not, or an answer that is WRONG; and what is wrong."""
    found = search(with_defaults(fields)[0], top=1)
    if not found.candidates:
        reason = found.finding
        is_reason = reason is not None and reason.rule == "plan-exists" and bool(reason.fix or reason.advice)
        return ("finding", "") if is_reason else ("WRONG", f"neither a plan nor a reason: {reason}")
    plan = found.best
    refused = errors(promoted(check(plan, notes=False)))
    if refused:
        return "WRONG", f"refused by {refused[0].rule}"
    if not estimate(plan).fits:
        return "WRONG", "does not fit"
    return ("plan", "") if fields["target"] != BRIDGE or exported(plan) else ("WRONG", "exports nothing")


def exported(plan: Plan) -> dict[str, str]:
    return export_files(export_plan(plan, BRIDGE, None), "plan.toml", Options(), ".")
