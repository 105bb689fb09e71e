"""Plan fields and Megatron's names for them, as data.

The keys of settings are Megatron Bridge's dotted overrides in the spelling of the newest release. `MOVED` has the older
spellings. An argument of Megatron-LM follows from the field that it sets (`releases.py`), or from `ARGUMENT_FIELDS`
where it sets another one. What one field of ours becomes several settings for is in `write_settings.py`, and back in
`read_settings.py`.
"""

from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A plan field with one value, and the settings that take this value as it is."""

    field: str
    path: str
    also: tuple[str, ...] = ()  # settings that must say the same
    when: str = "always"  # or `stated`: only where the plan states it; `moe`: always, for models with experts
    null: Any = None  # the value of ours that Megatron writes as null


PLAIN: tuple[Row, ...] = (
    Row("layout.tp", "model.tensor_model_parallel_size"),
    Row("layout.cp", "model.context_parallel_size"),
    Row("layout.pp", "model.pipeline_model_parallel_size"),
    Row("layout.vpp", "model.virtual_pipeline_model_parallel_size", null=1),
    Row("layout.ep", "model.expert_model_parallel_size"),
    Row("layout.etp", "model.expert_tensor_parallel_size"),
    Row("job.seq_len", "model.seq_length", also=("dataset.seq_length",)),
    Row("job.global_batch", "train.global_batch_size"),
    Row("job.micro_batch", "train.micro_batch_size"),
    Row("job.steps", "train.train_iters", when="stated"),
    Row("job.seed", "rng.seed", when="stated"),
    Row("job.dynamic_length", "model.variable_seq_lengths", when="stated"),
    Row("job.weight_decay", "optimizer.weight_decay", when="stated"),
    Row("job.adam_beta1", "optimizer.adam_beta1", when="stated"),
    Row("job.adam_beta2", "optimizer.adam_beta2", when="stated"),
    Row("job.adam_eps", "optimizer.adam_eps", when="stated"),
    Row("job.clip_norm", "optimizer.clip_grad", when="stated"),
    Row("knobs.store_param_remainders", "optimizer.store_param_remainders", when="stated"),
    Row("job.initial_loss_scale", "mixed_precision.initial_loss_scale", when="stated"),
    Row("job.loss_scale_window", "mixed_precision.loss_scale_window", when="stated"),
    Row("job.warmup_steps", "scheduler.lr_warmup_iters", when="stated"),
    Row("job.mtp_weight", "model.mtp_loss_scaling_factor", when="stated"),
    Row("job.z_loss", "model.moe_z_loss_coeff", when="stated", null=0.0),
    Row("job.bias_rate", "model.moe_router_bias_update_rate", when="stated"),
    Row("knobs.ep_overlap", "comm_overlap.overlap_moe_expert_parallel_comm", when="moe"),
    Row("knobs.delay_wgrad", "comm_overlap.delay_wgrad_compute", when="moe"),
    Row("knobs.wgrad_overlap", "model.overlap_dispatch_backward_with_experts_wgrad", when="stated"),
    Row("knobs.tp_overlap", "comm_overlap.tp_comm_overlap"),
    Row("knobs.grad_reduce_overlap", "comm_overlap.overlap_grad_reduce", also=("ddp.overlap_grad_reduce",)),
    Row("knobs.param_gather_overlap", "comm_overlap.overlap_param_gather", also=("ddp.overlap_param_gather",)),
    Row("knobs.grad_accum_fusion", "model.gradient_accumulation_fusion"),
    Row("knobs.permute_fusion", "model.moe_permute_fusion", when="moe"),
    Row("knobs.expert_fusion", "model.use_transformer_engine_op_fuser", when="moe"),
    Row("knobs.router_padding", "model.moe_router_padding_for_quantization", when="moe"),
    Row("knobs.cp_dynamic", "model.hybrid_context_parallel", also=("dataset.hybrid_context_parallel",), when="stated"),
    Row("knobs.fp8_attention", "mixed_precision.fp8_dot_product_attention"),
    Row("knobs.fp8_output", "model.fp8_output_proj"),
    Row("run.keep", "checkpoint.most_recent_k", when="stated"),
    Row("run.log_every", "logger.log_interval", when="stated"),
    Row("run.wandb", "logger.wandb_project", when="stated"),
    Row("model.num_layers", "model.num_layers", when="stated"),
    Row("model.num_experts", "model.num_moe_experts", when="stated"),
    Row("model.vocab", "model.vocab_size", when="stated"),
)
# Fields that only a model with experts has a use for.
MOE_FIELDS = (
    "layout.ep",
    "layout.etp",
    "job.z_loss",
    "job.bias_rate",
    "job.aux_loss",
    "job.seq_aux_loss",
    "job.routing",
    "job.capacity_factor",
    "job.capacity_scope",
    "knobs.dispatcher",
    "knobs.dispatch_sms",
    "knobs.router_dtype",
    "knobs.shared_expert_overlap",
)


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision of ours: Bridge's recipe for it, and the fields that Megatron-LM's arguments set for the same."""

    recipe: str
    fields: tuple[tuple[str, Any], ...]
    short: str = ""  # `-c` of the performance scripts


_BF16 = ("mixed_precision.bf16", True)
PRECISIONS: dict[str, Precision] = {
    "bf16": Precision("bf16_mixed", (_BF16,), "bf16"),
    "fp16": Precision("fp16_mixed", (("mixed_precision.fp16", True),)),
    "fp8-tensor": Precision(
        "bf16_with_fp8_delayed_scaling_mixed",
        (_BF16, ("mixed_precision.fp8", "hybrid"), ("mixed_precision.fp8_recipe", "delayed")),
        "fp8_ds",
    ),
    "fp8-cs": Precision(
        "bf16_with_fp8_current_scaling_mixed",
        (
            _BF16,
            ("mixed_precision.fp8", "hybrid"),
            ("mixed_precision.fp8_recipe", "tensorwise"),
            ("mixed_precision.first_last_layers_bf16", True),
            ("mixed_precision.num_layers_at_start_in_bf16", 1),
            ("mixed_precision.num_layers_at_end_in_bf16", 1),
        ),
        "fp8_cs",
    ),
    "fp8-blockwise": Precision(
        "bf16_with_fp8_subchannel_scaling_mixed",
        (_BF16, ("mixed_precision.fp8", "hybrid"), ("mixed_precision.fp8_recipe", "blockwise")),
        "fp8_sc",
    ),
    "mxfp8": Precision(
        "bf16_with_mxfp8_mixed",
        (_BF16, ("mixed_precision.fp8", "e4m3"), ("mixed_precision.fp8_recipe", "mxfp8")),
        "fp8_mx",
    ),
    "nvfp4": Precision(
        "bf16_with_nvfp4_mixed",
        (_BF16, ("mixed_precision.fp4", "e2m1"), ("mixed_precision.fp4_recipe", "nvfp4")),
        "nvfp4",
    ),
}
# No recipe has fp32: the one of bf16 with these fields set.
FP32_FIELDS = (
    ("mixed_precision.fp32", True),
    ("mixed_precision.bf16", False),
    ("mixed_precision.params_dtype", "fp32"),
    ("mixed_precision.pipeline_dtype", "fp32"),
)
DTYPE_PATHS = (
    "optimizer.exp_avg_dtype",
    "optimizer.exp_avg_sq_dtype",
    "optimizer.main_grads_dtype",
    "optimizer.main_params_dtype",
    "mixed_precision.params_dtype",
    "mixed_precision.pipeline_dtype",
)
TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
FLEX = ("deepep", "hybridep")  # dispatchers that are backends of Megatron's flex dispatcher
LR_SCHEDULES = {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}


@dataclass(frozen=True, slots=True)
class Moved:
    """An older spelling of a setting, up to and including a Bridge release. `{backend}` is the flex dispatcher's."""

    path: str
    older: str
    until: tuple[int, ...]
    dataset: str = ""  # only of this kind of dataset (`models.dataset_kind`)


MOVED: tuple[Moved, ...] = (
    Moved("model.cuda_graph_modules", "model.cuda_graph_scope", (0, 4)),
    Moved("model.moe_flex_dispatcher_num_sms", "model.moe_{backend}_num_sms", (0, 5)),
    Moved("dataset.seq_length", "dataset.sequence_length", (0, 5), dataset="pretrain"),
    Moved("dataset.enable_in_batch_packing", "dataset.pack_sequences_in_batch", (0, 5)),
    Moved("dataset.offline_packing_specs", "dataset.packed_sequence_specs", (0, 5)),
    Moved("validation.eval_interval", "train.eval_interval", (0, 3)),
    Moved("validation.eval_iters", "train.eval_iters", (0, 3)),
)
# Other spellings that are read, with the setting they mean.
PACKED_SIZE = "offline_packing_specs.packed_sequence_size"
READ_ALSO: dict[str, str] = {
    f"dataset.packed_sequence_specs.{PACKED_SIZE.rpartition('.')[2]}": f"dataset.{PACKED_SIZE}",
    "dataset.packed_sequence_specs.pad_seq_to_mult": "dataset.offline_packing_specs.pad_seq_to_mult",
    "dataset.packed_sequence_specs.pad_cu_seqlens": "dataset.offline_packing_specs.pad_cu_seqlens",
    "model.cuda_graph_scope": "model.cuda_graph_modules",
    "model.moe_deepep_num_sms": "model.moe_flex_dispatcher_num_sms",
    "model.moe_hybridep_num_sms": "model.moe_flex_dispatcher_num_sms",
    "model.moe_router_padding_for_fp8": "model.moe_router_padding_for_quantization",
    "model.overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "model.delay_wgrad_compute": "comm_overlap.delay_wgrad_compute",
    "model.tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "model.bf16": "mixed_precision.bf16",
    "model.fp16": "mixed_precision.fp16",
    "model.fp8": "mixed_precision.fp8",
    "model.fp8_recipe": "mixed_precision.fp8_recipe",
    "model.fp4": "mixed_precision.fp4",
    "model.fp8_dot_product_attention": "mixed_precision.fp8_dot_product_attention",
    "dist.use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "mixed_precision.fp8_param": "mixed_precision.fp8_param_gather",
    "mixed_precision.fp4_param": "mixed_precision.fp4_param_gather",
    "ddp.grad_reduce_in_fp32": "mixed_precision.grad_reduce_in_fp32",
    "ddp.overlap_grad_reduce": "comm_overlap.overlap_grad_reduce",
    "ddp.overlap_param_gather": "comm_overlap.overlap_param_gather",
    "dataset.seq_length": "model.seq_length",
    "dataset.sequence_length": "model.seq_length",
    "train.eval_interval": "validation.eval_interval",
    "train.eval_iters": "validation.eval_iters",
}

# Arguments of Megatron-LM whose field has another name than the setting.
ARGUMENT_FIELDS: dict[str, str] = {
    "model.num_moe_experts": "num_experts",
    "model.virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "model.vocab_size": "vocab_size",
}
# Settings that Megatron-LM turns on by itself and has an argument against, with the argument.
ARGUMENT_AGAINST: dict[str, str] = {"mixed_precision.grad_reduce_in_fp32": "--grad-reduce-in-bf16"}
# Settings of Bridge's own making, which Megatron-LM has no need of.
BRIDGE_ONLY = frozenset(
    {
        "dataset.blend",
        "model.cuda_graph_scope",
        "model.cpu_offloading",
        "model.use_te_rng_tracker",
        "ddp.check_for_nan_in_grad",
        "rerun_state_machine.check_for_nan_in_loss",
        "tokenizer.vocab_size",
        "mixed_precision.fp32",
        "mixed_precision.params_dtype",
        "mixed_precision.pipeline_dtype",
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",
    }
)

# Flags of Bridge's performance scripts (`scripts/performance/argument_parser.py`) with the setting or field they mean.
SCRIPT_FLAGS: dict[str, str] = {
    "-m": "family",
    "--model_family_name": "family",
    "-mr": "stem",
    "--model_recipe_name": "stem",
    "--recipe": "recipe",
    "-g": "cluster.chip",
    "--gpu": "cluster.chip",
    "-ng": "cluster.gpus",
    "--num_gpus": "cluster.gpus",
    "-gn": "cluster.gpus_per_node",
    "--gpus_per_node": "cluster.gpus_per_node",
    "-c": "precision",
    "--compute_dtype": "precision",
    "--task": "job.task",
    "-ms": "train.train_iters",
    "--max_steps": "train.train_iters",
    "-gb": "train.global_batch_size",
    "--global_batch_size": "train.global_batch_size",
    "-mb": "train.micro_batch_size",
    "--micro_batch_size": "train.micro_batch_size",
    "-sl": "model.seq_length",
    "--seq_length": "model.seq_length",
    "-tp": "model.tensor_model_parallel_size",
    "--tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "-pp": "model.pipeline_model_parallel_size",
    "--pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "-cp": "model.context_parallel_size",
    "--context_parallel_size": "model.context_parallel_size",
    "-vp": "model.virtual_pipeline_model_parallel_size",
    "--virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "-ep": "model.expert_model_parallel_size",
    "--expert_model_parallel_size": "model.expert_model_parallel_size",
    "-et": "model.expert_tensor_parallel_size",
    "--expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "--pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "--num_layers": "model.num_layers",
    "--cuda_graph_impl": "model.cuda_graph_impl",
    "--cuda_graph_scope": "model.cuda_graph_modules",
    "--moe_flex_dispatcher_backend": "model.moe_flex_dispatcher_backend",
    "--moe_a2a_overlap": "moe_a2a_overlap",
    "--use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "--recompute_modules": "model.recompute_modules",
    "-rl": "model.recompute_num_layers",
    "--recompute_num_layers": "model.recompute_num_layers",
    "-ol": "model.cpu_offloading_num_layers",
    "--activation_offload_layers": "model.cpu_offloading_num_layers",
    "--lr": "optimizer.lr",
    "--min_lr": "optimizer.min_lr",
    "--warmup_iters": "scheduler.lr_warmup_iters",
    "--tokenizer_type": "tokenizer.tokenizer_type",
}
SCRIPT_CHIPS = ("h100", "b200", "b300", "gb200", "gb300")  # values of `-g`

# Settings that follow from others (None), or that a plan takes for granted: an import passes over them as they are.
IMPLIED: dict[str, Any] = {
    "model.sequence_parallel": None,
    "model.use_te_rng_tracker": None,
    "model.moe_grouped_gemm": True,
    "model.pipeline_dtype": None,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.max_position_embeddings": None,
    "model.moe_paged_stash": None,
    "model.fine_grained_offloading_max_inflight_offloads": None,
    "rng.te_rng_tracker": None,
    "rerun_state_machine.check_for_nan_in_loss": None,
    "ddp.check_for_nan_in_grad": None,
    "ddp.use_distributed_optimizer": True,
    "ddp.average_in_collective": None,
    "model.calculate_per_token_loss": None,
    "model.account_for_embedding_in_pipeline_split": False,
    "model.account_for_loss_in_pipeline_split": False,
    "dataset.dataloader_type": None,
    "dataset.enable_in_batch_packing": False,
    "dataset.pack_sequences_in_batch": False,
    "dataset.enable_offline_packing": False,
    "dataset.offline_packing_specs": False,
    "dataset.offline_packing_specs.pad_cu_seqlens": None,
    "dataset.offline_packing_specs.pad_seq_to_mult": None,
    "dataset.packed_sequence_specs": False,
    "checkpoint.ckpt_format": None,
    "optimizer.use_distributed_optimizer": True,
    "optimizer.main_params_dtype": None,
    "optimizer.overlap_cpu_optimizer_d2h_h2d": None,
    "tokenizer.vocab_size": None,
    "scheduler.lr_decay_iters": None,
    "dist.use_decentralized_pg": False,
    "ddp.outer_dp_sharding_strategy": "no_shard",
    "ddp.megatron_fsdp_cuda_graph_mode": None,
    "ddp.fsdp_all_gather_in_start_param_sync": None,
    "mixed_precision.params_dtype": None,
    "mixed_precision.pipeline_dtype": None,
    "mixed_precision.autocast_enabled": None,
    "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": None,
}
# Facts of the model, in the group `model`: they choose it, and say nothing more to a plan.
SHAPE = frozenset(
    {
        "activation_func",
        "mtp_hybrid_override_pattern",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "group_query_attention",
        "normalization",
        "layernorm_epsilon",
        "qk_layernorm",
        "add_bias_linear",
        "add_qkv_bias",
        "swiglu",
        "gated_linear_unit",
        "rotary_base",
        "rotary_percent",
        "apply_rope_fusion",
        "position_embedding_type",
        "untie_embeddings_and_output_weights",
        "share_embeddings_and_output_weights",
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rope_type",
        "rotary_scaling_factor",
        "mscale",
        "mscale_all_dim",
        "use_rope_scaling",
        "rope_scaling_factor",
        "attention_output_gate",
        "experimental_attention_variant",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
        "make_vocab_size_divisible_by",
        "init_method_std",
    }
)
