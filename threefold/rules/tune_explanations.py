"""Explanations of the findings that `threefold tune` and `threefold card` raise.

`threefold check --explain SLUG` prints them. They stand here, below `tune/`, because the list of all slugs does.
"""

from threefold.findings import Explanation

EXPLANATIONS = {
    "baseline-runs": Explanation(
        what="The plan that `threefold tune` begins with runs here, with finite losses.",
        why="Changes are measured against it, so that without it there is nothing to be faster than.",
        confirm="Run `threefold train` on the plan for a few steps.",
        fix="Correct the plan, and tune in a new --out folder: the failed trial stays in the ledger.",
    ),
    "same-tuning": Explanation(
        what="A folder of trials belongs to the plan, the machine, the software and the timing window that are given.",
        why="Trials under another contract would be taken for answers to this question.",
        confirm="`threefold tune --show DIR --json` prints the contract of the folder.",
        fix="Choose another --out folder, or give the plan of the first time on the same machine.",
    ),
    "ledger-readable": Explanation(
        what="The folder of a tuning can be written, its ledger.sqlite is sound, and no other tuning is at work in it.",
        why="Every finished trial is kept there, and a tuning that was interrupted goes on from it.",
        confirm="Open the file with sqlite3 and run `PRAGMA integrity_check`.",
        fix="Choose another --out folder, restore the file, or wait for the other tuning.",
    ),
    "card-holds-evidence": Explanation(
        what="A card is a TOML file with a claim, and the figures of the claim are those of its evidence file.",
        why="A figure that is typed by hand drifts away from what was measured.",
        confirm="`threefold card check --evidence` reads every card of cards/ and compares its figures.",
        fix="Correct the field that is named, or copy the figure from the evidence.",
    ),
}
