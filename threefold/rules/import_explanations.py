"""Explanations of the findings that `threefold import` raises.

They stand here, below `interop/`, because the list of all slugs does.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "import-readable": Explanation(
        what="The text is a list of overrides, Megatron Bridge's YAML, or an argument line of Megatron-LM.",
        why="A plan is made of the names in it.",
        confirm="Look for `model.tensor_model_parallel_size=2`, a group `model:`, or `--tensor-model-parallel-size 2`.",
        fix="Give a file with one of the three, or pipe it in with `-`.",
    ),
    "import-needs-model": Explanation(
        what="An import knows its model.",
        why="Overrides and arguments do not name one; a recipe or the sizes of a model do.",
        confirm="Look for `-mr`, a recipe function, or `--hidden-size` and `--num-attention-heads`.",
        fix="Name it: --model, as `threefold models` lists it.",
    ),
    "import-needs-cluster": Explanation(
        what="An import knows its chip and its number of GPUs.",
        why="Settings of Megatron do not say where they run; the command around them may.",
        confirm="Look for `-g` and `-ng` of Bridge's scripts, or torchrun's --nnodes and --nproc-per-node.",
        fix="Give --chip and --gpus.",
        severity="warning",
    ),
    "import-recipe-decides": Explanation(
        what="The overrides of an import say everything that a recipe of Megatron Bridge decides.",
        why="Each recipe has degrees, batches and recompute of its own; overrides on top of it do not repeat them.",
        confirm="Print the recipe's configuration, or let Bridge write it as YAML, and look for the names.",
        fix="Import the complete YAML, or add the recipe's values as overrides.",
        severity="warning",
    ),
    "import-unknown-name": Explanation(
        what="Every override, argument and flag of an import is one of Megatron's.",
        why="A misspelt one would be left out without a word.",
        confirm="docs/reference/export.md says which releases the names were read from.",
        fix="Correct the name; one of your own script or model class can stay.",
        severity="warning",
    ),
    "import-settings-conflict": Explanation(
        what="Settings of an import that no plan holds go together in Megatron.",
        why="Rules judge fields of a plan. Of settings without a field Megatron's own checks are known, with the "
        "release and the line that refuses them; where its guides say otherwise, the code is followed.",
        confirm="The line in the message, in the wheel of that release.",
        fix="Change the setting as the message says, where the run keeps it.",
        severity="warning",
    ),
    "import-perf-recipe": Explanation(
        what="A training starts from a recipe of recipes/, and a benchmark from one of perf_recipes/.",
        why="perf_recipes/ measure upper bounds on mock data. The number of GPUs in a name is the allocation that was "
        "measured; with any override the result is no longer that of the recipe (Bridge's skill on recipes, 2026-04).",
        confirm="The module of the recipe, or the number of GPUs in its name.",
        fix="Take the recipe of recipes/ for a training; keep the allocation for a benchmark.",
        severity="warning",
    ),
    "import-without-counterpart": Explanation(
        what="Every setting of an import has a field of a plan that stands for it.",
        why="The plan would otherwise do something else than the settings it came from.",
        confirm="Compare the setting with docs/reference/plan-file.md.",
        fix="Set a field that comes near, or know that estimates and rules do not see the setting.",
        severity="warning",
    ),
}
