"""SIGINT, SIGTERM and SIGHUP: while a run starts they end it with one line, in its loop they save it."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.engine.run.checkpoints import read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, METRICS
from threefold.launch.stop_signals import INTERRUPTED, STOP_SIGNALS

RECIPE = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
SMALL = ["job.seq_len=32", "model.num_layers=1", "run.tensorboard=false", "job.data=synthetic", "--threads", "1"]
LONG = 1_000_000  # steps, so that only a signal ends the run
HANG_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work

# Python imports it before anything else. It sends a signal when a process first imports or opens what it was told: to
# itself, or from a rank to the agent.
SITECUSTOMIZE = """
import os, sys
number, event, name, rank = os.environ["SIGNAL_AT"].split()
def watch(happened, given):
    global rank
    if happened == event and os.environ.get("RANK", "none") == rank and str(given[0]).endswith(name):
        receiver = os.getpid() if rank == "none" else os.getppid()
        rank = "done"
        os.kill(receiver, int(number))
sys.addaudithook(watch)
"""

HANGING_SAVE = """
import sys, time
def watch(happened, given):
    if happened == "open" and str(given[0]).endswith("facts.json"):
        time.sleep(1e6)
sys.addaudithook(watch)
"""


def start(folder: Path, *words: str, env: dict[str, str] | None = None, **how: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "threefold", "train", str(RECIPE), *SMALL, "--run", str(folder), *words]
    path = os.pathsep.join([str(folder.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = os.environ | {"PYTHONPATH": path} | (env or {})
    return subprocess.Popen(command, env=given, text=True, **how)


def stop_at(moment: str, number: signal.Signals, folder: Path, *words: str) -> tuple[int, list[str]]:
    """The exit code and all lines of a run that gets a signal at a moment such as "import torch none"."""
    (folder.parent / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {"SIGNAL_AT": f"{int(number)} {moment}"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = start(folder, f"job.steps={LONG}", *words, env=env, preexec_fn=default_signals, **streams)
    try:
        said, _ = run.communicate(timeout=HANG_SECONDS)
    finally:
        run.kill()
    return run.returncode, said.splitlines()


def default_signals() -> None:
    """Whatever the tests were started under."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def check_stop(moment: str, number: signal.Signals, folder: Path, *words: str) -> None:
    assert_stopped(number, folder, *stop_at(moment, number, folder, *words))


def assert_stopped(number: signal.Signals, folder: Path, code: int, said: list[str]) -> None:
    """The run ended by the signal before its first step, and said so in one line."""
    said = [line for line in said if not line.startswith("starting from random weights")]
    assert said == [f"threefold train: stopped by {number.name}; checkpoints are as they were"], said
    assert code == 128 + number
    assert not list(folder.glob(f"{CHECKPOINTS}/*"))
    for log in folder.glob("logs/*"):  # a rank that talked when its peer left may say so, but no more
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("moment", ["import threefold.cli.command_line.inputs none", "import torch none"])
def test_a_signal_while_it_imports(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    check_stop(moment, number, tmp_path / "run")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("import threefold.engine.step none", signal.SIGINT),
        pytest.param("open run.lock none", signal.SIGTERM, marks=pytest.mark.slow),
        ("open contract.json.partial none", signal.SIGHUP),
    ],
)
def test_a_signal_while_it_builds(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    check_stop(moment, number, tmp_path / "run")


TWO = ["cluster.gpus=2", "layout.ep=2"]
RANKS = pytest.mark.parametrize(
    "words", [pytest.param([], id="one rank"), pytest.param(TWO, id="two ranks", marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("import threefold.cli.command_line.inputs 1", signal.SIGINT),  # ranks that just began
        pytest.param("open run.lock 0", signal.SIGHUP, marks=pytest.mark.slow),  # and ranks that wait for each other
        *(
            pytest.param(moment, number, marks=pytest.mark.slow)
            for moment in (
                "import threefold.launch.agent none",
                "import torch 1",
                "import threefold.engine.step 0",
            )
            for number in STOP_SIGNALS
        ),
    ],
)
def test_a_signal_while_two_ranks_start(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    check_stop(moment, number, tmp_path / "run", *TWO)


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_just_before_the_first_step_of_two_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """The agent may pass it on when the ranks are in the loop already: then they save."""
    folder = tmp_path / "run"
    code, said = stop_at("open contract.json.partial 0", number, folder, *TWO)
    if code == 0:
        assert_saved(folder)
    else:
        assert_stopped(number, folder, code, [line for line in said if not line.startswith("CPU threads of a rank")])


# In the loop


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    runs: list[subprocess.Popen[str]] = []
    yield runs
    for run in runs:
        run.kill()
        run.wait()


def wait_until(ready: Callable[[], bool], run: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + HANG_SECONDS
    while not ready():
        assert run.poll() is None, f"ended with {run.returncode}"
        assert time.monotonic() < end
        time.sleep(0.02)


def num_steps(folder: Path) -> int:
    path = folder / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_saved(folder: Path) -> None:
    """The newest checkpoint is of the last step that metrics tell of."""
    newest = max((folder / CHECKPOINTS).glob("step-????????"))
    last = json.loads((folder / METRICS).read_text().splitlines()[-1])["step"]
    assert read_checkpoint(newest)[1]["step"] == last


@RANKS
def test_a_run_whose_terminal_goes_away_saves(words: list[str], tmp_path: Path, started: list[Any]) -> None:
    """The kernel sends SIGHUP, and every later word to the terminal fails."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        default_signals()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    run = start(
        tmp_path / "run",
        f"job.steps={LONG}",
        *words,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    started.append(run)
    os.close(slave)
    os.set_blocking(master, False)

    def has_begun() -> bool:
        with suppress(OSError):  # nothing to read now
            os.read(master, 65536)
        return num_steps(tmp_path / "run") >= 2

    wait_until(has_begun, run)
    os.close(master)
    assert run.wait(HANG_SECONDS) == 0
    assert_saved(tmp_path / "run")


@pytest.mark.slow
def test_under_nohup_a_lost_terminal_is_nothing(tmp_path: Path, started: list[Any]) -> None:
    folder = tmp_path / "run"

    def ignore() -> None:
        default_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run = start(folder, f"job.steps={LONG}", preexec_fn=ignore, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    started.append(run)
    wait_until(lambda: num_steps(folder) >= 1, run)
    run.send_signal(signal.SIGHUP)
    seen = num_steps(folder)
    wait_until(lambda: num_steps(folder) >= seen + 5, run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(HANG_SECONDS) == 0
    assert_saved(folder)


@RANKS
def test_the_first_interrupt_in_the_loop_saves(words: list[str], tmp_path: Path, started: list[Any]) -> None:
    folder = tmp_path / "run"
    with (tmp_path / "said").open("w+") as said:
        run = start(folder, f"job.steps={LONG}", *words, preexec_fn=default_signals, stdout=said, stderr=said)
        started.append(run)
        wait_until(lambda: num_steps(folder) >= 2, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_SECONDS) == 0
        said.seek(0)
        text = said.read()
    assert text.count(INTERRUPTED) == 1
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith("stopped at step ")
    assert_saved(folder)


@RANKS
def test_the_second_interrupt_ends_the_run_at_once(words: list[str], tmp_path: Path, started: list[Any]) -> None:
    """The first one cannot end this run: its save never comes to an end."""
    folder = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(HANGING_SAVE)
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    given = [f"job.steps={LONG}", "run.save_every=0", *words]
    run = start(folder, *given, preexec_fn=default_signals, **streams)
    started.append(run)
    wait_until(lambda: num_steps(folder) >= 2, run)
    assert run.stderr is not None
    run.send_signal(signal.SIGINT)
    while INTERRUPTED not in (line := run.stderr.readline()):
        assert line, "it ended"
    run.send_signal(signal.SIGINT)
    assert run.wait(HANG_SECONDS) == 130
    assert "threefold train: stopped by SIGINT; checkpoints are as they were" in run.stderr.read()
    assert not list(folder.glob(f"{CHECKPOINTS}/step-*"))
