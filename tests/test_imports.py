"""The one-way order of imports, and that planning never loads torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree_shape

import threefold

PACKAGE = Path(threefold.__file__).parent
MAX_MODULES = 20
# Lowest first. A part imports itself and lower levels, never a neighbor on its own level.
LEVELS = (
    {"notebook"},
    {"units", "findings", "fields", "safe_files", "inert_pickle"},
    {"toml_file", "sqlite_file"},
    {"spec"},
    {"layout"},
    {"plan"},
    {"launch"},
    {"cost", "engine"},
    {"remedies"},
    {"rules", "dryrun"},
    {"search", "profile", "interop", "machine"},
    {"diagnose"},
    {"compare"},
    {"tune"},
    {"lookup"},
    {"report"},
    {"api"},
    {"explore", "mcp"},
    {"cli"},
)
LEVEL = {part: number for number, level in enumerate(LEVELS) for part in level}
TORCH_PARTS = {"engine", "dryrun"}
JUDGE = PACKAGE / "interop" / "megatron" / "judge"  # runs in Megatron's interpreter, as one file
# The folders and top-level modules of engine/ and cost/, by the same rule: each can be read from the bottom up.
INSIDE: dict[str, tuple[set[str], ...]] = {
    "engine": (
        {"context", "sum_dtype", "batch"},
        {"device"},
        {"dist", "autograd"},
        {"kernels"},
        {"precision", "optim"},
        {"lora"},
        {"model_options"},
        {"layers", "dispatch", "data_parallel"},
        {"attention", "moe"},
        {"vision"},
        {"models"},
        {"graphs", "shard"},
        {"schedule"},
        {"data", "run"},
        {"weights"},
        {"build"},
        {"profiler", "start", "step", "throughput"},
        {"effects"},
        {"train_state"},
        {"generate", "train_hooks", "train_setup"},
        {"train"},
        {"evaluate", "verify", "tune"},
    ),
    "cost": (
        {"vision"},
        {"local_parameters"},
        {"trained_weights"},
        {"delta_rule", "expert_load", "layer_work", "rates", "stack_traits", "stage_contents"},
        {"chip_file", "format_support", "rank_params"},
        {"memory", "traffic"},
        {"time"},
        {"cp_exchange", "estimate"},
        {"anchor", "fit", "fit_rates", "training_run"},
    ),
    "cost/memory": ({"stage_memory"}, {"megatron", "threefold"}, {"by_stack"}),
    "cost/traffic": ({"transfers"}, {"dispatch"}, {"megatron", "threefold"}, {"by_stack"}),
    "dryrun": (
        {"tracking"},
        {"simulated", "collective_match", "derive_shape", "optimizer_step", "representatives"},
        {"rehearse_rank"},
        {"memory_fit"},
        {"rehearse_plan", "measured"},
    ),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The part of the package a file belongs to: `plan` for plan/file.py, `units` for units.py."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path) -> Iterator[str]:
    """Every module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    part = part_of(file)
    assert part in LEVEL or part in ("__init__", "__main__"), f"{part} has no place in the order"
    for module in imports(file):
        root, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if root == "threefold" and other in LEVEL:
            # The package itself names what it loads from `api` when somebody asks for it.
            lower = part in ("__init__", "__main__") or (part in LEVEL and LEVEL[other] < LEVEL[part])
            assert other == part or lower, f"{part} imports {module}"
        if root == "torch":
            assert part in TORCH_PARTS or JUDGE in file.parents, f"{part} imports {module}"


@pytest.mark.parametrize("package", INSIDE)
def test_folders_inside_point_down(package: str) -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    level = {unit: number for number, units in enumerate(INSIDE[package]) for unit in units}
    root, prefix = PACKAGE / package, ["threefold", *package.split("/")]
    units = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert units - {"__init__"} == level.keys(), "every folder and module has a place in the order"
    wrong = []
    for file in sorted(root.rglob("*.py")):
        unit = file.relative_to(root).with_suffix("").parts[0]
        for module in imports(file):
            parts = module.split(".")
            if parts[: len(prefix)] == prefix and len(parts) > len(prefix) and parts[len(prefix)] in level:
                other = parts[len(prefix)]
                if other != unit and (unit not in level or level[other] >= level[unit]):
                    wrong.append(f"{file.relative_to(root)} imports {module}")
    assert not wrong


def test_few_modules_in_a_folder() -> None:
    """One responsibility a folder: more modules than this want a folder of their own. The verbs are a flat list."""
    crowded = {}
    for folder in {file.parent for file in FILES} - {PACKAGE / "cli"}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > MAX_MODULES:
            crowded[str(folder.relative_to(PACKAGE))] = len(modules)
    assert not crowded


def test_no_folder_lies_deep() -> None:
    left = {"cost/memory/threefold/graphs", "cost/memory/threefold/partly_frozen", "cost/memory/threefold/timelines"}
    left |= {"engine/kernels/experts/hopper", "interop/megatron/validation/judge"}  # these may only become fewer
    assert set(tree_shape.deep_folders()) <= left


def test_no_folder_is_in_a_cycle_with_what_lies_next_to_it() -> None:
    left = {"threefold.cli.command_line", "threefold.cost.memory.threefold.timelines", "threefold.diagnose.deaths"}
    left |= {"threefold.diagnose.logs", "threefold.engine.attention.head_groups"}  # these may only become fewer
    names = tree_shape.modules()
    imports = {name: list(tree_shape.imported(path, names)) for name, path in names.items()}
    assert set(tree_shape.cycles(names, imports)) <= left


def test_planning_never_loads_torch() -> None:
    program = "import sys, threefold.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_judging_a_plan_never_loads_the_engine() -> None:
    """Texts of the engine's findings are read as data (`engine/explanations.toml`), and only where somebody asks."""
    recipe = PACKAGE.parent / "recipes" / "deepseek-v3-4k-1024xh100-fp8.toml"
    program = (
        "import sys\n"
        "from threefold.cli.main import main\n"
        f"main(['check', {str(recipe)!r}])\n"
        "main(['check', '--explain', 'shard-readable'])\n"
        "sys.exit(any(name.startswith('threefold.engine') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_one_stage_never_loads_the_compiler_of_torch() -> None:
    """It takes most of a second to import. A model is built as training builds it, on the meta device first."""
    pytest.importorskip("torch")
    program = (
        "import sys, threefold.engine.train\n"
        "from threefold.engine.models.build import build_model\n"
        "from threefold.spec.models import MODELS\n"
        "build_model(MODELS['tiny-qwen3-moe'])\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
