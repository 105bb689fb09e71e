"""`threefold import`: a Bridge command line or override list, its YAML, or a Megatron-LM argument line as a plan."""

import ast
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from threefold.findings import Finding, Severity, did_you_mean, in_order, shown
from threefold.interop.megatron.architecture import like_models, match_model
from threefold.interop.megatron.argument_line import (
    MOE_DEFAULTS,
    find_argument,
    is_table,
    read_arguments,
    read_table,
)
from threefold.interop.megatron.bridge_summary import HEAD, overrides, summary_in
from threefold.interop.megatron.environment import EXPORTED_VARIABLES
from threefold.interop.megatron.field_names import PRECISIONS, SCRIPT_FLAGS, Settings
from threefold.interop.megatron.models import model_of_recipe, model_of_stem
from threefold.interop.megatron.python_settings import PythonSettings, read_python
from threefold.interop.megatron.read_settings import fields_of
from threefold.interop.megatron.setting_notes import PERF_RECIPE
from threefold.interop.megatron.settings_writer import LARGEST_BITS, plain_value
from threefold.interop.megatron.write_settings import pipeline_layout
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS

_OVERRIDE = re.compile(r"[+~]{0,2}([a-z_][\w]*(?:\.\w+)*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_PASSED_OVER = (
    "--config_variant",
    "-cv",
    "--account",
    "-a",
    "--partition",
    "-p",
    "--time_limit",
    "-t",
    "--max_retries",
)
_RECIPE_DECIDES = (  # settings that every recipe of Bridge sets in its own way
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.seq_length",
    "train.global_batch_size",
    "train.micro_batch_size",
    "model.recompute_granularity",
)
_LEFT_OUT = "..."
_ALLOCATION = re.compile(r"_(\d{1,6})gpu_([a-z]+\d+)_")  # in the name of a perf recipe: STEM_pretrain_128gpu_gb300_...
_PER_STAGE = "model.num_layers_per_virtual_pipeline_stage"
_PER_STAGE_ARGUMENT = "--num-layers-per-virtual-pipeline-stage"
_CHIP = "h100"  # of an import that names none
_MODELS_NAMED = 4


@dataclass
class Found:
    """What a text says: settings, and beside them the model, the cluster and the task."""

    settings: Settings = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    kind: str = "overrides"  # or `yaml`, `arguments`, `summary`: the last two name all that is no default


@dataclass(frozen=True)
class Imported:
    """The plan behind a text, where there is one, and everything found on the way."""

    plan: Plan | None
    findings: list[Finding]
    kind: str
    rest: Settings = field(default_factory=dict)  # settings that no field of the plan stands for


def import_text(text: str, given: Mapping[str, Any] | None = None, is_yaml: bool = False) -> Imported:
    """`given`: fields of the plan that the user states beside the text; they count more."""
    found = _read(text, is_yaml)
    if any(finding.rule == "import-readable" for finding in found.findings):
        return Imported(None, in_order(found.findings), found.kind)
    fields = {"target": "megatron-bridge", **found.fields, **(given or {})}
    if "model" not in fields and (name := match_model(found.settings)):
        fields["model"] = name
    model = MODELS.get(str(fields.get("model")))
    if found.kind == "arguments" and (model is None or model.is_moe):
        found.settings = MOE_DEFAULTS | found.settings
    more, findings, rest = fields_of(found.settings, model, has_arguments=found.kind == "arguments")
    findings = [*found.findings, *findings]
    fields = {**more, **fields}
    if "model" not in fields:
        findings.append(_no_model(found.settings))
        return Imported(None, in_order(findings), found.kind)
    if "cluster.chip" not in fields:
        fields["cluster.chip"] = _CHIP
        findings.append(_finding("import-needs-cluster", "cluster.chip", f"no chip named: {_CHIP}", "give --chip"))
    if found.kind in ("overrides", "yaml") and (
        missing := [path for path in _RECIPE_DECIDES if path not in found.settings]
    ):
        problem = f"the recipe decides {', '.join(missing)}, and the plan takes its own defaults"
        findings.append(_finding("import-recipe-decides", "model", problem, "add the recipe's values"))
    has_gpus = "cluster.gpus" in fields
    parsed = parse(fields)
    findings += parsed.findings
    if parsed.plan is None:
        return Imported(None, in_order(findings), found.kind)
    plan = parsed.plan
    if not has_gpus:
        plan = change(plan, {"cluster.gpus": plan.layout.min_gpus})
        problem = f"no number of GPUs named: {plan.cluster.gpus}, the fewest for this layout"
        findings.append(_finding("import-needs-cluster", "cluster.gpus", problem, "give --gpus"))
    return Imported(_in_own_words(plan), in_order(findings), found.kind, rest)


def _no_model(settings: Settings) -> Finding:
    """The finding of a text that names no model, with the models that have the sizes it does name."""
    names = like_models(settings)
    problem, advice = "no recipe, and no sizes of a known model", "name it: --model qwen3-30b-a3b"
    if names:
        more = f" and {len(names) - _MODELS_NAMED} more" if len(names) > _MODELS_NAMED else ""
        problem = f"no recipe, and the sizes are those of {', '.join(names[:_MODELS_NAMED])}{more}"
        advice = f"name it: --model {names[0]}, or add hidden_size and num_attention_heads"
    return _finding("import-needs-model", "model", problem, advice, "error")


def _finding(rule: str, at: str, problem: str, advice: str, severity: Severity = "warning") -> Finding:
    return Finding(rule=rule, at=at, problem=problem, advice=advice, severity=severity)


def _in_own_words(plan: Plan) -> Plan:
    """A plan without fields that say what their absence says too."""
    absent: dict[str, Any] = {}
    if plan.layout.stages is not None:
        without = change(plan, {"layout.stages": None})
        if pipeline_layout(without) == plan.layout.stages:
            absent["layout.stages"] = None
    if plan.job.mtp == plan.model.mtp_layers:
        absent["job.mtp"] = None
    if plan.knobs.cp_inner is not None and change(plan, {"knobs.cp_inner": None}).cp_inner == plan.knobs.cp_inner:
        absent["knobs.cp_inner"] = None
    if plan.cluster.gpus_per_node == plan.cluster.spec.gpus_per_node:
        absent["cluster.gpus_per_node"] = None
    return change(plan, absent) if absent else plan


def _read(text: str, is_yaml: bool) -> Found:
    if is_table(text):
        return _read_table(text)
    if HEAD in text:
        return replace(_read_words(shlex.split(overrides(summary_in(text)))), kind="summary")
    if is_yaml or _looks_like_yaml(text):
        return _read_yaml(text)
    if "OVERRIDES = [" in text and (script := _read_script(text)):
        return script
    if python := read_python(textwrap.dedent(text)):
        return _read_python(python)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        problem = f"not words of a command line: {error}"
        return Found(findings=[_finding("import-readable", "import", problem, "close the quotes", "error")])
    if not words:
        return Found(findings=[_finding("import-readable", "import", "nothing to read", "give a list", "error")])
    if again := [word for word in words if word.endswith(".py") and words.count(word) > 1]:
        problem = f"{len(again)} commands run {again[0]}, and each has settings of its own"
        return Found(findings=[_finding("import-readable", "import", problem, "give one of them", "error")])
    if any("-" in word[2:] and find_argument(word.partition("=")[0]) for word in words if word.startswith("--")):
        return _read_argument_line(words)
    return _read_words(words)


def _read_table(text: str) -> Found:
    """The table of arguments that Megatron-LM prints."""
    found = Found(kind="arguments")
    found.settings, ranks = read_table(text)
    if ranks is not None:
        found.fields["cluster.gpus"] = ranks
    found.settings.pop(_PER_STAGE, None)  # the table has the number of virtual stages too
    return found


def _read_python(python: PythonSettings) -> Found:
    """A recipe, a script that changes one, or lines of either, as Bridge's guides print them."""
    found = Found(settings=python.settings)
    for name in python.calls:
        _take_recipe(found, name)
    for name, value in python.variables.items():
        _take_variable(found, name, value)
    for path in python.unread:
        problem, advice = "its value is computed by the script", "add it as path=value, or the plan goes without it"
        found.findings.append(_finding("import-without-counterpart", path, problem, advice))
    return found


def _read_script(text: str) -> Found | None:
    """The training script of an export: its recipe and its list of overrides."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    words = [
        item.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        for item in node.value.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    recipes = [
        alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and "recipes" in (node.module or "")
        for alias in node.names
    ]
    is_own = "AutoBridge" not in text  # else the recipe only lends its frame to another model
    return _read_words([*(recipes if is_own else []), *words])


def _looks_like_yaml(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and re.match(r"\w+:(\s|$)", lines[0]) is not None


def _read_yaml(text: str) -> Found:
    try:
        import yaml  # type: ignore[import-untyped]  # no dependency of a planner: it comes with Bridge and transformers
    except ModuleNotFoundError:
        advice = "pip install pyyaml, or give the overrides as a list"
        return Found(
            findings=[_finding("import-readable", "import", "YAML needs PyYAML", advice, "error")], kind="yaml"
        )
    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date or a number that is none
        problem = f"not valid YAML: {' '.join(str(error).split())[:200]}"
        finding = _finding("import-readable", "import", problem, "correct the YAML", "error")
        return Found(findings=[finding], kind="yaml")
    if not isinstance(loaded, dict):
        finding = _finding("import-readable", "import", "no groups of settings", "give Bridge's YAML", "error")
        return Found(findings=[finding], kind="yaml")
    found = Found(kind="yaml")
    for group, fields in loaded.items():
        if group == "env_vars" and isinstance(fields, dict):
            for name, value in fields.items():
                _take_variable(found, str(name), str(value))
        elif not str(group).startswith("_"):
            found.settings |= _flat(str(group), fields)
    return found


def _flat(path: str, value: Any, depth: int = 3) -> Settings:
    """Tables inside tables as dotted paths. A function or a class in place of a value is known by its name."""
    value = _target(value)
    if not isinstance(value, dict):
        return {path: _plain(value)}
    inner = {str(name): item for name, item in value.items() if not str(name).startswith("_")}
    if not inner or not depth:
        return {path: str(value["_target_"])} if "_target_" in value else {}
    return {place: item for name in inner for place, item in _flat(f"{path}.{name}", inner[name], depth - 1).items()}


def _target(value: Any) -> Any:
    """Bridge writes members of enumerations and dtypes as tables: `_name_`, or `_target_` that is not to be called."""
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("_name_"), str):
        return value["_name_"]
    is_dtype = str(value.get("_target_")).startswith("torch.") and value.get("_call_") is False
    return value["_target_"] if is_dtype else value


def _plain(value: Any, depth: int = 2) -> Any:
    """Lists as tuples, two deep like the lists of a layout: aliases of a YAML could nest them without end.

    What no setting of Megatron is (a table inside a list, a set, a date, a number of hundreds of digits) is left out.
    """
    if isinstance(value, list):
        return tuple(_plain(item, depth - 1) for item in value) if depth else _LEFT_OUT
    value = _target(value)
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        return _LEFT_OUT
    return value if value is None or isinstance(value, bool | int | float | str) else _LEFT_OUT


def _read_argument_line(words: Sequence[str]) -> Found:
    found = Found(kind="arguments")
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    sizes = {"--nnodes": 1, "--nproc-per-node": 0}
    for i, word in enumerate(words[: start + 1]):
        if variable := _VARIABLE.fullmatch(word):
            _take_variable(found, *variable.groups())
        name, equals, value = word.replace("nproc_per_node", "nproc-per-node").partition("=")
        if name in sizes:
            value = value if equals else words[i + 1]
            sizes[name] = int(value) if value.isdigit() else 0
    if all(sizes.values()):
        found.fields["cluster.gpus"] = sizes["--nnodes"] * sizes["--nproc-per-node"]
        if sizes["--nnodes"] > 1:
            found.fields["cluster.gpus_per_node"] = sizes["--nproc-per-node"]
    found.settings, findings = read_arguments(words[start + 1 :])
    found.findings += findings
    _take_stages_from_layout(found.settings)
    _take_layers_of_a_stage(found)
    return found


def _take_stages_from_layout(settings: Settings) -> None:
    """Megatron-LM counts virtual stages by the bars of the layout string."""
    layout, pp = (
        settings.get("model.pipeline_model_parallel_layout"),
        settings.get("model.pipeline_model_parallel_size"),
    )
    parsed = parse({"model": "qwen3-30b-a3b", "layout.stages": layout}) if isinstance(layout, str) else None
    if parsed is not None and parsed.plan is not None and isinstance(pp, int) and pp > 0:
        settings["model.virtual_pipeline_model_parallel_size"] = -(-len(parsed.plan.chunks) // pp)


def _take_layers_of_a_stage(found: Found) -> None:
    """`--num-layers-per-virtual-pipeline-stage` as the number of virtual stages, as Megatron-LM counts it."""
    settings, advice = found.settings, "give --num-virtual-stages-per-pipeline-rank in its place"
    each = settings.pop(_PER_STAGE, None)
    if each is None:
        return
    layers, pp = settings.get("model.num_layers"), settings.get("model.pipeline_model_parallel_size", 1)
    if not all(isinstance(number, int) and number > 0 for number in (each, layers, pp)):
        problem = f"{shown(each)} layers a virtual stage, and no --num-layers to divide"
        found.findings.append(_finding("import-without-counterpart", _PER_STAGE_ARGUMENT, problem, advice))
    elif layers % (pp * each):
        problem = f"{layers} layers on PP {pp} are no whole virtual stages of {each}"
        found.findings.append(_finding("import-readable", _PER_STAGE_ARGUMENT, problem, advice, "error"))
    else:
        settings["model.virtual_pipeline_model_parallel_size"] = layers // pp // each


def _take_variable(found: Found, name: str, value: str) -> None:
    if name == "CUDA_DEVICE_MAX_CONNECTIONS":
        found.fields["knobs.max_connections"] = plain_value(value)
    elif name not in EXPORTED_VARIABLES:
        problem, advice = f"{shown(value)} has no counterpart in a plan", "set it in the run's environment too"
        found.findings.append(_finding("import-without-counterpart", name, problem, advice))


def _read_words(words: Sequence[str]) -> Found:
    """Flags and overrides of Bridge's scripts. A later word counts more, as it does there."""
    found = Found()
    rest = list(words)
    last: Settings = {}
    while rest:
        word = rest.pop(0)
        if variable := _VARIABLE.fullmatch(word):
            _take_variable(found, *variable.groups())
        elif match := _OVERRIDE.fullmatch(word):
            last[match[1].removeprefix("cfg.")] = _value(match[2])
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("-") and not _is_override(rest[0]) else ""
            _take_flag(found, name, value)
        else:
            _take_recipe(found, word)
    found.settings |= last
    if not found.settings and not found.fields:
        problem = "no override and no argument of Megatron in it"
        found.findings.append(_finding("import-readable", "import", problem, "write model.x=1 or --x 1", "error"))
    return found


def _take_recipe(found: Found, name: str) -> bool:
    """Whether a word is a recipe function: its model and task, and the machine in the name of a perf recipe."""
    recipe = model_of_recipe(name)
    if recipe is None:
        return False
    found.fields["model"], found.fields["job.task"] = recipe
    measured = _ALLOCATION.search(name)
    if measured is not None or "perf_recipes" in name:
        if measured is not None and measured[2] in CHIPS:
            found.fields |= {"cluster.gpus": int(measured[1]), "cluster.chip": measured[2]}
        found.findings.append(_finding("import-perf-recipe", "model", PERF_RECIPE, "a benchmark only: no training"))
    return True


def _is_override(word: str) -> bool:
    return _OVERRIDE.fullmatch(word) is not None


def _take_flag(found: Found, flag: str, value: str) -> None:
    path = SCRIPT_FLAGS.get(flag)
    if path is None:
        if flag not in _PASSED_OVER:
            found.findings.append(
                _finding("import-unknown-name", flag, "no flag that a plan has a field for", "the plan goes without it")
            )
    elif path == "stem":
        if model := model_of_stem(value):
            found.fields["model"] = model
        else:
            found.findings.append(_finding("import-unknown-name", flag, f"no model of ours is {value}", "give --model"))
    elif path == "recipe":
        if not _take_recipe(found, value):
            problem = f"no model of ours has the recipe {value}"
            found.findings.append(_finding("import-unknown-name", flag, problem, "give --model"))
    elif path == "precision":
        known = {precision.short: precision for precision in PRECISIONS.values() if precision.short}
        if value in known:
            found.settings["mixed_precision"] = known[value].recipe
        else:
            advice = did_you_mean(value, known)
            found.findings.append(
                _finding("import-unknown-name", flag, f"no precision of ours is {shown(value)}", advice)
            )
    elif path == "moe_a2a_overlap":
        if value.lower() in ("true", "1", "t", "yes", "y"):
            for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
                found.settings[f"comm_overlap.{name}"] = True
            problem = "this switch sets EP overlap and delayed weight gradients together"
            found.findings.append(_finding("overlap-switch-couples", flag, problem, "for an A/B set the two apart"))
    elif path == "model.moe_flex_dispatcher_backend":
        backend = _value(value)
        found.settings["model.moe_token_dispatcher_type"] = "alltoall" if backend is None else "flex"
        found.settings[path] = backend
    elif path.startswith(("cluster.", "job.")):
        found.fields[path] = plain_value(value)
    elif path != "family":
        found.settings[path] = _value(value)


def _value(text: str) -> Any:
    """A value as Hydra and Python write it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return tuple(_value(item) for item in inner.split(",")) if inner else ()
    return plain_value(text)


def named(imported: Imported, source: str) -> Imported:
    """Findings at the place that they came from."""
    findings = [replace(item, at=source) if item.at == "import" else item for item in imported.findings]
    return replace(imported, findings=findings)
