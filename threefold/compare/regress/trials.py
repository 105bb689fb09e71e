"""The folder of a hunt: the question, the plans that were tried, and every finished trial, so that it can be resumed.

    DIR/question.json     the two plans by their hashes, the command, its limit and metric
    DIR/trials.jsonl      one line a round: the fields that were moved, and the outcomes of the plans in it
    DIR/plans/*.toml      the plans
    DIR/trials/0007-B/    what the command printed, and the run folder that it was given

A round is one trial of plan A and one of another plan, right after each other, so that drift of the machine hits both.
It is written as one line when both are done: a round that was interrupted is measured again as a whole.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threefold.compare.regress.command import Command, Outcome, run_command
from threefold.findings import Finding, FindingsError
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.safe_files import open_to_append, read_bounded, write_aside

QUESTION, ROUNDS = "question.json", "trials.jsonl"
MAX_BYTES = 2**26

Say = Callable[[str], None]
Round = dict[str, Outcome]  # by role: "A", and the name of the other plan


class Trials:
    """Runs rounds of trials, or takes them from the folder where they are done."""

    def __init__(self, folder: Path, command: Command, question: dict[str, Any], say: Say) -> None:
        self.folder, self.command, self.say = folder, command, say
        self._done: dict[tuple[str, int], Round] = {}
        try:
            (folder / "plans").mkdir(parents=True, exist_ok=True)
            (folder / "trials").mkdir(exist_ok=True)
            self._check_question(question)
            self._read_rounds()
        except OSError as error:
            problem = f"cannot be used: {error.strerror or error}"
            advice = "choose another --out folder"
            raise FindingsError(
                [Finding(rule="run-writable", at=str(folder), problem=problem, advice=advice)]
            ) from None
        self.num_rounds = 0  # that the hunt has asked for

    def run_round(self, name: str, number: int, plans: Sequence[tuple[str, Plan]]) -> Round:
        """The outcomes of the plans by role, run in the order given. `name` and `number` tell rounds apart."""
        self.num_rounds += 1
        known = self._done.get((name, number))
        if known is not None and known.keys() == {role for role, _ in plans}:
            return known
        found = {role: self._run(role, plan) for role, plan in plans}
        self._write(name, number, found)
        return found

    def _run(self, role: str, plan: Plan) -> Outcome:
        path = (self.folder / "plans" / f"{plan.hash}.toml").absolute()
        write_aside(path, dump_plan(plan).encode())
        number = 1 + sum(1 for _ in (self.folder / "trials").iterdir())
        folder = (self.folder / "trials" / f"{number:04}-{role}").absolute()
        outcome = run_command(self.command, path, folder)
        seconds = "" if outcome.seconds is None else f", {outcome.seconds:.6g} s"
        self.say(f"trial {number}: plan {role}: {outcome.signature}{seconds}")
        return outcome

    def _write(self, name: str, number: int, found: Round) -> None:
        line = {"round": name, "number": number, "outcomes": {role: each.to_json() for role, each in found.items()}}
        with open_to_append(self.folder / ROUNDS) as file:
            file.write(json.dumps(line) + "\n")
        self._done[(name, number)] = found

    def _check_question(self, question: dict[str, Any]) -> None:
        path = self.folder / QUESTION
        if not path.exists():
            write_aside(path, json.dumps(question, indent=2).encode())
            return
        try:
            before = json.loads(read_bounded(path, MAX_BYTES))
        except (ValueError, RecursionError):
            before = None
        if before != question:
            names = sorted(
                name for name in question if not isinstance(before, dict) or before.get(name) != question[name]
            )
            problem = f"the folder holds the hunt for another regression: {', '.join(names)} differ"
            advice = "choose another --out folder, or give the plans and the command that it was started with"
            raise FindingsError([Finding(rule="same-hunt", at=str(self.folder), problem=problem, advice=advice)])

    def _read_rounds(self) -> None:
        """Take over finished rounds. A line that a kill cut off is dropped, and its round is measured again."""
        path = self.folder / ROUNDS
        if not path.exists():
            return
        content = read_bounded(path, MAX_BYTES)
        lines = content.splitlines(keepends=True)
        for line in lines:
            try:
                read = json.loads(line)
                outcomes = {role: Outcome.from_json(each) for role, each in read["outcomes"].items()}
                self._done[(str(read["round"]), int(read["number"]))] = outcomes
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
        if lines and not lines[-1].endswith(b"\n"):
            write_aside(path, b"".join(lines[:-1]))
