"""One run of `threefold train` whose ranks share a GPU and are disturbed one after the other.

A rank is killed (SIGKILL), another start of it aborts (SIGABRT), a third one stops for ever (SIGSTOP). After each the
agent must name the cause and start all ranks again, and the run must end as an undisturbed one does.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from repository import ROOT
from shared_gpu import Outcome, SharedGpuRanks, losses_of, shared_gpu_environment
from tiny_runs import tiny_plan

from threefold.engine.run.checkpoint_io import step_of_folder
from threefold.engine.run.folder import CHECKPOINTS
from threefold.launch.agent import LOGS
from threefold.plan.file import dump_plan

STEPS, RANKS, VICTIM = 20, 2, 1
HANG_SECONDS = 20.0  # more than a step takes on a busy machine
# The step behind whose checkpoint each signal is sent, and what the run must say about it.
DISTURBANCES = {
    signal.SIGKILL: (2, rf"rank {VICTIM} of {RANKS} was killed by SIGKILL; starting all ranks again"),
    signal.SIGABRT: (7, rf"rank {VICTIM} of {RANKS} was killed by SIGABRT; starting all ranks again"),
    signal.SIGSTOP: (12, rf"(phase-progresses|collective-arrives).*rank {VICTIM} has not been heard of"),
}
# Losses of the whole run, relative. Kernels on GPUs may add in another order each time, and twenty updates follow.
TOLERANCE = 1e-3


def run_fields(chip: str) -> dict[str, Any]:
    return {
        "cluster.chip": chip,
        "cluster.gpus": RANKS,
        "layout.ep": 2,
        "knobs.dispatcher": "alltoall",
        "job.data": "synthetic",
        "job.steps": STEPS,
        "run.save_every": 1,
        "run.hang_seconds": HANG_SECONDS,
    }


class DisturbedRun:
    """The command in a process of its own, with its output in a file."""

    def __init__(self, folder: Path, chip: str, limit: float) -> None:
        self.folder, self.end, self.began = folder, time.monotonic() + limit, time.monotonic()
        folder.parent.mkdir(parents=True, exist_ok=True)
        plan = folder.with_suffix(".toml")
        plan.write_text(dump_plan(tiny_plan(run_fields(chip))), encoding="utf-8")
        words = ["train", str(plan), "--run", str(folder), "--max-restarts", str(len(DISTURBANCES)), "--threads", "1"]
        self.output = folder.with_suffix(".txt")
        with self.output.open("wb") as out:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "threefold", *words],
                cwd=ROOT,
                env=os.environ | shared_gpu_environment() | {"PYTHONFAULTHANDLER": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def disturb(self) -> int:
        """Send every signal at its step and wait for the end of the run; returns its exit code."""
        try:
            victim: int | None = None
            for number, (step, _) in DISTURBANCES.items():
                victim = self._wait_for(step, victim)
                os.kill(victim, number)
            return self.agent.wait(max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            raise
        finally:
            self.agent.kill()  # and with it, its ranks
            self.agent.wait()

    def _wait_for(self, step: int, last: int | None) -> int:
        """The process of the rank that is next, once this step is saved and the last victim was replaced."""
        while True:
            victim = self._victim()
            if victim not in (None, last) and self._newest() >= step:
                assert victim is not None
                return victim
            if self.agent.poll() is not None or time.monotonic() > self.end:
                raise TimeoutError(f"the run never came behind step {step} with a rank {VICTIM} to disturb")
            time.sleep(0.01)

    def _ranks(self) -> list[int]:
        """The processes of the ranks, as far as they are there."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(rank) for rank in children.read_text().split()] if children.exists() else []

    def _victim(self) -> int | None:
        """The process of the rank that is disturbed, once it is there."""
        ranks = self._ranks()
        return ranks[VICTIM] if len(ranks) == RANKS else None

    def _dump_stacks(self) -> None:
        """Let ranks that hang write where they hang into their logs (PYTHONFAULTHANDLER)."""
        for rank in self._ranks():
            os.kill(rank, signal.SIGABRT)
        time.sleep(2)

    def _newest(self) -> int:
        """The newest checkpoint's step."""
        found = [step_of_folder(path.name) for path in (self.folder / CHECKPOINTS).glob("step-*")]
        return max((step for step in found if step is not None), default=0)

    def text(self) -> str:
        logs = sorted((self.folder / LOGS).glob("*.log"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in (self.output, *logs))


def disturb_run(folder: Path, chip: str, limit: float) -> list[Outcome]:
    """The outcomes of all disturbances, and of the end of the run."""
    run = DisturbedRun(folder, chip, limit)
    try:
        code: int | str = run.disturb()
    except (TimeoutError, subprocess.TimeoutExpired, ProcessLookupError) as error:
        code = f"{type(error).__name__}: {error}"
    seconds, text = time.monotonic() - run.began, run.text()
    found = []
    for number, (step, wanted) in DISTURBANCES.items():
        match = re.search(wanted, text)
        said = match[0] if match else f"not said: {wanted}"
        name = f"{signal.Signals(number).name} to rank {VICTIM} behind step {step}"
        found.append(Outcome(name, "equal" if match else "DIFFERENT", said, 0.0))
    ended = f"exit code {code}" if isinstance(code, int) else code
    log = "" if code == 0 else "\n".join(f"  run | {line}" for line in text.splitlines()[-80:])
    found.append(Outcome("the disturbed run ends", "equal" if code == 0 else "ERROR", ended, seconds, log))
    return found


def compare_with_undisturbed(ranks: SharedGpuRanks, folder: Path, disturbed: Path) -> Outcome:
    """Losses of the disturbed run against those of one that nobody disturbs."""
    began, name = time.monotonic(), "losses of the disturbed run"
    error = ranks.train(run_fields(ranks.chip), folder).get("error")
    if error:
        return Outcome(name, "ERROR", error, time.monotonic() - began)
    calm, found = losses_of(folder), losses_of(disturbed)
    if calm.keys() != found.keys():
        return Outcome(name, "DIFFERENT", f"steps {sorted(found)}", time.monotonic() - began)
    gap = max(abs(calm[step] - found[step]) / calm[step] for step in calm)
    kind = "equal" if gap <= TOLERANCE else "DIFFERENT"
    return Outcome(name, kind, f"differ by {gap:.0e} from those of an undisturbed one", time.monotonic() - began)
