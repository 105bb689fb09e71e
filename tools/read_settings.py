"""Reads from wheels every setting that Megatron and torchtitan have, for `threefold find --kind name`.

    python tools/read_settings.py WHEELS

`WHEELS` holds the wheels of `read_wheels.py`, in one folder or one a release, and may hold wheels of torchtitan.
Nothing of the wheels is imported. It writes `threefold/lookup/settings.json`: for each name its classes, with the file,
type and default in the newest release that has it, and the first and the last of these releases.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from read_wheels import ARGUMENTS_MODULE, PAIRS, Sources

PAGE = Path(__file__).parents[1] / "threefold" / "lookup" / "settings.json"
# Bridge's classes of training inherit from those of megatron.training.config since 0.4.
MODULES = {
    "megatron": (
        "megatron.core.",
        "megatron.training.config.",
        "megatron.bridge.training.",
        "megatron.bridge.data.",
        "megatron.bridge.peft.",
    ),
    "torchtitan": ("torchtitan.config.", "torchtitan.components.", "torchtitan.distributed.", "torchtitan.trainer"),
}
# Other models repeat their fields.
PROVIDERS = (
    "gpt_provider",
    "mla_provider",
    "mamba_provider",
    "hybrid_provider",
    "qwen3_vl_provider",
    "transformer_config",
)
ENDINGS = ("Config", "Provider", "Container", "Parallelism", "LoRA", "Training", "Plugin", "Specs")

Setting = tuple[str, str, str, str]  # class, file, type, default


def settings(sources: Sources, system: str) -> Iterator[tuple[str, Setting]]:
    """Every field of a configuration class, where it is first declared, and every argument of Megatron-LM."""
    for module in sorted(sources.files):
        is_provider = module.startswith("megatron.bridge.models.") and module.rpartition(".")[2] in PROVIDERS
        if module.startswith(MODULES[system]) or is_provider:
            for node in ast.walk(sources.tree(module) or ast.Module([], [])):
                if isinstance(node, ast.ClassDef) and node.name.endswith(ENDINGS) and node.name[0] != "_":
                    yield from _fields(node, sources.files[module][1])
    if system == "megatron":
        file = ARGUMENTS_MODULE.replace(".", "/") + ".py"
        for argument, (field, kind) in sources.arguments.items():
            yield argument, ("argument", file, kind, "" if field == argument[2:].replace("-", "_") else f"sets {field}")


def _fields(node: ast.ClassDef, file: str) -> Iterator[tuple[str, Setting]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            kind = ast.unparse(item.annotation).replace("'", "").replace('"', "")
            yield item.target.id, (node.name, file, kind[:60], _default(item.value))


def _default(value: ast.expr | None) -> str:
    """The default as it is written; of a `field(...)` what it holds."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        words = {word.arg: word.value for word in value.keywords}
        value = words.get("default", words.get("default_factory"))
    return ast.unparse(value)[:60] if value is not None else "required"


def read_folder(folder: Path) -> dict[str, dict[str, list[list[str]]]]:
    """For each system its settings by name: class, file, type, default, first and last release."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for system, release, wheels in _releases(folder):
        for name, (holder, file, kind, default) in settings(Sources(wheels), system):
            homes = found.setdefault(system, {}).setdefault(name, {})
            first = homes[holder][4] if holder in homes else release
            homes[holder] = [holder, file, kind, default, first, release]
    return {system: {name: list(homes.values()) for name, homes in names.items()} for system, names in found.items()}


def _releases(folder: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Oldest first, so that what is kept of a setting is what the newest release says."""
    for bridge, (core, _) in PAIRS.items():
        wheels = [*folder.rglob(f"megatron_bridge-{bridge}-*.whl"), *folder.rglob(f"megatron_core-{core}-*.whl")]
        if len(wheels) == 2:
            yield "megatron", bridge, wheels
    for wheel in sorted(folder.rglob("torchtitan-*.whl")):
        yield "torchtitan", wheel.name.split("-")[1], [wheel]


def as_json(found: dict[str, dict[str, list[list[str]]]]) -> str:
    """One name a line: a new release is then a change of few lines."""
    systems = []
    for system, names in found.items():
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(homes)}" for name, homes in sorted(names.items()))
        systems.append(f"{json.dumps(system)}: {{\n{rows}\n}}")
    return "{\n" + ",\n".join(systems) + "\n}\n"


if __name__ == "__main__":
    PAGE.write_text(as_json(read_folder(Path(sys.argv[1]))), encoding="utf-8")
