"""Stands for srun on one machine: `python fake_srun.py NTASKS COMMAND...` starts the tasks with Slurm's variables."""

import os
import signal
import subprocess
import sys
from typing import Any


def main(count: str, *command: str) -> int:
    every = {"SLURM_NTASKS": count, "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": count}
    tasks = [
        subprocess.Popen(command, env={**os.environ, **every, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(int(count))
    ]

    def end(*_: Any) -> None:
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, end)
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
