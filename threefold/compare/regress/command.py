"""Runs the user's command on one plan and says how it went: a step time, a crash, no memory, or no end.

`trials.py` calls `run_command`. The command gets the path of the plan in the place of `{plan}`, or as its last word; a
fresh run folder takes the place of `{run}`. Its time is read from that folder, or from a JSON object that it prints. It
runs in a process group of its own, which is ended when the time limit is over or this process is interrupted.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from threefold.findings import Finding, FindingsError
from threefold.profile.readers.run_record import read_run

Kind = Literal["ok", "out of memory", "time limit", "failed"]

PLAN_WORD, RUN_WORD = "{plan}", "{run}"
ELAPSED = "elapsed"  # the metric that is the time of the whole command
METRICS = ("step_seconds", "time.step_seconds")  # looked for in what is printed, where no name is given
MAX_OUTPUT_BYTES = 2**22  # the end of what a command prints that is looked at
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_NO_MEMORY = re.compile(
    rb"out of memory|OutOfMemoryError|OUT_OF_MEMORY|std::bad_alloc|\bMemoryError\b|Cannot allocate memory",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of the command went."""

    kind: Kind
    detail: str = ""  # "exit 1", "signal 9"
    seconds: float | None = None  # the step time, where the command gave one
    elapsed: float = 0.0

    @property
    def signature(self) -> str:
        """What two failures have in common when they are the same one."""
        return f"{self.kind} ({self.detail})" if self.kind == "failed" else self.kind

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Outcome":
        """An outcome as `to_json` gave it. Raises ValueError, KeyError or TypeError where it is none."""
        kind, seconds = facts["kind"], facts["seconds"]
        if kind not in get_args(Kind):
            raise ValueError(f"no kind of outcome: {kind}")
        return cls(kind, str(facts["detail"]), None if seconds is None else float(seconds), float(facts["elapsed"]))


@dataclass(frozen=True, slots=True)
class Command:
    """The command, its time limit, and where its time is found."""

    words: tuple[str, ...]
    limit_seconds: float
    metric: str | None = None  # a key in the JSON that it prints, or `ELAPSED`; None: whatever there is

    @property
    def makes_run(self) -> bool:
        return any(RUN_WORD in word for word in self.words)

    def argv(self, plan: Path, run: Path) -> list[str]:
        words = [word.replace(PLAN_WORD, str(plan)).replace(RUN_WORD, str(run)) for word in self.words]
        return words if any(PLAN_WORD in word for word in self.words) else [*words, str(plan)]


def run_command(command: Command, plan: Path, folder: Path) -> Outcome:
    """Run the command on a plan; its output and its run folder go into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / "stdout.txt", folder / "stderr.txt"]
    began = time.monotonic()
    with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
        code = _wait(_start(command.argv(plan, folder / "run"), out.fileno(), err.fileno()), command.limit_seconds)
    elapsed = time.monotonic() - began
    if code is None:
        return Outcome("time limit", f"{command.limit_seconds:g} s", elapsed=elapsed)
    if code != 0:
        detail = f"exit {code}" if code > 0 else f"signal {-code}"
        no_memory = any(_NO_MEMORY.search(_tail(path)) for path in outputs)
        return Outcome("out of memory" if no_memory else "failed", detail, elapsed=elapsed)
    seconds = _seconds(command, folder, elapsed)
    return Outcome("ok", seconds=seconds, elapsed=elapsed)


def _start(argv: Sequence[str], out: int, err: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
    except (OSError, ValueError) as error:
        problem = f"cannot be started: {getattr(error, 'strerror', None) or error}"
        advice = "behind -- give a program and its arguments, with {plan} where the plan's path belongs"
        raise FindingsError([Finding(rule="command-starts", at=argv[0], problem=problem, advice=advice)]) from None


def _wait(process: "subprocess.Popen[bytes]", limit_seconds: float) -> int | None:
    """The exit code; None where the limit was over. The process group never outlives this call."""
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the process group, also children that a process left behind."""
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read(MAX_OUTPUT_BYTES)


def _seconds(command: Command, folder: Path, elapsed: float) -> float | None:
    if command.metric == ELAPSED:
        return elapsed
    if command.makes_run and command.metric is None:
        return _run_seconds(folder / "run")
    return _printed_seconds(_tail(folder / "stdout.txt"), (command.metric,) if command.metric else METRICS)


def _run_seconds(folder: Path) -> float | None:
    """The median time of a steady step. The weights of the run are removed: nothing reads them again."""
    try:
        run = read_run(folder)
    except FindingsError:
        return None
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    steady = run.columns["seconds"][run.is_steady()]
    return float(np.median(steady)) if len(steady) else None


def _printed_seconds(output: bytes, names: Sequence[str]) -> float | None:
    """The metric in the whole output as JSON, else in the last line that is a JSON object with it."""
    for text in (output, *reversed(output.splitlines())):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        values = [_look_up(found, name) for name in names]
        if any(value is not None for value in values):
            return next(value for value in values if value is not None)
    return None


def _look_up(found: Any, name: str) -> float | None:
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) and found > 0 else None
