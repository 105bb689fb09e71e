"""Reads the names that a release of Megatron accepts from its published wheels, without importing them.

`python tools/read_wheels.py FOLDER` looks for wheels of `megatron-bridge` and `megatron-core` in a
folder (`pip download --no-deps --ignore-requires-python megatron-bridge==0.6.2`) and writes `wheel_fields.json`, which
`releases.py` reads: fields of the classes that overrides reach, functions and recipes that a script calls, and the
arguments of Megatron-LM.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[1] / "threefold" / "interop" / "megatron" / "wheel_fields.json"
# Which megatron-core a Bridge release was published with, and the NeMo container that holds both.
PAIRS = {
    "0.3.1": ("0.16.1", "26.02"),
    "0.4.2": ("0.17.1", "26.04"),
    "0.5.1": ("0.18.2", "26.06"),
    "0.6.2": ("0.19.2", "26.08"),
}
# Classes behind the first part of a dotted override: the module, and the first of these names that it has. A name with
# dots is of another module, in another release.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("megatron.bridge.training.config", ("TrainingConfig",)),
    "optimizer": ("megatron.bridge.training.config", ("OptimizerConfig",)),
    "scheduler": ("megatron.bridge.training.config", ("SchedulerConfig",)),
    "ddp": ("megatron.bridge.training.config", ("DistributedDataParallelConfig",)),
    "validation": ("megatron.bridge.training.config", ("ValidationConfig",)),
    "rng": ("megatron.bridge.training.config", ("RNGConfig",)),
    "logger": ("megatron.bridge.training.config", ("LoggerConfig",)),
    "checkpoint": ("megatron.bridge.training.config", ("CheckpointConfig",)),
    "dist": ("megatron.bridge.training.config", ("DistributedInitConfig",)),
    "rerun_state_machine": ("megatron.bridge.training.config", ("RerunStateMachineConfig",)),
    "tokenizer": ("megatron.bridge.training.tokenizers.config", ("TokenizerConfig",)),
    "comm_overlap": ("megatron.bridge.training.comm_overlap", ("CommOverlapConfig",)),
    "mixed_precision": ("megatron.bridge.training.mixed_precision", ("MixedPrecisionConfig",)),
    "dataset.pretrain": ("megatron.bridge.training.config", ("GPTDatasetConfig",)),
    "dataset.sft": ("megatron.bridge.training.config", ("FinetuningDatasetConfig", "GPTSFTDatasetConfig")),
    "dataset.packing": (
        "megatron.bridge.training.config",
        ("PackedSequenceSpecs", "megatron.bridge.data.packing.config.PackedSequenceSpecs"),
    ),
    "dataset.vlm": (
        "megatron.bridge.data.builders.direct_hf_sft",
        (
            "DirectHFSFTDatasetConfig",
            "megatron.bridge.data.vlm_datasets.hf_provider.HFDatasetConversationProvider",
        ),
    ),
    "model.gpt": ("megatron.bridge.models.gpt_provider", ("GPTModelProvider",)),
    "model.mla": ("megatron.bridge.models.mla_provider", ("MLAModelProvider",)),
    "model.vlm": ("megatron.bridge.models.qwen_vl.qwen3_vl_provider", ("Qwen3VLMoEModelProvider",)),
    "model.hybrid": ("megatron.bridge.models.mamba.mamba_provider", ("MambaModelProvider",)),
    "ft": ("megatron.bridge.training.config", ("FaultToleranceConfig",)),
    "nvrx_straggler": ("megatron.bridge.training.config", ("NVRxStragglerDetectionConfig",)),
    "inprocess_restart": ("megatron.bridge.training.config", ("InProcessRestartConfig",)),
    "profiling": ("megatron.bridge.training.config", ("ProfilingConfig",)),
    "container": ("megatron.bridge.training.config", ("ConfigContainer",)),
}
FUNCTIONS = (
    "megatron.bridge.training.flex_dispatcher_backend.apply_flex_dispatcher_backend",
    "megatron.bridge.training.mixed_precision.get_mixed_precision_config",
    "megatron.bridge.training.utils.omegaconf_utils.process_config_with_overrides",
    "megatron.bridge.training.utils.omegaconf_utils.parse_hydra_overrides",
    "megatron.bridge.training.utils.omegaconf_utils.create_omegaconf_dict_config",
    "megatron.bridge.training.utils.omegaconf_utils.apply_overrides",
    "megatron.bridge.training.pretrain.pretrain",
    "megatron.bridge.training.finetune.finetune",
    "megatron.bridge.training.gpt_step.forward_step",
    "megatron.bridge.training.vlm_step.forward_step",
)
RECIPE_FAMILIES = (
    "deepseek.deepseek_v3",
    "gpt_oss.gpt_oss",
    "kimi.kimi_k2",
    "llama.llama3",
    "moonlight.moonlight_16b",
    "nemotronh.nemotron_3_nano",
    "nemotronh.nemotron_3_super",
    "nemotronh.nemotron_3_ultra",
    "qwen.qwen3",
    "qwen.qwen3_moe",
    "qwen.qwen3_next",
    "qwen_vl.qwen3_vl",
    "qwen_vl.qwen35_vl",
)
ARGUMENTS_MODULE = "megatron.training.arguments"


class Sources:
    """The modules of some wheels as syntax trees, parsed when they are asked for."""

    def __init__(self, wheels: Iterable[Path]) -> None:
        self.files: dict[str, tuple[zipfile.ZipFile, str]] = {}
        for wheel in wheels:
            archive = zipfile.ZipFile(wheel)
            for name in archive.namelist():
                if name.endswith(".py"):
                    self.files[name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = (archive, name)
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees and module in self.files:
            archive, name = self.files[module]
            self._trees[module] = ast.parse(archive.read(name))
        return self._trees.get(module)

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
        """The definition behind a name in a module, also where that module imports it from another one."""
        tree = self.tree(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
        home = self._imported(module, name)
        return self.find(*home) if home else None

    def _imported(self, module: str, name: str) -> tuple[str, str] | None:
        """The module that a name comes from, and its name there."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree else ():
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self._absolute(module, node), alias.name
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        is_package = self.files[module][1].endswith("__init__.py")
        above = node.level - 1 if is_package else node.level
        parts = module.split(".")[: -above or None] if node.level else []
        return ".".join([*parts, *([node.module] if node.module else [])])

    def fields(self, module: str, name: str) -> dict[str, ast.AnnAssign]:
        """Fields of a dataclass with those of its bases, a subclass's own in place of a base's."""
        found = self.find(module, name)
        home, node = found or ("", None)
        if not isinstance(node, ast.ClassDef):
            return {}
        inherited: dict[str, ast.AnnAssign] = {}
        for base in reversed(node.bases):
            bare = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(bare, ast.Name):
                inherited |= self.fields(home, bare.id)
        own = {
            item.target.id: item
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
        }
        return inherited | own

    def function(self, path: str) -> list[str] | None:
        module, _, name = path.rpartition(".")
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.FunctionDef):
            return None
        arguments = found[1].args
        return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def recipes(self, family: str) -> list[str]:
        """Recipe functions that a module offers, its own and those that it imports under older names."""
        tree = self.tree(f"megatron.bridge.recipes.{family}")
        names = set()
        for node in tree.body if tree else ():
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and "recipes" in (node.module or ""):
                names |= {alias.asname or alias.name for alias in node.names}
        return sorted(name for name in names if re.search(r"_(pretrain|sft|finetune)(_mock)?_config$", name))

    def precision_recipes(self) -> list[str]:
        tree = self.tree("megatron.bridge.training.mixed_precision")
        return sorted(
            node.name
            for node in (tree.body if tree else ())
            if isinstance(node, ast.FunctionDef) and any(_is_name(mark, "register") for mark in node.decorator_list)
        )

    @cached_property
    def arguments(self) -> dict[str, list[str]]:
        """Arguments of Megatron-LM: the field that an argument sets, and its kind (`flag`, `off`, `value`, `list`)."""
        tree = self.tree(ARGUMENTS_MODULE)
        found: dict[str, list[str]] = {}
        for call in ast.walk(tree) if tree else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                found |= _argument(call)
        for function in tree.body if tree else ():
            if isinstance(function, ast.FunctionDef):
                found |= dict(self._generated(function))
        return dict(sorted(found.items()))

    def _generated(self, function: ast.FunctionDef) -> Iterator[tuple[str, list[str]]]:
        """Arguments that Megatron-LM makes from the fields of a dataclass (`ArgumentGroupFactory`)."""
        lists = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and _is_name(call.func, "ArgumentGroupFactory")):
                continue
            given = next((word.value for word in call.keywords if word.arg == "exclude"), None)
            excluded = _texts(lists.get(given.id) if isinstance(given, ast.Name) else given)
            source = call.args[0]
            if isinstance(source, ast.Name):
                for name, field in self.fields(ARGUMENTS_MODULE, source.id).items():
                    if name not in excluded:
                        yield from _field_arguments(name, field)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _texts(node: ast.AST | None) -> list[str]:
    """The text constants inside a node, in order."""
    nodes = ast.walk(node) if node else ()
    return [item.value for item in nodes if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _argument(call: ast.Call) -> dict[str, list[str]]:
    names = [item.value for item in call.args if isinstance(item, ast.Constant) and str(item.value).startswith("--")]
    words = {word.arg: word.value for word in call.keywords}
    action = (_texts(words.get("action")) or [""])[0]
    kind = {"store_true": "flag", "store_false": "off"}.get(action, "list" if "nargs" in words else "value")
    dest = (_texts(words.get("dest")) or [str(names[0])[2:].replace("-", "_") if names else ""])[0]
    return {str(name): [dest, kind] for name in names}


def _field_arguments(name: str, field: ast.AnnAssign) -> Iterator[tuple[str, list[str]]]:
    default, metadata = field.value, []
    if isinstance(default, ast.Call):
        words = {word.arg: word.value for word in default.keywords}
        if _is_false(words.get("init")):
            return
        metadata = [text for text in _texts(words.get("metadata")) if text.startswith("--")]
        default = words.get("default")
    annotation = ast.unparse(field.annotation)
    is_bool = annotation == "bool" or annotation.replace(" ", "") in ("Optional[bool]", "bool|None")
    is_off = is_bool and isinstance(default, ast.Constant) and default.value is True
    plain = name.replace("_", "-")
    names = [f"--no-{plain}", f"--disable-{plain}"] if is_off else [f"--{plain}"]
    kind = "off" if is_off else "flag" if is_bool else "list" if "ist[" in annotation else "value"
    for argument in metadata or names:
        yield argument, [name, kind]


def _is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def release_facts(bridge: Path, core: Path, container: str) -> dict[str, Any]:
    """What one pair of wheels accepts, as `wheel_fields.json` holds it."""
    sources = Sources([core, bridge])
    groups: dict[str, list[str]] = {}
    choices: dict[str, list[str]] = {}
    for group, (module, classes) in GROUPS.items():
        homes = [(home or module, name) for home, _, name in (text.rpartition(".") for text in classes)]
        found = next((fields for home, name in homes if (fields := sources.fields(home, name))), {})
        groups[group] = list(found)
        first = group.partition(".")[0]
        choices |= {f"{first}.{name}": texts for name, item in found.items() if (texts := _literal(item))}
    plain = set(groups["model.gpt"])
    for group in ("model.mla", "model.vlm", "model.hybrid"):  # what they have beside the fields of every model
        groups[group] = [name for name in groups[group] if name not in plain]
    hybrid = set(sources.fields(*_first(GROUPS["model.hybrid"])))
    groups["model.hybrid.lacks"] = sorted(plain - hybrid) if hybrid else []
    return {
        "bridge": _version(bridge),
        "core": _version(core),
        "container": container,
        "groups": groups,
        "functions": {path: words for path in FUNCTIONS if (words := sources.function(path)) is not None},
        "recipes": {family: names for family in RECIPE_FAMILIES if (names := sources.recipes(family))},
        "precision_recipes": sources.precision_recipes(),
        "choices": choices,
        "arguments": _by_kind(sources.arguments),
    }


def _first(group: tuple[str, tuple[str, ...]]) -> tuple[str, str]:
    return group[0], group[1][0]


def _literal(field: ast.AnnAssign) -> list[str]:
    """The texts that a field may have, where its annotation names them."""
    for node in ast.walk(field.annotation):
        if isinstance(node, ast.Subscript) and _is_name(node.value, "Literal"):
            return _texts(node.slice)
    return []


def _by_kind(arguments: dict[str, list[str]]) -> dict[str, list[str]]:
    """Arguments by kind, each as its name, or as `name=field` where the field is called otherwise."""
    kinds: dict[str, list[str]] = {}
    for name, (field, kind) in arguments.items():
        own = name[2:].replace("-", "_")
        kinds.setdefault(kind, []).append(name if own == field else f"{name}={field}")
    return kinds


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def find_pair(folder: Path, bridge: str, core: str) -> list[Path]:
    """The wheels of a pair in a folder or below it, those of Bridge first; fewer than two where one is missing."""
    patterns = (f"megatron_bridge-{bridge}-*.whl", f"megatron_core-{core}-*.whl")
    return [path for pattern in patterns for path in sorted(folder.rglob(pattern))[:1]]


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Every known pair of wheels in a folder, oldest first."""
    found = []
    for bridge, (core, container) in PAIRS.items():
        wheels = find_pair(folder, bridge, core)
        if len(wheels) == 2:
            found.append(release_facts(wheels[0], wheels[1], container))
    return found


def as_json(releases: list[dict[str, Any]]) -> str:
    """One list or table a line: a change of a release is then a change of few lines."""
    lines = ['{"source": "wheels of megatron-bridge and megatron-core on PyPI", "releases": [']
    for index, facts in enumerate(releases):
        rows = []
        for key, value in facts.items():
            if isinstance(value, dict):
                inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
                rows.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
            else:
                rows.append(f" {json.dumps(key)}: {json.dumps(value)}")
        lines.append("{\n" + ",\n".join(rows) + "\n}" + ("," if index < len(releases) - 1 else ""))
    return "\n".join([*lines, "]}"]) + "\n"


if __name__ == "__main__":
    text = as_json(read_folder(Path(sys.argv[1])))
    FACTS.write_text(text, encoding="utf-8")
