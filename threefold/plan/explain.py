"""Explanations of the findings that parsing a plan and completing a draft raise.

`threefold check --explain SLUG` prints them: what should hold, why, how to confirm a problem, and how to fix it.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "file-readable": Explanation(
        what="The plan is a readable TOML file.",
        why="A half-read plan would run something else than was meant.",
        confirm="Open the file at the place the message names.",
        fix="Correct the TOML, or give the right path.",
    ),
    "unknown-field": Explanation(
        what="Every key of a plan is a known field.",
        why="A misspelt knob that is silently ignored costs a run.",
        confirm="`threefold schema` lists all fields.",
        fix="Use the name that is meant, or delete the key: a guess at a name is never applied.",
    ),
    "wrong-type": Explanation(
        what="Every field has a value of its type.",
        why="'8' and 8 are not the same plan.",
        confirm="`threefold schema` gives the type of each field.",
        fix="Write the value in the type the message names.",
    ),
    "known-value": Explanation(
        what="Fields with fixed choices hold one of them.",
        why="An unknown dispatcher or precision cannot be priced or run.",
        confirm="`threefold schema` lists the choices.",
        fix="Use one of the choices in the message.",
    ),
    "in-range": Explanation(
        what="Numbers are within the range their field allows.",
        why="Degrees of zero or below place no rank.",
        confirm="Compare the value with the range in the message.",
        fix="Set it inside the range.",
    ),
    "known-model": Explanation(
        what="The model is known by name or by a Hugging Face configuration.",
        why="Sizes and layers come from it.",
        confirm="`threefold models` lists the names.",
        fix="Use a listed name, or hf:path of a config.json.",
    ),
    "model-config": Explanation(
        what="A Hugging Face configuration describes a supported family completely.",
        why="A guessed dimension would falsify every number.",
        confirm="Read the file the message names.",
        fix="Complete it, or use a supported model_type.",
    ),
    "stages-readable": Explanation(
        what="The pipeline layout string can be parsed.",
        why="Every layer must be on exactly one chunk.",
        confirm="`threefold show` prints the chunks of a plan.",
        fix="Use E, t, m, L, bars, '*n' and parentheses, in that order.",
    ),
    "flex-needs-backend": Explanation(
        what="A flex dispatcher names its backend.",
        why="Upstream, the type without the backend changes nothing: the run keeps the speed of alltoall.",
        confirm="Look for the backend in the effective configuration of the run.",
        fix="Set knobs.dispatcher to deepep or hybridep; that alone activates it.",
    ),
    "overlap-switch-couples": Explanation(
        what="An A/B changes one variable.",
        why=(
            "The convenience switch moe_a2a_overlap turns on EP overlap and delayed weight gradients together. "
            "Since 2026-07-25 upstream's examples set delay_wgrad_compute to false: the first A/B is of overlap alone."
        ),
        confirm="Compare the two knobs in `threefold show`.",
        fix="Set knobs.ep_overlap and knobs.delay_wgrad apart.",
        severity="warning",
    ),
    "one-value-per-field": Explanation(
        what="Two names for one field say the same.",
        why="Upstream, a dispatcher type of alltoall beside a flex backend silently keeps alltoall.",
        confirm="Look for both spellings in the file or on the command line.",
        fix="Keep one; the field of the plan alone is enough.",
    ),
    "no-free-field": Explanation(
        what="A plan that is checked has a value in every field.",
        why="'auto' marks a draft: a question, not a plan.",
        confirm='Search the file for "auto".',
        fix="Write a value, or let `threefold plan` choose one.",
    ),
    "recompute-chosen": Explanation(
        what="A memory budget for recompute is met by the cheapest set of modules that an estimate finds.",
        why="Names in the plan hold for every version; what meets a budget is estimated anew each time.",
        confirm="Compare the peak in `threefold estimate` with and without the names of the message.",
        fix="Write the names in place of the budget; where no set meets it, a larger budget, offload or more ranks.",
        severity="warning",
    ),
    "plan-exists": Explanation(
        what="A draft has at least one plan that obeys the rules and fits the memory.",
        why=(
            "With what it fixes, every layout breaks a rule or needs more memory than a GPU has, recompute and "
            "offload included."
        ),
        confirm="Compare the need of the leanest plan, which the message names, with the chip's memory.",
        fix="The nearest change that gives a plan: a free field, more GPUs, a larger chip, or another target.",
    ),
}
