"""The files of an export: scripts that a shell and Python read, segments of racks, and the environment."""

import subprocess
from itertools import pairwise

import pytest
from megatron_exports import recipe, recipe_plans

from threefold.interop.megatron.bridge_files import (
    export_files,
    job_script,
    overrides,
    performance_script,
    torchrun_script,
    train_script,
)
from threefold.interop.megatron.environment import EXPORTED_VARIABLES, environment_of
from threefold.interop.megatron.export_plan import BRIDGE, FORMATS, LM, export_plan
from threefold.interop.megatron.field_names import DTYPE_PATHS, TORCH_DTYPES
from threefold.interop.megatron.import_text import import_text
from threefold.launch.slurm import Options, segment_nodes
from threefold.plan.parse import change
from threefold.plan.plan import Plan

GB200 = recipe("deepseek-v3-4k-256xgb200-mxfp8")
H100 = recipe("deepseek-v3-128k-256xh100-fp8")


@pytest.mark.parametrize("name", recipe_plans())
def test_scripts_are_valid_bash_and_python(name: str) -> None:
    plan = recipe(name)
    for to in FORMATS:
        files = export_files(export_plan(plan, to), f"recipes/{name}.toml", Options(), "out")
        for file, text in files.items():
            if file.endswith((".sh", ".sbatch")):
                subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        if to == BRIDGE:
            compile(files["train.py"], "train.py", "exec")


@pytest.mark.parametrize(
    ("gpus", "segment"),
    [
        (256, 16),  # 64 nodes of 4: four segments, each in one rack of 72
        (64, 16),  # one rack
        (72, 18),
        (128, 16),
        (96, 12),  # 24 nodes: two segments of 12, the largest that divide them and fit the 64 GPUs of a block
        (4, None),
    ],
)
def test_racks_are_asked_for_in_whole_segments(gpus: int, segment: int | None) -> None:
    """EP 64 inside a rack needs 16 nodes of 4 GPUs that Slurm places together."""
    assert segment_nodes(change(GB200, {"cluster.gpus": gpus})) == segment


def test_only_racks_have_segments() -> None:
    assert segment_nodes(H100) is None
    assert "#SBATCH --segment=16\n" in job_script(export_plan(GB200), "plan.toml", Options())
    assert "--segment" not in job_script(export_plan(H100), "plan.toml", Options())


def variables(plan: Plan) -> dict[str, str]:
    return {item.name: item.value for item in environment_of(plan)}


@pytest.mark.parametrize(
    ("changes", "connections"),
    [
        ({}, "1"),  # CP on Hopper
        ({"layout.cp": 1}, "32"),  # DeepEP
        ({"layout.cp": 1, "knobs.dispatcher": "alltoall"}, "8"),
        ({"knobs.ep_overlap": True}, "32"),
        ({"knobs.max_connections": 4}, "4"),
        ({"cluster.chip": "b200"}, "32"),
        ({"knobs.data_parallel": "fsdp", "knobs.dispatcher": "alltoall"}, "8"),  # FSDP asserts that it is not 1
    ],
)
def test_connections_follow_the_performance_scripts(changes: dict[str, object], connections: str) -> None:
    """As `_set_num_cuda_device_max_connections` of scripts/performance/perf_plugins.py has it."""
    assert variables(change(H100, changes))["CUDA_DEVICE_MAX_CONNECTIONS"] == connections


def test_an_arm_without_overlap_has_the_queues_that_check_wants() -> None:
    """32 of them are for EP overlap; TP and CP before Blackwell want one."""
    tp = {"layout.tp": 2, "knobs.dispatcher": "deepep", "knobs.max_connections": 32}
    plan = change(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap"), tp)
    script = performance_script(export_plan(plan))
    starts = [line.split()[0] for line in script.splitlines() if "uv run" in line]
    assert starts == [f"CUDA_DEVICE_MAX_CONNECTIONS={count}" for count in (1, 32, 32)]


EXPORTS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    # what Megatron refused or misread: a recipe, changes to it, and overrides that its export must have
    "the recipe's dtypes of the optimizer": (
        "deepseek-v3-4k-1024xh100-fp8",
        {},
        {
            "optimizer.main_grads_dtype": "fp32",
            "optimizer.main_params_dtype": "fp32",
            "optimizer.exp_avg_dtype": "fp32",
            "optimizer.exp_avg_sq_dtype": "fp32",
            "optimizer.use_distributed_optimizer": True,
        },
    ),
    "the recipe's ends of a pipeline": (
        "qwen3-235b-a22b-128k-128xgb200-bf16",
        {},
        {
            "model.account_for_embedding_in_pipeline_split": False,
            "model.account_for_loss_in_pipeline_split": False,
        },
    ),
    "packing in a batch with images": (
        "qwen3-vl-235b-a22b-4k-128xgb200-bf16-3d-pipeline",
        {},
        {"dataset.enable_in_batch_packing": False},
    ),
    "packing in a batch, in a release before": (
        "qwen3-vl-235b-a22b-4k-128xgb200-bf16-3d-pipeline",
        {"stack.release": "26.06"},
        {"dataset.pack_sequences_in_batch": False},
    ),
    "packed answers": (
        "tiny-qwen3-moe-256-1xcpu-fp32",
        {"job.task": "sft"},
        {"dataset.enable_offline_packing": False, "dataset.offline_packing_specs": None},
    ),
    "answers over context parallelism": (
        "qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d",
        {"layout.cp": 2},
        {"ddp.average_in_collective": False, "model.calculate_per_token_loss": True},
    ),
    "lengths that vary, without experts": (
        "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap",
        {"model": "qwen3-8b", "layout.ep": 1, "job.dynamic_length": True},
        {"model.moe_token_dispatcher_type": "alltoall", "model.variable_seq_lengths": True},
    ),
    "a field that hybrid models had not yet": (
        "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap",
        {"model": "nemotron-3-nano", "stack.release": "26.04"},
        {"model.use_transformer_engine_op_fuser": "absent"},
    ),
    "a pattern of MTP that makes a depth of its own": (
        "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap",
        {"model": "nemotron-3-super", "job.mtp": 0},
        {"model.mtp_num_layers": None, "model.mtp_hybrid_override_pattern": None},
    ),
    "the delta rule before Core 0.19": (
        "qwen3-next-80b-a3b-32k-32xgb200-bf16",
        {"stack.release": "26.06", "layout.cp": 2},
        {"model.cp_comm_type": None},
    ),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_says_what_a_recipe_would_leave_in_megatrons_way(case: str) -> None:
    name, changes, wanted = EXPORTS[case]
    settings = export_plan(change(recipe(name), changes)).settings
    assert {path: settings.get(path, "absent") for path in wanted} == wanted


def test_images_come_from_the_recipes_own_dataset() -> None:
    settings = export_plan(recipe("qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d-ep")).settings
    assert "dataset.blend" not in settings
    assert export_plan(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap")).settings["dataset.blend"] is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"knobs.activation_offload": ["moe_act"]}, "NVTE_CPU_OFFLOAD_V1"),
        ({"knobs.expert_fusion": True}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP"),
    ],
)
def test_variables_without_which_megatron_refuses_a_knob(changes: dict[str, object], name: str) -> None:
    assert variables(change(H100, changes))[name] == "1"
    assert name not in variables(H100)


def test_every_variable_of_an_export_is_passed_over_by_an_import() -> None:
    more = {"knobs.activation_offload": ["moe_act"], "knobs.expert_fusion": True, "knobs.precision": "nvfp4"}
    dense = {"model": "llama3-8b", "layout.ep": 1, "layout.vpp": 1, "layout.stages": None, "job.mtp": 0}
    plans = [*recipe_plans().values(), change(GB200, more), change(GB200, dense)]
    names = {item.name for plan in plans for item in environment_of(plan)}
    assert names - EXPORTED_VARIABLES == {"CUDA_DEVICE_MAX_CONNECTIONS"}
    assert set() == EXPORTED_VARIABLES - names


def test_a_vision_model_without_a_recipe_has_the_frame_of_one_with_images() -> None:
    script = train_script(export_plan(recipe("tiny-qwen3-vl-moe-256-4xcpu-fp32-fsdp")))
    assert "from megatron.bridge.recipes.qwen_vl.qwen3_vl import qwen3_vl_30b_a3b_" in script
    assert "cfg.dataset.hf_processor_path = source" in script


def test_hybridep_is_told_its_domain() -> None:
    found = variables(GB200)
    names = ("NVLINK_DOMAIN_SIZE", "USE_MNNVL", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN")
    assert [found[name] for name in names] == ["72", "1", "64"]
    hopper = variables(change(H100, {"knobs.dispatcher": "hybridep"}))
    assert [hopper[name] for name in names] == ["8", "0", "8"]
    assert "USE_MNNVL" not in variables(H100)


def test_every_variable_has_a_reason() -> None:
    for plan in recipe_plans().values():
        assert all(item.reason for item in environment_of(plan))


def test_a_batch_job_writes_its_own_script() -> None:
    export = export_plan(GB200)
    text = job_script(export, "plans/my plan.toml", Options(time="4:00:00", container="a b.sqsh"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert train_script(export) in text
    assert "#SBATCH --nodes=64\n#SBATCH --ntasks-per-node=1\n" in text
    assert "'--container-image=a b.sqsh'" in text
    assert "requeue" not in text  # the program does not save at a signal
    assert "--standalone" in torchrun_script(export_plan(change(GB200, {"cluster.gpus": 4, "layout.ep": 4})))


def test_a_job_says_where_checkpoints_go_and_what_to_trace() -> None:
    text = job_script(export_plan(GB200), "plan.toml", Options(run="/shared/my runs", nsys=True))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    folder = '"/shared/my runs/checkpoints"'
    assert f"'checkpoint.save={folder}' 'checkpoint.load={folder}' profiling.use_nsys_profiler=true" in text
    assert "nsys profile" in text


def test_a_model_without_a_recipe_is_read_from_a_checkpoint() -> None:
    mixtral = change(H100, {"model": "mixtral-8x7b", "layout.vpp": 1, "job.mtp": None, "layout.ep": 8})
    script = train_script(export_plan(mixtral))
    assert 'source = "mistralai/Mixtral-8x7B-v0.1"' in script
    assert "cfg.model = AutoBridge.from_hf_pretrained(source)" in script
    tiny = train_script(export_plan(recipe("tiny-qwen3-moe-256-1xcpu-fp32")))
    assert 'os.environ["HF_MODEL"]' in tiny


def test_strings_are_quoted_as_hydra_reads_them() -> None:
    written = overrides(export_plan(GB200))
    assert 'model.pipeline_model_parallel_layout="Et*4|(t*4|)*14tmL"' in written
    moments = change(GB200, {"knobs.optimizer_dtype": "bf16", "knobs.graphs": ["full_iteration"]})
    written = overrides(export_plan(moments))
    assert "optimizer.exp_avg_dtype=torch.bfloat16" in written
    assert "model.cuda_graph_modules=[]" in written
    assert "--exp-avg-dtype" in export_plan(moments, LM).arguments


def test_remainders_of_masters_need_megatrons_precision_aware_optimizer() -> None:
    """Megatron reads store_param_remainders there alone. What a plan does not state is left to Megatron."""
    assert not [line for line in overrides(export_plan(GB200)) if "store_param_remainders" in line]
    split = change(GB200, {"knobs.store_param_remainders": True})
    written = overrides(export_plan(split))
    assert "optimizer.store_param_remainders=true" in written
    assert "optimizer.use_precision_aware_optimizer=true" in written
    assert "optimizer.exp_avg_dtype=torch.float32" in written


def test_an_argument_line_says_what_no_recipe_says_for_it() -> None:
    """Megatron-LM stops without --train-iters and --lr, refuses a seed of 0, and has other betas than a plan."""
    words = export_plan(H100, LM).arguments
    said = dict(pairwise(words))
    job = H100.job
    for name, value in {
        "--train-iters": job.steps,
        "--lr": job.lr,
        "--adam-beta2": job.adam_beta2,
        "--weight-decay": job.weight_decay,
        "--lr-warmup-iters": job.warmup_steps,
    }.items():
        assert float(said[name]) == value
    assert job.seed == 0
    assert not {"--seed", "--moe-z-loss-coeff"} & {*words}
    assert "--seed" in export_plan(change(H100, {"job.seed": 7}), LM).arguments
    assert "rng.seed" not in export_plan(change(H100, {"job.seed": 0})).settings


def test_hydra_reads_every_override_as_it_was_meant() -> None:
    """Hydra's own parser, where it is installed: it is what Bridge parses overrides with."""
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    for name, plan in recipe_plans().items():
        export = export_plan(plan)
        read = parser.parse_overrides(overrides(export))
        for parsed, (path, value) in zip(read, export.settings.items(), strict=True):
            wanted = TORCH_DTYPES[str(value)] if path in DTYPE_PATHS else value
            found = parsed.value()
            found = [str(item) for item in found] if isinstance(found, list) else str(found)
            assert (parsed.key_or_group, found) == (
                path,
                [str(item) for item in wanted] if isinstance(wanted, tuple) else str(wanted),
            ), name


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ("/data/a.bin", ("/data/a",)),
        (("/data/a.bin:0.3", "/data/b.idx:0.7"), (0.3, "/data/a", 0.7, "/data/b")),
        (("/data/a.bin", "/data/b.bin"), ("/data/a", "/data/b")),
        (("/data/a.bin", "/data/b.tok"), None),  # ours beside Megatron's
    ],
)
def test_datasets_of_megatron_are_handed_on(data: str | tuple[str, ...], paths: tuple[object, ...] | None) -> None:
    for to in FORMATS:
        export = export_plan(change(H100, {"job.data": data}), to)
        assert export.settings.get("dataset.data_path") == paths
        assert ("job.data" in {item.field for item in export.lost}) == (paths is None)
    if paths is not None:
        assert "--data-path" in export.arguments


def test_prefixes_of_datasets_come_back() -> None:
    for text in ("dataset.data_path=[0.3,/data/a,0.7,/data/b]", "x.py --data-path 0.3 /data/a 0.7 /data/b --bf16"):
        given = {"model": "deepseek-v3", "cluster.chip": "h100", "cluster.gpus": 8}
        plan = import_text(text, given).plan
        assert plan is not None
        assert plan.job.data == ("/data/a:0.3", "/data/b:0.7")
