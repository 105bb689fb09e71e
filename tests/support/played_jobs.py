"""A cluster that is played: runs the jobs that `tune` wrote for Megatron Bridge, and leaves the logs that they would.

A job's step time is planted by its overrides. The machine may drift; a job may crash, run out of memory, or fall back
to another dispatcher. What Bridge prints is written after `job_logs.py`.
"""

import math
import random
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from job_logs import bridge_summary, megatron_step

Overrides = dict[str, str]


@dataclass
class PlayedCluster:
    """Runs the jobs of a batch in their order. `seconds` of a step and `ending` depend on a job's overrides."""

    seconds: Callable[[Overrides], float]
    ending: Callable[[Overrides], str] = lambda overrides: ""
    notice: Callable[[Overrides], str] = lambda overrides: ""
    loss: Callable[[Overrides], float] = lambda overrides: 0.0  # added to the loss of every step
    drift: float = 0.0  # of a job, relative to the one before it
    noise: float = 0.005
    edit: Callable[[Overrides], Overrides] = lambda overrides: overrides  # what somebody changed in the job by hand
    num_jobs: int = 0
    seed: int = 0

    def run(self, batch: Path) -> int:
        jobs = re.findall(r"--output=(\S+)", batch.read_text())
        for place in jobs:
            self._run_job(Path(shlex.split(place)[0]))
        return len(jobs)

    def _run_job(self, log: Path) -> None:
        lines = (log.parent / "overrides.txt").read_text().splitlines()
        overrides = self.edit(dict(line.partition("=")[::2] for line in lines))
        if flex := re.search(r'apply_flex_dispatcher_backend\(.*"(\w+)"\)', (log.parent / "train.py").read_text()):
            overrides["model.moe_flex_dispatcher_backend"] = flex[1]
            overrides["model.moe_token_dispatcher_type"] = "flex" if not self.notice(overrides) else "alltoall"
        draw = random.Random(f"{self.seed} {self.num_jobs}")
        speed = self.seconds(overrides) * (1 + self.drift) ** self.num_jobs * math.exp(draw.gauss(0, self.noise))
        self.num_jobs += 1
        steps = int(overrides["train.train_iters"])
        said = _summary(overrides) + ([self.notice(overrides)] if self.notice(overrides) else [])
        ending = self.ending(overrides)
        for step in range(1, (2 if ending else steps) + 1):
            loss = 12.0 - 2.0 * (1 - math.exp(-step / 20)) + self.loss(overrides)
            said.append(megatron_step(draw, step, steps, seconds=speed, loss=loss))
        said.append(ending or "[after training is done] datetime: 2026-03-03 12:00:00")
        log.write_text("\n".join(f"15: {line}" for line in said) + "\n")


def _summary(overrides: Overrides) -> list[str]:
    """Bridge's summary with the settings of the job; the shape of the model stays as it was."""
    head = bridge_summary()
    first = next(number for number, line in enumerate(head) if line.startswith("[model]"))
    groups: dict[str, list[str]] = {"model": [line for line in head[first + 1 :] if "(Mcore" in line]}
    stated = {line.split(":")[0].strip() for line in groups["model"]}
    for path, value in overrides.items():
        group, _, name = path.partition(".")
        if name in stated and group == "model":
            groups["model"] = [line for line in groups["model"] if line.split(":")[0].strip() != name]
        groups.setdefault(group, []).append(f"  {name}: {_as_python(value)}")
    lines = head[:first]
    for group, rows in groups.items():
        lines += [f"[{group}] Non-default values (vs Mcore TransformerConfig):", *rows, ""]
    return [*lines, "=" * 70]


def _as_python(value: str) -> str:
    if value in ("true", "false", "null"):
        return {"true": "True", "false": "False", "null": "None"}[value]
    if value.startswith("["):
        return "[" + ", ".join(repr(item) for item in value[1:-1].split(",") if item) + "]"
    return value
