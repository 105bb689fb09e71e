"""Names that other trainers have for our fields: the Trainer of Hugging Face, TRL, axolotl, torchtitan, Megatron-LM.

`aliases.resolve` reads them beside Megatron's settings. A name stands in `SAME` only where it means the same; one that
means something near stands in `OTHERWISE` with the difference, and is never translated.
"""

GROUPS = (
    *("training", "parallelism", "optimizer", "lr_scheduler", "checkpoint", "metrics", "validation", "trainer", "args"),
    *("train", "sft", "config", "lora", "debug", "cluster", "job", "layout", "knobs", "run", "model", "dataset"),
)
_BY_FIELD = {
    "cluster.gpus": "gpus num_gpus world_size ngpus",
    "cluster.gpus_per_node": "nproc_per_node gpus_per_node num_gpus_per_node devices_per_node",
    "job.seq_len": "max_length max_seq_length max_seq_len sequence_len model_max_length cutoff_len context_length "
    "seq_len",
    "job.global_batch": "train_batch_size",
    "job.micro_batch": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "job.steps": "max_steps train_iters training_steps train_steps num_train_steps steps num_training_steps",
    "job.seed": "seed",
    "job.lr": "learning_rate lr base_lr peak_lr max_lr",
    "job.min_lr": "min_lr_factor min_lr_ratio min_lr_rate",
    "job.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_iters warmup_steps warmup",
    "job.lr_schedule": "lr_decay_style",
    "job.decay_fraction": "decay_ratio",
    "job.weight_decay": "weight_decay",
    "job.adam_eps": "adam_epsilon",
    "job.clip_norm": "max_grad_norm max_norm clip_grad gradient_clipping gradient_clip_val grad_clip",
    "job.packing": "packing sample_packing",
    "job.lora_rank": "lora_r",
    "job.lora_alpha": "lora_alpha",
    "job.aux_loss": "moe_aux_loss_coeff router_aux_loss_coef",
    "job.z_loss": "moe_z_loss_coeff",
    "job.bias_rate": "moe_router_bias_update_rate",
    "layout.tp": "tensor_parallel_degree tensor_parallel_size tp_size tp_degree",
    "layout.cp": "context_parallel_degree cp_size cp_degree",
    "layout.pp": "pipeline_parallel_degree pipeline_parallel_size pp_size pp_degree",
    "layout.ep": "expert_parallel_degree expert_parallel_size ep_size ep_degree",
    "layout.etp": "expert_tensor_parallel_degree etp_size",
    "layout.replicate": "data_parallel_replicate_degree dp_replicate_size dp_replicate",
    "layout.vpp": "vpp_size num_virtual_stages_per_pipeline_rank",
    "run.save_every": "save_steps save_interval checkpoint.interval",
    "run.log_every": "logging_steps log_interval log_freq",
    "run.eval_every": "eval_steps eval_interval validation.freq",
    "run.keep": "save_total_limit",
    "run.wandb": "wandb_project",
    "knobs.max_connections": "cuda_device_max_connections",
}
SAME = {name: field for field, names in _BY_FIELD.items() for name in names.split()}

EPOCH_WORDS = ("epochs", "num_epochs", "num_train_epochs", "max_epochs")
_STEPS = "a plan counts optimizer steps: job.steps = epochs x sequences / job.global_batch; finetune takes --epochs"
_TOKENS = "a plan counts optimizer steps: job.steps = tokens / (job.global_batch x job.seq_len)"
_BATCH = "job.global_batch is the sequences of an optimizer step, job.micro_batch those of one forward on one rank"
_SHARD = "it follows from cluster.gpus and the other degrees; delete it"
_DATA = "job.data names files, folders or built-in data"
OTHERWISE = {
    **dict.fromkeys(EPOCH_WORDS, _STEPS),
    **dict.fromkeys(("tokens", "num_tokens", "max_tokens", "train_tokens", "total_tokens"), _TOKENS),
    **dict.fromkeys(("batch_size", "local_batch_size", "bs", "per_device_batch_size"), _BATCH),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
        "it follows: job.global_batch / (job.micro_batch x DP)",
    ),
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_fraction", "warmup_fraction"), "job.warmup_steps = that share x job.steps"
    ),
    **dict.fromkeys(("num_nodes", "nnodes", "nodes"), "cluster.gpus = nodes x GPUs of a node"),
    **dict.fromkeys(
        ("dp", "edp", "data_parallel_size", "dp_size", "data_parallel_shard_degree", "dp_shard_size"), _SHARD
    ),
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler", "decay_type"),
        "job.lr_schedule is cosine, wsd or constant; it ends at job.min_lr x the peak, elsewhere mostly at 0",
    ),
    "min_lr": "job.min_lr is a share of the peak learning rate, not a learning rate",
    **dict.fromkeys(
        ("optim", "optimizer", "optimizer_name", "optimizer_type"),
        "job.optimizer is adamw or muon; knobs.optimizer_dtype says in which bits their states are held",
    ),
    **dict.fromkeys(
        ("output_dir", "save_dir", "dump_folder"), "the folder of a run is named on the command line: --run FOLDER"
    ),
    **dict.fromkeys(
        ("base_model", "model_name_or_path", "pretrained_model_name_or_path", "hf_assets_path"),
        'model = "hf:PATH" reads a configuration; `threefold finetune PATH` starts from its weights',
    ),
    **dict.fromkeys(("datasets", "dataset", "dataset_name", "dataset_path", "train_data", "data_path"), _DATA),
    **dict.fromkeys(
        ("lora_target_modules", "target_modules"),
        "job.lora_targets names parts of a layer: attention, mlp, shared_experts, experts",
    ),
    "lora_dropout": "adapters have no dropout here; delete it",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "frozen weights stay in knobs.precision; delete it"),
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "fsdp", "fsdp_config", "sharding_strategy"),
        "knobs.data_parallel says who shards what: zero1 (optimizer states), fsdp (all), hsdp",
    ),
    **dict.fromkeys(
        ("flash_attention", "flash_attn", "attn_implementation"), "the fastest attention kernel is taken; delete it"
    ),
    "report_to": "run.tensorboard=true, or run.wandb=PROJECT",
    "eval_iters": "run.eval_batches counts microbatches of one evaluation",
    "compile.enable": "knobs.compile compiles norms, routers and dense MLPs, not whole blocks",
    "activation_checkpoint.mode": "knobs.recompute names modules, or full",
    "gradient_checkpointing_kwargs": "knobs.recompute names modules, or full",
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision"), "knobs.precision is bf16, fp16, fp32 or 8-bit"),
}


def looked_up(path: str) -> tuple[str, str]:
    """The path without dashes and in lower case, and its name without a group that another trainer puts before it."""
    plain = path.lstrip("-").replace("-", "_").lower()
    group, _, name = plain.rpartition(".")
    return plain, name if not group or group in GROUPS else plain


def same_field(path: str) -> str | None:
    """Our field behind another trainer's name, where the two mean the same."""
    return next((SAME[name] for name in looked_up(path) if name in SAME), None)


def difference(path: str) -> str | None:
    """What to write in place of a name that means something else here, or that has no field."""
    return next((OTHERWISE[name] for name in looked_up(path) if name in OTHERWISE), None)
