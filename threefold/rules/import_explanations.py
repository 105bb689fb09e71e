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
    "import-without-counterpart": Explanation(
        what="Every setting of an import has a field of a plan that stands for it.",
        why="The plan would otherwise do something else than the settings it came from.",
        confirm="Compare the setting with docs/reference/plan-file.md.",
        fix="Set a field that comes near, or know that estimates and rules do not see the setting.",
        severity="warning",
    ),
}
