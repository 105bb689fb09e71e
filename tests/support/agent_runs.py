"""Runs by `threefold train` in processes of their own, whose ranks tests kill, stop or starve."""

import os
import subprocess
import sys
import time
from pathlib import Path

from repository import ROOT
from tiny_runs import tiny_plan

from threefold.engine.run.folder import CHECKPOINTS
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan

HANG_SECONDS = 1500.0  # after which a test fails: long enough for a machine with much other work


def plan_of(ranks: int, steps: int, **run: float) -> Plan:
    layout = {"layout.ep": 2} if ranks == 2 else {"layout.ep": 2, "layout.pp": 2}
    fields = {"cluster.gpus": ranks, "job.data": "synthetic", "job.steps": steps, "job.global_batch": 2 * ranks}
    fields |= layout
    return tiny_plan({**fields, "run.save_every": 1, **{f"run.{name}": value for name, value in run.items()}})


class Run:
    """`threefold train` in processes of its own."""

    def __init__(self, plan: Plan, folder: Path, restarts: int) -> None:
        self.folder = folder
        path = folder.with_suffix(".toml")
        path.write_text(dump_plan(plan))
        words = ["train", str(path), "--run", str(folder), "--max-restarts", str(restarts), "--threads", "1"]
        self.said = folder.with_suffix(".txt").open("w+")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "threefold", *words], env=env, stdout=self.said, stderr=subprocess.STDOUT
        )

    def ranks(self) -> list[int]:
        """Process numbers of the ranks, in the order they were started."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(word) for word in children.read_text().split()] if children.exists() else []

    def steps(self) -> int:
        return len(list((self.folder / CHECKPOINTS).glob("step-????????")))

    def newest(self) -> int:
        names = [path.name for path in (self.folder / CHECKPOINTS).glob("step-*") if path.name[5:].isdigit()]
        return max((int(name[5:]) for name in names), default=0)

    def wait_for(self, step: int) -> bool:
        """Until a checkpoint of this step or a later one is there; False where the run ended before."""
        end = time.monotonic() + HANG_SECONDS
        while self.newest() < step:
            if self.agent.poll() is not None:
                return False
            assert time.monotonic() < end, self.text()
            time.sleep(0.02)
        return True

    def finish(self) -> int:
        return self.agent.wait(timeout=HANG_SECONDS)

    def text(self) -> str:
        self.said.seek(0)
        return self.said.read()
