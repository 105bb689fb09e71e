"""Layouts that real ranks of NCCL run on one shared GPU, and how far they may differ from one rank there.

Most layouts are those of the oracle, by name. They are tiny, because kernels of ranks that share a GPU are time-sliced.
"""

import math
from dataclasses import replace
from typing import Any

from oracle_layouts import CASES as ORACLE_CASES
from oracle_layouts import Case
from repository import ROOT

from threefold.engine.verify.compare import Comparison
from threefold.layout.degrees import Layout
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan

STEPS = 2  # the second one shows weights and states that the first one got wrong
PRECISIONS = ("fp32", "bf16")
# Sums in another order, relative to the largest element of a tensor. On CPUs losses differ by 1e-7 and gradients by
# 8e-7 in fp32; on GPUs the kernels of attention and of GEMMs depend on shapes, and keep fewer bits of fp32.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3
# In bf16 a few choices of experts turn, so that gradients of single experts are not compared. Seen on CPUs: 4e-4 of
# losses, 5e-3 of gradient norms.
BF16_LOSS_TOLERANCE, BF16_NORM_TOLERANCE = 5e-3, 5e-2
# Fractions of the largest gradient. A gradient below the first one is rounding in fp32; below the second, mostly so.
VANISHING, SMALL = 1e-6, 1e-2

# The most important ones first: a run by hand may end before all of them had their turn.
_NAMES = {
    4: (
        "tp cp ep etp",
        "dp pp vpp ep",
        "ep overlap",
        "fsdp cp ep",
        "cp p2p, windows and sinks",
        "cp all-gather, latents",
        "cp a2a, latents",
        "cp a2a+p2p",
        "dualpipev, tied, ep",
        "zero-bubble, fsdp",
        "ep overlap, chunks",
        "hsdp with experts",
        "tp with copied key heads",
        "dp tp ep edp",
        "ep with shared experts beside it",
        "tp etp",
        "dp pp",
        "ep overlap, fsdp",
        "latents ep overlap",
        "cp passes states",
        "tp overlap",
        "muon, cut matrices",
    ),
    2: (
        "dp",
        "tp",
        "pp",
        "vpp",
        "zero-bubble of chunks",
        "dualpipev",
        "cp a2a",
        "cp all-gather, sinks",
        "ep overlap, mtp",
        "etp",
        "fsdp",
    ),
}
_ORACLE = {case.name: case for case in ORACLE_CASES}
CASES: dict[int, dict[str, Case]] = {ranks: {name: _ORACLE[name] for name in names} for ranks, names in _NAMES.items()}
SCOPES, WHOLE = ("attn", "moe_router", "moe_preprocess"), ("full_iteration",)
# Layouts whose ranks record CUDA graphs on a GPU, collectives included. Two microbatches warm up, so there are more.
# Whole microbatches are of dense models: experts in fp32 run one by one, with their sizes on the host.
_GRAPHED = {
    4: {"tp cp ep etp": SCOPES, "ep overlap": SCOPES, "dp pp vpp ep": SCOPES, "cp": WHOLE},
    2: {"tp": SCOPES, "dualpipev": SCOPES, "tp with one key head": WHOLE, "dp without experts": WHOLE},
}
for _ranks, _graphed in _GRAPHED.items():
    for _name, _scopes in _graphed.items():
        _plain = _ORACLE[_name]
        _job = {**_plain.job, "packing": False, "global_batch": max(8, _plain.job.get("global_batch", 0))}
        _knobs = {**_plain.knobs, "graphs": _scopes}
        _case = replace(_plain, name=f"{_name}, graphs", job=_job, knobs=_knobs)
        CASES[_ranks][_case.name] = _case
# Optimizer states on the host: updates run beside the next forward, and weights are gathered behind them.
for _ranks, _names in {4: ("dp tp ep edp",), 2: ("dp", "fsdp")}.items():
    for _plain in (_ORACLE[_name] for _name in _names):
        _case = replace(
            _plain, name=f"{_plain.name}, states on the host", knobs={**_plain.knobs, "optimizer_offload": 1.0}
        )
        CASES[_ranks][_case.name] = _case


def case_plan(case: Case, precision: str, chip: str) -> Plan:
    """The plan of a case on a chip, with as few microbatches as it needs.

    The dispatcher is written out, because that of a GPU is by default a package which may not be installed.
    """
    plan = case.plan
    fields: dict[str, Any] = {"cluster.chip": chip, "knobs.precision": precision}
    if "dispatcher" not in case.knobs:
        fields["knobs.dispatcher"] = "alltoall"
    if plan.layout.pp == 1 and not plan.knobs.ep_overlap:
        fields["job.global_batch"] = 2 * plan.job.micro_batch * plan.layout.dp
    return replace(change(plan, fields), model=plan.model)


def judge(found: Comparison, precision: str) -> tuple[str, str]:
    """The kind of outcome, "equal", "near", "tied" or "DIFFERENT", and the largest differences. A case that is tied
    proves nothing, and counts as failed: another seed would have to be chosen.

    Weights in fp32 are not compared: where a gradient is only rounding, AdamW moves a weight by the whole learning rate
    in the direction of that rounding. The losses of the second step and of the evaluation show an update gone wrong.
    """
    said = f"loss {found.loss:.0e}, norm {found.norm:.0e}, gradient {found.gradient:.0e} ({found.worst})"
    said = "; ".join([said, *found.problems])
    if precision != "fp32":
        is_near = found.loss <= BF16_LOSS_TOLERANCE and found.norm <= BF16_NORM_TOLERANCE and not found.problems
        return "near" if is_near else "DIFFERENT", said
    rest = max(found.norm, found.gradient, found.state / 2, found.bias)  # second moments are squares of gradients
    if not found.problems and found.loss <= LOSS_TOLERANCE and rest <= GRADIENT_TOLERANCE:
        return "equal", said
    said += f", state {found.state:.0e}, bias {found.bias:.0e}, {found.near_ties} near ties"
    return ("tied" if found.near_ties and not found.problems else "DIFFERENT"), said


def recipe_layouts(ranks: int) -> dict[Layout, list[str]]:
    """The layouts of recipes that fold experts over attention, on so few ranks, and the recipes that have each.

    Every axis that a recipe uses is kept where there are ranks for it: pipelines first, then those of tensors.
    """
    found: dict[Layout, list[str]] = {}
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        plan = read_plan(str(path)).plan
        if plan is not None and plan.layout.ep > 1:
            found.setdefault(_on_ranks(plan.layout, ranks), []).append(path.stem)
    return found


def _on_ranks(layout: Layout, ranks: int) -> Layout:
    pp = min(layout.pp, 2)
    stage = ranks // pp
    tp, etp = min(layout.tp, 2, stage), min(layout.etp, 2, stage)
    cp = min(layout.cp, 2, stage // tp)
    ep = 2 ** int(math.log2(min(layout.ep, stage // etp)))
    return Layout(tp=tp, cp=cp, pp=pp, vpp=1, ep=ep, etp=etp, gpus=ranks)
