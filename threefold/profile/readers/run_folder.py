"""Reads what a run wrote about itself: its traces, its plan, step times, peak memory and expert loads.

The folder is that of `threefold train` (docs/reference/run-folder.md); `profile/` in it holds one trace a rank.
Memory snapshots beside them (`memory-N.pickle`) are read by `threefold diagnose`.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from threefold.cost.layer_work import expert_skew
from threefold.findings import FindingsError
from threefold.plan.file import read_plan
from threefold.plan.load import ROUTING
from threefold.plan.plan import Plan
from threefold.profile.readers.text_stream import unreadable
from threefold.safe_files import check_inside, open_regular, read_json, read_lines

PLAN, METRICS, LOADS, PROFILE = "plan.toml", "metrics.jsonl", "loads.json", "profile"
# JSON files that runs write; the last two those of a checkpoint that was finetuned.
NO_TRACES = ("contract.json", LOADS, ROUTING, "effects.json", "base.json", "hf_config.json")
TRACE_SUFFIXES = (".json", ".json.gz", ".sqlite")
MAX_STEPS = 100_000  # of the metrics that are in memory: the last ones
MAX_TRACES = 4096
PARTS = ("encoder", "projector", "decoder")  # of a vision-language model, each with a column of seconds


@dataclass(frozen=True, slots=True)
class RunLog:
    """What the run's own files say; None where they say nothing."""

    step_seconds: float | None = None  # median of the logged steps behind the warm-up
    num_steps: int = 0
    peak_bytes: int | None = None  # of the rank that uses most
    expert_imbalance: float | None = None  # load of the busiest expert rank over the mean, worst layer
    busiest_expert: float | None = None  # load of the busiest expert over the mean, worst layer
    mfu: float | None = None
    step_lengths: dict[int, float] = field(default_factory=dict)  # seconds of each logged step, by its number
    part_seconds: dict[str, float] = field(default_factory=dict)  # of encoder, projector and decoder in that step


def find_traces(folder: Path) -> list[Path]:
    """The traces of a run, or of a folder that holds nothing but traces, by rank."""
    places = [folder / PROFILE, folder] if (folder / PROFILE).is_dir() else [folder]
    found: list[Path] = []
    for place in places:
        try:
            found = [path for path in place.iterdir() if path.name.endswith(TRACE_SUFFIXES) and _is_trace(path, place)]
        except OSError as error:
            raise unreadable(place, f"cannot be listed: {error.strerror or error}") from None
        if found:
            break
    if not found:
        advice = "record one with `threefold train PLAN --profile`, or give a trace file"
        raise unreadable(folder, "the folder holds no trace (profile/rank-*.json.gz)", advice)
    if len(found) > MAX_TRACES:
        raise unreadable(folder, f"the folder holds more than {MAX_TRACES} traces", "give one of them")
    for path in found:
        try:
            check_inside(path, folder)
        except OSError as error:
            raise unreadable(path, str(error), "copy the file into the folder") from None
    return sorted(found, key=_by_rank)


def _is_trace(path: Path, place: Path) -> bool:
    """Beside other files of a run only traces of ranks count."""
    return path.name not in NO_TRACES and (place.name != PROFILE or "memory" not in path.name)


def _by_rank(path: Path) -> tuple[int, str]:
    digits = "".join(letter for letter in path.name.partition(".")[0] if letter.isdigit())
    return (int(digits[:9]) if digits else -1, path.name)


def read_run(folder: Path) -> tuple[Plan | None, RunLog]:
    """The plan of a run and what its logs say. A plan that cannot be read is none: `check` explains it."""
    plan = None
    try:
        open_regular(folder / PLAN, within=folder).close()
        plan = read_plan(str(folder / PLAN)).plan
    except (OSError, FindingsError):
        plan = None
    lines = _metrics(folder)
    timed = [line for line in lines if _is_positive(line.get("seconds"))]
    seconds = [line["seconds"] for line in timed]
    behind_warm_up = timed[min(6, len(timed) // 2) :]
    steady = sorted(line["seconds"] for line in behind_warm_up)
    peaks = [line["memory_bytes"] for line in lines if _is_positive(line.get("memory_bytes"))]
    mfu = [line["mfu"] for line in lines if _is_positive(line.get("mfu"))]
    return plan, RunLog(
        step_seconds=steady[len(steady) // 2] if steady else None,
        num_steps=len(seconds),
        peak_bytes=int(max(peaks)) if peaks else None,
        expert_imbalance=_imbalance(folder, plan.layout.ep if plan else 1),
        busiest_expert=_imbalance(folder, 1),
        mfu=mfu[-1] if mfu else None,
        step_lengths={int(line["step"]): line["seconds"] for line in timed if _is_positive(line.get("step"))},
        part_seconds=_part_seconds(behind_warm_up),
    )


def _part_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each part over these steps; empty for a run that did not measure them."""
    columns: dict[str, list[Any]] = {part: [line.get(f"{part}_seconds") for line in lines] for part in PARTS}
    is_known = all(_is_positive(value) or value == 0 for column in columns.values() for value in column)
    return {part: float(statistics.median(column)) for part, column in columns.items()} if lines and is_known else {}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics that are whole, of the last steps."""
    try:
        lines = deque(read_lines(folder / METRICS, within=folder), MAX_STEPS)
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            values = msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError, ValueError):  # a line that a kill cut off
            continue
        if isinstance(values, dict):
            found.append(values)
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _imbalance(folder: Path, ep: int) -> float | None:
    """The worst layer's load of the busiest expert rank, or of the busiest expert without EP, over the mean."""
    try:
        loads = read_json(folder / LOADS, within=folder)
    except (OSError, ValueError):
        return None
    layers = loads if isinstance(loads, list) else []
    skews = []
    for layer in layers:
        if isinstance(layer, list) and layer and all(_is_positive(one) or one == 0 for one in layer) and sum(layer):
            ranks = ep if ep > 1 and len(layer) % ep == 0 else len(layer)
            skews.append(expert_skew([one / sum(layer) for one in layer], ranks))
    return max(skews, default=None)
