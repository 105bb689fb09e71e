"""A plan as settings of Megatron: dotted paths with values, and what could not be said.

Both exports begin here. `settings_of` goes through the table of plain fields and through one function a theme for the
fields that become several settings, then leaves out what the release does not know.
"""

from collections.abc import Callable

from threefold.cost.format_support import offloads_masters
from threefold.interop.megatron.field_names import FLEX, FP32_FIELDS, LR_SCHEDULES, MOE_FIELDS, PLAIN, PRECISIONS
from threefold.interop.megatron.releases import Release
from threefold.interop.megatron.settings_writer import (
    NO_COUNTERPART,
    NO_EFFECT,
    NO_EXPERTS,
    PACKING,
    SAID_BY_NAMES,
    SAME_AS_ABSENT,
    UNKNOWN_FIELD,
    Writer,
    data_of_paths,
    leave_out_unknown,
    paths_of_data,
    value_of,
)
from threefold.layout.stages import format_stages
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.rules.megatron.graphs import has_paged_stash
from threefold.spec.models import MODELS

_MODULES_SINCE = {"gdn_norm_out": (0, 6), "fused_group_mlp": (0, 6)}  # Megatron Core 0.19


def settings_of(plan: Plan, release: Release, to: str) -> Writer:
    """Every setting that the plan asks for and the release knows, and the table of the rest."""
    writer = Writer(plan, release, to)
    _write_plain(writer)
    for write in _THEMES:
        write(writer)
    for path in dict(plan.written):
        if path in NO_COUNTERPART:
            writer.lose(path, NO_COUNTERPART[path])
        elif path in SAID_BY_NAMES:
            writer.respell(path, SAID_BY_NAMES[path])
    leave_out_unknown(writer)
    _name_the_rest(writer)
    return writer


def _write_plain(writer: Writer) -> None:
    plan = writer.plan
    for row in PLAIN:
        if (row.field in MOE_FIELDS or row.when == "moe") and not plan.model.is_moe:
            writer.lose(row.field, NO_EXPERTS)
            continue
        if row.when == "stated" and not writer.is_stated(row.field):
            continue
        value = value_of(plan, row.field)
        if row.field == "job.seed" and value == 0:
            if row.field in plan.stated:
                writer.always_lose(row.field, value, "Megatron takes seeds above 0 only, and has 1234 without one")
            continue
        value = None if row.null is not None and value == row.null else value
        for path in (row.path, *row.also):
            writer.put(row.field, path, value)


def _write_layout(writer: Writer) -> None:
    plan, layout = writer.plan, writer.plan.layout
    writer.put("layout.tp", "model.sequence_parallel", layout.tp > 1)
    stages = pipeline_layout(plan)
    writer.put("layout.stages", "model.pipeline_model_parallel_layout", stages)
    if writer.to == "megatron-bridge":  # recipes count the ends as layers, which a string excludes
        for end in ("embedding", "loss"):
            writer.put("layout.stages", f"model.account_for_{end}_in_pipeline_split", False)
    if layout.stages is not None and layout.stages == _balanced(plan):
        writer.respell("layout.stages", SAME_AS_ABSENT)
    schedule = "interleaved" if layout.vpp > 1 else "1f1b"
    if layout.schedule == schedule:
        writer.respell("layout.schedule", "it follows from the number of virtual stages, and is read back as absent")
    elif layout.schedule is not None:
        writer.lose("layout.schedule", f"with {layout.vpp} virtual stages Megatron runs {schedule} and nothing else")


def pipeline_layout(plan: Plan) -> str | None:
    """The layout string. Layers that do not divide evenly need one also where the plan has none."""
    if plan.layout.stages is not None:
        return plan.layout.stages
    is_even = plan.layout.chunks == 1 or plan.model.num_layers % plan.layout.chunks == 0
    return None if is_even else format_stages(plan.chunks)


def _balanced(plan: Plan) -> str | None:
    return pipeline_layout(change(plan, {"layout.stages": None}))


def _write_data_parallel(writer: Writer) -> None:
    kind, copies = writer.plan.knobs.data_parallel, writer.plan.layout.replicate
    for group in ("ddp", "optimizer"):
        writer.put("knobs.data_parallel", f"{group}.use_distributed_optimizer", True)
    writer.put("knobs.data_parallel", "ddp.use_megatron_fsdp", kind != "zero1")
    if kind != "zero1":
        writer.put("knobs.data_parallel", "ddp.data_parallel_sharding_strategy", "optim_grads_params")
        writer.put("knobs.data_parallel", "checkpoint.ckpt_format", "fsdp_dtensor")  # Bridge refuses any other
        if writer.to == "megatron-bridge":
            writer.put("knobs.data_parallel", "ddp.average_in_collective", False)
            writer.put("layout.replicate", "ddp.outer_dp_sharding_strategy", "no_shard")  # what a plan's copies are
        if "full_iteration" in writer.plan.knobs.graphs and writer.release.number[:2] >= (0, 5):
            writer.put("knobs.graphs", "ddp.megatron_fsdp_cuda_graph_mode", True)  # buffers keep their addresses
            writer.put("knobs.graphs", "ddp.fsdp_all_gather_in_start_param_sync", False)
    writer.put("layout.replicate", "ddp.num_distributed_optimizer_instances", copies)
    if kind == "hsdp" and copies == 1:
        writer.respell("knobs.data_parallel", "HSDP with one copy of the sharded model is FSDP")
    if kind == "fsdp" and copies > 1:
        writer.respell("knobs.data_parallel", "FSDP with copies of the sharded model is HSDP")


def _write_precision(writer: Writer) -> None:
    knobs = writer.plan.knobs
    name = knobs.precision if knobs.precision in PRECISIONS else "bf16"
    if knobs.precision not in PRECISIONS and knobs.precision != "fp32":
        writer.lose("knobs.precision", f"Megatron has no recipe for {knobs.precision}; the export says bf16")
    if writer.to == "megatron-bridge":
        writer.put("knobs.precision", "mixed_precision", PRECISIONS[name].recipe)
    # The fields say no more than the recipe does, so that a list of overrides is complete without it.
    for path, value in FP32_FIELDS if knobs.precision == "fp32" else PRECISIONS[name].fields:
        writer.put("knobs.precision", path, value)
    if writer.plan.low_precision and knobs.precision in PRECISIONS:
        kind = "fp4" if name == "nvfp4" else "fp8"
        writer.put("knobs.fp8_params", f"mixed_precision.{kind}_param_gather", knobs.fp8_params)
        if name == "mxfp8":  # Bridge refuses one without the other
            reuse = "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
            writer.put("knobs.fp8_params", reuse, knobs.fp8_params)
    else:
        writer.lose("knobs.fp8_params", NO_EFFECT)


def _write_optimizer_states(writer: Writer) -> None:
    knobs = writer.plan.knobs
    is_aware = knobs.optimizer_dtype != "fp32" or knobs.grad_dtype != "fp32" or knobs.store_param_remainders
    if knobs.optimizer_offload > 0 and (writer.to == "megatron-lm" or offloads_masters(writer.plan)):
        is_aware = True  # Megatron-LM asserts it (core 0.19.2, training/arguments.py)
    writer.put("knobs.grad_dtype", "mixed_precision.grad_reduce_in_fp32", knobs.grad_dtype == "fp32")
    writer.put("knobs.optimizer_dtype", "optimizer.use_precision_aware_optimizer", is_aware)
    if is_aware or writer.to == "megatron-bridge":  # a recipe's own dtypes would count, and need the aware optimizer
        writer.put("knobs.grad_dtype", "optimizer.main_grads_dtype", knobs.grad_dtype)
        for moment in ("exp_avg", "exp_avg_sq"):
            writer.put("knobs.optimizer_dtype", f"optimizer.{moment}_dtype", knobs.optimizer_dtype)
    if writer.to == "megatron-bridge":
        writer.put("knobs.optimizer_dtype", "optimizer.main_params_dtype", "fp32")
    writer.put("knobs.optimizer_offload", "optimizer.optimizer_cpu_offload", knobs.optimizer_offload > 0)
    if knobs.optimizer_offload > 0:
        writer.put("knobs.optimizer_offload", "optimizer.optimizer_offload_fraction", knobs.optimizer_offload)
        writer.put("knobs.optimizer_offload", "optimizer.overlap_cpu_optimizer_d2h_h2d", True)


def _write_dispatcher(writer: Writer) -> None:
    knobs, is_flex = writer.plan.knobs, writer.plan.knobs.dispatcher in FLEX
    writer.put("knobs.dispatcher", "model.moe_token_dispatcher_type", "flex" if is_flex else "alltoall")
    writer.put("knobs.dispatcher", "model.moe_flex_dispatcher_backend", knobs.dispatcher if is_flex else None)
    if knobs.dispatcher == "local":
        writer.respell("knobs.dispatcher", "Megatron keeps tokens on their rank by alltoall at EP 1")
    overlaps = knobs.shared_expert_overlap and not (is_flex and writer.to == "megatron-bridge")
    writer.put("knobs.shared_expert_overlap", "model.moe_shared_expert_overlap", overlaps)
    if not overlaps:
        writer.lose("knobs.shared_expert_overlap", "apply_flex_dispatcher_backend turns it off")
    if knobs.dispatch_sms is not None and is_flex:
        writer.put("knobs.dispatch_sms", "model.moe_flex_dispatcher_num_sms", knobs.dispatch_sms)
    elif not is_flex:
        writer.lose("knobs.dispatch_sms", NO_EFFECT)


def _write_routing(writer: Writer) -> None:
    job, knobs = writer.plan.job, writer.plan.knobs
    writer.put("job.routing", "model.moe_router_force_load_balancing", job.routing == "forced-balance")
    writer.put("knobs.router_dtype", "model.moe_router_dtype", "fp32" if knobs.router_dtype == "fp32" else None)
    is_rank = writer.plan.has_rank_capacity
    expert_factor = None if is_rank else job.capacity_factor
    writer.put("job.capacity_factor", "model.moe_expert_capacity_factor", expert_factor)
    writer.put("job.capacity_factor", "model.moe_pad_expert_input_to_capacity", expert_factor is not None)
    if is_rank:
        writer.put("job.capacity_factor", "model.moe_expert_rank_capacity_factor", job.capacity_factor)
    elif job.capacity_factor is None:
        writer.lose("job.capacity_scope", NO_EFFECT)
    if writer.is_stated("job.aux_loss", "job.seq_aux_loss"):
        weights = {"aux_loss": job.aux_loss, "seq_aux_loss": job.seq_aux_loss}
        used = {name: weight for name, weight in weights.items() if weight > 0} or {"none": 0.0}
        types, coefficients = tuple(used), tuple(used.values())
        source = "job.aux_loss" if job.aux_loss or not job.seq_aux_loss else "job.seq_aux_loss"
        writer.put(source, "model.moe_router_load_balancing_type", types[0] if len(types) == 1 else types)
        writer.put(source, "model.moe_aux_loss_coeff", coefficients[0] if len(types) == 1 else coefficients)


def _write_experts(writer: Writer) -> None:
    if not writer.plan.model.is_moe and writer.plan.job.dynamic_length and writer.to == "megatron-bridge":
        # Megatron refuses lengths that vary with its own default, also where there are no experts to dispatch to.
        writer.put("job.dynamic_length", "model.moe_token_dispatcher_type", "alltoall")
    if writer.plan.model.is_moe and writer.plan.knobs.expert_fusion and writer.plan.model.activation == "relu2":
        writer.put("knobs.expert_fusion", "model.use_fused_weighted_squared_relu", True)  # not in every recipe
    if writer.plan.model.is_moe:
        _write_dispatcher(writer)
        _write_routing(writer)
        return
    for path in MOE_FIELDS:
        writer.lose(path, NO_EXPERTS)


def _write_recompute(writer: Writer) -> None:
    knobs = writer.plan.knobs
    names = _known_modules(writer, "knobs.recompute", knobs.recompute)
    is_full = "full" in names
    writer.put("knobs.recompute", "model.recompute_granularity", "full" if is_full else "selective" if names else None)
    writer.put("knobs.recompute", "model.recompute_modules", None if is_full or not names else names)
    method, layers = (knobs.recompute_method or "uniform", knobs.recompute_layers or 1) if is_full else (None, None)
    writer.put("knobs.recompute_method", "model.recompute_method", method)
    writer.put("knobs.recompute_layers", "model.recompute_num_layers", layers)
    if is_full and len(names) > 1:
        writer.respell("knobs.recompute", "full recompute covers the other names")
    for path, same in (("knobs.recompute_method", "uniform"), ("knobs.recompute_layers", 1)):
        if not is_full:
            writer.lose(path, NO_EFFECT)
        elif value_of(writer.plan, path) == same:
            writer.respell(path, SAME_AS_ABSENT)


def _known_modules(writer: Writer, source: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of modules without those that the release does not have, and without a budget in place of names."""
    since = writer.release.number[:2]
    known = tuple(name for name in names if ":" not in name and _MODULES_SINCE.get(name, (0,)) <= since)
    if known != names:
        gone = ", ".join(name for name in names if name not in known)
        writer.lose(source, f"Megatron Core {writer.release.core} has no module {gone}")
    return known


def _write_graphs(writer: Writer) -> None:
    scopes = writer.plan.knobs.graphs
    is_full, is_old = "full_iteration" in scopes, writer.release.number[:2] < (0, 5)
    kind = "full_iteration" if is_full else "transformer_engine" if scopes else "none"
    writer.put("knobs.graphs", "model.cuda_graph_impl", "local" if is_full and is_old else kind)
    if is_full and is_old:
        writer.put("knobs.graphs", "model.cuda_graph_modules", ("full_iteration",))
    elif scopes:
        writer.put("knobs.graphs", "model.cuda_graph_modules", () if is_full else scopes)
    elif writer.plan.knobs.delay_wgrad and not is_old and writer.to == "megatron-bridge":
        # Bridge asks for a recipe's modules also without graphs; arguments of Megatron-LM have none to take back.
        writer.put("knobs.graphs", "model.cuda_graph_modules", ())
    if is_full and len(scopes) > 1:
        writer.respell("knobs.graphs", "a graph of the full iteration covers the other scopes")
    if scopes and not is_old:  # Megatron refuses the older name, which recipes still set, beside the newer one
        writer.put("knobs.graphs", "model.cuda_graph_scope", None)
    if scopes:
        writer.put("knobs.graphs", "model.use_te_rng_tracker", True)
        writer.put("knobs.graphs", "rng.te_rng_tracker", True)
    if is_full:
        writer.put("knobs.graphs", "rerun_state_machine.check_for_nan_in_loss", False)
        writer.put("knobs.graphs", "ddp.check_for_nan_in_grad", False)
    if is_full and not is_old:
        if has_paged_stash(writer.plan):  # nothing is dropped: an iteration that overflows runs once more, eagerly
            writer.put("knobs.graphs", "model.moe_paged_stash", True)
            if not writer.plan.knobs.activation_offload:  # which Megatron reads there without a look whether it is set
                writer.put("knobs.graphs", "model.offload_modules", ())
        if writer.plan.knobs.activation_offload:  # how many copies of a name may be under way; recipes have 1 or 2
            writer.put("knobs.activation_offload", "model.fine_grained_offloading_max_inflight_offloads", 1)


def _write_activation_offload(writer: Writer) -> None:
    knobs = writer.plan.knobs
    names = _known_modules(writer, "knobs.activation_offload", knobs.activation_offload)
    writer.put("knobs.activation_offload", "model.fine_grained_activation_offloading", bool(names))
    if names:
        writer.put("knobs.activation_offload", "model.offload_modules", names)
    layers = knobs.activation_offload_layers
    writer.put("knobs.activation_offload_layers", "model.cpu_offloading", layers > 0)
    if layers:
        writer.put("knobs.activation_offload_layers", "model.cpu_offloading_num_layers", layers)


def _write_context_parallel(writer: Writer) -> None:
    plan, knobs = writer.plan, writer.plan.knobs
    if knobs.cp_dynamic:
        writer.put("knobs.cp_dynamic", "model.max_seqlen_per_dp_cp_rank", plan.job.seq_len // plan.layout.cp)
        writer.put("knobs.cp_dynamic", "model.calculate_per_token_loss", True)
        writer.put("knobs.cp_dynamic", "dataset.dataloader_type", "single")
    if plan.layout.cp > 1 or writer.is_stated("knobs.cp_comm"):
        # Megatron Core 0.18 refuses a type where a layer is no attention (delta-rule-by-p2p); p2p is what it then does.
        is_implied = plan.model.delta is not None and writer.release.number[:2] < (0, 6) and knobs.cp_comm == "p2p"
        writer.put("knobs.cp_comm", "model.cp_comm_type", None if is_implied else knobs.cp_comm)
    is_nested = "a2a+p2p" in ((knobs.cp_comm,) if isinstance(knobs.cp_comm, str) else knobs.cp_comm)
    if not is_nested:
        writer.lose("knobs.cp_inner", NO_EFFECT)
    elif plan.layout.cp % plan.cp_inner:
        writer.lose("knobs.cp_inner", f"{plan.cp_inner} ranks do not divide CP {plan.layout.cp}")
    else:
        sizes = (plan.cp_inner, plan.layout.cp // plan.cp_inner)
        writer.put("knobs.cp_inner", "model.hierarchical_context_parallel_sizes", sizes)
        if writer.to == "megatron-bridge":  # other groups have one level; since 0.4 Bridge refuses the pair
            writer.put("knobs.cp_inner", "dist.use_decentralized_pg", False)
        if knobs.cp_inner is not None and change(plan, {"knobs.cp_inner": None}).cp_inner == knobs.cp_inner:
            writer.respell("knobs.cp_inner", SAME_AS_ABSENT)


def _write_model(writer: Writer) -> None:
    plan, model = writer.plan, writer.plan.model
    writer.put("knobs.loss_fusion", "model.cross_entropy_loss_fusion", plan.knobs.loss_fusion)
    if plan.knobs.loss_fusion:
        is_refused = writer.to == "megatron-lm" and writer.release.number >= (
            0,
            5,
        )  # core 0.18.2, training/arguments.py
        writer.put("knobs.loss_fusion", "model.cross_entropy_fusion_impl", "native" if is_refused else "te")
        if is_refused:
            reason = "Megatron-LM refuses Transformer Engine's fused loss: its own, which an import reads as off"
            writer.always_respell("knobs.loss_fusion", True, reason)
    if model.mtp_layers or plan.job.mtp is not None:
        writer.put("job.mtp", "model.mtp_num_layers", plan.mtp or None)
        if plan.job.mtp == model.mtp_layers:
            writer.respell("job.mtp", SAME_AS_ABSENT)
    if not plan.mtp:
        is_bridge = writer.to == "megatron-bridge" and writer.release.number >= (0, 4)
        if model.mtp_layers and model.family == "nemotron_h" and is_bridge:
            writer.put("job.mtp", "model.mtp_hybrid_override_pattern", None)  # which makes a depth of its own
        writer.settings.pop("model.mtp_loss_scaling_factor", None)
        writer.lose("job.mtp_weight", NO_EFFECT)
    cut = dict(plan.written)
    _respell_uncut(writer)
    _write_vocab_of_recipe(writer)
    if model.is_moe and ("model.num_dense_layers" in cut or ("model.num_layers" in cut and model.num_dense_layers)):
        dense = min(model.num_dense_layers, model.num_layers)
        frequency = (0,) * dense + (1,) * (model.num_layers - dense)
        writer.put("model.num_dense_layers", "model.moe_layer_freq", frequency)
    elif not model.is_moe:
        writer.lose("model.num_dense_layers", NO_EXPERTS)
    if plan.is_vlm:
        names = {"vision": "vision_model", "projector": "vision_projection", "language": "language_model"}
        for part, name in names.items():
            writer.put("job.freeze", f"model.freeze_{name}", part in plan.job.freeze)
        if set(plan.job.freeze) - set(names):
            writer.lose("job.freeze", "Megatron freezes whole parts of a model, not patterns of names")
        elif plan.job.freeze != tuple(part for part in names if part in plan.job.freeze):
            writer.respell("job.freeze", "Megatron has a switch for each part, and no order")
    else:
        writer.lose("job.freeze", "Megatron freezes parts of vision-language models only")


_MOONLIGHT_ROWS = 163842  # recipes/moonlight/h100/moonlight_16b.py of Bridge 0.6.2: "all 163842 finetuning-token rows"


def _write_vocab_of_recipe(writer: Writer) -> None:
    """Moonlight's finetuning recipes have rows for two more tokens, padded for their own TP."""
    plan = writer.plan
    is_its = plan.model_name == "moonlight-16b-a3b" and "model.vocab" not in dict(plan.written)
    if is_its and plan.job.task != "pretrain" and writer.to != "megatron-lm":
        writer.put("model.vocab", "model.vocab_size", -(-_MOONLIGHT_ROWS // plan.layout.tp) * plan.layout.tp)
        reason = "Bridge's finetuning recipe has rows for two more tokens, padded for TP"
        writer.always_respell("model.vocab", plan.model.vocab, reason)


def _respell_uncut(writer: Writer) -> None:
    """Sizes that are written as cuts and are the model's own."""
    whole, cut = MODELS.get(writer.plan.model_name), dict(writer.plan.written)
    if whole is None:
        return
    sizes = {name: getattr(whole, name) for name in ("num_layers", "num_experts", "vocab")}
    sizes["num_dense_layers"] = min(whole.num_dense_layers, writer.plan.model.num_layers)
    for name, size in sizes.items():
        if cut.get(f"model.{name}") == size:
            writer.respell(f"model.{name}", SAME_AS_ABSENT)
    if cut.get("model.num_dense_layers", 0) > writer.plan.model.num_layers:
        writer.respell("model.num_dense_layers", "no more layers can be dense than there are")


def _write_dataset_of_recipe(writer: Writer) -> None:
    """What a recipe's own dataset must say so that the plan's batch and context parallelism go with it."""
    plan = writer.plan
    if plan.is_vlm:  # recipes pack in the batch, which makes lengths vary
        writer.put("job.packing", "dataset.enable_in_batch_packing", False)
    elif plan.packs_offline:
        specs = "dataset.offline_packing_specs"
        if writer.release.has_field("dataset.enable_offline_packing", dataset="sft"):  # else the size says it
            writer.put("job.packing", "dataset.enable_offline_packing", True)
        writer.put("job.packing", f"{specs}.packed_sequence_size", plan.job.seq_len)
        writer.put("job.packing", f"{specs}.pad_seq_to_mult", plan.layout.packed_multiple)
        captured = {"attn", "full_iteration"} & set(plan.knobs.graphs)  # attention in a graph reads the bounds too
        writer.put("job.packing", f"{specs}.pad_cu_seqlens", bool(captured))
    elif plan.job.task == "sft":  # recipes pack offline, in one sequence a microbatch
        writer.put("job.packing", "dataset.enable_offline_packing", False)
        writer.put("job.packing", "dataset.offline_packing_specs", None)
    if plan.layout.cp > 1 and (plan.is_vlm or plan.job.task == "sft"):  # a rank may have no token with a loss
        writer.put("layout.cp", "model.calculate_per_token_loss", True)
        writer.put("layout.cp", "ddp.average_in_collective", False)


def _write_data(writer: Writer) -> None:
    plan = writer.plan
    if writer.to == "megatron-bridge":
        _write_dataset_of_recipe(writer)
    if plan.job.packing and (writer.to != "megatron-bridge" or not plan.packs_offline):
        writer.lose("job.packing", PACKING)
    if plan.job.data == "synthetic" and plan.job.task == "pretrain":
        if writer.to == "megatron-lm":
            writer.put("job.data", "dataset.mock_data", True)
        elif not plan.is_vlm:  # whose recipe has synthetic conversations
            writer.put("job.data", "dataset.blend", None)
        writer.put("job.data", "tokenizer.tokenizer_type", "NullTokenizer")
        writer.put("job.data", "tokenizer.vocab_size", plan.model.vocab)
    elif plan.job.task == "pretrain" and (paths := paths_of_data(plan.job.data)):
        if writer.to == "megatron-bridge":
            writer.put("job.data", "dataset.blend", None)  # a recipe's own would count more
        writer.put("job.data", "dataset.data_path", paths)
        if data_of_paths(paths) != plan.job.data:
            writer.respell("job.data", "Megatron names its files by their prefix")
    else:
        reason = "the recipe's data is used; set dataset.blend to the prefixes of Megatron's own files (.bin and .idx)"
        if writer.to == "megatron-lm":
            reason = "the line names no data: add --data-path (prefixes of .bin and .idx) and --tokenizer-type"
        writer.always_lose("job.data", plan.job.data, reason)
    if writer.to == "megatron-lm":
        writer.put("job.task", "train.sft", plan.job.task == "sft")


def _write_schedule(writer: Writer) -> None:
    job = writer.plan.job
    # Always: some recipes have an optimizer of their own (Kimi K2 has Muon), with other states in memory.
    writer.put("job.optimizer", "optimizer.optimizer", "adam" if job.optimizer == "adamw" else job.optimizer)
    if writer.is_stated("job.lr", "job.min_lr"):
        writer.put("job.lr", "optimizer.lr", job.lr)
        writer.put("job.min_lr", "optimizer.min_lr", float(f"{job.lr * job.min_lr:.12g}"))
        if not job.lr:
            writer.lose("job.min_lr", "a fraction of a learning rate of 0")
    if writer.is_stated("job.steps"):  # a recipe warms up for hundreds of steps, and Megatron asserts that they end
        warmup = min(job.warmup_steps, job.steps - 1)
        writer.put("job.warmup_steps", "scheduler.lr_warmup_iters", warmup)
        if warmup < job.warmup_steps:
            writer.always_lose(
                "job.warmup_steps", job.warmup_steps, f"Megatron wants it to end before training: {warmup}"
            )
        writer.put("job.steps", "scheduler.lr_decay_iters", job.steps)
    if writer.is_stated("job.lr_schedule"):
        writer.put("job.lr_schedule", "scheduler.lr_decay_style", LR_SCHEDULES[job.lr_schedule])
    if job.lr_schedule != "wsd":
        writer.lose("job.decay_fraction", NO_EFFECT)
        return
    decay = round(job.decay_fraction * job.steps)
    writer.put("job.steps", "train.train_iters", job.steps)
    writer.put("job.decay_fraction", "scheduler.lr_wsd_decay_iters", decay)
    writer.put("job.decay_fraction", "scheduler.lr_wsd_decay_style", "linear")
    if decay / job.steps != job.decay_fraction:
        writer.lose("job.decay_fraction", f"Megatron counts the decay in whole steps: {decay}")


def _write_run(writer: Writer) -> None:
    run = writer.plan.run
    if writer.is_stated("run.save_every"):
        writer.put("run.save_every", "checkpoint.save_interval", run.save_every or None)
    if writer.is_stated("run.eval_every"):
        path = "validation.eval_interval" if run.eval_every else "validation.eval_iters"
        writer.put("run.eval_every", path, run.eval_every)
    if writer.is_stated("run.gc_every"):
        writer.put("run.gc_every", "train.manual_gc", run.gc_every > 0)
        if run.gc_every:
            writer.put("run.gc_every", "train.manual_gc_interval", run.gc_every)
    if writer.is_stated("run.hang_seconds"):
        minutes = run.hang_seconds / 60
        if minutes and minutes.is_integer():
            writer.put("run.hang_seconds", "dist.distributed_timeout_minutes", int(minutes))
        else:
            writer.lose("run.hang_seconds", "Megatron's limit of collectives is in whole minutes")


_THEMES: tuple[Callable[[Writer], None], ...] = (
    _write_layout,
    _write_data_parallel,
    _write_precision,
    _write_optimizer_states,
    _write_experts,
    _write_recompute,
    _write_graphs,
    _write_activation_offload,
    _write_context_parallel,
    _write_model,
    _write_data,
    _write_schedule,
    _write_run,
)
# Fields that another part of an export says: the launch, the selection of the model, or the environment.
_SAID_ELSEWHERE = (
    "model",
    "target",
    "cluster.chip",
    "cluster.gpus",
    "cluster.gpus_per_node",
    "job.task",
    "knobs.max_connections",
)


def _name_the_rest(writer: Writer) -> None:
    said = {*writer.sources.values(), *_SAID_ELSEWHERE, "job.min_lr", "job.capacity_scope", "job.seq_aux_loss"}
    for path in dict(writer.plan.written):
        if path not in said and path in FIELDS:
            writer.lose(path, UNKNOWN_FIELD)
