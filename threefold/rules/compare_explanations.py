"""Explanations of the findings that `threefold compare` and `threefold regress` raise.

`threefold check --explain SLUG` prints them: what should hold, why, how to confirm a problem, and how to fix it. They
stand here, below `compare/`, because the list of all slugs does.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "work-is-comparable": Explanation(
        what="The two sides of a comparison do the same kind of work.",
        why=(
            "A step that drops tokens, freezes parts, forces the routing or sees no images is faster because it does "
            "less. Unequal batches and lengths are converted, per useful token or per model FLOP; other work cannot be."
        ),
        confirm="Read the contract that `threefold compare --anyway` prints, field by field.",
        fix="Make the two alike in the field that the message names, or compare with --anyway and say so.",
    ),
    "one-declared-difference": Explanation(
        what="Two sides of an A/B differ in the declared field and in nothing else of their contracts.",
        why=(
            "The gain of a comparison belongs to its one variable only where nothing else moved. A convergence field "
            "(data, batch, routing, losses, optimizer, arithmetic and state precision) makes a new experiment."
        ),
        confirm="`threefold contract B --against A` names each difference with its class.",
        fix="Make the two alike in the other fields, or declare each of them and give the gain to none alone.",
    ),
    "contract-readable": Explanation(
        what="A contract is read from a plan, the folder of a run, logs of a job, or a file that was written before.",
        why="A contract file whose facts do not have its hash was changed, and holds nobody to anything.",
        confirm="`threefold contract FILE` prints the contract and its hash.",
        fix="Give the source of the contract, and write the file anew with --out.",
    ),
    "enough-steps": Explanation(
        what="There are enough timed steps to tell a difference from noise.",
        why="The first steps of a run warm up, and the time of a single step is noise.",
        confirm="Count the lines of metrics.jsonl inside the steady window.",
        fix="Let the run take 30 steps or more, or give a --window inside of its steps.",
    ),
    "command-starts": Explanation(
        what="The command that `threefold regress` is given can be started.",
        why="Every trial is a run of it.",
        confirm="Run the command by hand on plan A.",
        fix="Give a program that exists, with its arguments, behind --.",
    ),
    "good-plan-runs": Explanation(
        what="The first plan of `threefold regress` runs without a failure.",
        why="The hunt looks for the change that breaks a plan that works.",
        confirm="Look at the output of the trial in the hunt's folder.",
        fix="Give the plan that works first, correct the command, or raise --limit.",
    ),
    "same-hunt": Explanation(
        what="A folder of trials belongs to the plans and the command that are given.",
        why="Trials of another question would be taken for answers to this one.",
        confirm="Compare question.json in the folder with the command line.",
        fix="Choose another --out folder, or give the plans and the command of the first time.",
    ),
}
