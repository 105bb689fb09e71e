"""Fields of a plan as they stand in Megatron's configuration after all of Megatron's own set-up."""

from collections.abc import Callable
from typing import Any

_FP8 = {"delayed": "fp8-tensor", "tensorwise": "fp8-cs", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def bridge_values(cfg: Any, layers: list[list[int]] | None) -> dict[str, Any]:
    """`layers`: decoder layers of every chunk, by stage then chunk. A field that a release lacks is left out."""
    readers: dict[str, Callable[[], Any]] = {
        "job.global_batch": lambda: cfg.train.global_batch_size,
        "job.micro_batch": lambda: cfg.train.micro_batch_size,
        "dp": lambda: cfg.data_parallel_size,
        "dataset.seq_len": lambda: _first(cfg.dataset, "seq_length", "sequence_length"),
        "knobs.grad_reduce_overlap": lambda: bool(cfg.ddp.overlap_grad_reduce),
        "knobs.param_gather_overlap": lambda: bool(cfg.ddp.overlap_param_gather),
        "knobs.grad_dtype": lambda: "fp32" if cfg.ddp.grad_reduce_in_fp32 else "bf16",
        "fsdp": lambda: bool(cfg.ddp.use_megatron_fsdp),
        "knobs.optimizer_dtype": lambda: _dtype(cfg.optimizer.exp_avg_dtype),
        "knobs.optimizer_offload": lambda: (
            cfg.optimizer.optimizer_offload_fraction if cfg.optimizer.optimizer_cpu_offload else 0.0
        ),
    }
    values = {**_read(readers), **model_values(cfg.model)}
    if layers is not None:
        values["layers of the chunks"] = layers
    return values


def model_values(model: Any) -> dict[str, Any]:
    """The part that Megatron's model configuration holds; Megatron-LM's arguments have the same names."""
    return _read(
        {
            "layout.tp": lambda: model.tensor_model_parallel_size,
            "layout.cp": lambda: model.context_parallel_size,
            "layout.pp": lambda: model.pipeline_model_parallel_size,
            "layout.vpp": lambda: model.virtual_pipeline_model_parallel_size or 1,
            "layout.ep": lambda: model.expert_model_parallel_size,
            "layout.etp": lambda: model.expert_tensor_parallel_size,
            "job.seq_len": lambda: model.seq_length,
            "sequence_parallel": lambda: bool(model.sequence_parallel),
            "job.mtp": lambda: model.mtp_num_layers or 0,
            "knobs.recompute": lambda: _recompute(model),
            "knobs.recompute_method": lambda: model.recompute_method,
            "knobs.recompute_layers": lambda: model.recompute_num_layers,
            "knobs.dispatcher": lambda: _dispatcher(model),
            "knobs.ep_overlap": lambda: bool(model.overlap_moe_expert_parallel_comm),
            "knobs.delay_wgrad": lambda: bool(model.delay_wgrad_compute),
            "knobs.shared_expert_overlap": lambda: bool(model.moe_shared_expert_overlap),
            "knobs.tp_overlap": lambda: bool(model.tp_comm_overlap),
            "knobs.graphs": lambda: _graphs(model),
            "knobs.activation_offload": lambda: _offloaded(model),
            "knobs.precision": lambda: _precision(model),
            "knobs.router_dtype": lambda: model.moe_router_dtype or "bf16",
            "model.num_layers": lambda: model.num_layers,
            "model.dim": lambda: model.hidden_size,
            "model.num_experts": lambda: model.num_moe_experts,
            "model.top_k": lambda: model.moe_router_topk,
            "model.expert_dim": lambda: model.moe_ffn_hidden_size,
            "model.vocab": lambda: model.vocab_size,
        }
    )


def _read(readers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read()
        except AttributeError:  # of a release without the field
            continue
    return values


def _first(owner: Any, *names: str) -> Any:
    return next(value for name in names if (value := getattr(owner, name, None)) is not None)


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _recompute(model: Any) -> list[str]:
    if model.recompute_granularity == "full":
        return ["full"]
    return sorted(model.recompute_modules or []) if model.recompute_granularity else []


def _dispatcher(model: Any) -> str:
    kind = str(model.moe_token_dispatcher_type)
    return str(getattr(model, "moe_flex_dispatcher_backend", "deepep")) if kind == "flex" else kind


def _graphs(model: Any) -> list[str]:
    implementation = getattr(model, "cuda_graph_impl", "none")
    modules = getattr(model, "cuda_graph_modules", None)
    if modules is None:
        modules = getattr(model, "cuda_graph_scope", None) or []
    names = [modules] if isinstance(modules, str) else [str(getattr(module, "name", module)) for module in modules]
    if implementation == "none":
        return []
    if implementation in ("local", "full_iteration"):
        return ["full_iteration"]
    return sorted(names)


def _offloaded(model: Any) -> list[str]:
    return sorted(model.offload_modules or []) if model.fine_grained_activation_offloading else []


def _precision(model: Any) -> str:
    if getattr(model, "fp4", None):
        return "nvfp4"
    if getattr(model, "fp8", None):
        recipe = model.fp8_recipe
        return _FP8.get(str(getattr(recipe, "value", recipe)), str(recipe))
    return "bf16" if model.bf16 else "fp16" if model.fp16 else "fp32"
