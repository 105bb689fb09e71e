"""The command lines and config families of NVIDIA's Megatron Bridge skill documents come out of our recipes.

Documents: 000 and 001 (long context), 002 (optimization workflow), 003 (VLM training), 004 (expert-parallel overlap).
Expected overrides are written down by hand from the documents, with Megatron's names for their words. What differs is
in `DIFFERENCES`, each with its reason.
"""

import shlex

import pytest
from megatron_exports import recipe

from threefold.interop.megatron.bridge_files import overrides, performance_script, performance_words, train_script
from threefold.interop.megatron.export_plan import LM, export_plan
from threefold.interop.megatron.import_text import import_text
from threefold.interop.megatron.releases import known_releases
from threefold.plan.parse import change

DSV3 = (
    "model.tensor_model_parallel_size=1",
    "model.expert_model_parallel_size=32",
    "model.pipeline_model_parallel_size=8",
    "model.virtual_pipeline_model_parallel_size=4",
    "mixed_precision.fp8=hybrid",
    "mixed_precision.fp8_recipe=blockwise",
    "model.moe_token_dispatcher_type=flex",
    "model.moe_flex_dispatcher_backend=deepep",
    "model.recompute_granularity=selective",
    "model.recompute_modules=[mla_up_proj,layernorm,moe,mlp]",
    "optimizer.optimizer_cpu_offload=true",
    "optimizer.optimizer_offload_fraction=1.0",
)
EXPECTED: dict[str, tuple[str, ...]] = {
    "deepseek-v3-128k-256xh100-fp8": (*DSV3, "model.context_parallel_size=32", "model.seq_length=131072"),
    "deepseek-v3-256k-512xh100-fp8": (*DSV3, "model.context_parallel_size=64", "model.seq_length=262144"),
    "qwen3-235b-a22b-128k-128xgb200-bf16": (
        "model.tensor_model_parallel_size=4",
        "model.context_parallel_size=4",
        "model.expert_model_parallel_size=32",
        "model.pipeline_model_parallel_size=4",
        "model.virtual_pipeline_model_parallel_size=12",
        "mixed_precision.bf16=true",
        "model.moe_token_dispatcher_type=flex",
        "model.moe_flex_dispatcher_backend=hybridep",
        "model.recompute_modules=[moe_act,layernorm]",
        "model.cuda_graph_impl=transformer_engine",
        "model.cuda_graph_modules=[attn,moe_router,moe_preprocess]",
    ),
    "qwen3-vl-235b-a22b-4k-64xgb200-bf16-fsdp-bringup": (
        "model.tensor_model_parallel_size=1",
        "model.context_parallel_size=1",
        "model.pipeline_model_parallel_size=1",
        "model.expert_model_parallel_size=64",
        "model.moe_flex_dispatcher_backend=hybridep",
        "model.recompute_granularity=full",
        "ddp.use_megatron_fsdp=true",
    ),
    "qwen3-vl-235b-a22b-4k-64xgb200-bf16-fsdp": (
        "model.recompute_granularity=selective",
        "model.cuda_graph_modules=[attn]",
        "model.freeze_vision_model=true",
        "ddp.use_megatron_fsdp=true",
    ),
    "qwen3-vl-235b-a22b-4k-128xgb200-bf16-3d-pipeline": (
        "model.tensor_model_parallel_size=1",
        "model.context_parallel_size=1",
        "model.pipeline_model_parallel_size=2",
        "model.moe_flex_dispatcher_backend=hybridep",
        "model.cuda_graph_modules=[attn]",
        "ddp.use_megatron_fsdp=false",
    ),
    "qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d": (
        "model.context_parallel_size=1",
        "model.pipeline_model_parallel_size=1",
        "model.expert_model_parallel_size=8",
        "model.expert_tensor_parallel_size=8",
        "model.moe_flex_dispatcher_backend=hybridep",
        "ddp.use_megatron_fsdp=false",
    ),
}
# Where the words of a document and an export differ.
DIFFERENCES = {
    "up_proj, norm": "Megatron accepts these modules only as mla_up_proj and layernorm",
    "CUDA Graph: a + b": "from Bridge 0.5 on the scopes are cuda_graph_modules, beside cuda_graph_impl",
    "EDP=2": "it follows from the number of GPUs and the other degrees; Megatron has no setting for it",
    "Precision: FP8-class": "on Hopper blockwise scaling, as document 002 says",
    "3D parallel: TP=1": "on 64 GPUs TP 8, as the performance tracker that the document draws on has it",
    "cfg.model.bf16 = True": "Bridge sets it from the mixed-precision recipe, so that the export writes that one",
    "cfg.model.fp16 = False": "the same",
    "--fake-init-process-group": "a mode of a dry run and no setting; upstream spells it --fake-process-group",
    "overrides beside the three of 004": "the script would decide them: an export says all that the plan says",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_config_families_come_out_of_the_recipes(name: str) -> None:
    written = overrides(export_plan(recipe(name)))
    assert [text for text in EXPECTED[name] if text not in written] == []


# Document 004, the command line of the arm with EP overlap.
COMMAND_004 = shlex.split("""
uv run python scripts/performance/run_script.py
  -m qwen -mr qwen3_30b_a3b --task pretrain -g h100 -c bf16 -ng 16 -gn 8 --max_steps 8 --config_variant v1
  --cuda_graph_impl none --moe_flex_dispatcher_backend None --moe_a2a_overlap false --tokenizer_type NullTokenizer
  comm_overlap.overlap_moe_expert_parallel_comm=true comm_overlap.delay_wgrad_compute=false
  model.moe_shared_expert_overlap=false
""")
ARMS_004 = {
    "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap": ("false", "false"),
    "qwen3-30b-a3b-4k-16xh100-bf16-overlap": ("true", "false"),
    "qwen3-30b-a3b-4k-16xh100-bf16-overlap-wgrad": ("true", "true"),
}


@pytest.mark.parametrize("name", ARMS_004)
def test_the_arms_of_the_overlap_document_come_out_word_by_word(name: str) -> None:
    overlap, delay = ARMS_004[name]
    document = [word for word in COMMAND_004 if not word.startswith("comm_overlap.")]
    document += [f"comm_overlap.overlap_moe_expert_parallel_comm={overlap}"]
    document += [f"comm_overlap.delay_wgrad_compute={delay}"]
    export = export_plan(recipe(name))
    words = performance_words(export, steps=8)
    flags = [word for word in words if "=" not in word]
    assert flags == [word for word in document if "=" not in word]  # the same flags, in the same order
    assert [word for word in document if word not in words] == []
    beside = [word.partition("=")[0] for word in words if "=" in word and word not in document]
    assert sorted(beside) == sorted(path for path in export.settings if not _is_in(document, path))


def _is_in(document: list[str], path: str) -> bool:
    return any(word.startswith(f"{path}=") for word in document)


def test_an_export_writes_the_three_arms_of_the_a_b() -> None:
    script = performance_script(export_plan(recipe("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap")))
    assert script.count("--max_steps 8") == 3
    pairs = [("false", "false"), ("true", "false"), ("true", "true")]
    names = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
    arms = script.split("uv run python")[1:]
    assert [tuple(f"comm_overlap.{name}=true" in arm for name in names) for arm in arms] == [
        tuple(value == "true" for value in pair) for pair in pairs
    ]


def test_arms_that_megatron_would_refuse_are_not_written() -> None:
    """Full recompute excludes EP overlap: one line, without an A/B."""
    plan = change(recipe("qwen3-30b-a3b-4k-16xh100-bf16-no-overlap"), {"knobs.recompute": ["full"]})
    assert performance_script(export_plan(plan)).count("uv run python") == 1


def test_flex_is_activated_by_the_function_that_the_document_names() -> None:
    plan = change(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap"), {"knobs.dispatcher": "deepep"})
    script = train_script(export_plan(plan))
    call = 'apply_flex_dispatcher_backend(cfg.model, moe_flex_dispatcher_backend="deepep")'
    assert call in script
    assert script.index("process_config_with_overrides(cfg") < script.index(call) < script.index("pretrain(config=cfg")
    assert "apply_flex_dispatcher_backend" not in train_script(export_plan(change(plan, {"knobs.dispatcher": None})))


SNIPPET_004 = """
from megatron.bridge.training.flex_dispatcher_backend import apply_flex_dispatcher_backend
cfg.comm_overlap.overlap_moe_expert_parallel_comm = True
cfg.comm_overlap.delay_wgrad_compute = True
cfg.model.moe_shared_expert_overlap = False
cfg.model.expert_model_parallel_size = 8
cfg.model.num_moe_experts = 64
cfg.model.moe_token_dispatcher_type = "alltoall"
cfg.model.bf16 = True
cfg.model.fp16 = False
"""


def test_lines_of_a_script_are_read_and_come_out_again() -> None:
    imported = import_text(SNIPPET_004, {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 8})
    assert imported.plan is not None
    assert imported.plan.knobs.precision == "bf16"
    written = overrides(export_plan(imported.plan))
    spelled = {"cfg.model.bf16 = True": "mixed_precision.bf16=true", "cfg.model.fp16 = False": ""}
    for line in SNIPPET_004.strip().splitlines()[1:]:
        path, _, value = line.removeprefix("cfg.").partition(" = ")
        expected = spelled.get(line, f"{path}={value.strip(chr(34)).lower()}")
        assert not expected or expected in written
        assert line not in spelled or line in DIFFERENCES


def test_the_arguments_that_document_002_names_come_out() -> None:
    """Parallel folding, overlaps, dispatcher and manual garbage collection, as arguments of Megatron-LM."""
    plan = change(
        recipe("qwen3-235b-a22b-128k-128xgb200-bf16"),
        {"knobs.tp_overlap": True, "knobs.ep_overlap": True, "run.gc_every": 50, "knobs.graphs": None},
    )
    words = export_plan(plan, LM).arguments
    named = (
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-token-dispatcher-type",
        "--moe-flex-dispatcher-backend",
        "--overlap-moe-expert-parallel-comm",
        "--overlap-grad-reduce",
        "--tp-comm-overlap",
        "--manual-gc",
    )
    assert [word for word in named if word not in words] == []
    assert "--fake-init-process-group" not in known_releases()[-1].by_argument
    assert "--fake-process-group" in known_releases()[-1].by_argument
