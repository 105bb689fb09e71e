"""Every name of an export is one that the published wheels have: overrides, functions, recipes and arguments."""

import ast
import json
import re
from functools import cache
from typing import Any

import pytest
from megatron_exports import published_plans, recipe, recipe_plans
from plans import build
from repository import ROOT

from threefold.interop.megatron.bridge_files import train_script
from threefold.interop.megatron.export_plan import BRIDGE, FORMATS, LM, Export, export_plan
from threefold.interop.megatron.field_names import PLAIN
from threefold.interop.megatron.models import BRIDGE_MODELS, model_kind
from threefold.interop.megatron.releases import known_releases
from threefold.interop.megatron.settings_writer import argument_for
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.spec.models import MODELS

PLANS = {**recipe_plans(), **published_plans()}
RELEASES = ("0.3.1", "0.4.2", "0.5.1", "0.6.2")


@cache
def wheels(bridge: str) -> dict[str, Any]:
    facts = json.loads((ROOT / "threefold" / "interop" / "megatron" / "wheel_fields.json").read_text())
    found: dict[str, Any] = next(release for release in facts["releases"] if release["bridge"] == bridge)
    return found


def unknown_overrides(export: Export) -> list[str]:
    """Overrides whose group or field no class of the release has, looked up in the facts and not by the exporter."""
    facts, plan = wheels(export.release.bridge), export.plan
    groups = dict(facts["groups"])
    groups["model"] = groups["model.gpt"] + groups.get(f"model.{model_kind(plan.model)}", [])
    groups["dataset"] = list(groups["dataset.vlm" if plan.is_vlm else f"dataset.{plan.job.task}"])
    specs = "offline_packing_specs" if "offline_packing_specs" in groups["dataset"] else "packed_sequence_specs"
    groups["dataset"] += [f"{specs}.{name}" for name in groups["dataset.packing"]]
    unknown = []
    for path in export.settings:
        group, _, name = path.partition(".")
        if group not in facts["groups"]["container"] or name not in groups[group]:
            unknown.append(path)
    return unknown


def unknown_arguments(export: Export) -> list[str]:
    listed = {word.partition("=")[0] for words in wheels(export.release.bridge)["arguments"].values() for word in words}
    return [word for word in export.arguments if word.startswith("--") and word not in listed]


def unknown_imports(export: Export) -> list[str]:
    """Names that the training script takes from modules that do not define them."""
    facts, unknown = wheels(export.release.bridge), []
    for node in ast.walk(ast.parse(train_script(export))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            family = node.module.removeprefix("megatron.bridge.recipes.")
            is_recipe = alias.name in facts["recipes"].get(family, [])
            is_class = alias.name in ("CommOverlapConfig", "AutoBridge")
            if not is_recipe and not is_class and f"{node.module}.{alias.name}" not in facts["functions"]:
                unknown.append(f"{node.module}.{alias.name}")
    return unknown


def unknown_parameters(export: Export) -> list[str]:
    """Keywords in calls of the training script that the called function does not take."""
    taken = {path.rpartition(".")[2]: words for path, words in wheels(export.release.bridge)["functions"].items()}
    return [
        f"{node.func.id}({word.arg})"
        for node in ast.walk(ast.parse(train_script(export)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in taken
        for word in node.keywords
        if word.arg not in taken[node.func.id]
    ]


def unknown_values(export: Export) -> dict[str, Any]:
    """Values that the annotation of their field does not have."""
    choices = wheels(export.release.bridge)["choices"]
    return {
        path: value
        for path, value in export.settings.items()
        if value is not None and path in choices and value not in choices[path]
    }


@pytest.mark.parametrize("name", PLANS)
def test_every_exported_name_is_in_the_wheels(name: str) -> None:
    plan = PLANS[name]
    assert len(PLANS) >= 94 + 22  # all usable published rows and all recipes
    for release in (None, "0.6.2"):  # the one that the plan names, and the newest
        bridge, lm = export_plan(plan, BRIDGE, release), export_plan(plan, LM, release)
        assert unknown_overrides(bridge) == []
        assert unknown_values(bridge) == {}
        assert unknown_values(lm) == {}
        assert unknown_imports(bridge) == []
        assert unknown_parameters(bridge) == []
        assert bridge.precision in wheels(bridge.release.bridge)["precision_recipes"]
        assert unknown_arguments(lm) == []


def test_a_wrong_name_would_be_seen() -> None:
    export = export_plan(recipe("deepseek-v3-128k-256xh100-fp8"))
    export.settings["model.tensor_parallel"] = 1
    export.settings["nosuch.seed"] = 1
    export.settings["model.cuda_graph_impl"] = "whole"
    assert unknown_overrides(export) == ["model.tensor_parallel", "nosuch.seed"]
    assert unknown_values(export) == {"model.cuda_graph_impl": "whole"}


# What releases before 0.5 have no field for. Published runs of these releases ran branches of their own.
OLDER_LACK = {"knobs.expert_fusion", "knobs.fp8_output", "job.capacity_factor"}
LM_LACKS = {"knobs.fp8_attention", "job.freeze", "model", "knobs.store_param_remainders"}
ALWAYS = {"job.data", "job.images", "job.max_pixels", "knobs.graph_memory_gb", "run.tensorboard", "stack.measured"}
ALWAYS |= {"job.packing"}  # Megatron packs in its datasets


@pytest.mark.parametrize("name", PLANS)
def test_what_is_lost_is_known(name: str) -> None:
    """Recipes and published runs are expressed but for these fields, each for a reason that the table gives."""
    plan = PLANS[name]
    is_ours = name in recipe_plans() and plan.cluster.chip == "cpu"
    for to in FORMATS:
        export = export_plan(plan, to)
        allowed = ALWAYS | (OLDER_LACK if export.release.bridge < "0.5" else set()) | (LM_LACKS if to == LM else set())
        unexpected = {item.field for item in export.lost} - allowed
        assert is_ours or not unexpected, [str(item) for item in export.lost]


@pytest.mark.parametrize("release", RELEASES)
def test_names_that_moved_are_spelled_as_the_release_does(release: str) -> None:
    plan = change(recipe("qwen3-235b-a22b-128k-128xgb200-bf16"), {"knobs.dispatch_sms": 16, "run.eval_every": 100})
    settings = export_plan(plan, BRIDGE, release).settings
    is_new = release >= "0.5"
    scopes = ("attn", "moe_router", "moe_preprocess")
    assert settings["model.cuda_graph_modules" if is_new else "model.cuda_graph_scope"] == scopes
    assert settings.get("model.cuda_graph_scope") == (None if is_new else scopes)
    sms = "model.moe_flex_dispatcher_num_sms" if release == "0.6.2" else "model.moe_hybridep_num_sms"
    assert settings[sms] == 16
    assert settings["train.eval_interval" if release == "0.3.1" else "validation.eval_interval"] == 100
    full = export_plan(change(plan, {"knobs.graphs": ["full_iteration"]}), BRIDGE, release).settings
    assert full["model.cuda_graph_impl"] == ("full_iteration" if is_new else "local")


@pytest.mark.parametrize(
    ("named", "release", "is_remarked"),
    [
        (None, "0.6.2", False),
        ("26.08", "0.6.2", False),
        ("26.04.01", "0.4.2", False),
        ("0.5", "0.5.1", False),
        ("25.09", "0.3.1", True),
        ("nightly", "0.6.2", True),
        ("card-2026-08", "0.6.2", True),
    ],
)
def test_the_release_is_the_one_that_the_plan_names(named: str | None, release: str, is_remarked: bool) -> None:
    plan = change(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap"), {"stack.release": named})
    export = export_plan(plan)
    assert (export.release.bridge, bool(export.remark)) == (release, is_remarked)


def test_every_field_of_a_plan_is_expressed_or_has_its_own_reason() -> None:
    """No field is left to the sentence for fields that nobody thought of."""
    base: Plan = recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap")
    reasons = {}
    for path, field in FIELDS.items():
        value = next((v for v in _values(path, field) if v != field.default), None)
        if value is None or path == "model":
            continue
        export = export_plan(change(base, {path: value}))
        reasons |= {item.field: item.reason for item in export.inexpressible}
    unknown = [path for path, reason in reasons.items() if reason.startswith("no setting of Megatron is known")]
    assert unknown == []


def _values(path: str, field: Any) -> list[Any]:
    if path == "layout.stages":
        return ["Et*24|t*24L"]
    if field.choices:
        return [[field.choices[0]]] if list in field.types and str not in field.types else list(field.choices)
    if bool in field.types:
        return [True, False]
    if int in field.types or float in field.types:
        return [value for value in (2, 0.5) if (field.at_most or 2) >= value >= (field.at_least or 0)]
    return [["a"]] if field.types == (list,) else ["some"]


def test_recipes_of_our_models_exist() -> None:
    """The newest release has a recipe for every model that names one, and our names are models of ours."""
    offered = {name for names in wheels("0.6.2")["recipes"].values() for name in names}
    for name, known in BRIDGE_MODELS.items():
        assert name in MODELS
        if known.stem:
            assert any(re.match(rf"{known.stem}_pretrain(_mock)?_config$", recipe) for recipe in offered), name


def test_the_reference_lists_the_plain_fields() -> None:
    page = (ROOT / "docs" / "reference" / "export.md").read_text(encoding="utf-8")
    for row in PLAIN:
        argument = argument_for(row.path, known_releases()[-1])
        line = f"| `{row.field}` | {', '.join(f'`{path}`' for path in (row.path, *row.also))} | "
        assert line + (f"`{argument.name}` |" if argument else "none |") in page


def test_megatron_lm_is_told_what_it_asks_for() -> None:
    """Its validate_args refuses TE's fused loss, and an offloaded optimizer that is not precision-aware."""
    plan = change(recipe("qwen3-30b-a3b-4k-16xh100-bf16-overlap"), {"knobs.optimizer_offload": 1.0})
    words = list(export_plan(plan, LM).arguments)
    assert words[words.index("--cross-entropy-fusion-impl") + 1] == "native"
    assert "--use-precision-aware-optimizer" in words
    assert export_plan(plan, BRIDGE).settings["model.cross_entropy_fusion_impl"] == "te"
    older = list(export_plan(plan, LM, "0.4.2").arguments)
    assert older[older.index("--cross-entropy-fusion-impl") + 1] == "te"


# Bridge 0.6.2 computes the same multiple for its collation (bridge/training/config.py:1213 to 1218), and its GLM-5.2
# recipe at CP 32 pads to 64.
@pytest.mark.parametrize(("cp", "tp", "multiple"), [(1, 1, 1), (32, 1, 64), (1, 4, 4), (4, 2, 8), (2, 8, 16)])
def test_packed_conversations_are_exported(cp: int, tp: int, multiple: int) -> None:
    fields = {"model": "qwen3-30b-a3b", "target": "megatron-bridge", "cluster.chip": "h100", "cluster.gpus": 128}
    fields |= {"layout.cp": cp, "layout.tp": tp, "job.seq_len": 8192, "job.global_batch": 128, "job.task": "sft"}
    export = export_plan(build({**fields, "job.packing": True}))
    specs = "dataset.offline_packing_specs"
    assert export.settings["dataset.enable_offline_packing"] is True
    assert export.settings[f"{specs}.packed_sequence_size"] == 8192
    assert export.settings[f"{specs}.pad_seq_to_mult"] == multiple
    assert export.settings.get("model.calculate_per_token_loss", False) is (cp > 1)
    unpacked = export_plan(build(fields)).settings
    assert unpacked["dataset.enable_offline_packing"] is False
    assert unpacked[specs] is None
    older = export_plan(build({**fields, "job.packing": True}), BRIDGE, "0.5.1")
    assert older.settings["dataset.packed_sequence_specs.pad_seq_to_mult"] == multiple
    assert unknown_overrides(older) == []
