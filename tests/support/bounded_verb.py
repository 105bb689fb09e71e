"""Runs a verb in a process of its own, with bounds on CPU time and memory: what tests of hostile files share."""

import os
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_CPU_SECONDS = 60  # 10 are promised; with much other work the same instructions take several times as long
MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Ended:
    """How a verb ended: the exit code, or the negative signal, and everything it printed."""

    code: int
    said: str
    cpu_seconds: float
    added_bytes: int  # at most, to the memory of the process it was forked from


def run_bounded(words: Sequence[str], folder: Path) -> Ended:
    """Run `threefold WORDS` in a fork of this process, within a folder. Memory past its bound is not to be had."""
    said = folder / "said.txt"
    before = _status("VmRSS")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _as_child(words, folder, said)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime
    text = said.read_text(encoding="utf-8", errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, seconds, max(0, used.ru_maxrss * 1024 - before))


def _as_child(words: Sequence[str], folder: Path, said: Path) -> int:
    from threefold.cli.main import main

    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, handle in ((0, nothing), (1, out), (2, out)):
        os.dup2(handle, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS + 1))
    most = _status("VmData") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return main(list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
