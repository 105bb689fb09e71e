"""Which settings that no plan holds exclude each other, as data.

An import asks here. A plan that comes out of it goes without these settings, so that no rule of `check` sees them.
Places in Megatron's wheels are looked up by `tools/read_megatron.py`, as those of rules are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from threefold.findings import Finding
from threefold.interop.megatron.field_names import Settings
from threefold.spec.megatron import places
from threefold.spec.stacks import CORE_CONFIG

_CONFIG = "bridge/training/config.py"
_ARGUMENTS = "training/arguments.py"
_FSDP = "ddp.use_megatron_fsdp"
_HIERARCHY = "model.hierarchical_context_parallel_sizes"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that do not go together, or not as somebody expects. `at` is the one to change."""

    name: str  # in `spec/megatron.json`, behind `setting:`
    at: str
    holds: Callable[[Settings], object]
    problem: str
    advice: str
    place: tuple[str, str] | None = None  # a file under `megatron/`, and words of its message there


def _is_nested(settings: Settings) -> bool:
    kinds = settings.get("model.cp_comm_type")
    return "a2a+p2p" in (kinds if isinstance(kinds, tuple | list) else (kinds,))


def _has_several(settings: Settings, *degrees: str) -> bool:
    values = (settings.get(f"model.{name}_model_parallel_size") for name in degrees)
    return any(isinstance(value, int) and value > 1 for value in values)


def _has_other_product(settings: Settings) -> bool:
    sizes, cp = settings.get(_HIERARCHY), settings.get("model.context_parallel_size")
    is_known = isinstance(sizes, tuple | list) and all(isinstance(size, int) for size in sizes)
    return bool(is_known and isinstance(cp, int) and prod(sizes or ()) != cp)


def _counts_ends(settings: Settings) -> bool:
    ends = ("embedding", "loss")
    counted = any(settings.get(f"model.account_for_{end}_in_pipeline_split") for end in ends)
    return counted and settings.get("model.pipeline_model_parallel_layout") is not None


def _names(settings: Settings, path: str) -> set[str]:
    value = settings.get(path) or ()
    return {str(name) for name in (value.split(",") if isinstance(value, str) else value)}


def _graphs(settings: Settings) -> str:
    return str(settings.get("model.cuda_graph_impl") or "none")


def _offloads(settings: Settings) -> set[str]:
    """Modules whose activations are offloaded by name."""
    has = settings.get("model.fine_grained_activation_offloading")
    return _names(settings, "model.offload_modules") if has else set()


def _repeats_dropout(settings: Settings) -> bool:
    """Whether a graph holds a recompute of something random."""
    scopes, names = _names(settings, "model.cuda_graph_modules"), _names(settings, "model.recompute_modules")

    def is_repeated(scope: str, name: str) -> bool:
        return name in names and (_graphs(settings) == "full_iteration" or not scopes or scope in scopes)

    hidden = is_repeated("mlp", "mlp") or is_repeated("moe", "moe")
    return _graphs(settings) != "none" and bool(
        (settings.get("model.attention_dropout") and is_repeated("attn", "core_attn"))
        or (settings.get("model.hidden_dropout") and hidden)
        or (settings.get("model.moe_input_jitter_eps") is not None and is_repeated("moe", "moe"))
    )


def _is_nccl_ep(settings: Settings) -> bool:
    return settings.get("model.moe_flex_dispatcher_backend") == "ncclep"


def _overlaps_wgrad_alone(settings: Settings) -> bool:
    names = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
    return not any(settings.get(f"comm_overlap.{name}") for name in names)


def _has_two_counts_of_sms(settings: Settings) -> bool:
    counts = {settings.get(f"model.moe_{name}_num_sms") for name in ("deepep", "hybridep")} - {None}
    return len(counts) > 1 and settings.get("model.moe_flex_dispatcher_num_sms") in counts


def _saves(settings: Settings) -> bool:
    return any(settings.get(f"checkpoint.{name}") is not None for name in ("save", "load"))


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "fsdp-registers-user-buffers",
        "ddp.fsdp_manual_registration",
        lambda s: s.get("ddp.fsdp_manual_registration") and not s.get("ddp.nccl_ub"),
        "manual registration without NCCL user buffers",
        "set ddp.nccl_ub, which turns the registration on by itself",
        (_CONFIG, "DDP.fsdp_manual_registration requires DDP.nccl_ub!"),
    ),
    Conflict(
        "fsdp-has-no-replicas-to-compare",
        "train.check_weight_hash_across_dp_replicas_interval",
        lambda s: s.get(_FSDP) and s.get("train.check_weight_hash_across_dp_replicas_interval"),
        "a hash of weights over data-parallel ranks with FSDP, where no two ranks hold the same",
        "leave the interval out",
        (_CONFIG, "TrainingConfig.check_weight_hash_across_dp_replicas_interval is not"),
    ),
    Conflict(
        "one-kind-of-fsdp",
        "dist.use_torch_fsdp2",
        lambda s: s.get(_FSDP) and s.get("dist.use_torch_fsdp2"),
        "Megatron's FSDP and torch's together",
        "keep Megatron's: torch's failed at its start when upstream last tried it (2026-08)",
        (_CONFIG, "use_megatron_fsdp and use_torch_fsdp2 are mutually exclusive."),
    ),
    Conflict(
        "fsdp-orders-ranks-by-itself",
        "dist.use_tp_pp_dp_mapping",
        lambda s: s.get(_FSDP) and s.get("dist.use_tp_pp_dp_mapping"),
        "an order of ranks of its own with Megatron's FSDP",
        "leave use_tp_pp_dp_mapping out",
        (_CONFIG, "use_tp_pp_dp_mapping is not supported with Megatron FSDP"),
    ),
    Conflict(
        "torch-fsdp-is-alone",
        "dist.use_torch_fsdp2",
        lambda s: s.get("dist.use_torch_fsdp2") and _has_several(s, "pipeline", "expert"),
        "torch's FSDP with a pipeline or expert parallelism",
        "Megatron's FSDP (ddp.use_megatron_fsdp) goes with EP",
        (_ARGUMENTS, "--use-torch-fsdp2 is not supported with pipeline parallelism"),
    ),
    Conflict(
        "fsdp-has-its-checkpoints",
        "checkpoint.ckpt_format",
        lambda s: s.get(_FSDP) and _saves(s) and s.get("checkpoint.ckpt_format", "torch_dist") != "fsdp_dtensor",
        "checkpoints of Megatron's FSDP in another format than fsdp_dtensor",
        "set fsdp_dtensor; it reads neither torch_dist nor zarr, nor they it, and reshards over all axes",
        (_CONFIG, "Megatron-FSDP requires the fsdp_dtensor checkpointing format!"),
    ),
    Conflict(
        "fsdp-graph-keeps-buffers",
        "ddp.megatron_fsdp_cuda_graph_mode",
        lambda s: (
            s.get(_FSDP)
            and s.get("model.cuda_graph_impl") == "full_iteration"
            and not s.get("ddp.megatron_fsdp_cuda_graph_mode")
        ),
        "a graph of the iteration with FSDP whose buffers move",
        "set ddp.megatron_fsdp_cuda_graph_mode (Bridge 0.5 and later), as an export does",
    ),
    Conflict(
        "hierarchical-cp-has-sizes",
        _HIERARCHY,
        lambda s: _is_nested(s) and not s.get(_HIERARCHY),
        "a2a+p2p without sizes of its groups",
        "set [ranks of the a2a, ranks of the ring]; older stacks ran without an exchange: each rank saw its own chunk, "
        "with too high a throughput and wrong gradients",
        (_CONFIG, "hierarchical_context_parallel_sizes must be set when cp_comm_type"),
    ),
    Conflict(
        "hierarchical-cp-sizes-multiply",
        _HIERARCHY,
        _has_other_product,
        "sizes of hierarchical groups whose product is not CP",
        "[ranks of the a2a, ranks of the ring], CP in all",
        (_CONFIG, "Product of hierarchical_context_parallel_sizes"),
    ),
    Conflict(
        "hierarchical-cp-has-global-groups",
        "dist.use_decentralized_pg",
        lambda s: s.get("dist.use_decentralized_pg") and s.get(_HIERARCHY),
        "hierarchical context parallelism with decentralized process groups",
        "set dist.use_decentralized_pg=false, as an export does; Bridge's skill still says that groups stay flat "
        "without a word, which was so before 0.4",
        ("bridge/training/initialize.py", "Decentralized process groups (use_decentralized_pg=True) do not support"),
    ),
    Conflict(
        "hybrid-cp-loss-by-token",
        "model.calculate_per_token_loss",
        lambda s: s.get("model.hybrid_context_parallel") and s.get("model.calculate_per_token_loss") is False,
        "hybrid context parallelism without a loss by token",
        "set model.calculate_per_token_loss, as an export does",
        (_ARGUMENTS, "Hybrid context parallelism must be used with --calculate-per-token-loss"),
    ),
    Conflict(
        "hybrid-cp-single-loader",
        "dataset.dataloader_type",
        lambda s: s.get("model.hybrid_context_parallel") and s.get("dataset.dataloader_type") not in (None, "single"),
        "hybrid context parallelism with another data loader than `single`",
        "set dataset.dataloader_type=single, as an export does",
        (_ARGUMENTS, "Hybrid context parallelism only supported with single dataloader type"),
    ),
    Conflict(
        "layout-string-counts-ends",
        "model.account_for_embedding_in_pipeline_split",
        _counts_ends,
        "embedding or loss counted as layers beside a layout string",
        "set both account_for_*_in_pipeline_split to false, as an export does",
        (CORE_CONFIG, "pipeline_model_parallel_layout cannot be set"),
    ),
    Conflict(
        "mxfp8-gather-reuses-gradients",
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",
        lambda s: (
            s.get("mixed_precision.fp8_param_gather")
            and s.get("mixed_precision.fp8_recipe") == "mxfp8"
            and s.get("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag") is False
            and not s.get(_FSDP)
        ),
        "MXFP8 parameters gathered without the gradient buffer",
        "set mixed_precision.reuse_grad_buf_for_mxfp8_param_ag; they travel in BF16 all the same, so that the gather "
        "gets no smaller, although upstream's precision recipes turn it on",
        (_CONFIG, "When fp8_param_gather=True and fp8_recipe='mxfp8', "),
    ),
    Conflict(
        "offload-leaves-masters",
        "optimizer.use_precision_aware_optimizer",
        lambda s: (
            s.get("optimizer.optimizer_cpu_offload") and s.get("optimizer.use_precision_aware_optimizer") is False
        ),
        "optimizer states on the host without the precision-aware optimizer: master weights stay on the GPU",
        "set optimizer.use_precision_aware_optimizer, as an export does: 12 bytes a parameter leave in place of 8",
        (_ARGUMENTS, "The optimizer cpu offload must be used in conjunction with"),
    ),
    Conflict(
        "async-save-has-its-formats",
        "checkpoint.async_save",
        lambda s: (
            s.get("checkpoint.async_save")
            and s.get("checkpoint.ckpt_format") not in (None, "torch_dist", "fsdp_dtensor")
        ),
        "checkpoints written in the background in a format without it",
        "set torch_dist; Bridge's check also takes fsdp_dtensor since 0.5, which its guides leave out",
        (_CONFIG, "async_save is only supported with ckpt_format="),
    ),
    Conflict(
        "async-save-has-a-folder",
        "checkpoint.async_save",
        lambda s: s.get("checkpoint.async_save") and s.get("checkpoint.save", "") is None,
        "checkpoints written in the background to no folder",
        "set checkpoint.save",
        (_CONFIG, "async_save is enabled, but save is not set."),
    ),
    Conflict(
        "fault-tolerance-without-nsys",
        "ft.enable_ft_package",
        lambda s: s.get("ft.enable_ft_package") and s.get("profiling.use_nsys_profiler"),
        "fault tolerance and Nsight Systems together: NeMo-Run drops Nsight with a warning",
        "trace a run without fault tolerance",
    ),
    Conflict(
        "one-straggler-detector",
        "nvrx_straggler.enabled",
        lambda s: s.get("nvrx_straggler.enabled") and s.get("straggler.log_straggler"),
        "two detectors of stragglers",
        "keep nvrx_straggler (every 300 s, thresholds 0.7)",
    ),
    Conflict(
        "in-process-restart-is-alone",
        "inprocess_restart.enabled",
        lambda s: (
            s.get("inprocess_restart.enabled") and (s.get("train.exit_signal_handler") or s.get("ft.enable_ft_package"))
        ),
        "restarts inside of processes with preemption or with restarts of the job",
        "one of them; in-process restarts want NCCL_NVLS_ENABLE=0 and srun --kill-on-bad-exit=0",
    ),
    Conflict(
        "in-process-limits-rise",
        "inprocess_restart.hard_timeout",
        lambda s: s.get("inprocess_restart.soft_timeout", 60.0) >= s.get("inprocess_restart.hard_timeout", 90.0),
        "a hard limit that is not above the soft one",
        "soft below hard (60 and 90 s), and NCCL's watchdog above both",
    ),
    Conflict(
        "saved-activations-or-sequence-parallel",
        "model.distribute_saved_activations",
        lambda s: s.get("model.distribute_saved_activations") and s.get("model.sequence_parallel"),
        "saved activations distributed over TP ranks that already cut the sequence",
        "leave distribute_saved_activations out: sequence parallelism saves what it would",
        (CORE_CONFIG, 'f"distribute_saved_activations: {self.distribute_saved_activations} must be "'),
    ),
    Conflict(
        "paged-stash-has-a-capacity",
        "model.moe_paged_stash",
        lambda s: s.get("model.moe_paged_stash") and s.get("model.moe_expert_rank_capacity_factor") is None,
        "a paged stash without a capacity per rank",
        "set model.moe_expert_rank_capacity_factor; recipes have 1.2 to 1.5",
        (CORE_CONFIG, "moe_paged_stash requires moe_expert_rank_capacity_factor to be set"),
    ),
    Conflict(
        "paged-stash-keeps-layers",
        "model.cpu_offloading",
        lambda s: s.get("model.moe_paged_stash") and s.get("model.cpu_offloading"),
        "a paged stash with offload of whole layers",
        "one of them",
        (CORE_CONFIG, "moe_paged_stash cannot be enabled with cpu_offloading."),
    ),
    Conflict(
        "paged-stash-holds-experts",
        "model.offload_modules",
        lambda s: s.get("model.moe_paged_stash") and _offloads(s) & {"expert_fc1", "moe_act", "fused_group_mlp"},
        "offload of what the paged stash holds",
        "leave expert_fc1, moe_act and fused_group_mlp out of offload_modules",
        (CORE_CONFIG, "When moe_paged_stash is enabled, offload_modules must not include"),
    ),
    Conflict(
        "graphed-recompute-is-not-random",
        "model.cuda_graph_modules",
        _repeats_dropout,
        "a graph that holds the recompute of something random",
        "no dropout or jitter (an export has none), or recompute outside of the graph",
        (CORE_CONFIG, "attention dropout is not supported with graphed attention "),
    ),
    Conflict(
        "whole-graph-bounds-offload",
        "model.fine_grained_offloading_max_inflight_offloads",
        lambda s: (
            _offloads(s)
            and _graphs(s) == "full_iteration"
            and s.get("model.fine_grained_offloading_max_inflight_offloads") is None
        ),
        "offload by module in a graph of the whole iteration without a bound",
        "set the most copies of a name that may be under way, as an export does: recipes have 1 or 2",
        (CORE_CONFIG, '"fine_grained_offloading_max_inflight_offloads must be a non-negative "'),
    ),
    Conflict(
        "local-graph-offloads-experts",
        "model.offload_modules",
        lambda s: _graphs(s) == "local" and _offloads(s) - {"expert_fc1", "moe_act", "fused_group_mlp"},
        "offload beside graphs of impl `local` of other modules than those of experts",
        "expert_fc1, moe_act and fused_group_mlp alone, or graphs of transformer_engine",
        (CORE_CONFIG, "\"fine-grained activation offloading with cuda_graph_impl='local' \""),
    ),
    Conflict(
        "packed-graph-has-one-width",
        "dataset.pad_to_max_length",
        lambda s: (
            s.get("dataset.enable_offline_packing")
            and _graphs(s) in ("transformer_engine", "full_iteration")
            and not s.get("dataset.pad_to_max_length")
        ),
        "offline packing under graphs without one width",
        "set dataset.pad_to_max_length; where attention is captured offline_packing_specs.pad_cu_seqlens too",
        (_CONFIG, "Offline packing with CUDA graphs requires dataset pad_to_max_length=True."),
    ),
    Conflict(
        "nccl-ep-overlap-keeps-inputs",
        "model.offload_modules",
        lambda s: (
            _is_nccl_ep(s) and s.get("comm_overlap.overlap_moe_expert_parallel_comm") and "expert_fc1" in _offloads(s)
        ),
        "EP overlap by NCCL EP with offload of expert_fc1, whose input the overlap frees",
        "leave expert_fc1 out, or take another dispatcher",
        (CORE_CONFIG, "overlap_moe_expert_parallel_comm with ncclep does not support offloading"),
    ),
    Conflict(
        "nccl-ep-has-a-capacity",
        "model.moe_expert_rank_capacity_factor",
        lambda s: _is_nccl_ep(s) and s.get("model.moe_expert_rank_capacity_factor") is None,
        "NCCL EP without a capacity per rank, which sizes its buffer",
        "set it generously: a rank that receives more ends the run",
        ("core/transformer/moe/token_dispatcher.py", "The 'ncclep' backend requires moe_expert_rank_capacity_factor"),
    ),
    Conflict(
        "nccl-ep-copies-where-shapes-move",
        "model.moe_ncclep_zero_copy",
        lambda s: s.get("model.moe_ncclep_zero_copy") and not s.get("model.moe_ncclep_static_shape"),
        "NCCL EP without copies, and without fixed shapes",
        "set model.moe_ncclep_static_shape, which wants fused experts (use_transformer_engine_op_fuser)",
        ("core/transformer/moe/token_dispatcher.py", "moe_ncclep_zero_copy requires moe_ncclep_static_shape"),
    ),
    Conflict(
        "dispatch-with-wgrad-is-alone",
        "model.overlap_dispatch_backward_with_experts_wgrad",
        lambda s: s.get("model.overlap_dispatch_backward_with_experts_wgrad") and not _overlaps_wgrad_alone(s),
        "dispatch of the backward next to weight gradients, with EP overlap or delayed weight gradients",
        "a third way to hide an exchange, without two microbatches at a time; it needs Transformer Engine 2.3",
        (CORE_CONFIG, "'overlap_dispatch_backward_with_experts_wgrad.'"),
    ),
    Conflict(
        "graph-modules-have-one-name",
        "model.cuda_graph_scope",
        lambda s: s.get("model.cuda_graph_scope") and s.get("model.cuda_graph_modules") not in (None, "full", (), []),
        "modules of graphs under their older name and under their newer one",
        "keep model.cuda_graph_modules",
        (CORE_CONFIG, '"cuda_graph_scope and cuda_graph_modules cannot be set together."'),
    ),
    Conflict(
        "dispatchers-share-multiprocessors",
        "model.moe_flex_dispatcher_num_sms",
        _has_two_counts_of_sms,
        "two numbers of multiprocessors under names by backend, which have become one",
        "set model.moe_flex_dispatcher_num_sms",
        (CORE_CONFIG, "Conflicting deprecated SM-count knobs"),
    ),
    Conflict(
        "early-release-needs-ep-overlap",
        "model.ep_overlap_early_attn_memory_release",
        lambda s: (
            s.get("model.ep_overlap_early_attn_memory_release")
            and not s.get("comm_overlap.overlap_moe_expert_parallel_comm")
        ),
        "an early release of attention's memory, which belongs to EP overlap",
        "set comm_overlap.overlap_moe_expert_parallel_comm, or leave it out",
        (CORE_CONFIG, "'ep_overlap_early_attn_memory_release'"),
    ),
)


def conflicts_of(settings: Settings) -> Iterator[Finding]:
    """What does not go together among the settings of an import."""
    for one in CONFLICTS:
        try:
            is_there = one.holds(settings)
        except TypeError:  # a value of another kind than the setting's, which parsing speaks of
            continue
        if is_there:
            problem = one.problem
            if one.place is not None and (place := places().get(f"setting:{one.name}")):
                problem += f" (refused: {place})"
            advice, rule = one.advice, "import-settings-conflict"
            yield Finding(rule=rule, at=one.at, problem=problem, advice=advice, severity="warning")
