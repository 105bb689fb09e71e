"""Signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal is gone). This module imports no torch.

`cli/main.py` enters `end_at_once` before it imports anything that takes time. `train.py` enters `stop_between_steps`
for its loop, and the agent installs handlers that forward signals to its ranks. A signal that is ignored when the
process starts, as SIGHUP is under nohup, stays ignored.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_CODE = 128  # shells add the number of the signal to it
INTERRUPTED = "stopping after this step, saving; Ctrl-C again ends the run at once, without saving\n"
Handler = Callable[[int, FrameType | None], Any]


def stop_message(number: int) -> str:
    """The message where a signal ended a run outside of its loop, or a second Ctrl-C anywhere."""
    return f"threefold train: stopped by {signal.Signals(number).name}; checkpoints are as they were\n"


def block_stop_signals() -> None:
    """Let signals wait in a rank that starts, until `end_at_once` can handle them. Runs between fork and exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def end_at_once() -> Iterator[None]:
    """Inside the block a signal ends the process with one line and the shell's exit code.

    A run that starts has nothing to save. An exception in place of the exit could arrive anywhere in an import, and
    there it becomes a traceback or is lost.
    """
    with install_handlers(dict.fromkeys(STOP_SIGNALS, _exit_now)):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield


@contextmanager
def stop_between_steps(ask_to_stop: Callable[[], None]) -> Iterator[None]:
    """Inside the block signals call `ask_to_stop`; a second SIGINT (Ctrl-C) ends the process at once."""
    interrupts = 0

    def ask(number: int, frame: FrameType | None) -> None:
        ask_to_stop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            _exit_now(number, frame)
        _say_interrupted()
        ask_to_stop()

    handlers: dict[signal.Signals, Handler] = {signal.SIGTERM: ask, signal.SIGHUP: ask}
    if signal.getsignal(signal.SIGINT) is _exit_now:  # a program that calls `train` may have its own handler
        handlers[signal.SIGINT] = interrupt
    with install_handlers(handlers):
        yield


def _say_interrupted() -> None:
    """Answer the first Ctrl-C, on the first rank. Python's streams are passed by: the signal may fall into a print."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, INTERRUPTED.encode())


def _exit_now(number: int, frame: FrameType | None) -> None:
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # the agent of several ranks says it once
        with suppress(OSError):
            os.write(2, stop_message(number).encode())
    os._exit(SIGNAL_CODE + number)


@contextmanager
def install_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install handlers inside the block, except for signals that are ignored."""
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not in the main thread: the caller handles signals
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
