"""Progress of a run for people: a live line on a terminal, plain lines elsewhere, TensorBoard, Weights & Biases.

`engine/train.py` writes to it after every step. Ranks other than the first print to `NULL_STREAM`.
"""

import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from threefold.launch.output import write_and_flush
from threefold.units import format_bytes


class _NullStream(StringIO):
    """Discards what is written, for ranks that print nothing."""

    def write(self, text: str) -> int:
        return len(text)


NULL_STREAM = _NullStream()


class Progress:
    """Loss, speed, memory and the time left, rewritten in place on a terminal."""

    def __init__(self, steps: int, out: TextIO | None = None) -> None:
        self.steps, self.out = steps, out or sys.stderr or NULL_STREAM
        self.live = self.out.isatty()
        self.began = time.monotonic()
        self.first_step: int | None = None  # of this process

    def show(self, step: int, values: dict[str, Any]) -> None:
        """Show a step; the first one of a run has the number 1, as in `metrics.jsonl`."""
        self.first_step = step if self.first_step is None else self.first_step
        done = step + 1 - self.first_step
        left = (time.monotonic() - self.began) / done * (self.steps - step)
        line = (
            f"step {step}/{self.steps}  loss {values['loss']:.4f}  grad norm {values['grad_norm']:.3g}  "
            f"lr {values['lr']:.3g}  {_speed(values)}  {format_bytes(values['memory_bytes'])}  {_clock(left)} left"
        )
        write_and_flush(self.out, f"\r\033[K{line}" if self.live else f"{line}\n")

    def say(self, text: str) -> None:
        write_and_flush(self.out, f"\r\033[K{text}\n" if self.live else f"{text}\n")

    def close(self) -> None:
        if self.live:
            write_and_flush(self.out, "\n")


def _speed(values: dict[str, Any]) -> str:
    """Tokens, images and FLOPs per second. Padding is named where there is some, MFU where the peak is known."""
    tokens, useful = values["tokens_per_second"], values["useful_tokens_per_second"]
    of_them = f" ({useful:,.0f} useful)" if useful < tokens else ""
    mfu = f"  MFU {values['mfu']:.1%} of {values['mfu_peak']}" if "mfu" in values else ""
    images = f"  {values['images_per_second']:,.1f} images/s" if "images_per_second" in values else ""
    return f"{tokens:,.0f} tokens/s{of_them}{images}  {values['tflops_per_gpu']:.3g} TFLOP/s a rank{mfu}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ExperimentTrackers:
    """Sends metrics to TensorBoard and Weights & Biases, where the plan asks for them and they are installed."""

    def __init__(self, folder: Path, tensorboard: bool, wandb: str | None, config: dict[str, Any], say: Any) -> None:
        self._say = say
        self._writer: Any = None
        self._wandb: Any = None
        self._texts: dict[str, str] = {}  # written already
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

    @property
    def is_used(self) -> bool:
        return self._writer is not None or self._wandb is not None

    def write(self, step: int, values: dict[str, Any]) -> None:
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float)}
        texts = {
            name: value for name, value in values.items() if isinstance(value, str) and self._texts.get(name) != value
        }
        self._texts |= texts  # such as the peak of MFU, which does not change from step to step
        try:
            for name, text in texts.items() if self._writer else ():
                self._writer.add_text(name, text, step)
            for name, value in scalars.items() if self._writer else ():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._writer = None
            self._say(f"TensorBoard is not written any more: {error}")
        if self._wandb:
            self._wandb.config.update(texts, allow_val_change=True)
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        if self._writer:
            with suppress(OSError):  # the disk may be full
                self._writer.close()
        if self._wandb:
            self._wandb.finish()
