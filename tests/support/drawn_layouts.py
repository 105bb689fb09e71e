"""Layouts drawn at random for the oracle: tiny models of every family that the engine trains, on up to eight ranks.

`draw_layout(seed)` draws a model, a layout, a job and knobs from all that a plan can say, whether they go together or
not: models that see, adapters and frozen parts among them. `resolve(drawn)` asks the rules: the plan as it was drawn,
as repaired by the fixes of the rules, or nothing. `layout_runs.py` runs the plans, in fp64 or with a precision of its
own choice. Left out are `compile` (minutes a case) and knobs of GPUs that a CPU does not have (`dispatch_sms`,
`expert_kernels`).
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import tiny_vision
from tiny_models import FAMILIES, config_of

from threefold.cost.cp_exchange import resolve_exchange
from threefold.findings import Finding, FindingsError
from threefold.layout.degrees import SCHEDULES
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
from threefold.rules.all import errors, judge, promoted, repair
from threefold.spec.hf import model_from_dict

MAX_RANKS = 8
MAX_PASSES = 12  # layers times microbatches, above which a draw has the smallest of each that is left
_RANKS = (2, 2, 3, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8, 8)
_FAMILIES = (*FAMILIES, "deepseek_v3", "deepseek_v3", "qwen3_next", "qwen3_moe", "gpt_oss")
_DENSE = ("llama", "qwen3")
_LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_GROUP_LIMITED = (*_LATENT, "dots1", "glm4_moe", "nemotron_h")  # experts in groups, with the keys of DeepSeek-V3
_SEEING = tuple(tiny_vision.CONFIGS)
_FROZEN = ("*.experts.*", "layers.0.*", "embed.weight", "*norm*", "*.mixer.*", "*.router.*", "head.weight", "language")
_SHARDING_AXES = ("tp", "cp", "ep", "etp")
_OBSTACLES = ("recompute_method", "recompute_layers", "activation_offload", "activation_offload_layers")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """One draw: a Hugging Face configuration and the fields of a plan."""

    seed: str
    config: dict[str, Any]
    fields: Fields


@dataclass(frozen=True)
class Resolved:
    """The plan that the rules leave of a draw."""

    plan: Plan | None  # None: refused, also with the fixes that the rules offer
    repaired: tuple[str, ...]  # the rules whose fixes were applied
    refusals: tuple[str, ...]  # the rules that refuse it still


def draw_layout(seed: int | str, families: Sequence[str] = ()) -> Drawn:
    """The draw of a seed: of any of the models in `tiny_models` and `tiny_vision`, or of these `families`."""
    draw, parts = random.Random(f"layout {seed}"), random.Random(f"parts {seed}")
    family = draw.choice(families or _FAMILIES)
    if _one_in(parts, 5) and not families:
        family = parts.choice(_SEEING)
    fields = {"model": family, "target": "threefold", "cluster.chip": "cpu"}
    fields |= _draw_degrees(draw, family in _DENSE)
    config, mtp = _draw_config(draw, family, fields)
    depths = config.get("num_nextn_predict_layers", 0) if mtp is None else mtp
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    if fields["layout.pp"] > 1 and _one_in(draw, 2):
        fields["layout.stages"] = _draw_stages(draw, fields, num_layers, depths)
    fields |= _draw_job(draw, fields, num_layers) | {"job.mtp": mtp}
    fields |= _draw_knobs(draw, fields, num_layers)
    fields |= _draw_trained_parts(parts, family in _SEEING)
    can_be_dynamic = fields["layout.cp"] > 1 and fields["layout.pp"] == 1 and not fields.get("knobs.ep_overlap")
    if can_be_dynamic and _one_in(parts, 2):
        fields["knobs.cp_dynamic"] = True
    if fields.get("knobs.ep_overlap") and draw.random() < 0.8:
        fields |= _without_obstacles(draw, fields)
    if fields["knobs.precision"] == "bf16" and _one_in(random.Random(f"states {seed}"), 2):
        fields["knobs.store_param_remainders"] = True
    return Drawn(str(seed), config, {path: value for path, value in fields.items() if value is not None})


def resolve(drawn: Drawn) -> Resolved:
    """Judge a draw as `threefold train` does, and repair it where it is refused."""
    try:
        model = model_from_dict(drawn.config, name=str(drawn.fields["model"]), source="drawn")
        plan = parse(drawn.fields, model=model).plan
    except (FindingsError, ValueError) as error:
        return Resolved(None, (), (type(error).__name__,))
    if plan is None:
        return Resolved(None, (), ("parse",))
    plan, refusals = _judge(plan)
    if not refusals:
        return Resolved(plan, (), ())
    changed, applied = repair(plan)
    changed, left = _judge(changed)
    names = tuple(finding.rule for finding in applied)
    is_legal = not left and 1 < changed.layout.gpus <= MAX_RANKS
    return Resolved(changed if is_legal else None, names, tuple(finding.rule for finding in left))


def _judge(plan: Plan) -> tuple[Plan, list[Finding]]:
    plan = resolve_exchange(plan)
    return plan, errors(promoted(judge(plan)))


def _one_in(draw: random.Random, number: int) -> bool:
    return draw.randrange(number) == 0


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _draw_degrees(draw: random.Random, dense: bool) -> Fields:
    """Degrees that mostly divide the ranks, and a schedule that mostly fits the chunks."""
    gpus = draw.choice(_RANKS)
    if _one_in(draw, 12):
        degrees = {axis: draw.choice((1, 1, 2, 3, 4)) for axis in ("pp", "tp", "cp", "ep", "etp")}
    else:
        pp = draw.choice([1, 1, *_divisors(gpus)[: 3 if gpus < 8 else 2]])
        tp = draw.choice([1, *_divisors(gpus // pp)])
        cp = draw.choice([1, *_divisors(gpus // pp // tp)])
        ep = draw.choice(_divisors(gpus // pp))
        etp = draw.choice([1, 1, *_divisors(gpus // pp // ep)])
        degrees = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "etp": etp}
    if dense and not _one_in(draw, 10):
        degrees |= {"ep": 1, "etp": 1}
    fields = {"cluster.gpus": gpus, "cluster.domain": draw.choice((None, None, None, 2, 4))}
    fields |= {f"layout.{axis}": degree for axis, degree in degrees.items()}
    return fields | (_draw_schedule(draw) if degrees["pp"] > 1 else {})


def _draw_schedule(draw: random.Random) -> Fields:
    schedule = draw.choice((None, None, *SCHEDULES, "zero-bubble", "dualpipev"))
    vpp = {"1f1b": 1, "dualpipev": 2, "interleaved": draw.choice((2, 3))}.get(str(schedule))
    any_vpp = draw.choice((1, 1, 2, 2, 3))
    return {"layout.vpp": any_vpp if vpp is None or _one_in(draw, 15) else vpp, "layout.schedule": schedule}


def _draw_config(draw: random.Random, family: str, layout: Fields) -> tuple[dict[str, Any], int | None]:
    """A configuration, and the MTP depths that the job trains; None are those of the model."""
    if family in _SEEING:
        return _draw_seeing_config(draw, family, layout), None
    config = config_of(family, odd=_one_in(draw, 3))
    chunks = layout["layout.pp"] * layout.get("layout.vpp", 1)
    more = draw.choice((1, 2, 2, 3)) if chunks == 1 else min(chunks, 8) + draw.choice((-2, -1, 0, 0, 1))
    config["num_hidden_layers"] = num_layers = max(1, more)
    config["tie_word_embeddings"] = _one_in(draw, 3)
    if _one_in(draw, 8):
        config["vocab_size"] = draw.choice((7, 20, 64))
    if layout["layout.tp"] > 4 or _one_in(draw, 6):
        config["num_attention_heads"] = 8
        config["num_key_value_heads"] = 8 if family in _LATENT else draw.choice((1, 2, 4, 8))
    if layout["layout.tp"] == 3:
        config |= {"num_attention_heads": 6, "num_key_value_heads": 6 if family in _LATENT else 3}
    delta, windows = ("linear_attention", "full_attention"), ("sliding_attention", "full_attention")
    kinds = {"qwen3_next": delta, "qwen3_5_moe_text": delta, "gpt_oss": windows, "dots1": windows}
    kinds["gemma4_text"] = windows
    if family in kinds:
        config["layer_types"] = [draw.choice(kinds[family]) for _ in range(num_layers)]
    if family == "nemotron_h":
        # Experts and a mixer at least, so that every axis has something to shard.
        config["num_hidden_layers"] = num_layers = max(2, num_layers)
        mixers, others = ("linear_attention", "linear_attention", "full_attention"), ("moe", "mlp")
        kept = [draw.choice((*mixers, *others)) for _ in range(num_layers - 2)]
        config["layers_block_type"] = ["moe", *kept, draw.choice(mixers)]
        config["tie_word_embeddings"] = False
    if family in _GROUP_LIMITED:
        config["first_k_dense_replace"] = draw.choice((0, 1, 1, min(2, num_layers - 1)))
        config["num_nextn_predict_layers"] = draw.choice((0, 0, 1, 1, 2))
    if family == "qwen3_moe" and _one_in(draw, 6):
        config["mlp_only_layers"] = [draw.randrange(num_layers)]
    if family not in _DENSE:
        _draw_experts(draw, family, layout["layout.ep"], config)
    if family == "phimoe":  # whose routers choose two, and whose tied head has no bias
        config |= {"num_experts_per_tok": 2, "lm_head_bias": not config["tie_word_embeddings"]}
    has_depths = family in (*_LATENT, "glm4_moe", "nemotron_h")
    return config, draw.choice((None, None, None, 0, 0, 1, 2)) if has_depths or _one_in(draw, 4) else None


def _draw_seeing_config(draw: random.Random, family: str, layout: Fields) -> dict[str, Any]:
    """A vision-language model: layers and experts of its decoder are drawn, its encoder is left as it is."""
    config = copy.deepcopy(tiny_vision.CONFIGS[family])
    text, chunks = config["text_config"], layout["layout.pp"] * layout.get("layout.vpp", 1)
    text["num_hidden_layers"] = num_layers = max(2, draw.choice((2, 3)) if chunks == 1 else min(chunks, 8))
    if family == "qwen3_5_moe":
        kinds = ("linear_attention", "full_attention")
        text["layer_types"] = [draw.choice(kinds) for _ in range(num_layers)]
    if layout["layout.tp"] > 4:
        text |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    _draw_experts(draw, family, layout["layout.ep"], text)
    return config


def _draw_trained_parts(draw: random.Random, sees: bool) -> Fields:
    """Adapters, frozen parts and recompute of an encoder; mostly none of them."""
    fields: Fields = {}
    if _one_in(draw, 5):
        fields["job.lora_rank"] = draw.choice((1, 2, 3, 8))
        fields["job.lora_alpha"] = draw.choice((None, 1.0, 5.0))
        fields["job.lora_targets"] = draw.sample(LORA_TARGETS, draw.randint(1, len(LORA_TARGETS)))
    elif _one_in(draw, 5):
        fields["job.freeze"] = draw.sample(_FROZEN, draw.randint(1, 2))
    if sees:
        fields["job.images"] = 1.0
        if _one_in(draw, 3):
            fields["knobs.vision_recompute"] = draw.sample(VISION_RECOMPUTE, draw.randint(1, 2))
        if _one_in(draw, 3):
            fields["job.freeze"] = draw.sample(("vision", "projector", "language"), draw.randint(1, 2))
    return fields


def _draw_experts(draw: random.Random, family: str, ep: int, config: dict[str, Any]) -> None:
    """Experts that mostly divide by EP, some of them so few that a rank has one."""
    name = dict.fromkeys(("mixtral", "gpt_oss", "granitemoe", "minimax_m2"), "num_local_experts")
    name |= {**dict.fromkeys(_GROUP_LIMITED, "n_routed_experts"), "ernie4_5_moe": "moe_num_experts"}
    count = ep * draw.choice((1, 2, 2, 3)) if not _one_in(draw, 10) else draw.choice((4, 6, 8))
    config[name.get(family, "num_experts")] = count = max(2, count)
    top_k = "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"
    config[top_k] = draw.randint(1, min(4, count))
    if family in _GROUP_LIMITED:
        config["n_group"] = groups = draw.choice([n for n in _divisors(count) if count // n > 1])
        config["topk_group"] = top = draw.randint(1, groups)
        config["num_experts_per_tok"] = draw.randint(1, min(4, count // groups * top))
        config["n_shared_experts"] = draw.choice((1, 1, 2))


def _draw_stages(draw: random.Random, fields: Fields, num_layers: int, mtp: int) -> str:
    """A string of stages that is cut anywhere: chunks are uneven, some of them empty."""
    items = "E" + "t" * num_layers + "m" * mtp + "L"
    first, last = (0, len(items)) if _one_in(draw, 12) else (1, len(items) - 1)
    cuts = sorted(draw.randint(first, last) for _ in range(fields["layout.pp"] * fields["layout.vpp"] - 1))
    ends = zip([0, *cuts], [*cuts, len(items)], strict=True)
    return "|".join(items[start:stop] for start, stop in ends)


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
        "job.seq_len": draw.choice(lengths or [step]) if not _one_in(draw, 20) else draw.choice((10, 13, 16)),
        "job.micro_batch": micro_batch,
        "job.global_batch": dp * micro_batch * count + (_one_in(draw, 20)),
        "job.data": "synthetic",
        "job.optimizer": draw.choice(("adamw", "adamw", "adamw", "muon")),
        "job.packing": _one_in(draw, 2),
        "job.dynamic_length": _one_in(draw, 12),
        "job.task": draw.choice(("pretrain", "pretrain", "sft")),
        "job.routing": "forced-balance" if _one_in(draw, 25) else None,
        "job.capacity_factor": draw.choice((0.6, 1.0, 1.25, 4.0)) if _one_in(draw, 6) else None,
        "job.capacity_scope": "rank" if _one_in(draw, 40) else None,
        "job.freeze": [draw.choice(("vision", "language"))] if _one_in(draw, 30) else None,
        "job.clip_norm": draw.choice((0.0, 0.5, 0.5, 100.0)),
        "job.aux_loss": draw.choice((0.0, 0.01, 0.01)),
        "job.seq_aux_loss": draw.choice((0.0, 0.01)),
        "job.z_loss": draw.choice((0.0, 0.001)),
        "job.mtp_weight": draw.choice((0.0, 0.3, 0.3, 0.3)),
        "job.bias_rate": draw.choice((0.0, 0.01, 0.01)),
        "job.weight_decay": draw.choice((0.0, 0.1, 0.1)),
        "job.seed": draw.randrange(1000),
    }


# Knobs that every so many draws turn, and to what.
_KNOBS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "precision": (3, ("bf16", "fp32", "fp16")),
    "dispatcher": (8, ("local", "local", "deepep")),
    "grad_reduce_overlap": (3, (False,)),
    "param_gather_overlap": (3, (False,)),
    "tp_overlap": (3, (True,)),
    "shared_expert_overlap": (3, (True,)),
    "optimizer_offload": (5, (0.3, 0.5, 1.0)),
    "activation_offload_layers": (8, (1, 2, 3)),
    "optimizer_dtype": (8, ("bf16",)),
    "master_weights": (8, (False,)),
    "grad_dtype": (6, ("bf16",)),
    "grad_accum_fusion": (6, (False,)),
    "permute_fusion": (20, (False,)),
    "expert_fusion": (3, (True,)),
    "loss_fusion": (20, (False,)),
    "router_dtype": (20, ("bf16",)),
    "router_padding": (20, (True,)),
    "graphs": (40, (["attn"], ["moe_router"])),
    "max_connections": (20, (1, 32)),
}


def _draw_knobs(draw: random.Random, fields: Fields, num_layers: int) -> Fields:
    knobs: Fields = {"knobs.precision": "fp32"}
    for name, (rate, values) in _KNOBS.items():
        if _one_in(draw, rate):
            knobs[f"knobs.{name}"] = draw.choice(values)
    knobs |= _draw_data_parallel(draw, fields)
    if fields["layout.ep"] > 1 and _one_in(draw, 2):
        knobs |= {"knobs.ep_overlap": True, "knobs.delay_wgrad": draw.choice((True, False))}
    elif _one_in(draw, 20):
        knobs["knobs.delay_wgrad"] = True
    knobs |= _draw_recompute(draw)
    if _one_in(draw, 4):
        knobs["knobs.activation_offload"] = _sample(draw, OFFLOAD_MODULES)
    if fields["layout.cp"] > 1:
        each = [draw.choice(CP_COMM) for _ in range(num_layers)]
        knobs["knobs.cp_comm"] = each if _one_in(draw, 5) else draw.choice(CP_COMM)
        knobs["knobs.cp_exchange"] = draw.choice((None, *CP_EXCHANGE))
        mixed = knobs["knobs.cp_comm"] == "a2a+p2p" or _one_in(draw, 8)
        knobs["knobs.cp_inner"] = draw.choice((None, *_divisors(fields["layout.cp"]))) if mixed else None
    return knobs


def _draw_data_parallel(draw: random.Random, fields: Fields) -> Fields:
    """ZeRO-1, FSDP or HSDP, whose copies mostly divide both kinds of data parallelism."""
    kind = draw.choice(("zero1", "zero1", "fsdp", "hsdp"))
    ranks, degree = fields["cluster.gpus"] // fields["layout.pp"], {a: fields[f"layout.{a}"] for a in _SHARDING_AXES}
    both = gcd(ranks // (degree["tp"] * degree["cp"]), ranks // (degree["ep"] * degree["etp"]))
    if kind == "hsdp" and both > 1:
        return {"knobs.data_parallel": kind, "layout.replicate": draw.choice([*_divisors(both)[1:], 2])}
    return {"knobs.data_parallel": kind} if kind != "hsdp" or _one_in(draw, 3) else {"knobs.data_parallel": "fsdp"}


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
    return {"knobs.recompute": [draw.choice(names)] if kind == "one" else _sample(draw, names)}


def _sample(draw: random.Random, names: Sequence[str]) -> list[str]:
    return draw.sample(names, draw.randint(1, 4))


def _without_obstacles(draw: random.Random, fields: Fields) -> Fields:
    """What EP overlap excludes, taken back: the fix of a rule may be to go without the overlap that was drawn."""
    kept = [name for name in fields.get("knobs.recompute", []) if name not in ("moe", "full")]
    changes: Fields = {f"knobs.{name}": None for name in (*_OBSTACLES, "shared_expert_overlap", "dispatcher")}
    changes["knobs.recompute"] = kept or None
    if fields["layout.pp"] > 1 and fields["layout.vpp"] == 1:
        changes |= {"layout.vpp": 2, "layout.stages": None}
        changes["layout.schedule"] = draw.choice((None, "interleaved", "dualpipev", "zero-bubble"))
    return changes
