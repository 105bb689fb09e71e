"""Random plans for the study of estimate against rehearsal, drawn from everything that our engine runs.

`accepted_plans(seed)` yields plans that no rule objects to. Layers and experts are few, so that a rehearsal takes
seconds; widths, tokens, degrees and knobs are those of real plans. Of large CP only the plan has many GPUs: one rank is
rehearsed. Every field of `knobs` is written in one of several plans, with values that change memory and with others.
"""

import random
from collections.abc import Iterator
from typing import Any

from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.plan.plan import (
    CP_COMM,
    CP_EXCHANGE,
    LORA_TARGETS,
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    VISION_RECOMPUTE,
    Plan,
)
from threefold.rules.all import blockers, check
from threefold.rules.stacks import ENGINE_LIMITS
from threefold.spec.model import MlaSpec, ModelSpec
from threefold.spec.models import MODELS

MODEL_NAMES = (
    "deepseek-v3",
    "deepseek-v3",
    "kimi-k2",
    "moonlight-16b-a3b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
    "qwen3-next-80b-a3b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "mixtral-8x7b",
    "llama3-8b",
    "qwen3-8b",
    "qwen3-vl-30b-a3b",
    "qwen3-vl-235b-a22b",
    "qwen3.5-35b-a3b",
)
FROZEN = ("*.experts.*", "embed.weight", "*.mixer.*", "*norm*", "*.router.*")
TOKENS = tuple(4096 * 2**n for n in range(8))  # 4K to 512K
RANK_TOKENS = (1024, 65_536)  # tokens of a sequence on one context-parallel rank
DELTA_RANK_TOKENS = 4096  # the same with the delta rule, which a rehearsal goes through in chunks of 64
PRECISIONS = {
    "h100": ("bf16", "bf16", "bf16", "fp16", "fp32", "fp8-cs", "fp8-rowwise", "fp8-blockwise", "fp8-blockwise"),
    "b200": ("bf16", "bf16", "fp8-cs", "mxfp8", "mxfp8", "nvfp4"),
}
PRECISIONS |= {"h200": PRECISIONS["h100"], "gb200": PRECISIONS["b200"], "a100": ("bf16", "fp16")}


def accepted_plans(seed: int) -> Iterator[Plan]:
    """Plans without errors that the engine trains."""
    draw = random.Random(seed)
    while True:
        fields = {path: value for path, value in random_fields(draw).items() if value is not None}
        try:
            plan = parse(fields).plan
        except FindingsError:
            continue
        if plan is None or not plan.num_microbatches:
            continue
        found = check(plan)
        # The engine has no package for a dispatcher on a chip that upstream leaves out, which is only a warning.
        if blockers(found) or any(f.rule in (*ENGINE_LIMITS, "dispatcher-supports-chip") for f in found):
            continue
        yield plan


def random_fields(draw: random.Random) -> dict[str, Any]:
    """The fields of one plan, whether rules accept it or not."""
    name = draw.choice(MODEL_NAMES)
    model, chip = MODELS[name], draw.choice(("h100", "h200", "b200", "gb200", "h100", "h200", "a100"))
    precision = draw.choice(PRECISIONS[chip])
    fields: dict[str, Any] = {"model": name, "target": "threefold", "cluster.chip": chip, "knobs.precision": precision}
    with_graphs = _one_in(draw, 10)
    fields |= _layout(draw, model, with_graphs)
    fields |= _job(draw, model, fields)
    fields |= _trained_parts(draw, model)
    fields |= _schedule(draw, fields)
    fields |= _recompute(draw, model)
    fields |= _offload(draw)
    fields |= _other_knobs(draw, fields)
    if with_graphs:
        fields |= _graphs(draw, fields)
    return fields | (_without_obstacles(fields) if fields["knobs.ep_overlap"] else {})


def _without_obstacles(fields: dict[str, Any]) -> dict[str, Any]:
    """What a plan with EP overlap must not have."""
    kept = [name for name in fields["knobs.recompute"] if name not in ("moe", "full")]
    absent = ("recompute_method", "recompute_layers", "activation_offload", "activation_offload_layers")
    changes: dict[str, Any] = {f"knobs.{name}": None for name in (*absent, "shared_expert_overlap")}
    changes |= {"knobs.recompute": kept, "job.mtp": 0}
    if fields["layout.pp"] > 1 and fields["layout.schedule"] != "dualpipev":
        changes |= {"layout.schedule": None, "layout.vpp": 2, "model.num_layers": 2 * fields["layout.pp"]}
    return changes


def _one_in(draw: random.Random, number: int) -> bool:
    return draw.randrange(number) == 0


def _layout(draw: random.Random, model: ModelSpec, with_graphs: bool) -> dict[str, Any]:
    tp, cp = (1, 1) if with_graphs else (draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 1, 2, 4, 8, 16, 32, 64)))
    pp, vpp = draw.choice(((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (2, 3)))
    ep, etp = (draw.choice((1, 2, 4, 8, 16, 32)), draw.choice((1, 1, 1, 1, 2))) if model.moe else (1, 1)
    if with_graphs and _one_in(draw, 3):  # only without exchanges a graph holds all of an MoE layer
        ep = etp = 1
    wide = max(tp * cp, ep * etp)
    gpus = pp * wide * draw.choice((1, 2, 4, 8))
    fields = {"layout.tp": tp, "layout.cp": cp, "layout.pp": pp, "layout.vpp": vpp, "layout.ep": ep, "layout.etp": etp}
    num_layers = pp * vpp * draw.choice((1, 1, 2)) if pp > 1 else draw.choice((2, 3, 4, 6))
    fields |= {"cluster.gpus": gpus, "model.num_layers": max(2, num_layers)}
    if model.moe:
        fewest = max(ep * draw.choice((1, 2, 4, 8)), model.moe.top_k, 8 * model.moe.num_groups)
        fields["model.num_experts"] = min(model.moe.num_experts, fewest)
        fields["model.num_dense_layers"] = min(model.num_dense_layers, draw.choice((0, 1, 3)))
    return fields


def _job(draw: random.Random, model: ModelSpec, fields: dict[str, Any]) -> dict[str, Any]:
    cp = fields["layout.cp"]
    fewest, most = RANK_TOKENS if model.delta is None else (RANK_TOKENS[0], DELTA_RANK_TOKENS)
    seq_len = draw.choice([n for n in TOKENS if fewest <= n // cp <= most] or TOKENS[-1:])
    dp = fields["cluster.gpus"] // (fields["layout.tp"] * cp * fields["layout.pp"])
    micro_batch = draw.choice((1, 1, 1, 2)) if seq_len // cp <= 16_384 else 1
    num_microbatches = draw.choice((1, 1, 2, 4)) if fields["layout.pp"] == 1 else draw.choice((4, 8, 16))
    capacity = model.moe is not None and _one_in(draw, 10)
    return {
        "job.seq_len": seq_len,
        "job.micro_batch": micro_batch,
        "job.global_batch": dp * micro_batch * num_microbatches,
        "job.mtp": draw.choice((0, None)),
        "job.optimizer": draw.choice(("adamw", "adamw", "adamw", "adamw", "muon")),
        "job.packing": True if _one_in(draw, 8) else None,
        "job.capacity_factor": draw.choice((1.0, 1.25)) if capacity else None,
        "job.aux_loss": 0.0 if _one_in(draw, 4) else None,
        "job.routing": "forced-balance" if model.moe and _one_in(draw, 6) else None,
    }


def _trained_parts(draw: random.Random, model: ModelSpec) -> dict[str, Any]:
    """Adapters, frozen weights, and the pictures of a model that sees."""
    fields: dict[str, Any] = {}
    if _one_in(draw, 8):
        fields["job.lora_rank"] = draw.choice((4, 16, 64))
        fields["job.lora_targets"] = draw.sample(LORA_TARGETS, draw.randint(1, len(LORA_TARGETS)))
    elif _one_in(draw, 10):
        fields["job.freeze"] = draw.sample(FROZEN, draw.randint(1, 2))
    if model.vision is not None:
        fields |= {"job.data": "scenes", "job.images": draw.choice((0.5, 1.0, 4.0))}
        fields["job.max_pixels"] = draw.choice((None, 65_536, 262_144))
        if _one_in(draw, 2):
            fields["job.freeze"] = draw.choice((["vision"], ["vision", "projector"], ["language"]))
        if _one_in(draw, 3):
            fields["knobs.vision_recompute"] = draw.sample(VISION_RECOMPUTE, 1)
    return fields


def _schedule(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    schedule = draw.choice((None, None, "zero-bubble", "dualpipev")) if fields["layout.pp"] > 1 else None
    overlap = fields["layout.ep"] > 1 and _one_in(draw, 3)
    chosen: dict[str, Any] = {"layout.schedule": schedule, "knobs.ep_overlap": overlap}
    if schedule == "dualpipev":
        chosen["layout.vpp"] = 2
    if overlap:
        chosen |= {"job.mtp": 0, "knobs.delay_wgrad": draw.choice((False, True))}
    return chosen


def _recompute(draw: random.Random, model: ModelSpec) -> dict[str, Any]:
    """One name, a random set of names, or whole layers. A name that the model has nothing of is seldom drawn."""
    kind = draw.choice(("none", "none", "one", "one", "some", "some", "full"))
    absent = {"mla_up_proj"} if not isinstance(model.attention, MlaSpec) else set()
    absent |= {"gdn_norm_out"} if model.delta is None else set()
    absent |= {"moe", "moe_act"} if model.moe is None else set()
    absent |= {"shared_experts"} if model.moe is None or not model.moe.shared_width else set()
    names = [name for name in RECOMPUTE_MODULES[:-1] if name not in absent or _one_in(draw, 20)]
    if kind == "full":
        method = draw.choice(("uniform", "block", None))
        layers = draw.choice((1, 1, 2, 3)) if method else None
        return {"knobs.recompute": ["full"], "knobs.recompute_method": method, "knobs.recompute_layers": layers}
    count = {"none": 0, "one": 1, "some": min(len(names), draw.randint(2, 4))}[kind]
    return {"knobs.recompute": draw.sample(names, count)}


def _offload(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if _one_in(draw, 7):
        fields["knobs.optimizer_offload"] = draw.choice((0.25, 0.5, 1.0))
    if _one_in(draw, 4):
        fields["knobs.activation_offload"] = draw.sample(OFFLOAD_MODULES, draw.randint(1, 4))
    elif _one_in(draw, 10):
        fields["knobs.activation_offload_layers"] = draw.choice((1, 2))
    return fields


def _other_knobs(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "knobs.dispatcher": draw.choice(("alltoall", "alltoall", "deepep", "hybridep")),
        "knobs.expert_fusion": draw.choice((False, True)),
    }
    if fields["layout.cp"] > 1:
        knobs |= _context_parallel(draw, fields)
    for name, (rate, values) in _RARE.items():
        if _one_in(draw, rate):
            knobs[f"knobs.{name}"] = draw.choice(values)
    if knobs.get("knobs.data_parallel") == "hsdp":
        knobs["layout.replicate"] = 2
    return knobs


def _graphs(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Scopes of CUDA graphs, and without what excludes them."""
    routed = ["attn", "moe_router", "moe_preprocess"]
    scopes = (["attn"], ["moe_router"], routed, routed, routed, routed, ["mlp"], ["attn", "mlp"])
    wide = (["moe"], ["moe"], ["attn", "moe"], *([["full_iteration"]] if fields["cluster.gpus"] == 1 else []))
    chosen = draw.choice(wide if fields["layout.ep"] * fields["layout.etp"] == 1 and _one_in(draw, 2) else scopes)
    excluded = ("activation_offload", "activation_offload_layers", "compile", "data_parallel", "fp8_dispatch")
    knobs: dict[str, Any] = {"knobs.graphs": chosen, "knobs.ep_overlap": False, "knobs.delay_wgrad": None}
    knobs |= {"knobs.dispatcher": "alltoall", "knobs.precision": draw.choice(("bf16", "bf16", "fp16"))}
    knobs["knobs.recompute"] = [name for name in fields["knobs.recompute"] if name not in ("moe", "full")]
    knobs |= {f"knobs.{name}": None for name in (*excluded, "recompute_method", "recompute_layers")}
    return knobs | {"layout.schedule": None, "layout.replicate": None}


def _context_parallel(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    kind: Any = draw.choice((*CP_COMM, *CP_COMM, "each"))
    if kind == "each":
        kind = [draw.choice(CP_COMM) for _ in range(fields["model.num_layers"])]
    knobs = {"knobs.cp_comm": kind}
    if _one_in(draw, 2):
        knobs["knobs.cp_exchange"] = draw.choice(CP_EXCHANGE)
    if _one_in(draw, 3):
        inner = draw.choice([n for n in (1, 2, 4, 4, 8, 8, 8, 8, 8) if fields["layout.cp"] % n == 0])
        knobs |= {"knobs.cp_inner": inner} | ({"knobs.cp_comm": "a2a+p2p"} if inner > 1 else {})
    return knobs


# Knobs that every so many plans set, and to what; some change memory and some do not.
_RARE: dict[str, tuple[int, tuple[Any, ...]]] = {
    "data_parallel": (3, ("zero1", "fsdp", "fsdp", "fsdp", "hsdp", "hsdp")),
    "dispatch_sms": (12, (16, 24)),
    "shared_expert_overlap": (6, (True,)),
    "grad_reduce_overlap": (8, (False,)),
    "param_gather_overlap": (8, (False,)),
    "tp_overlap": (3, (True,)),
    "compile": (10, (True,)),
    "optimizer_dtype": (6, ("bf16", "fp32")),
    "master_weights": (10, (False,)),
    "grad_dtype": (6, ("bf16",)),
    "grad_accum_fusion": (6, (False,)),
    "permute_fusion": (12, (False,)),
    "expert_kernels": (8, ("torch", "triton")),
    "loss_fusion": (12, (False,)),
    "router_dtype": (12, ("bf16",)),
    "router_padding": (12, (True,)),
    "fp8_params": (12, (False,)),
    "fp8_attention": (12, (False,)),
    "fp8_output": (12, (False,)),
    "fp8_dispatch": (4, (True,)),
    "max_connections": (10, (1, 8, 32)),
}
