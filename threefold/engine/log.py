"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere, TensorBoard beside."""

import errno
import os
import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from threefold.units import format_bytes


class _Nowhere(StringIO):
    """Forgets what is written: for ranks that do not speak."""

    def write(self, text: str) -> int:
        return len(text)


NOWHERE = _Nowhere()
_GONE = (errno.EPIPE, errno.EIO)  # of a pipe that its reader closed, of a terminal


def write_to(out: TextIO | None, text: str) -> None:
    """Write it now, if it can be written: that nobody reads a run any more is no reason to lose it.

    Where the reader is gone, all that is written there later goes nowhere, also by others and when Python ends.
    """
    if out is None:  # started without one
        return
    try:
        out.write(text)
        out.flush()
    except OSError as error:
        if error.errno in _GONE:
            _send_nowhere(out)


def _send_nowhere(out: TextIO) -> None:
    with suppress(OSError):  # it has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)


class Progress:
    """Loss, speed, memory and the time left, rewritten in place on a terminal."""

    def __init__(self, steps: int, out: TextIO | None = None) -> None:
        self.steps, self.out = steps, out or sys.stderr or NOWHERE
        self.live = self.out.isatty()
        self.began = time.monotonic()
        self.first: int | None = None

    def show(self, step: int, values: dict[str, Any]) -> None:
        self.first = step if self.first is None else self.first
        done = step + 1 - self.first
        left = (time.monotonic() - self.began) / done * (self.steps - step - 1)
        line = (
            f"step {step + 1}/{self.steps}  loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{values['tflops']:.2f} TFLOP/s  {format_bytes(values['memory_bytes'])}  {_clock(left)} left"
        )
        write_to(self.out, f"\r\033[K{line}" if self.live else f"{line}\n")

    def say(self, text: str) -> None:
        write_to(self.out, f"\r\033[K{text}\n" if self.live else f"{text}\n")

    def close(self) -> None:
        if self.live:
            write_to(self.out, "\n")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Board:
    """TensorBoard and Weights & Biases, where asked for and installed."""

    def __init__(self, folder: Path, tensorboard: bool, wandb: str | None, config: dict[str, Any], say: Any) -> None:
        self._say = say
        self._writer: Any = None
        self._wandb: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(folder / "tensorboard"))
            except ImportError:
                say("TensorBoard is not installed: metrics.jsonl alone is written (pip install tensorboard)")
        if wandb:
            try:
                import wandb as service

                self._wandb = service.init(project=wandb, dir=str(folder), config=config, resume="allow")
            except ImportError:
                say("wandb is not installed: nothing is sent (pip install wandb)")

    def write(self, step: int, values: dict[str, Any]) -> None:
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float)}
        try:
            for name, value in scalars.items() if self._writer else ():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._writer = None
            self._say(f"TensorBoard is not written any more: {error}")
        if self._wandb:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        if self._writer:
            with suppress(OSError):  # as the last values may be on a full disk
                self._writer.close()
        if self._wandb:
            self._wandb.finish()
