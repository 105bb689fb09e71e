"""Runs a command line in a forked child with limits, and judges how it ended.

The child has a copy of all files, a home of its own and no input. An audit hook refuses what Python writes outside of
the scratch folder. Ends that fail a line: a traceback, a code that means nothing, a refusal without a word, JSON
that is none, a warning of Python, more memory or time than a command may take.
"""

import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from drawn_lines import may_take_long
from line_files import WORK, make_files

from threefold.cli.main import main

DATA_BYTES = 3 * 2**30  # of private memory that a command may ask for, torch included
CPU_SECONDS = 60  # a plan of 1024 GPUs takes some seconds
HANG_SECONDS = 400.0  # of ranks that are started, also on a busy machine
IDLE_SECONDS = 30.0  # asleep without a pause: a command that waits for nothing that will come
SERVES = "explore"  # ends when it is told to, and is told once it has printed its address
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/shm")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CODES_OF_FLAGS = {3: "--verify", 125: "--fail-above"}  # nothing could be judged
CHANGES = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.link": 1,
    "os.symlink": 1,
    "os.truncate": 0,
}
REASON = re.compile(
    r"^(error|warning)\[|^threefold( [a-z-]+)?: |\"ok\": false|\"severity\": \"error\"|see `threefold check`"
    r"|NOT the same|no plan|did not|does not|not judged",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a line ended."""

    words: Sequence[str]
    code: int  # that of a shell: 128 + the number of the signal
    out: str
    err: str
    cpu_seconds: float
    peak_bytes: int
    is_hanging: bool

    @property
    def is_cut_short(self) -> bool:
        return self.is_hanging or self.code == 128 + signal.SIGXCPU

    def problem(self, may_be_long: bool) -> str:
        """What is wrong with the end; empty where nothing is."""
        both = self.out + self.err
        found = re.search(r"Traceback \(most recent|Fatal Python error|Exception ignored|^\S*Warning: ", both, re.M)
        if found:
            return f"{found[0]}: {both.strip().splitlines()[-1][:200]}"
        if self.is_cut_short:
            return "" if may_be_long else f"did not end: {self.cpu_seconds:.0f} s of CPU time"
        own = CODES_OF_FLAGS.get(self.code)
        if self.code not in (0, 1, 2) and not (own and own in " ".join(self.words)):
            return f"exit code {self.code}"
        if self.code and not REASON.search(both):
            return f"exit code {self.code} without a reason"
        if self.code == 2 and "threefold" not in self.err:
            return "a wrong command line, and no message about it"
        options = takewhile(lambda word: word != "--", self.words)
        serves = "mcp" in self.words and self.code == 0  # its standard output is for clients, and there were none
        return self._json_problem() if "--json" in options and self.code < 2 and not serves else ""

    def _json_problem(self) -> str:
        try:
            json.loads(self.out, parse_constant=_refuse_constant)
        except ValueError as error:
            # One line on standard error says of a file that it cannot be written: there is no answer then.
            is_unwritten = self.code == 1 and not self.out and self.err.startswith("threefold ")
            return "" if is_unwritten or _is_help(self.words) else f"standard output is no JSON value: {error}"
        return ""


def _is_help(words: Sequence[str]) -> bool:
    return bool({"--help", "-h"} & set(words))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


class Scratch:
    """A copy of the files, made anew where a line has changed something in it."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self._folder = tempfile.TemporaryDirectory(prefix="line-")
        self.root = Path(self._folder.name).resolve()
        self.place = self.root / "scratch"
        self._clean: list[tuple[Any, ...]] = []

    def renew(self) -> None:
        if self._clean and _entries(self.place) == self._clean:
            return
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.files, self.place, symlinks=True, copy_function=_copy)
        self._clean = _entries(self.place)

    def close(self) -> None:
        self._folder.cleanup()


def run_line(words: Sequence[str], scratch: Scratch) -> Ended:
    """Run a line in a clean copy of the files."""
    scratch.renew()
    out, err = scratch.root / "out", scratch.root / "err"
    for path in (out, err):
        path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _be_the_command(words, scratch.place, out, err)
    code, usage, is_hanging = _wait(child, words, out)
    read = [path.read_bytes().decode(errors="replace") if path.exists() else "" for path in (out, err)]
    return Ended(words, code, *read, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, is_hanging)


def _entries(place: Path) -> list[tuple[Any, ...]]:
    """Every file and folder with what changes when it is written."""
    found = []
    for folder, folders, names in os.walk(place):
        for name in (*folders, *names):
            seen = os.lstat(f"{folder}/{name}")
            found.append((folder, name, seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mode))
    return sorted(found)


def _copy(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target)


def _wait(child: int, words: Sequence[str], out: Path) -> tuple[int, Any, bool]:
    end, is_told = time.monotonic() + HANG_SECONDS, False
    awake, look, used, is_hanging = time.monotonic(), 0.0, "", False
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if not is_told and SERVES in words and out.exists() and b"http" in out.read_bytes():
            os.kill(child, signal.SIGTERM)
            is_told = True
        if time.monotonic() > look:
            look = time.monotonic() + 0.5
            if (now := _cpu_if_asleep(child)) != used or not now:
                awake, used = time.monotonic(), now
        is_idle = not may_take_long(words) and time.monotonic() - awake > IDLE_SECONDS
        if (is_idle or time.monotonic() > end) and not is_hanging:
            is_hanging = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what the command has started and left behind
    code = os.waitstatus_to_exitcode(status)
    return (code if code >= 0 else 128 - code), usage, is_hanging


def _cpu_if_asleep(child: int) -> str:
    """The CPU time that a command and what it started have used, in the words of the kernel; empty while one of them
    runs or waits for its turn."""
    used = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[3] == str(child):  # its session
                if fields[0] in "RD":
                    return ""
                used.append((stat.parent.name, *fields[11:15]))
    return str(sorted(used))


def _be_the_command(words: Sequence[str], scratch: Path, out: Path, err: Path) -> None:
    """The child: never returns."""
    code = 70
    try:
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((0, sys.__stdin__), (1, sys.__stdout__), (2, sys.__stderr__)):
            setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(os.dup(number), "r" if number == 0 else "w"))
            assert stream is not None
        os.chdir(scratch / WORK)
        home = str(scratch / "home")
        os.environ |= {
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/cache",
            "TMPDIR": home,
            "BROWSER": "true",
            "COLUMNS": "120",
        }
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _watch_writes(scratch)
        code = main([word.replace("\x00", "\\0") for word in words])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_writes(scratch: Path) -> None:
    """End the child where Python opens a file outside of the scratch folder to write, or changes a folder there."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int) or not flags & WRITES:
                return
        elif event in CHANGES:
            path = args[CHANGES[event]]
            if not isinstance(path, str | bytes | os.PathLike):
                return
        else:
            return
        where = os.path.normpath(scratch / WORK / os.fsdecode(path))  # resolving links would open files here
        if event == "os.mkdir" and Path(where).is_dir():
            return
        if (
            not where.startswith((f"{scratch}/", f"{scratch.parent}/", "/proc/self/", *DEVICES))
            and "__pycache__" not in where
        ):
            os.write(
                2, f"\nTraceback (most recent call first): {event} outside of the scratch folder: {where}\n".encode()
            )
            traceback.print_stack()
            os._exit(71)

    sys.addaudithook(check)


def shell_line(words: Sequence[str]) -> str:
    return " ".join(
        ["threefold", *(word if re.fullmatch(r"[\w./=:,+-]+", word) else repr(word)[:200] for word in words)]
    )


def run_by_hand(lines: list[list[str]]) -> int:
    """Run lines and show how they ended."""
    import torch

    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        files = Scratch(make_files(Path(folder) / "files"))
        for words in lines:
            print(shell_line(words), flush=True)
            ended = run_line(words, files)
            problem = ended.problem(may_be_long=True)
            bad += bool(problem)
            print(ended.out[-3000:], ended.err[-3000:], sep="\n")
            print(
                f"code {ended.code}, {ended.cpu_seconds:.1f} s, {ended.peak_bytes / 2**20:.0f} MiB: {problem or 'held'}"
            )
    return 1 if bad else 0
