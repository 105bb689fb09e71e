"""Layouts, jobs and knobs of a plan, drawn at random for `drawn_layouts.py`.

`draw_fields` draws every field of a plan that decides what ranks compute. `NOT_DRAWN` names the others, each with its
reason; `test_drawn_layouts.py` holds that no field is missing from both.
"""

import random
from collections.abc import Sequence
from math import gcd
from typing import Any

from drawn_models import Fields, divisors, one_in

from threefold.layout.degrees import SCHEDULES
from threefold.plan.load import WORKLOADS
from threefold.plan.plan import (
    CP_COMM,
    CP_EXCHANGE,
    EXPERT_KERNELS,
    LORA_TARGETS,
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    VISION_RECOMPUTE,
)

MAX_PASSES = 12  # layers times microbatches, above which a draw has the smallest of each that is left
_RANKS = (2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8, 8)
_FROZEN = ("*.experts.*", "layers.0.*", "layers.1.*", "embed.weight", "*norm*", "*.mixer.*", "*.router.*")
FROZEN = (*_FROZEN, "head.weight", "language", "*mtp*")
_SHARDING_AXES = ("tp", "cp", "ep", "etp")
EIGHT_BITS = ("fp8-cs", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
FORMATS = ("bf16", "fp16", "fp16", "fp16", *EIGHT_BITS)  # fp16 has fields of its own

_DATA = "the oracle makes its own microbatches, and no loader reads this"
_REFUSED = "`check` refuses it for the threefold engine (engine-has-knob)"
# Fields, or whole tables, that are not drawn.
NOT_DRAWN: dict[str, str] = {
    "model": "the configuration itself is drawn, with its layers, experts and vocabulary",
    "target": "only the threefold engine runs here",
    "run": "it says how a run is kept, and changes no result",
    "stack": "versions of software, which the engine does not read",
    "job.data": _DATA,
    "job.tokenizer": _DATA,
    "job.text_field": _DATA,
    "job.val_data": _DATA,
    "job.val_fraction": _DATA,
    "job.max_bad_records": _DATA,
    "job.max_pixels": _DATA,
    "knobs.fp8_params": _REFUSED,
    "knobs.fp8_attention": _REFUSED,
}

# Fields that stand alone: one draw in so many turns them, to one of these values.
_SINGLE: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cluster.domain": (3, (2, 4)),
    "cluster.gpus_per_node": (8, (2, 4)),
    "job.steps": (2, (2, 3, 5, 1000)),
    "job.min_lr": (5, (0.0, 0.5, 1.0)),
    "job.lr_schedule": (3, ("wsd", "constant")),
    "job.decay_fraction": (6, (0.0, 0.5, 1.0)),
    "job.adam_beta1": (6, (0.0, 0.5, 0.99)),
    "job.adam_beta2": (6, (0.5, 0.999)),
    "job.adam_eps": (6, (1e-6, 1e-4)),
    "job.clip_norm": (1, (0.0, 0.5, 0.5, 100.0)),
    "job.weight_decay": (3, (0.0, 0.01)),
    "job.dynamic_length": (10, (True,)),
    "job.routing": (15, ("forced-balance",)),
    "job.capacity_factor": (6, (0.3, 0.6, 1.0, 1.1, 1.25, 4.0)),
    "job.capacity_scope": (20, ("rank",)),
    "job.aux_loss": (1, (0.0, 0.01, 0.01)),
    "job.seq_aux_loss": (2, (0.01,)),
    "job.z_loss": (2, (0.001,)),
    "job.mtp_weight": (3, (0.0, 0.5)),
    "job.bias_rate": (1, (0.0, 0.01, 0.01)),
    "knobs.dispatcher": (8, ("local", "local", "deepep")),
    "knobs.grad_reduce_overlap": (3, (False,)),
    "knobs.param_gather_overlap": (3, (False,)),
    "knobs.tp_overlap": (3, (True,)),
    "knobs.shared_expert_overlap": (4, (True,)),
    "knobs.wgrad_overlap": (12, (True,)),
    "knobs.optimizer_offload": (5, (0.3, 0.5, 1.0)),
    "knobs.activation_offload_layers": (8, (1, 2, 3)),
    "knobs.optimizer_dtype": (8, ("bf16",)),
    "knobs.master_weights": (8, (False,)),
    "knobs.grad_dtype": (6, ("bf16",)),
    "knobs.grad_accum_fusion": (6, (False,)),
    "knobs.permute_fusion": (12, (False,)),
    "knobs.expert_fusion": (3, (True,)),
    "knobs.expert_kernels": (10, EXPERT_KERNELS),
    "knobs.delta_kernels": (10, ("torch",)),
    "knobs.loss_fusion": (12, (False,)),
    "knobs.router_dtype": (12, ("bf16",)),
    "knobs.router_padding": (12, (True,)),
    "knobs.compile": (25, (True,)),  # rare: a second or two for each rank
    "knobs.max_connections": (12, (1, 32)),
}

# Fields that need others: a draw may turn some of these together, over what was drawn before.
_NO_OVERLAP: Fields = {"knobs.ep_overlap": None, "knobs.delay_wgrad": None}
_FLEX: Fields = {"cluster.chip": "h100", "knobs.precision": "bf16", "knobs.fp8_dispatch": None}
# What stands in the way of graphs, taken back.
BY_GRAPHS: Fields = {
    "cluster.chip": "h100",
    "knobs.data_parallel": "zero1",
    "layout.replicate": None,
    "knobs.compile": None,
    "knobs.activation_offload": None,
    "knobs.activation_offload_layers": None,
    "knobs.cp_dynamic": None,
    "job.dynamic_length": None,
}
_TOGETHER: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"knobs.recompute": (["full"],), "knobs.recompute_save": (["core_attn"],), **dict.fromkeys(_NO_OVERLAP, (None,))},
    {"knobs.recompute": (["full"],), "knobs.recompute_method": ("uniform", "block"), "knobs.recompute_layers": (1, 2),
     "knobs.recompute_save": (None, ["core_attn"]), **dict.fromkeys(_NO_OVERLAP, (None,))},
    {**{path: (value,) for path, value in _FLEX.items()}, "knobs.dispatcher": ("deepep", "hybridep"),
     "knobs.dispatch_sms": (None, 8, 20)},
    {**{path: (value,) for path, value in BY_GRAPHS.items()}, "job.packing": (False,),
     "knobs.graphs": (["attn"], ["attn", "moe_router"], ["attn", "mlp"], ["attn", "moe_router", "moe_preprocess"]),
     "knobs.graph_memory_gb": (None, 0.0, 1.0)},
    {**{path: (value,) for path, value in BY_GRAPHS.items()}, "knobs.graphs": (["moe_router"], ["mlp", "moe_router"]),
     "knobs.graph_memory_gb": (None, 0.0, 1.0)},
    {**{path: (value,) for path, value in BY_GRAPHS.items()}, "knobs.graphs": (["moe"], ["attn", "moe"]),
     "job.capacity_factor": (1.25, 4.0), "job.packing": (False,)},
    {**{path: (value,) for path, value in BY_GRAPHS.items()}, "knobs.graphs": (["full_iteration"],),
     "job.capacity_factor": (0.6, 1.1, 1.5, 4.0), "job.capacity_scope": ("rank",), "job.packing": (False,),
     "knobs.dispatcher": ("alltoall",), **dict.fromkeys(_NO_OVERLAP, (None,))},
    {"knobs.precision": ("bf16",), "knobs.store_param_remainders": (True,), "knobs.master_weights": (None,)},
    {"job.optimizer": ("adamw",), "knobs.optimizer_offload": (0.2, 0.9, 1.0)},
    {"job.optimizer": ("muon",), "knobs.optimizer_offload": (None,)},
    {"job.lora_rank": (1, 2, 3, 8), "job.lora_alpha": (None, 0.7, 9.0), "knobs.tp_overlap": (None,),
     "job.lora_targets": (["attention"], ["experts"], ["mlp", "shared_experts", "attention", "experts"])},
    {"job.freeze": tuple([name] for name in FROZEN), "job.lora_rank": (None,)},
    {"job.packing": (True,), "job.task": ("sft",), "job.micro_batch": (1,)},
    {"job.capacity_factor": (0.6, 1.1, 1.25), "job.capacity_scope": (None,)},
    {"knobs.data_parallel": ("fsdp",), "knobs.graphs": (None,)},
    {"knobs.wgrad_overlap": (True,), "knobs.data_parallel": ("zero1",), "knobs.dispatcher": ("alltoall",),
     "knobs.expert_balance": (None,), **dict.fromkeys(_NO_OVERLAP, (None,))},
    {"job.mtp": (0, 1, 2), "job.mtp_weight": (0.1, 1.0)},
    {"job.dynamic_length": (True,)},
)  # fmt: skip


def draw_degrees(draw: random.Random, dense: bool) -> Fields:
    """Degrees that mostly divide the ranks, and a schedule that mostly fits the chunks."""
    gpus = draw.choice(_RANKS)
    if one_in(draw, 12):
        degrees = {axis: draw.choice((1, 1, 2, 3, 4)) for axis in ("pp", "tp", "cp", "ep", "etp")}
    else:
        pp = draw.choice([1, 1, *divisors(gpus)[: 3 if gpus < 8 else 2]])
        tp = draw.choice([1, *divisors(gpus // pp)])
        cp = draw.choice([1, *divisors(gpus // pp // tp)])
        ep = draw.choice(divisors(gpus // pp))
        etp = draw.choice([1, 1, *divisors(gpus // pp // ep)])
        degrees = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "etp": etp}
    if dense and not one_in(draw, 10):
        degrees |= {"ep": 1, "etp": 1}
    fields: Fields = {"cluster.gpus": gpus, **{f"layout.{axis}": degree for axis, degree in degrees.items()}}
    return fields | (_draw_schedule(draw) if degrees["pp"] > 1 else {})


def _draw_schedule(draw: random.Random) -> Fields:
    schedule = draw.choice((None, None, *SCHEDULES, "zero-bubble", "dualpipev"))
    vpp = {"1f1b": 1, "dualpipev": 2, "interleaved": draw.choice((2, 3))}.get(str(schedule))
    any_vpp = draw.choice((1, 1, 2, 2, 3))
    return {"layout.vpp": any_vpp if vpp is None or one_in(draw, 15) else vpp, "layout.schedule": schedule}


def draw_stages(draw: random.Random, fields: Fields, num_layers: int, mtp: int) -> str:
    """A string of stages that is cut anywhere: chunks are uneven, some of them empty."""
    items = "E" + "t" * num_layers + "m" * mtp + "L"
    first, last = (0, len(items)) if one_in(draw, 12) else (1, len(items) - 1)
    cuts = sorted(draw.randint(first, last) for _ in range(fields["layout.pp"] * fields["layout.vpp"] - 1))
    ends = zip([0, *cuts], [*cuts, len(items)], strict=True)
    return "|".join(items[start:stop] for start, stop in ends)


def draw_fields(draw: random.Random, layout: Fields, num_layers: int, sees: bool, formats: Sequence[str]) -> Fields:
    """Layout, job and knobs of a plan that is trained in one of these formats; without any, fp64 shows it."""
    fields = {**layout, "cluster.chip": draw.choice(("cpu", "cpu", "cpu", "h100"))}
    fields |= _draw_job(draw, fields, num_layers) | _draw_knobs(draw, fields, num_layers)
    fields |= {path: draw.choice(values) for path, (rate, values) in _SINGLE.items() if one_in(draw, rate)}
    fields |= _draw_trained_parts(draw, sees)
    can_be_dynamic = fields["layout.cp"] > 1 and fields["layout.pp"] == 1 and not fields.get("knobs.ep_overlap")
    if can_be_dynamic and one_in(draw, 2):
        fields["knobs.cp_dynamic"] = True
    for together in draw.sample(_TOGETHER, draw.choice((1, 1, 2, 3))):
        fields |= {path: draw.choice(values) for path, values in together.items()}
    return fields | (_draw_formats(draw, formats) if formats else {})


def _draw_formats(draw: random.Random, formats: Sequence[str]) -> Fields:
    """A format that the model is trained in, and what only such a format has."""
    precision = draw.choice(formats)
    fields: Fields = {"knobs.precision": precision, "knobs.muon_dtype": draw.choice((None, "bf16", "fp32"))}
    if fields["knobs.muon_dtype"] and one_in(draw, 2):
        fields |= {"job.optimizer": "muon", "knobs.optimizer_offload": None}
    if precision == "fp16":
        fields["job.initial_loss_scale"] = draw.choice((None, 16.0, 256.0, 65536.0))
        fields["job.loss_scale_window"] = draw.choice((None, 1, 1, 2))
    if precision in EIGHT_BITS:
        fields["knobs.fp8_dispatch"] = draw.choice((None, True, True))
        fields["knobs.fp8_output"] = draw.choice((None, True))
    return fields


def _draw_job(draw: random.Random, fields: Fields, num_layers: int) -> Fields:
    pp, tp, cp = (fields[f"layout.{axis}"] for axis in ("pp", "tp", "cp"))
    dp = max(1, fields["cluster.gpus"] // (pp * tp * cp))
    count = draw.choice((1, 2, 2, 3, 4)) if pp == 1 else draw.choice((1, 2, pp, pp + 1, 2 * pp, 2 * pp, 2 * pp + 1))
    if fields.get("layout.schedule") == "dualpipev" or fields.get("layout.vpp", 1) > 1:
        count = draw.choice((count, 2 * pp, 2 * pp))
    micro_batch = draw.choice((1, 1, 1, 2, 2, 3)) if count * num_layers <= MAX_PASSES else 1
    step = (2 * cp if cp > 1 else 1) * tp
    lengths = [step * n for n in range(1, 25) if 8 <= step * n <= (32 if count * num_layers <= MAX_PASSES else 16)]
    return {
        "job.seq_len": draw.choice(lengths or [step]) if not one_in(draw, 20) else draw.choice((10, 13, 16)),
        "job.micro_batch": micro_batch,
        "job.global_batch": dp * micro_batch * count + (one_in(draw, 20)),
        "job.data": "synthetic",
        "job.optimizer": draw.choice(("adamw", "adamw", "adamw", "muon")),
        "job.packing": one_in(draw, 2),
        "job.task": draw.choice(("pretrain", "pretrain", "sft")),
        # The steps that are compared are the first ones: their rates must be large enough to show a wrong update.
        "job.lr": draw.choice((1e-3, 3e-3, 1e-2)),
        "job.warmup_steps": draw.choice((0, 0, 1, 2)),
        "job.seed": draw.randrange(1000),
    }


def _draw_trained_parts(draw: random.Random, sees: bool) -> Fields:
    """Adapters, frozen parts and recompute of an encoder; mostly none of them."""
    fields: Fields = {}
    if one_in(draw, 6):
        fields["job.lora_rank"] = draw.choice((1, 2, 3, 8))
        fields["job.lora_alpha"] = draw.choice((None, 1.0, 5.0))
        fields["job.lora_targets"] = draw.sample(LORA_TARGETS, draw.randint(1, len(LORA_TARGETS)))
    elif one_in(draw, 6):
        fields["job.freeze"] = draw.sample(FROZEN, draw.randint(1, 2))
    if sees:
        fields["job.images"] = draw.choice((1.0, 0.5, 3.0))
        if one_in(draw, 2):
            fields["knobs.vision_recompute"] = draw.sample(VISION_RECOMPUTE, draw.randint(1, 2))
        if one_in(draw, 3):
            fields["job.freeze"] = draw.sample(("vision", "projector", "language"), draw.randint(1, 2))
    return fields


def _draw_knobs(draw: random.Random, fields: Fields, num_layers: int) -> Fields:
    knobs: Fields = {"knobs.precision": draw.choice(("fp32", "fp32", "bf16", "fp16"))}
    if knobs["knobs.precision"] == "bf16" and one_in(draw, 2):
        knobs["knobs.store_param_remainders"] = True
    knobs |= _draw_data_parallel(draw, fields)
    if fields["layout.ep"] > 1 and one_in(draw, 2):
        knobs |= {"knobs.ep_overlap": True, "knobs.delay_wgrad": draw.choice((True, False))}
    elif one_in(draw, 20):
        knobs["knobs.delay_wgrad"] = True
    knobs |= _draw_recompute(draw)
    if one_in(draw, 4):
        knobs["knobs.activation_offload"] = draw.sample(OFFLOAD_MODULES, draw.randint(1, 4))
    if fields["layout.cp"] > 1:
        each = [draw.choice(CP_COMM) for _ in range(num_layers)]
        knobs["knobs.cp_comm"] = each if one_in(draw, 5) else draw.choice(CP_COMM)
        knobs["knobs.cp_exchange"] = draw.choice((None, *CP_EXCHANGE))
        mixed = knobs["knobs.cp_comm"] == "a2a+p2p" or one_in(draw, 8)
        knobs["knobs.cp_inner"] = draw.choice((None, *divisors(fields["layout.cp"]))) if mixed else None
    return knobs


def draw_balance(draw: random.Random, fields: Fields, dense: bool) -> Fields:
    """An uneven load of the experts, and copies of them. It has a `draw` of its own: others stay as they were."""
    if dense or fields.get("job.routing") == "forced-balance" or one_in(draw, 2):
        return {}
    load: Fields = {"job.load": draw.choice(WORKLOADS)}
    if fields["layout.ep"] == 1 or fields.get("knobs.dispatcher") not in (None, "local") or one_in(draw, 4):
        return load
    copies, every = draw.choice((None, None, 2, 3)), draw.choice((None, None, None, 2))
    given = {"knobs.expert_balance": "replicate", "knobs.expert_copies": copies, "knobs.expert_balance_every": every}
    return load | given


def _draw_data_parallel(draw: random.Random, fields: Fields) -> Fields:
    """ZeRO-1, FSDP or HSDP, whose copies mostly divide both kinds of data parallelism."""
    kind = draw.choice(("zero1", "zero1", "fsdp", "hsdp"))
    ranks, degree = fields["cluster.gpus"] // fields["layout.pp"], {a: fields[f"layout.{a}"] for a in _SHARDING_AXES}
    both = gcd(ranks // (degree["tp"] * degree["cp"]), ranks // (degree["ep"] * degree["etp"]))
    if kind == "hsdp" and both > 1:
        return {"knobs.data_parallel": kind, "layout.replicate": draw.choice([*divisors(both)[1:], 2])}
    return {"knobs.data_parallel": kind} if kind != "hsdp" or one_in(draw, 3) else {"knobs.data_parallel": "fsdp"}


def _draw_recompute(draw: random.Random) -> Fields:
    kind = draw.choice(("none", "none", "one", "some", "some", "full"))
    if kind == "none":
        return {}
    if kind == "full":
        layers = draw.choice((None, 1, 1, 2, 3))
        return {
            "knobs.recompute": ["full"],
            "knobs.recompute_method": draw.choice((None, "uniform", "block")),
            "knobs.recompute_layers": layers,
        }
    names = RECOMPUTE_MODULES[:-1]
    return {"knobs.recompute": [draw.choice(names)] if kind == "one" else draw.sample(names, draw.randint(1, 4))}
