"""What settings mean that no plan holds, as data. An import says it next to the setting that it leaves out."""

_ON_MAIN = "on Megatron Core's main alone (d98e8a6, 2026-08), in no release"
_RESILIENCY = "Bridge's guide on resiliency (read 2026-08-22)"
# What a setting means that a plan goes without. A name that ends with a dot stands for a group.
NOTES: dict[str, str] = {
    "comm_overlap.bucket_size": "it counts parameters, not bytes: so says Megatron Core, and Bridge's performance "
    "guide once otherwise; with a pipeline it follows the virtual stage",
    "ddp.bucket_size": "it counts parameters, not bytes; comm_overlap.bucket_size counts more",
    "comm_overlap.tp_comm_overlap": "with TP of 2 and more, sequence parallelism and Transformer Engine; else Bridge "
    "turns it off with one warning",
    "dataset.enable_in_batch_packing": "packing is offline (text, microbatch 1), in the batch (images, microbatch "
    "above 1) or Energon's own (Qwen-VL, microbatch 1): one of them",
    "comm_overlap.tp_comm_overlap_cfg": "a preset by chip, hidden size, TP, microbatch and length; without one "
    "Transformer Engine takes its own, with a warning",
    "comm_overlap.overlap_p2p_comm": "Bridge sets it: true with virtual stages, else false",
    "comm_overlap.batch_p2p_comm": "Bridge sets it: true for a pipeline without virtual stages, else false",
    "comm_overlap.align_param_gather": "Bridge sets it: true with virtual stages and data parallelism",
    "comm_overlap.overlap_param_gather_with_optimizer_step": "Bridge leaves it off for a fault of checkpoints",
    "ddp.outer_dp_sharding_strategy": "a plan's HSDP keeps whole copies (no_shard); `optim` shards optimizer states "
    "over the copies too, as Bridge's HSDP recipe of DeepSeek-V3 does",
    "ddp.megatron_fsdp_version": "2 is a bring-up on main (2026-08): BF16 and data parallelism alone, without MoE, "
    "HSDP, checkpoints, clipping, FP8, graphs and offload",
    "ddp.nccl_ub": "user buffers exclude expandable segments of the allocator, which an export sets",
    "model.moe_hybridep_num_sms_preprocessing": "multiprocessors of HybridEP's preparation: 108 by default; recipes "
    "with EP overlap have 32, and high_priority_a2a_comm_stream (Bridge 0.6.2)",
    "model.high_priority_a2a_comm_stream": "exchanges are not queued behind GEMMs; recipes with EP overlap set it",
    "model.moe_hybridep_pad_uneven_dispatch_inputs": "ranks pad to the widest one: Bridge sets it for packed "
    "eager runs (main, 2026-08-03); graphs need equal widths without it",
    "model.moe_dispatch_fwd_dtype": f"rows in MXFP8: {_ON_MAIN}, for NCCL EP with fused experts",
    "model.moe_combine_bwd_dtype": f"gradients of rows in MXFP8: {_ON_MAIN}, for NCCL EP with fused experts",
    "model.enable_mhc_connections": f"hyper-connections: {_ON_MAIN}; their recompute (`mhc`) goes without mlp, MTP, a "
    "pipeline, full recompute and offload by module",
    "model.moe_paged_stash_page_size": "tokens in a page of the stash: 64",
    "model.moe_paged_stash_buffer_size_factor_cuda": "the stash over its average need; recipes have 1.0 to 1.2",
    "model.moe_paged_stash_buffer_size_factor_cpu": "of the stash, what is on the host: 0; recipes have up to 1.0",
    "model.moe_mlp_glu_interleave_size": "32 in recipes with a paged stash: gates and values of experts in turns, "
    "which fused kernels read; Bridge converts checkpoints",
    "model.moe_pad_experts_for_cuda_graph_inference": "recipes with a paged stash set it; training does not read it",
    "optimizer.optimizer_cuda_graph": "the update as a graph of its own (experimental, Bridge 0.4 and later); a "
    "graph of the iteration ends before it",
    "peft.sequence_parallel_input_regather": "LoRA saves its rank's part of the sequence and gathers it again in "
    "backward: for linear_qkv and linear_fc1 with TP; not with graphs, offload of layers, full recompute or that of "
    "mlp",
    "ft.": f"it takes effect under ft_launcher or Slurm; torchrun turns it off without a word: export with "
    f"--fault-tolerance; {_RESILIENCY}",
    "nvrx_straggler.": f"reports slow GPUs every 300 s by default, and stops at none; {_RESILIENCY}",
    "inprocess_restart.": f"asks for torch 2.5.1, NCCL 2.26.2 and NCCL_NVLS_ENABLE=0, and not for NeMo-Run; "
    f"{_RESILIENCY}",
    "rerun_state_machine.": "a suspected step is run again; exit code 16 asks to be resumed to decide, 17 says that "
    "it failed; run.bad_steps is nearest",
    "train.exit_signal_handler": "ranks save at the end of a step; torchrun ends them 30 s after the signal, plain "
    "srun does not",
    "checkpoint.async_save": "asks for a folder to save to, the persistent worker (use_persistent_ckpt_worker) and the "
    "format torch_dist (Bridge's check also takes fsdp_dtensor)",
    "checkpoint.non_persistent_ckpt_type": "checkpoints on the disks of nodes, with copies on others",
    "checkpoint.non_persistent_local_ckpt_dir": "checkpoints on the disks of nodes, with copies on others "
    "(non_persistent_local_ckpt_algo=fully_parallel)",
}
PERF_RECIPE = "a recipe of perf_recipes: an upper bound on mock data, for the number of GPUs in its name and unchanged"


def note_of(path: str) -> str:
    """What is known of a setting without a field, to follow an advice; nothing for most."""
    group = f"{path.partition('.')[0]}."
    return NOTES.get(path) or NOTES.get(group, "")
