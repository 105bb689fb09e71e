"""Settings that upstream added, withdrew or explained in August 2026: what an export says, and what an import tells."""

from dataclasses import replace
from typing import Any

import pytest
from megatron_exports import recipe
from plans import CLEAN, build

from threefold.cli.main import main
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.data_parallel import data_parallel_seconds
from threefold.cost.time.step import step_time
from threefold.interop.megatron.bridge_files import export_files, job_script, train_script
from threefold.interop.megatron.environment import environment_of
from threefold.interop.megatron.export_plan import LM, Export, export_plan
from threefold.interop.megatron.import_text import import_text
from threefold.interop.megatron.setting_facts import CONFLICTS
from threefold.interop.megatron.setting_notes import NOTES
from threefold.launch.slurm import Options, faults
from threefold.plan.parse import change
from threefold.rules.all import errors, explain, judge
from threefold.rules.fixes import repair
from threefold.spec.megatron import places

QWEN = recipe("qwen3-235b-a22b-4k-256xh100-bf16")
FSDP = recipe("qwen3-vl-235b-a22b-4k-64xgb200-bf16-fsdp")


def settings(fields: dict[str, Any], release: str | None = None, to: str = "megatron-bridge") -> dict[str, Any]:
    return dict(export_plan(change(QWEN, fields), to, release).settings)


def test_hierarchical_cp_asks_for_global_groups() -> None:
    nested = {"layout.cp": 8, "job.seq_len": 32768, "knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 4}
    found = settings(nested)
    assert found["dist.use_decentralized_pg"] is False
    assert found["model.hierarchical_context_parallel_sizes"] == (4, 2)
    assert "dist.use_decentralized_pg" not in settings({"layout.cp": 8, "job.seq_len": 32768})


def test_optimizer_offload_copies_beside_the_update_and_takes_master_weights() -> None:
    found = settings({"knobs.optimizer_offload": 0.5})
    assert found["optimizer.overlap_cpu_optimizer_d2h_h2d"] is True
    assert found["optimizer.use_precision_aware_optimizer"] is True
    assert settings({})["optimizer.use_precision_aware_optimizer"] is False


def test_offloaded_bytes_are_those_of_the_code() -> None:
    """12 bytes a parameter of the shard with the precision-aware optimizer; 8 where its master weights stay."""
    plan = build({**CLEAN, "cluster.chip": "gb200", "knobs.precision": "mxfp8"})

    def freed(fields: dict[str, Any]) -> float:
        one = change(plan, fields)
        off = change(one, {"knobs.optimizer_offload": 1.0})
        before, after = (memory(each).worst.terms["optimizer"] for each in (one, off))
        return (before - after) / before

    assert freed({}) == 1.0
    assert freed({"knobs.fp8_params": True}) == pytest.approx(8 / 12)


def test_a_step_with_offloaded_states_takes_what_upstream_measured() -> None:
    """1.9, 2.5 and 4.2 times as long at 25, 50 and 100% (Bridge's skill on CPU offloading, 2026-08-22): the extra time
    is linear in the share, and at all of the states 1.6 to 4 times what a quarter and a half of them add."""
    seconds = [
        step_time(one, rates_of(one)).step_seconds
        for one in (change(QWEN, {"knobs.optimizer_offload": share}) for share in (0.0, 0.25, 0.5, 1.0))
    ]
    extra = [each - seconds[0] for each in seconds[1:]]
    assert extra[1] / extra[0] == pytest.approx(2, rel=0.05)
    assert extra[2] / extra[0] == pytest.approx((4.2 - 1) / (1.9 - 1), rel=0.15)


def test_mxfp8_parameters_are_gathered_in_bf16() -> None:
    plan = build({**CLEAN, "cluster.chip": "gb200", "knobs.precision": "mxfp8", "knobs.param_gather_overlap": False})
    times = [
        data_parallel_seconds(change(plan, fields), 0.0, rates_of(plan))
        for fields in ({}, {"knobs.fp8_params": True}, {"knobs.precision": "fp8-cs", "knobs.fp8_params": True})
    ]
    assert times[0] == times[1] > times[2]


def test_first_and_last_layers_of_current_scaling_are_in_bf16() -> None:
    """`bf16_with_fp8_current_scaling_mixed` of Bridge 0.6.2: one layer at each end."""
    for to in ("megatron-bridge", LM):
        found = settings({"knobs.precision": "fp8-cs"}, to=to)
        names = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        assert [found[f"mixed_precision.{name}"] for name in names] == [True, 1, 1]
    assert "mixed_precision.first_last_layers_bf16" not in settings({"knobs.precision": "fp8-blockwise"})


@pytest.mark.parametrize(("layers", "is_said"), [(1, False), (2, True)])
def test_other_layers_in_bf16_are_not_dropped_in_silence(layers: int, is_said: bool) -> None:
    name = "mixed_precision.num_layers_at_end_in_bf16"
    found = import_text(f"mixed_precision=bf16_with_fp8_current_scaling_mixed {name}={layers}", {"model": "qwen3-8b"})
    assert [one.at for one in found.findings if one.rule == "import-without-counterpart"] == [name] * is_said


@pytest.mark.parametrize(("backend", "count"), [("deepep", 20), ("hybridep", 16)])
def test_the_multiprocessors_of_the_backend_in_use_count(backend: str, count: int) -> None:
    text = f"model.moe_token_dispatcher_type=flex model.moe_flex_dispatcher_backend={backend} "
    text += "model.moe_deepep_num_sms=20 model.moe_hybridep_num_sms=16"
    plan = import_text(text, {"model": "qwen3-30b-a3b"}).plan
    assert plan is not None
    assert plan.knobs.dispatch_sms == count


WHOLE = {"knobs.graphs": ["full_iteration"], "knobs.ep_overlap": False, "knobs.delay_wgrad": False}
STASH = {**WHOLE, "job.capacity_factor": 1.5, "job.capacity_scope": "rank"}
STASH |= {"knobs.dispatcher": "hybridep", "knobs.expert_fusion": True}


def test_a_dropless_graph_of_the_iteration_has_a_paged_stash() -> None:
    """As the recipes of Bridge 0.6.2 for GB200 with a paged stash have it (perf_recipes/qwen/gb200/qwen3_moe.py)."""
    found = settings(STASH)
    assert found["model.moe_paged_stash"] is True
    assert found["model.moe_expert_rank_capacity_factor"] == 1.5
    assert found["model.offload_modules"] == ()  # Megatron Core 0.19.2 ends in a TypeError without it
    variables = {one.name: one.value for one in environment_of(change(QWEN, STASH))}
    assert variables["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "0"
    assert variables["PYTORCH_CUDA_ALLOC_CONF"].endswith(",graph_capture_record_stream_reuse:True")
    assert "model.moe_paged_stash" not in settings({**WHOLE, "job.capacity_factor": 1.0})
    assert "model.moe_paged_stash" not in settings(STASH, "0.4.2")
    plain = {one.name: one.value for one in environment_of(QWEN)}
    assert plain["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1"


def test_a_graph_of_the_iteration_bounds_the_copies_of_offload() -> None:
    name = "model.fine_grained_offloading_max_inflight_offloads"
    whole = {**WHOLE, "job.capacity_factor": 1.0, "knobs.activation_offload": ["core_attn"]}
    assert settings(whole)[name] == 1
    assert name not in settings({**whole, "knobs.graphs": ["attn"]})


@pytest.mark.parametrize(
    ("text", "recompute", "graphs"),
    [
        ("model.recompute_granularity=selective model.recompute_modules=[]", (), ()),
        ("model.recompute_granularity=selective", ("core_attn",), ()),
        ("model.cuda_graph_impl=local model.cuda_graph_modules=[moe_router]", (), ("moe_router", "moe_preprocess")),
        ("model.cuda_graph_impl=transformer_engine model.cuda_graph_modules=[moe_router]", (), ("moe_router",)),
    ],
)
def test_what_megatron_reads_into_lists(text: str, recompute: tuple[str, ...], graphs: tuple[str, ...]) -> None:
    """An empty list recomputes nothing, a missing one core_attn; impl `local` captures router and preprocessing
    together (transformer_config.py of Megatron Core 0.19.2)."""
    plan = import_text(text, {"model": "qwen3-235b-a22b", "cluster.chip": "h100", "cluster.gpus": 64}).plan
    assert plan is not None
    assert (plan.knobs.recompute, plan.knobs.graphs) == (recompute, graphs)


def test_hybrid_cp_says_what_megatron_asserts() -> None:
    fields = {"layout.cp": 4, "layout.pp": 1, "layout.vpp": 1, "layout.stages": None, "knobs.cp_dynamic": True}
    found = settings({**fields, "knobs.ep_overlap": False, "knobs.graphs": []})
    assert found["model.calculate_per_token_loss"] is True
    assert found["dataset.dataloader_type"] == "single"


def test_fsdp_is_exported_as_the_guide_has_it() -> None:
    found = dict(export_plan(FSDP).settings)
    assert found["ddp.average_in_collective"] is False
    assert found["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"
    assert found["checkpoint.ckpt_format"] == "fsdp_dtensor"
    assert found["ddp.outer_dp_sharding_strategy"] == "no_shard"
    captured = dict(export_plan(change(FSDP, {"knobs.graphs": ["full_iteration"]})).settings)
    assert captured["ddp.megatron_fsdp_cuda_graph_mode"] is True
    older = export_plan(change(FSDP, {"knobs.graphs": ["full_iteration"]}), release="0.4.2")
    assert "ddp.megatron_fsdp_cuda_graph_mode" not in older.settings


def test_a_short_run_states_its_warmup_and_decay() -> None:
    """Recipes warm up for 500 steps, and Megatron asserts fewer than the decay has."""
    found = settings({"job.steps": 6})
    assert found["scheduler.lr_warmup_iters"] == 5
    assert found["scheduler.lr_decay_iters"] == 6
    assert "scheduler.lr_warmup_iters" not in settings({})
    lost = {item.field: item.reason for item in export_plan(change(QWEN, {"job.steps": 6})).lost}
    assert lost["job.warmup_steps"].endswith(": 5")


def test_delayed_weight_gradients_have_no_graphs_of_a_recipe() -> None:
    """`has_cuda_graph_module` of Bridge 0.6.2 asks for the modules alone, and Nemotron's recipe names some."""
    delayed = {"knobs.graphs": [], "knobs.ep_overlap": True, "knobs.delay_wgrad": True}
    assert settings(delayed)["model.cuda_graph_modules"] == ()
    assert "model.cuda_graph_modules" not in settings({**delayed, "knobs.delay_wgrad": False})


def test_moonlight_has_rows_for_its_finetuning_tokens() -> None:
    """163,842 rows, padded for TP (recipes/moonlight/h100/moonlight_16b.py of Bridge 0.6.2); 163,840 else."""
    fields = {"model": "moonlight-16b-a3b", "job.task": "sft", "layout.stages": None, "layout.vpp": 1, "layout.pp": 1}
    assert settings({**fields, "layout.tp": 2})["model.vocab_size"] == 163842
    assert settings({**fields, "layout.tp": 4})["model.vocab_size"] == 163844
    assert "model.vocab_size" not in settings({**fields, "job.task": "pretrain"})


def test_dense_pipelines_have_larger_pieces() -> None:
    def chunk(fields: dict[str, Any]) -> str | None:
        return next((v.value for v in environment_of(build(fields)) if v.name == "NCCL_P2P_NET_CHUNKSIZE"), None)

    dense = {"model": "llama3.1-405b", "cluster.chip": "gb200", "cluster.gpus": 64, "job.global_batch": 64}
    assert chunk({**dense, "layout.pp": 4}) == "2097152"
    assert chunk(dense) is None
    assert chunk(CLEAN) is None


def job(options: Options) -> str:
    return job_script(export_plan(QWEN), "plan.toml", options, "out/train.py")


def test_fault_tolerance_has_its_launcher_and_its_settings() -> None:
    """Section limits, restarts and switches of Bridge's guide on resiliency."""
    text = job(Options(fault_tolerant=True, time="4:00:00"))
    assert "ft_launcher --ft-rank_section_timeouts=setup:600,step:180,checkpointing:420" in text
    assert "--ft-rank_out_of_section_timeout=300" in text
    assert "torchrun" not in text
    assert "--max-restarts=3" in text
    assert "checkpoint.async_save=true train.exit_duration_in_mins=235" in text  # 5 minutes before the limit
    script = train_script(export_plan(QWEN), fault_tolerant=True)
    assert "cfg.ft = FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=True)" in script
    compile(script, "train.py", "exec")
    assert "FaultToleranceConfig" not in train_script(export_plan(QWEN))
    assert "ft_launcher" not in job(Options())


def test_fault_tolerance_and_nsight_exclude_each_other() -> None:
    assert [one.at for one in faults(QWEN, Options(fault_tolerant=True, nsys=True))] == ["--fault-tolerance"]
    assert not list(faults(QWEN, Options(fault_tolerant=True)))


def test_fault_tolerance_belongs_to_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    path = "recipes/qwen3-235b-a22b-4k-256xh100-bf16.toml"
    assert main(["export", path, "--to", "megatron-lm", "--fault-tolerance"]) == 2
    assert "--fault-tolerance goes with" in capsys.readouterr().err
    assert main(["launch", path, "--torchrun", "--fault-tolerance"]) == 2


def test_a_job_says_that_bridge_resumes_by_itself() -> None:
    assert "nemo_experiments" in job(Options())
    assert "nemo_experiments" not in job(Options(run="runs/a"))


EXCLUDED = [
    ("fsdp-registers-user-buffers", "ddp.fsdp_manual_registration=true", "ddp.nccl_ub=true"),
    (
        "fsdp-has-no-replicas-to-compare",
        "ddp.use_megatron_fsdp=true train.check_weight_hash_across_dp_replicas_interval=100",
        "train.check_weight_hash_across_dp_replicas_interval=null",
    ),
    ("one-kind-of-fsdp", "dist.use_megatron_fsdp=true dist.use_torch_fsdp2=true", "dist.use_torch_fsdp2=false"),
    (
        "fsdp-orders-ranks-by-itself",
        "ddp.use_megatron_fsdp=true dist.use_tp_pp_dp_mapping=true",
        "dist.use_tp_pp_dp_mapping=false",
    ),
    (
        "torch-fsdp-is-alone",
        "dist.use_torch_fsdp2=true model.expert_model_parallel_size=8",
        "model.expert_model_parallel_size=1",
    ),
    (
        "fsdp-has-its-checkpoints",
        "ddp.use_megatron_fsdp=true checkpoint.save=/a checkpoint.ckpt_format=torch_dist",
        "checkpoint.ckpt_format=fsdp_dtensor",
    ),
    (
        "fsdp-graph-keeps-buffers",
        "ddp.use_megatron_fsdp=true model.cuda_graph_impl=full_iteration",
        "ddp.megatron_fsdp_cuda_graph_mode=true",
    ),
    (
        "hierarchical-cp-has-sizes",
        "model.cp_comm_type=a2a+p2p model.context_parallel_size=8",
        "model.hierarchical_context_parallel_sizes=[4,2]",
    ),
    (
        "hierarchical-cp-sizes-multiply",
        "model.context_parallel_size=8 model.hierarchical_context_parallel_sizes=[4,4]",
        "model.hierarchical_context_parallel_sizes=[4,2]",
    ),
    (
        "hierarchical-cp-has-global-groups",
        "dist.use_decentralized_pg=true model.context_parallel_size=8 model.hierarchical_context_parallel_sizes=[4,2]",
        "dist.use_decentralized_pg=false",
    ),
    (
        "hybrid-cp-loss-by-token",
        "model.hybrid_context_parallel=true model.calculate_per_token_loss=false",
        "model.calculate_per_token_loss=true",
    ),
    (
        "hybrid-cp-single-loader",
        "model.hybrid_context_parallel=true dataset.dataloader_type=cyclic",
        "dataset.dataloader_type=single",
    ),
    (
        "layout-string-counts-ends",
        "model.pipeline_model_parallel_layout=Et|tL model.account_for_loss_in_pipeline_split=true",
        "model.account_for_loss_in_pipeline_split=false",
    ),
    (
        "mxfp8-gather-reuses-gradients",
        "mixed_precision.fp8_param_gather=true mixed_precision.fp8=e4m3 mixed_precision.fp8_recipe=mxfp8 "
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false",
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true",
    ),
    (
        "offload-leaves-masters",
        "optimizer.optimizer_cpu_offload=true optimizer.use_precision_aware_optimizer=false",
        "optimizer.use_precision_aware_optimizer=true",
    ),
    (
        "async-save-has-its-formats",
        "checkpoint.async_save=true checkpoint.ckpt_format=zarr",
        "checkpoint.ckpt_format=fsdp_dtensor",
    ),
    ("async-save-has-a-folder", "checkpoint.async_save=true checkpoint.save=null", "checkpoint.save=/a"),
    (
        "fault-tolerance-without-nsys",
        "ft.enable_ft_package=true profiling.use_nsys_profiler=true",
        "profiling.use_nsys_profiler=false",
    ),
    ("one-straggler-detector", "nvrx_straggler.enabled=true straggler.log_straggler=true", "nvrx_straggler.enabled=0"),
    (
        "in-process-restart-is-alone",
        "inprocess_restart.enabled=true train.exit_signal_handler=true",
        "train.exit_signal_handler=false",
    ),
    ("in-process-limits-rise", "inprocess_restart.soft_timeout=90.0", "inprocess_restart.hard_timeout=120.0"),
    (
        "saved-activations-or-sequence-parallel",
        "model.distribute_saved_activations=true model.sequence_parallel=true",
        "model.sequence_parallel=false",
    ),
    (
        "paged-stash-has-a-capacity",
        "model.moe_paged_stash=true",
        "model.moe_expert_rank_capacity_factor=1.5 model.moe_flex_dispatcher_backend=hybridep",
    ),
    (
        "paged-stash-keeps-layers",
        "model.moe_paged_stash=true model.moe_expert_rank_capacity_factor=1.5 model.cpu_offloading=true "
        "model.cpu_offloading_num_layers=2",
        "model.cpu_offloading=false",
    ),
    (
        "paged-stash-holds-experts",
        "model.moe_paged_stash=true model.moe_expert_rank_capacity_factor=1.5 "
        "model.fine_grained_activation_offloading=true model.offload_modules=[core_attn,moe_act]",
        "model.offload_modules=[core_attn]",
    ),
    (
        "graphed-recompute-is-not-random",
        "model.cuda_graph_impl=transformer_engine model.cuda_graph_modules=[attn] "
        "model.recompute_granularity=selective model.recompute_modules=[core_attn] model.attention_dropout=0.1",
        "model.attention_dropout=0.0",
    ),
    (
        "whole-graph-bounds-offload",
        "model.cuda_graph_impl=full_iteration model.fine_grained_activation_offloading=true "
        "model.offload_modules=[core_attn]",
        "model.fine_grained_offloading_max_inflight_offloads=1",
    ),
    (
        "local-graph-offloads-experts",
        "model.cuda_graph_impl=local model.cuda_graph_modules=[attn] model.fine_grained_activation_offloading=true "
        "model.offload_modules=[core_attn,moe_act]",
        "model.offload_modules=[moe_act]",
    ),
    (
        "packed-graph-has-one-width",
        "dataset.enable_offline_packing=true model.cuda_graph_impl=full_iteration",
        "dataset.pad_to_max_length=true",
    ),
    (
        "nccl-ep-overlap-keeps-inputs",
        "model.moe_token_dispatcher_type=flex model.moe_flex_dispatcher_backend=ncclep "
        "model.moe_expert_rank_capacity_factor=2.0 comm_overlap.overlap_moe_expert_parallel_comm=true "
        "model.fine_grained_activation_offloading=true model.offload_modules=[expert_fc1]",
        "model.offload_modules=[core_attn]",
    ),
    (
        "nccl-ep-has-a-capacity",
        "model.moe_token_dispatcher_type=flex model.moe_flex_dispatcher_backend=ncclep",
        "model.moe_expert_rank_capacity_factor=2.0",
    ),
    (
        "nccl-ep-copies-where-shapes-move",
        "model.moe_ncclep_zero_copy=true",
        "model.moe_ncclep_static_shape=true",
    ),
    (
        "dispatch-with-wgrad-is-alone",
        "model.overlap_dispatch_backward_with_experts_wgrad=true comm_overlap.delay_wgrad_compute=true",
        "comm_overlap.delay_wgrad_compute=false",
    ),
    (
        "graph-modules-have-one-name",
        "model.cuda_graph_scope=[attn] model.cuda_graph_modules=[moe_router]",
        "model.cuda_graph_scope=null",
    ),
    (
        "dispatchers-share-multiprocessors",
        "model.moe_token_dispatcher_type=flex model.moe_flex_dispatcher_backend=deepep model.moe_deepep_num_sms=20 "
        "model.moe_hybridep_num_sms=16",
        "model.moe_flex_dispatcher_num_sms=24",
    ),
    (
        "early-release-needs-ep-overlap",
        "model.ep_overlap_early_attn_memory_release=true",
        "comm_overlap.overlap_moe_expert_parallel_comm=true",
    ),
]


def conflicts(text: str) -> list[str]:
    found = import_text(text, {"model": "qwen3-235b-a22b", "cluster.chip": "h100", "cluster.gpus": 64}).findings
    return [f"{one.at}: {one.problem}" for one in found if one.rule == "import-settings-conflict"]


def test_every_conflict_has_a_case() -> None:
    assert [one.name for one in CONFLICTS] == [name for name, _, _ in EXCLUDED]


@pytest.mark.parametrize(("name", "text", "cure"), EXCLUDED)
def test_settings_that_exclude_each_other_are_named(name: str, text: str, cure: str) -> None:
    one = next(one for one in CONFLICTS if one.name == name)
    said = conflicts(text)
    assert len(said) == 1
    assert said[0].startswith(f"{one.at}: {one.problem}")
    assert ("refused: " in said[0]) == (f"setting:{name}" in places())
    assert conflicts(f"{text} {cure}") == []


def test_values_of_another_kind_are_no_conflict() -> None:
    assert conflicts("inprocess_restart.soft_timeout=long model.hierarchical_context_parallel_sizes=many") == []


def test_an_older_name_alone_is_no_conflict() -> None:
    assert conflicts("model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[attn]") == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("comm_overlap.bucket_size=1000", "parameters, not bytes"),
        ("comm_overlap.overlap_p2p_comm=true", "true with virtual stages"),
        ("ddp.megatron_fsdp_version=2", "without MoE, HSDP"),  # no release has it yet
        ("ddp.outer_dp_sharding_strategy=optim", "no_shard"),
        ("ft.enable_ft_package=true", "torchrun turns it off without a word"),
        ("rerun_state_machine.rerun_mode=validate_results", "exit code 16"),
        ("inprocess_restart.enabled=true", "NCCL 2.26.2"),
        ("checkpoint.non_persistent_ckpt_type=local", "disks of nodes"),
        ("ddp.nccl_ub=true", "exclude expandable segments"),
        ("model.moe_hybridep_num_sms_preprocessing=32", "108 by default"),
        ("model.moe_dispatch_fwd_dtype=mxfp8", "in no release"),
        ("model.enable_mhc_connections=true", "goes without mlp, MTP"),
        ("model.moe_hybridep_pad_uneven_dispatch_inputs=true", "equal widths"),
        ("optimizer.optimizer_cuda_graph=true", "ends before it"),
        ("model.moe_paged_stash_buffer_size_factor_cpu=1.0", "on the host"),
        ("model.moe_pad_experts_for_cuda_graph_inference=true", "training does not read it"),
        ("peft.sequence_parallel_input_regather=true", "not with graphs"),
    ],
)
def test_settings_without_a_field_are_explained(setting: str, words: str) -> None:
    found = import_text(setting, {"model": "qwen3-235b-a22b", "cluster.chip": "h100", "cluster.gpus": 64}).findings
    assert any(words in one.advice for one in found)
    assert setting.partition("=")[0] in NOTES or f"{setting.partition('.')[0]}." in NOTES


def test_a_perf_recipe_is_a_benchmark_of_its_machine() -> None:
    imported = import_text("deepseek_v3_pretrain_128gpu_gb300_fp8mx_hsdp_config")
    assert imported.plan is not None
    assert (imported.plan.cluster.chip, imported.plan.cluster.gpus) == ("gb300", 128)
    assert "import-perf-recipe" in {one.rule for one in imported.findings}
    assert "import-perf-recipe" not in {one.rule for one in import_text("deepseek_v3_pretrain_config").findings}


def test_narrow_reduction_is_noted_from_128_ranks_on() -> None:
    def noted(fields: dict[str, Any]) -> bool:
        found = judge(build({**CLEAN, "knobs.grad_dtype": "bf16", **fields}), notes=True)
        return any(one.rule == "narrow-reduction-over-many" for one in found)

    assert not noted({})  # 64 ranks
    assert noted({"cluster.gpus": 2048})
    assert not noted({"cluster.gpus": 2048, "knobs.grad_dtype": "fp32"})


def test_a_larger_tp_makes_room_for_a_plain_exchange() -> None:
    """Eight key/value heads: TP 2 x CP 4 by a2a in place of TP 1 x CP 16 by a2a+p2p."""
    fields: dict[str, Any] = {"model": "llama3-8b", "target": "megatron-bridge", "cluster.chip": "h100"}
    fields |= {"cluster.gpus": 64, "job.seq_len": 65536, "job.global_batch": 64, "layout.cp": 16}
    fields |= {"knobs.cp_comm": "a2a+p2p", "knobs.recompute": ["full"]}
    found = [one for one in judge(build(fields)) if one.rule == "hierarchical-cp-has-a-case"]
    assert found
    ways = [dict(way) for way in found[0].fixes]
    assert {"layout.tp": 2, "layout.cp": 4, "knobs.cp_comm": "a2a", "knobs.cp_inner": None} in ways


@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("fsdp-pipeline-is-untried", "Until 2026-08 this was an error"),
        ("fsdp-features", "2026-08"),
        ("fsdp-excludes-full-graph", "Since Megatron Core 0.18"),
        ("fsdp-needs-connections", "The check of Bridge is followed"),
        ("hierarchical-cp-has-a-case", "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"),
        ("cp-from-shard-target", "2026-04"),
        ("grids-divide-ranks", "product"),
        ("low-precision-after-bf16", "Until 2026-08-01"),
    ],
)
def test_explanations_say_what_changed_or_where_upstream_differs(slug: str, words: str) -> None:
    said = explain(slug)
    assert said is not None
    assert words in said.why + said.confirm


def test_exports_with_fault_tolerance_have_all_files() -> None:
    export: Export = export_plan(QWEN)
    files = export_files(export, "plan.toml", replace(Options(), fault_tolerant=True), "out")
    assert "ft_launcher" in files["job.sbatch"]
    assert "FaultToleranceConfig" in files["train.py"]


@pytest.mark.parametrize(
    "fields",
    [{"knobs.optimizer_dtype": "bf16"}, {"knobs.grad_dtype": "bf16"}, {"knobs.optimizer_offload": 0.5}],
)
def test_megatrons_precision_aware_optimizer_is_adam(fields: dict[str, Any]) -> None:
    """megatron-core 0.19.2, core/optimizer/optimizer_config.py:433."""
    refused = {one.rule for one in judge(build({**CLEAN, "job.optimizer": "muon", **fields}))}
    assert "narrow-states-need-adamw" in refused
    assert "narrow-states-need-adamw" not in {one.rule for one in judge(build({**CLEAN, **fields}))}


@pytest.mark.parametrize(("model", "pp"), [("nemotron-3-ultra", 6), ("qwen3-vl-30b-a3b", 4)])
def test_where_virtual_stages_go_overlap_goes_with_them(model: str, pp: int) -> None:
    fields: dict[str, Any] = {"model": model, "target": "megatron-bridge", "cluster.chip": "gb200", "cluster.gpus": 384}
    fields |= {"layout.pp": pp, "layout.vpp": 2, "layout.ep": 8, "job.global_batch": 768, "job.mtp": 0}
    repaired, _ = repair(build({**fields, "knobs.ep_overlap": True}))
    assert (repaired.layout.vpp, repaired.knobs.ep_overlap) == (1, False)
    assert not errors(judge(repaired))
