"""Lines of single steps: which system wrote them, and their numbers as columns.

A parser is made from the first line of its form and remembers where each number stands, so that the next one costs a
split and a few conversions. When a column is full, every second entry is dropped, so that memory stays bounded.
"""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

System = Literal["megatron", "torchtitan", "threefold"]
NUMBERS = ("step", "seconds", "tflops", "loss", "grad_norm", "memory_percent", "tokens_per_second", "balance")
_MOST_STEPS = 2**19
_NAN = float("nan")
_MEGATRON_FIELDS = {
    b"elapsed time per iteration (ms)": "seconds",
    b"throughput per GPU (TFLOP/s/GPU)": "tflops",
    b"throughput (TFLOP/s/GPU)": "tflops",
    b"lm loss": "loss",
    b"loss": "loss",
    b"reduced_train_loss": "loss",
    b"grad norm": "grad_norm",
    b"load_balancing_loss": "balance",
    b"seq_load_balancing_loss": "balance",
    b"global_load_balancing_loss": "balance",
}
_ITERATION = re.compile(rb"iteration\s+(\d{1,15})\s*/\s*(\d{1,15}|infinity)\s*\|")
_SKIPPED = re.compile(rb"number of skipped iterations:\s*(\d{1,9})")
_TITAN = re.compile(
    rb"step:\s*(?P<step>\d{1,15})\s+loss:\s*(?P<loss>\S+)(?:\s+grad_norm:\s*(?P<grad_norm>\S+))?"
    rb"\s+memory:\s*(?P<memory>[\d.]+)GiB\((?P<memory_percent>[\d.]+)%\)\s+tps:\s*(?P<tokens_per_second>[\d,]+)"
    rb"(?:\s+tflops:\s*(?P<tflops>[\d,.]+))?(?:\s+mfu:\s*(?P<mfu>[\d.]+)%)?"
)
_OURS = re.compile(
    rb"step (?P<step>\d{1,15})/(?P<total>\d{1,15})  loss (?P<loss>\S+)  grad norm (?P<grad_norm>\S+)  lr \S+  "
    rb"(?P<tokens_per_second>[\d,]+) tokens/s.*?  (?P<tflops>\S+) TFLOP/s a rank"
)


@dataclass
class Steps:
    """The steps of one log, as columns of equal length; a number that a line lacks is NaN."""

    system: System | None = None
    columns: dict[str, "array[float]"] = field(default_factory=lambda: {name: array("d") for name in NUMBERS})
    total: int | None = None  # steps that the run was asked for
    stride: int = 1  # of the lines, how many stand for one entry
    num_read: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    first_nan: int | None = None
    attempt_starts: list[int] = field(default_factory=list)  # entries at which the count of steps went back
    last: int = -1
    capacity_gib: float | None = None
    max_gib: float = 0.0

    def add(self, values: dict[str, float]) -> None:
        step = int(values["step"])
        if step <= self.last:
            self.attempt_starts.append(len(self.columns["step"]))
        self.last = step
        self.num_read += 1
        loss, norm = values.get("loss", 0.0), values.get("grad_norm", 0.0)
        if not (abs(loss) < float("inf") and abs(norm) < float("inf")):
            self.num_nan += 1
            self.first_nan = step if self.first_nan is None else self.first_nan
        if self.num_read % self.stride:
            return
        for name, column in self.columns.items():
            column.append(values.get(name, _NAN))
        if len(self.columns["step"]) >= _MOST_STEPS:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self.attempt_starts = [start // 2 for start in self.attempt_starts]
            self.stride *= 2


Parser = Callable[[bytes, Steps], bool]  # of a line; False where it is of another form


class MegatronParser:
    """Reads lines of Megatron-LM and Megatron Bridge that have the fields of the one that it was made from."""

    def __init__(self, line: bytes) -> None:
        parts = line.split(b"|")
        self.places = [
            (place, name)
            for place, part in enumerate(parts)
            if (name := _MEGATRON_FIELDS.get(part.rpartition(b":")[0].strip()))
        ]
        self.has_skipped = b"number of skipped iterations" in line

    def __call__(self, line: bytes, steps: Steps) -> bool:
        match = _ITERATION.search(line)
        if match is None:
            return False
        parts = line.split(b"|")
        values = {"step": float(match[1])}
        try:
            for place, name in self.places:
                values[name] = float(parts[place].rpartition(b":")[2])
        except (ValueError, IndexError):
            return False
        if "seconds" in values:
            values["seconds"] /= 1000
        steps.system = "megatron"
        if steps.total is None and match[2].isdigit():
            steps.total = int(match[2])
        if self.has_skipped and (skipped := _SKIPPED.search(line)):
            steps.num_skipped += int(skipped[1])
        steps.add(values)
        return True


def _by_names(pattern: re.Pattern[bytes], system: System, line: bytes, steps: Steps) -> bool:
    match = pattern.search(line)
    if match is None:
        return False
    named = {name: text.replace(b",", b"") for name, text in match.groupdict().items() if text}
    try:
        values = {name: float(text) for name, text in named.items()}
    except ValueError:
        return False
    steps.system = system
    if "total" in values:
        steps.total = int(values["total"])
    if "memory" in values:
        steps.max_gib = max(steps.max_gib, values["memory"])
        if values.get("memory_percent"):
            steps.capacity_gib = values["memory"] * 100 / values["memory_percent"]
    steps.add(values)
    return True


def titan_parser(line: bytes, steps: Steps) -> bool:
    return _by_names(_TITAN, "torchtitan", _uncolored(line), steps)


def own_parser(line: bytes, steps: Steps) -> bool:
    return _by_names(_OURS, "threefold", line, steps)


def _uncolored(line: bytes) -> bytes:
    return re.sub(rb"\x1b\[[0-9;]*m", b"", line) if b"\x1b" in line else line


def parser_for(line: bytes) -> Parser | None:
    """The parser of a line that reports a step, or None where it reports none."""
    if b"iteration" in line and b"|" in line and _ITERATION.search(line):
        return MegatronParser(line)
    if b"tps:" in line and _TITAN.search(_uncolored(line)):
        return titan_parser
    return own_parser if b" TFLOP/s a rank" in line and _OURS.search(line) else None
