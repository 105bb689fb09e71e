"""Overrides, YAML and arguments become plans; what cannot is one finding with a fix."""

import pytest
from job_logs import bridge_summary
from megatron_exports import recipe
from repository import ROOT

from threefold.interop.megatron.bridge_files import overrides, overrides_yaml, train_script
from threefold.interop.megatron.export_plan import export_plan
from threefold.interop.megatron.field_names import PLAIN
from threefold.interop.megatron.import_text import Imported, import_text
from threefold.interop.megatron.releases import known_releases
from threefold.plan.parse import change

PLAN = recipe("deepseek-v3-4k-256xgb200-mxfp8")
OF_THE_RECIPE = {"job.seed": 1234, "job.warmup_steps": 40}  # which our recipe leaves to Bridge's
GIVEN = {"model": "deepseek-v3", "cluster.chip": "gb200", "cluster.gpus": 256}


def rules(imported: Imported) -> list[str]:
    return [finding.rule for finding in imported.findings]


def test_every_file_of_an_export_reads_back() -> None:
    export = export_plan(PLAN)
    for text in ("\n".join(overrides(export)), overrides_yaml(export), train_script(export)):
        imported = import_text(text, GIVEN)
        assert imported.plan is not None, imported.findings
        assert dict(imported.plan.written) == dict(PLAN.written)
        assert imported.findings == []


def test_a_complete_yaml_of_bridge_is_read() -> None:
    """The layout of a configuration that Bridge saves with a checkpoint, with settings that no plan has."""
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider
  num_layers: 48
  hidden_size: 2048
  num_attention_heads: 32
  num_query_groups: 4
  num_moe_experts: 128
  moe_ffn_hidden_size: 768
  moe_router_topk: 8
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  context_parallel_size: 1
  expert_model_parallel_size: 8
  seq_length: 8192
  moe_token_dispatcher_type: flex
  moe_flex_dispatcher_backend: deepep
  recompute_granularity: selective
  recompute_modules: [moe_act]
  activation_func:
    _target_: torch.nn.functional.silu
    _call_: false
  cuda_graph_impl: transformer_engine
  cuda_graph_modules:
  - _target_: megatron.core.transformer.enums.CudaGraphModule
    _call_: true
    _args_: [2]
    _name_: attn
train: {global_batch_size: 512, micro_batch_size: 2}
optimizer:
  use_precision_aware_optimizer: true
  exp_avg_dtype:
    _target_: torch.bfloat16
    _call_: false
mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: true}
"""
    imported = import_text(text, {"cluster.chip": "h100", "cluster.gpus": 16})
    plan = imported.plan
    assert plan is not None
    assert plan.model_name == "qwen3-30b-a3b"
    assert (plan.layout.tp, plan.layout.ep, plan.job.seq_len, plan.job.global_batch) == (2, 8, 8192, 512)
    assert (plan.knobs.precision, plan.knobs.fp8_params, plan.knobs.optimizer_dtype) == ("fp8-cs", True, "bf16")
    assert (plan.knobs.dispatcher, plan.knobs.recompute) == ("deepep", ("moe_act",))
    assert plan.knobs.graphs == ("attn",)
    assert imported.findings == []


def test_what_bridge_writes_of_an_export_is_its_plan() -> None:
    text = (ROOT / "tests" / "interop" / "megatron" / "bridge_configuration.yaml").read_text(encoding="utf-8")
    imported = import_text(text, {"cluster.chip": "h100", "cluster.gpus": 16})
    assert imported.plan is not None, imported.findings
    told = {path: value for path, value in imported.plan.written if not path.startswith("run.")}
    assert told == {**dict(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap").written), **OF_THE_RECIPE}
    [finding] = imported.findings  # whatever else is on has its name there
    for name in ("checkpoint.save_optim", "model.bias_activation_fusion", "tokenizer.tokenizer_model", "dataset.split"):
        assert name in finding.problem


TABLE = """some line of a log
------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. True
  bf16 ............................................ True
  cuda_graph_impl ................................. transformer_engine
  cuda_graph_modules .............................. [<CudaGraphModule.attn: 2>, <CudaGraphModule.moe_router: 5>]
  exp_avg_dtype ................................... torch.float32
  expert_model_parallel_size ...................... 8
  global_batch_size ............................... 256
  gradient_accumulation_fusion .................... True
  grad_reduce_in_bf16 ............................. False
  hidden_size ..................................... 4096
  hysteresis ...................................... 2
  micro_batch_size ................................ 1
  moe_ffn_hidden_size ............................. 14336
  moe_router_dtype ................................ None
  moe_router_topk ................................. 2
  moe_token_dispatcher_type ....................... alltoall
  num_attention_heads ............................. 32
  num_experts ..................................... 8
  num_layers ...................................... 32
  num_layers_per_virtual_pipeline_stage ........... 4
  num_query_groups ................................ 8
  overlap_grad_reduce ............................. True
  pipeline_model_parallel_size .................... 4
  recompute_granularity ........................... selective
  recompute_modules ............................... ['layernorm', 'moe_act']
  seq_length ...................................... 4096
  tensor_model_parallel_size ...................... 2
  virtual_pipeline_model_parallel_size ............ 2
  world_size ...................................... 64
-------------------- end of arguments ---------------------
"""


@pytest.mark.parametrize("rank", ["", "[default0]:", "0: "])
def test_the_table_that_megatron_lm_prints_is_read(rank: str) -> None:
    imported = import_text("".join(f"{rank}{line}\n" for line in TABLE.splitlines()), {"cluster.chip": "h100"})
    plan = imported.plan
    assert plan is not None, imported.findings
    assert (plan.model_name, plan.cluster.gpus, plan.job.global_batch) == ("mixtral-8x7b", 64, 256)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.vpp, plan.layout.ep) == (2, 4, 2, 8)
    assert plan.knobs.recompute == ("layernorm", "moe_act")
    assert plan.knobs.graphs == ("attn", "moe_router")
    assert (plan.knobs.precision, plan.knobs.grad_dtype, plan.knobs.router_dtype) == ("bf16", "fp32", "bf16")
    assert (plan.knobs.grad_reduce_overlap, plan.knobs.param_gather_overlap) == (True, False)
    assert {finding.at for finding in imported.findings} == {
        "model.accumulate_allreduce_grads_in_fp32",
        "model.hysteresis",
    }


def test_the_table_of_every_argument_is_its_plan() -> None:
    """What Megatron-LM 0.19.2 prints of the export of a recipe: sizes of what is off stand there at their defaults."""
    text = (ROOT / "tests" / "interop" / "megatron" / "megatron_lm_arguments.log").read_text(encoding="utf-8")
    imported = import_text(text, {"cluster.chip": "gb200"})
    assert imported.plan is not None, imported.findings
    assert rules(imported) == ["import-without-counterpart"]
    own = {
        "job.seed": 1234,
        "run.log_every": 100,
        "knobs.loss_fusion": False,
    }  # Megatron-LM's; the fused loss is Bridge's
    assert dict(imported.plan.written) == dict(recipe("deepseek-v3-4k-256xgb200-mxfp8").written) | own


SCRIPT = """
from megatron.bridge.recipes.qwen.qwen3_moe import qwen3_30b_a3b_pretrain_config
from megatron.bridge.training.comm_overlap import CommOverlapConfig

cfg = qwen3_30b_a3b_pretrain_config()
cfg.model.tensor_model_parallel_size = 2
cfg.model.recompute_granularity = "selective"
cfg.model.recompute_modules = [
    "layernorm",
    "moe_act",
]
cfg.optimizer.exp_avg_dtype = torch.bfloat16
cfg.optimizer.use_precision_aware_optimizer = True
cfg.train.global_batch_size = 8 * 64
cfg.mixed_precision = bf16_with_mxfp8_mixed()
cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True)
cfg.env_vars = {"CUDA_DEVICE_MAX_CONNECTIONS": 32, "MY_SWITCH": 1}
if cfg.model.tensor_model_parallel_size > 1:
    cfg.model.expert_model_parallel_size = 8
apply_flex_dispatcher_backend(cfg.model, moe_flex_dispatcher_backend="hybridep")
"""


def test_the_python_of_a_recipe_is_read() -> None:
    imported = import_text(SCRIPT, {"cluster.chip": "gb200", "cluster.gpus": 16})
    plan = imported.plan
    assert plan is not None, imported.findings
    assert (plan.model_name, plan.job.task, plan.layout.tp, plan.layout.ep) == ("qwen3-30b-a3b", "pretrain", 2, 8)
    assert (plan.knobs.precision, plan.knobs.optimizer_dtype) == ("mxfp8", "bf16")
    assert (plan.knobs.recompute, plan.knobs.dispatcher) == (("layernorm", "moe_act"), "hybridep")
    assert (plan.knobs.ep_overlap, plan.knobs.tp_overlap, plan.knobs.max_connections) == (True, False, 32)
    named = {finding.at for finding in imported.findings if finding.rule == "import-without-counterpart"}
    assert named == {"train.global_batch_size", "MY_SWITCH"}  # a product, and a variable of the user's own


@pytest.mark.parametrize(
    ("words", "vpp", "rules_of_it"),
    [
        ("--num-layers 32", 4, []),
        ("", None, ["import-without-counterpart"]),
        ("--num-layers 33", None, ["import-readable"]),
    ],
)
def test_layers_of_a_virtual_stage_are_counted(words: str, vpp: int | None, rules_of_it: list[str]) -> None:
    """As in training/arguments.py of megatron-core 0.19.2: layers over PP over this number."""
    line = f"pretrain_gpt.py {words} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --bf16"
    given = {"model": "mixtral-8x7b", "cluster.chip": "h100", "cluster.gpus": 64, "knobs.dispatcher": "alltoall"}
    imported = import_text(line, given)
    said = [one.rule for one in imported.findings if one.at == "--num-layers-per-virtual-pipeline-stage"]
    assert said == rules_of_it
    if vpp is not None:
        assert imported.plan is not None
        assert imported.plan.layout.vpp == vpp


def test_nothing_that_a_plan_has_no_place_for_is_dropped_in_silence() -> None:
    text = (
        "MY_FLAG=3 NCCL_NVLS_ENABLE=0 pretrain.py -mr qwen3_30b_a3b model.hidden_dropout=0.1 model.attention_dropout=0"
    )
    named = {
        finding.at for finding in import_text(text, GIVEN).findings if finding.rule == "import-without-counterpart"
    }
    assert {"MY_FLAG", "model.hidden_dropout"} == named


def test_an_argument_line_is_read_with_what_megatron_does_without_an_argument() -> None:
    text = """CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \\
      --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
      --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size=8 --tensor-model-parallel-size 2 \\
      --moe-ffn-hidden-size 14336 --bf16 --seq-length 4096 --global-batch-size 256 --micro-batch-size 1 \\
      --no-gradient-accumulation-fusion \\
      --recompute-granularity full --recompute-method block --recompute-num-layers 4"""
    imported = import_text(text, {"cluster.chip": "h100"})
    plan = imported.plan
    assert plan is not None
    assert (plan.model_name, plan.cluster.gpus, plan.knobs.max_connections) == ("mixtral-8x7b", 32, 1)
    assert (plan.knobs.recompute, plan.knobs.recompute_method, plan.knobs.recompute_layers) == (("full",), "block", 4)
    off = (plan.knobs.grad_reduce_overlap, plan.knobs.permute_fusion, plan.knobs.grad_accum_fusion)
    assert (off, plan.knobs.router_dtype) == ((False, False, False), "bf16")
    assert rules(imported) == ["import-without-counterpart"]  # Megatron-LM's own default, allgather


def test_megatron_lms_short_form_recomputes_attention() -> None:
    """Selective recompute (training/arguments.py), which by itself is of core_attn (transformer_config.py)."""
    line = "pretrain_gpt.py --recompute-activations --moe-token-dispatcher-type alltoall --num-layers 48 --bf16"
    imported = import_text(line, {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 8})
    assert imported.plan is not None
    assert imported.plan.knobs.recompute == ("core_attn",)
    assert rules(imported) == []


def test_what_a_recipe_decides_and_what_is_missing_is_said() -> None:
    imported = import_text("model.expert_model_parallel_size=8", {"model": "qwen3-30b-a3b"})
    assert imported.plan is not None
    assert imported.plan.cluster.gpus == 8  # the fewest for EP 8
    assert rules(imported) == ["import-needs-cluster", "import-needs-cluster", "import-recipe-decides"]


def test_a_backend_alone_is_said_to_activate_nothing() -> None:
    imported = import_text("model.moe_flex_dispatcher_backend=deepep", GIVEN)
    assert imported.plan is not None
    assert any(f.at == "model.moe_flex_dispatcher_backend" for f in imported.findings)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "import-readable"),
        ("hello world", "import-readable"),
        ("model.x='unclosed", "import-readable"),
        ("model:\n  a: [1, 2\n", "import-readable"),
        ("optimizer:\n  lr: 2024-13-45\n", "import-readable"),
        ("pretrain_gpt.py --num-layers 4 --hidden-size", "import-readable"),
        ("python a.py model.a=1\npython a.py model.a=2", "import-readable"),
        ("model.tensor_model_parallel_size=2", "import-needs-model"),
        ("-mr qwen3_30b_a3b model.tensor_model_parallel_size=two", "wrong-type"),
        ("-mr qwen3_30b_a3b model.recompute_granularity=selective model.recompute_modules=[no]", "known-value"),
        ("pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-paralel-size 2", "import-needs-model"),
        ("-mr qwen3_30b_a3b --moe_a2a_overlap true", "overlap-switch-couples"),
        ("-mr nosuch_model train.micro_batch_size=1", "import-unknown-name"),
        ("--recipe nosuch_config train.micro_batch_size=1", "import-unknown-name"),
        ("-mr qwen3_30b_a3b -c fp99", "import-unknown-name"),
    ],
)
def test_what_cannot_be_read_is_a_finding(text: str, rule: str) -> None:
    found = import_text(text)
    assert rule in rules(found)
    assert all(finding.advice or finding.fix for finding in found.findings)
    if rule == "import-readable":  # and nothing about what could not be read
        assert rules(found) == [rule]
    if rule in ("import-readable", "import-needs-model", "wrong-type", "known-value"):
        assert found.plan is None
        assert any(finding.severity == "error" for finding in found.findings)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model.hidden_size=2048 model.num_moe_experts=128 model.moe_router_topk=8", "qwen3-30b-a3b"),
        ("model.moe_ffn_hidden_size=2048 model.kv_lora_rank=512 model.moe_router_topk=8", "deepseek-v3"),
        ("model.hidden_size=2049", "no sizes of a known model"),
        ("model.tensor_model_parallel_size=2", "no sizes of a known model"),
    ],
)
def test_models_that_match_some_sizes_are_named(text: str, names: str) -> None:
    """Sizes of the models' cards."""
    [said] = [one for one in import_text(text).findings if one.rule == "import-needs-model"]
    assert names in said.problem


@pytest.mark.parametrize("prefix", ["", "[default3]:"])
def test_a_log_with_the_summary_of_bridge_is_read(prefix: str) -> None:
    imported = import_text("\n".join(prefix + line for line in ["started", *bridge_summary(), "iteration 1"]))
    assert imported.plan is not None
    assert (imported.plan.model.name, imported.plan.layout.ep) == ("qwen3-30b-a3b", 8)
    assert imported.plan.job.global_batch == 256
    assert rules(imported) == ["import-needs-cluster"] * 2  # what is not printed has its default: no recipe decides


def test_a_misspelt_argument_is_named_with_its_neighbors() -> None:
    imported = import_text("pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-paralel-size 2")
    said = next(finding for finding in imported.findings if finding.rule == "import-unknown-name")
    assert "--pipeline-model-parallel-size" in said.advice


def test_a_misspelt_override_is_told_from_one_without_a_counterpart() -> None:
    text = "model.tensor_model_parallell_size=2 bar.baz=1 logger.tensorboard_dir=x profiling.use_nsys_profiler=true"
    said = {finding.at: finding for finding in import_text(text, GIVEN).findings}
    assert said["model.tensor_model_parallell_size"].rule == said["bar.baz"].rule == "import-unknown-name"
    assert "did you mean tensor_model_parallel_size" in said["model.tensor_model_parallell_size"].advice
    for path in ("logger.tensorboard_dir", "profiling.use_nsys_profiler"):
        assert said[path].rule == "import-without-counterpart"
    many = import_text(" ".join(f"model.x{n}=1" for n in range(20)), GIVEN)
    assert rules(many).count("import-unknown-name") == 8
    assert any("12 others" in finding.problem for finding in many.findings)


def test_a_cut_model_stays_cut() -> None:
    cut = change(PLAN, {"model.num_layers": 14, "layout.pp": 1, "layout.vpp": 1, "layout.stages": None})
    imported = import_text("\n".join(overrides(export_plan(cut))), GIVEN)
    assert imported.plan is not None
    assert (imported.plan.model.num_layers, imported.plan.model.num_dense_layers) == (14, 3)


VALUES = ("x", "-1", "1.5", "null", "true", "[]", "[a,b]", "[[1]]", "''", "99999999999999999999", "1e999")
BESIDE = """-mr deepseek_v3 -g h100 -ng 8 ddp.use_megatron_fsdp=true optimizer.use_precision_aware_optimizer=true
    optimizer.lr=1 train.train_iters=10 scheduler.lr_wsd_decay_iters=2 model.recompute_granularity=full"""


def test_no_value_of_any_setting_is_a_traceback() -> None:
    """Wrong values are findings of parsing, also where a field is computed from a setting."""
    release = known_releases()[-1]
    paths = [row.path for row in PLAIN] + [path for path in export_plan(PLAN).settings if release.has_field(path)]
    extra = ("optimizer.min_lr", "scheduler.lr_wsd_decay_iters", "dist.distributed_timeout_minutes", "mixed_precision")
    for path in {*paths, *extra}:
        for value in VALUES:
            import_text(f"{BESIDE} {path}={value}")


@pytest.mark.parametrize("value", ["[{a: 1}]", "!!set {a, b}", "2024-01-01", "0x1" + "0" * 400, "[[{a: 1}]]", "{a: 1}"])
def test_no_kind_of_value_in_a_yaml_is_a_traceback(value: str) -> None:
    extra = ("optimizer.optimizer", "scheduler.lr_decay_style", "scheduler.lr_wsd_decay_iters", "optimizer.min_lr")
    extra += ("dist.distributed_timeout_minutes", "model.moe_router_load_balancing_type", "dataset.data_path")
    for path in {*(row.path for row in PLAIN), *export_plan(PLAN).settings, *extra}:
        group, _, name = path.partition(".")
        beside = "optimizer: {lr: 1}\ntrain: {train_iters: 3}\nmodel: {moe_aux_loss_coeff: [1]}"
        import_text(f"{beside}\n{group}:\n  {name}: {value}\n", GIVEN)
    for word in (f"optimizer.min_lr=1{'0' * 400}", f"dataset.data_path=[1{'0' * 400},a]"):
        import_text(f"{BESIDE} {word}", GIVEN)


def test_a_yaml_of_nested_aliases_ends() -> None:
    levels = "\n".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    imported = import_text(f"model:\n  a0: &a0 [1, 2]\n{levels}\n")
    assert imported.plan is None
