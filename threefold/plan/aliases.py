"""Megatron's names for our fields, accepted wherever a plan field is: in files and in overrides.

Those of other trainers are in `words.py`."""

from collections.abc import Callable
from typing import Any

from threefold.findings import Finding
from threefold.plan.words import SAME, same_field

Fields = dict[str, Any]

FLEX_BACKENDS = ("deepep", "hybridep")
# Modules that upstream's guides spell one way and Megatron another; ours are Megatron's accepted spellings.
MODULES = {"up_proj": "mla_up_proj", "norm": "layernorm", "layer_norm": "layernorm", "shared_expert": "shared_experts"}

_PLAIN = {
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "virtual_pipeline_model_parallel_size": "layout.vpp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.etp",
    "pipeline_model_parallel_layout": "layout.stages",
    "num_moe_experts": "model.num_experts",
    "seq_length": "job.seq_len",
    "sequence_length": "job.seq_len",
    "global_batch_size": "job.global_batch",
    "micro_batch_size": "job.micro_batch",
    "mtp_num_layers": "job.mtp",
    "mtp_loss_scaling_factor": "job.mtp_weight",
    "adam_beta1": "job.adam_beta1",
    "adam_beta2": "job.adam_beta2",
    "adam_eps": "job.adam_eps",
    "store_param_remainders": "knobs.store_param_remainders",
    "initial_loss_scale": "job.initial_loss_scale",
    "loss_scale_window": "job.loss_scale_window",
    "moe_expert_capacity_factor": "job.capacity_factor",
    "overlap_moe_expert_parallel_comm": "knobs.ep_overlap",
    "delay_wgrad_compute": "knobs.delay_wgrad",
    "overlap_dispatch_backward_with_experts_wgrad": "knobs.wgrad_overlap",
    "moe_shared_expert_overlap": "knobs.shared_expert_overlap",
    "overlap_grad_reduce": "knobs.grad_reduce_overlap",
    "overlap_param_gather": "knobs.param_gather_overlap",
    "tp_comm_overlap": "knobs.tp_overlap",
    "recompute_modules": "knobs.recompute",
    "recompute_method": "knobs.recompute_method",
    "recompute_num_layers": "knobs.recompute_layers",
    "gradient_accumulation_fusion": "knobs.grad_accum_fusion",
    "moe_permute_fusion": "knobs.permute_fusion",
    "moe_router_dtype": "knobs.router_dtype",
    "moe_router_padding_for_fp8": "knobs.router_padding",
    "moe_router_padding_for_quantization": "knobs.router_padding",
    "fp8_param": "knobs.fp8_params",
    "fp8_param_gather": "knobs.fp8_params",
    "cuda_graph_scope": "knobs.graphs",
    "cp_comm_type": "knobs.cp_comm",
    "hybrid_context_parallel": "knobs.cp_dynamic",
    "optimizer_offload_fraction": "knobs.optimizer_offload",
    "moe_deepep_num_sms": "knobs.dispatch_sms",
    "moe_hybridep_num_sms": "knobs.dispatch_sms",
}
_GROUPS = ("model", "comm_overlap", "train", "dataset", "ddp", "optimizer", "mixed_precision", "dist", "cfg")


def resolve(path: str, value: Any) -> tuple[Fields, list[Finding]] | None:
    """Our fields for a name of Megatron or another trainer, or None when the name is not one of theirs."""
    group, _, name = path.lstrip("-").replace("-", "_").rpartition(".")
    is_megatron = not group or group.removeprefix("cfg.") in _GROUPS
    if is_megatron and name in _PLAIN:
        return {_PLAIN[name]: value}, []
    if name in _CONVERTED and (is_megatron or name == "gradient_checkpointing"):
        return _CONVERTED[name](path, value)
    field = same_field(path)
    return ({field: value}, []) if field else None


def field_of(path: str) -> str:
    """Our field behind a plain name of another trainer; other paths as they are."""
    renamed = resolve(path, None) if path.rpartition(".")[2] not in _CONVERTED else None
    return next(iter(renamed[0]), path) if renamed else path


def base_dtype(path: str) -> str | None:
    """`bf16` or `fp16` where the path is one of Megatron's two switches of the base, which mean something together."""
    group, _, name = path.lstrip("-").rpartition(".")
    is_switch = name in ("bf16", "fp16") and (not group or group.removeprefix("cfg.") in _GROUPS)
    return name if is_switch else None


def known_names() -> list[str]:
    return [*_PLAIN, *_CONVERTED, *SAME, "bf16", "fp16"]


def names_of(field: str) -> list[str]:
    """Megatron's names that set one of our fields, alone or together with others, but those that switch it off."""
    found = [name for name, path in _PLAIN.items() if path == field]
    for name, convert in _CONVERTED.items():
        set_by = {
            path for sample in (True, "full") for path, value in convert(name, sample)[0].items() if value is not False
        }
        found += [name] if field in set_by else []
    return [*found, *(("bf16", "fp16") if field == "knobs.precision" else ())]


def _dispatcher_type(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    if value == "flex":
        finding = Finding(
            rule="flex-needs-backend",
            at=path,
            problem="dispatcher type flex names no backend: nothing faster would run",
            fix={"knobs.dispatcher": "deepep"},
            advice="setting the backend is enough to activate it",
            fixes=[{"knobs.dispatcher": "hybridep"}, {path: None, "knobs.dispatcher": "alltoall"}],
        )
        return {}, [finding]
    return {"knobs.dispatcher": value}, []


def _flex_backend(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    if value in (None, "None", "none", ""):
        return {}, []
    return {"knobs.dispatcher": value}, []


def _granularity(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    if value in ("selective", None):
        return {}, []
    return {"knobs.recompute": ["full"] if value == "full" else value}, []


def _both_overlaps(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    if value is False:  # upstream the switch at rest changes nothing, so that the two knobs can be set apart
        return {}, []
    fields: Fields = {"knobs.ep_overlap": value, "knobs.delay_wgrad": value, "knobs.shared_expert_overlap": False}
    finding = Finding(
        rule="overlap-switch-couples",
        at=path,
        severity="warning",
        problem="this switch sets ep_overlap and delay_wgrad together, so a gain cannot be attributed to either",
        advice="for an A/B set knobs.ep_overlap and knobs.delay_wgrad apart",
    )
    return fields, [finding] if value is True else []


def _force_balance(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    return {"job.routing": "forced-balance" if value is True else "learned" if value is False else value}, []


def _cpu_offload(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    return {"knobs.optimizer_offload": 1.0 if value is True else 0.0 if value is False else value}, []


def _whole_layers(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    return {"knobs.recompute": ["full"] if value is True else [] if value is False else value}, []


def _no_field(path: str, value: Any) -> tuple[Fields, list[Finding]]:
    return {}, []


_CONVERTED: dict[str, Callable[[str, Any], tuple[Fields, list[Finding]]]] = {
    "moe_token_dispatcher_type": _dispatcher_type,
    "moe_flex_dispatcher_backend": _flex_backend,
    "recompute_granularity": _granularity,
    "gradient_checkpointing": _whole_layers,
    "moe_a2a_overlap": _both_overlaps,
    "moe_router_force_load_balancing": _force_balance,
    "optimizer_cpu_offload": _cpu_offload,
    "sequence_parallel": _no_field,  # always on with tensor parallel here
}
