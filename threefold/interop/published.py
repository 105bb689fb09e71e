"""Rows of `published_runs.json` as plans: runs that others measured, with the settings behind the figure."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.plan.parse import Parsed, parse
from threefold.plan.plan import GRAPH_SCOPES
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS

Row = Mapping[str, Any]

TUNED = ("tuned_benchmark", "controlled_ab")
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_KNOBS = {  # extra_knobs that are fields of ours under another name
    "moe_shared_expert_overlap": "knobs.shared_expert_overlap",
    "overlap_grad_reduce": "knobs.grad_reduce_overlap",
    "moe_permute_fusion": "knobs.permute_fusion",
    "fp8_param": "knobs.fp8_params",
    "use_transformer_engine_op_fuser": "knobs.expert_fusion",
    "fp8_dot_product_attention": "knobs.fp8_attention",
    "fp8_output_proj": "knobs.fp8_output",
    "moe_router_padding_for_quantization": "knobs.router_padding",
}


# Dtypes of moments and gradients in a model's named recipe, for rows that do not repeat them.
_RECIPE_STATES = {
    ("deepseek-v3", None): ("bf16", "bf16"),
    ("moonlight-16b-a3b", None): ("bf16", "bf16"),
    ("nemotron-3-super", "h100"): ("bf16", "bf16"),
}


_DSV3_LONG = {
    "layout.pp": 8,
    "layout.vpp": 4,
    "layout.ep": 32,
    "knobs.recompute": ["mla_up_proj", "layernorm", "moe", "mlp"],
    "knobs.cp_comm": "a2a+p2p",
}
# Precision of recipes by platform, for rows that state none (the recipes that the rows of 2026 ran).
_UNSTATED = {"ampere": "bf16", "hopper": "fp8-blockwise", "blackwell": "mxfp8"}
# Shapes of named recipes, for rows that state no more than model, machine, length and CP.
_RECIPE_SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek-v3", "h100"): _DSV3_LONG,  # recipes/deepseek-v3-128k-256xh100-fp8
    ("qwen3-next-80b-a3b", "gb200"): {"layout.ep": 32, "job.mtp": 0},  # recipes/qwen3-next-80b-a3b-8k-32xgb200-bf16
    ("qwen3-235b-a22b", "gb200"): {"layout.pp": 4, "layout.vpp": 12, "layout.ep": 32},
    ("qwen3-30b-a3b", "h100"): {"job.global_batch": 8},  # the offload guide's minimal command
}
_MICROBATCHES = 16  # where a row states no global batch: enough that fill and drain do not dominate


def load_rows(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no list of runs")
    return rows


def is_usable(row: Row) -> bool:
    """A throughput row to calibrate on and to be judged by: MoE, settings known, tuned, not superseded."""
    return bool(
        row.get("is_moe")
        and row.get("knobs_match")
        and row.get("status") == "ok"
        and not row.get("superseded")
        and row.get("tflops_per_gpu")
        and row.get("perf_class") in TUNED
    )


def cannot_express(row: Row) -> str | None:
    """Why a row cannot become a plan, or None."""
    if row.get("model") not in MODELS:
        return f"model {row.get('model')} is not known"
    if row.get("system") not in CHIPS:
        return f"system {row.get('system')} is not known"
    if row.get("task") not in ("pretrain", "sft", None):
        return f"task {row.get('task')} is not supported"
    if not row.get("gpus"):
        return "the number of GPUs is not stated"
    return None


def plan_from_row(row: Row) -> Parsed:
    """The plan behind a row. Axes left out are 1; settings left out keep their defaults."""
    return parse(fields_from_row(row))


def fields_from_row(row: Row) -> dict[str, Any]:
    extra: Mapping[str, Any] = row.get("extra_knobs") or {}
    fields: dict[str, Any] = {
        "model": row["model"],
        "target": "megatron-bridge",
        "cluster.chip": row["system"],
        "cluster.gpus": row["gpus"],
        "job.seq_len": row.get("seq_len"),
        "job.micro_batch": row.get("mbs"),
        "job.global_batch": row.get("gbs"),
        "job.task": row.get("task"),
        "job.data": "synthetic" if row.get("perf_class") in TUNED else None,
        "job.mtp": _mtp(row),
        "job.routing": "forced-balance" if row.get("routing") == "force_balance" else None,
        **{f"layout.{axis}": row.get(axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")},
        "layout.stages": _stages(row),
        "knobs.precision": _precision(row),
        "knobs.dispatcher": row.get("dispatcher"),
        "knobs.ep_overlap": row.get("ep_overlap"),
        "knobs.delay_wgrad": row.get("delay_wgrad"),
        "knobs.recompute": _recompute(row),
        "knobs.graphs": _graphs(row),
        "stack.release": release(row),
    }
    if not row.get("gbs") and not row.get("fsdp"):
        shape = _RECIPE_SHAPES.get((row["model"], row["system"]), {})
        fields |= {path: value for path, value in shape.items() if fields.get(path) in (None, [])}
    fields |= {ours: extra.get(theirs) for theirs, ours in _KNOBS.items()}
    if extra.get("cross_entropy_fusion_impl") == "native":
        fields["knobs.loss_fusion"] = False
    fields |= _memory_knobs(row, extra)
    stated = {path: value for path, value in fields.items() if value is not None}
    if "job.global_batch" not in stated:
        stated["job.global_batch"] = _batch(stated)
    return stated


def _batch(fields: Mapping[str, Any]) -> int:
    """A global batch for a row without one: whole rounds of the pipeline on every data-parallel rank."""
    degrees = [int(fields.get(f"layout.{axis}") or 1) for axis in ("tp", "cp", "pp")]
    shards = degrees[0] * degrees[1] * degrees[2]
    dp = max(1, int(fields["cluster.gpus"]) // shards)
    return dp * int(fields.get("job.micro_batch") or 1) * _MICROBATCHES * degrees[2]


def release(row: Row) -> str | None:
    """'26.04.01 NeMo container' -> '26.04.01'; a card dated 2026-08-14 -> 'card-2026-08'."""
    text = str(row.get("release") or "")
    if found := re.match(r"\d\d\.\d\d(\.\d\d)?", text):
        return found.group()
    if found := re.search(r"(\d{4}-\d\d)-\d\d", text):
        return f"card-{found.group(1)}"
    return None


def _precision(row: Row) -> str:
    """A row without a stated precision ran what its recipe had for the platform; 'fp8' alone is current scaling."""
    stated = row.get("precision")
    if stated is None:
        return _UNSTATED[CHIPS[row["system"]].architecture]
    return "fp8-cs" if stated == "fp8" else str(stated)


def _mtp(row: Row) -> int | None:
    depths = row.get("mtp_num_layers")
    if depths is None and row.get("pp_layout"):
        return str(row["pp_layout"]).count("m")
    return depths


def _stages(row: Row) -> str | None:
    """The layout string; an MTP layer in the string of a run without MTP is dropped, as the run dropped it."""
    text = row.get("pp_layout")
    if not text or (row.get("pp") or 1) == 1:
        return None
    return str(text).replace("m", "") if _mtp(row) == 0 else str(text)


def _recompute(row: Row) -> list[str]:
    return ["full"] if row.get("recompute_granularity") == "full" else list(row.get("recompute_modules") or [])


def _graphs(row: Row) -> list[str]:
    kind = row.get("cuda_graph_impl")
    if kind in (None, "none"):
        return []
    if kind == "full_iteration":
        return ["full_iteration"]
    return [scope for scope in row.get("cuda_graph_scopes") or [] if scope in GRAPH_SCOPES]


def _memory_knobs(row: Row, extra: Mapping[str, Any]) -> dict[str, Any]:
    named = _RECIPE_STATES.get((row["model"], None)) or _RECIPE_STATES.get((row["model"], row.get("system")))
    moments, grads = named or (None, None)
    moments = _DTYPES.get(str(extra.get("exp_avg_dtype")), moments)
    fields: dict[str, Any] = {
        "knobs.optimizer_dtype": moments,
        # The default of Megatron's precision-aware optimizer (its `OptimizerConfig`); master weights in fp16, which one
        # recipe asks for, take as many bytes.
        "knobs.store_param_remainders": (moments in ("bf16", "fp16") and row.get("precision") == "bf16") or None,
        "knobs.grad_dtype": _DTYPES.get(str(extra.get("main_grads_dtype")), grads),
        "knobs.tp_overlap": extra.get("tp_comm_overlap") if (row.get("tp") or 1) > 1 else None,
        "knobs.data_parallel": "fsdp" if row.get("fsdp") or extra.get("use_megatron_fsdp") else None,
    }
    if (row.get("dispatcher") or "") in ("deepep", "hybridep"):
        fields["knobs.dispatch_sms"] = extra.get(f"moe_{row['dispatcher']}_num_sms")
    if factor := extra.get("moe_expert_rank_capacity_factor"):
        fields |= {"job.capacity_factor": factor, "job.capacity_scope": "rank"}
    elif factor := extra.get("moe_expert_capacity_factor"):
        fields["job.capacity_factor"] = factor
    offload = row.get("optimizer_offload")
    fields["knobs.optimizer_offload"] = float(offload) if offload else None
    activations = row.get("activation_offload")
    if isinstance(activations, Mapping):
        fields["knobs.activation_offload"] = activations.get("fine_grained_modules")
        fields["knobs.activation_offload_layers"] = activations.get("cpu_offloading_num_layers")
    return fields
