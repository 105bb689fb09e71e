"""Measures trials one after the other in processes that stay alive between them, because starting ranks takes longer
than measuring them.

`threefold calibrate` and `threefold tune` use a `PlanSession`. A crash, a full memory or a hang is the result of the
trial in which it happened; the next trial starts new processes. All plans of a session have the same number of ranks.
This module imports no torch.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from threefold.launch.rank_process import RankProcess, start_rank

RANK_MODULE = ("-m", "threefold.engine.tune.session_rank")
POLL_SECONDS = 0.05
END_SECONDS = 20.0  # that a launcher of a cluster has to end its ranks, before it is killed


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed that the machine reaches at one size."""

    what: str  # "gemm bf16", "attention", "copy", "launch", "all-to-all ep"
    size: int  # rows, tokens of a sequence, or bytes
    rate: float  # FLOP/s, bytes/s, or launches/s


class PlanSession:
    """The processes of a number of ranks, started with the first trial and after each failure.

    `module` is what a rank runs. `launcher` is a command that starts one process a rank on the nodes of a cluster, such
    as srun; the folder must then be one that all nodes see. Without it all ranks are processes of this machine.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        env: Mapping[str, str],
        module: Sequence[str] = RANK_MODULE,
        launcher: Sequence[str] = (),
    ) -> None:
        self.folder, self.ranks, self.env = folder, ranks, dict(env)
        self.module, self.launcher = list(module), list(launcher)
        self._jobs, self._results = folder / "jobs.jsonl", folder / "results.jsonl"
        self._processes: list[RankProcess] = []
        self._num_jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def measure(self, fields: Mapping[str, Any], window: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
        """The result of `run_trial` on the first rank, or `error`: why there is none."""
        return self._run({"fields": dict(fields), "window": dict(window)}, limit_seconds)

    def speeds(self, fields: Mapping[str, Any], limit_seconds: float) -> list[Speed]:
        """The speeds that the machine reaches, with the collectives of the axes of this plan; none where that fails."""
        result = self._run({"fields": dict(fields), "window": None}, limit_seconds)
        return [Speed(**speed) for speed in result.get("speeds", ())]

    def _run(self, job: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
        if not self._processes:
            self._start()
        with self._jobs.open("a", encoding="utf-8") as jobs:
            jobs.write(json.dumps(job) + "\n")
        self._num_jobs += 1
        result = self._wait(limit_seconds)
        if "error" in result:  # memory that a failed plan left behind must not fail the next one
            self.close()
        return result

    def close(self) -> None:
        for process in self._processes:
            if self.launcher:  # it ends the ranks on other nodes
                process.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.process.wait(END_SECONDS)
            process.kill()
            process.process.wait()
        self._processes = []

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        logs = [self.folder / f"rank-{rank}.log" for rank in range(1 if self.launcher else self.ranks)]
        for path in (self._jobs, self._results, *logs):
            path.write_text("", encoding="utf-8")
        self._num_jobs = 0
        argv = [*self.launcher, sys.executable, *self.module, str(self._jobs), str(self._results)]
        every = [_meeting_point()] if self.launcher else _rank_variables(self.ranks)
        for rank, variables in enumerate(every):
            self._processes.append(start_rank(argv, {**self.env, **variables}, rank, logs[rank]))

    def _wait(self, limit_seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            ended = [process for process in self._processes if process.has_ended]
            text = self._results.read_text(encoding="utf-8")
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if len(lines) >= self._num_jobs:
                result: dict[str, Any] = json.loads(lines[self._num_jobs - 1])
                return result
            if ended:
                failed = next((process for process in ended if process.process.returncode), ended[0])
                return {"error": _failure_reason(failed)}
            if time.monotonic() - began > limit_seconds:
                return {"error": f"no result within {limit_seconds:.0f} s"}
            time.sleep(POLL_SECONDS)


def _failure_reason(failed: RankProcess) -> str:
    lines = [line for line in failed.log_tail() if line.strip()]
    if any("out of memory" in line.lower() for line in lines):
        return "out of memory"
    return f"rank {failed.number} {failed.end_reason}" + (f": {lines[-1].strip()}" if lines else "")


def _rank_variables(ranks: int) -> list[dict[str, str]]:
    """The variables of torchrun for each rank. A single rank needs none."""
    if ranks == 1:
        return [{}]
    every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return [
        {name: str(value) for name, value in {**every, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]


def _meeting_point() -> dict[str, str]:
    """The meeting point of ranks of a cluster: on the first node, which is this one unless the environment names
    another."""
    address = os.environ.get("MASTER_ADDR") or socket.gethostname()
    return {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return port
