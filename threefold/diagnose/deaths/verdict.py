"""What a job died of, from the errors in all of its logs: the first one that says a cause, and how sure that is.

Errors are ordered by what they say (a cause before a symptom before what follows from a death), then by time. An
exception that no entry of the catalogue knows counts as a cause: a known one after it would be a wrong name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from threefold.diagnose.deaths.catalogue import Death
from threefold.diagnose.logs.scan import Scan
from threefold.diagnose.logs.sightings import Sighting, is_fatal
from threefold.units import format_bytes

Kind = Literal["fragmentation", "other process", "shortage", "unknown"]
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d{1,18}(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_PARTS = {
    "requested": (rf"Tried to allocate {_SIZE}",),
    "capacity": (rf"total capa?ci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total",),
}
_PHASES = (  # the innermost frame decides
    (r"optimizer\.step|adam|_step\b.*optim|step_with_ready_grads", "optimizer step"),
    (r"load_checkpoint|load_state_dict|dist_checkpointing|checkpointing\.py|dcp\.load", "checkpoint"),
    (r"custom_backward|run_backward|\.backward\(|autograd", "backward"),
    (r"forward_step|forward_backward|_forward|\.forward|_call_impl|forward\b", "forward"),
    (r"setup_model|get_model|model_provider|_apply|to_empty|init_weights|build_model", "building the model"),
)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes of one message; what it does not say is None."""

    requested: float | None = None
    capacity: float | None = None
    free: float | None = None
    process: float | None = None
    allocated: float | None = None
    unallocated: float | None = None  # reserved by PyTorch's allocator and held by no tensor
    phase: str = ""

    @property
    def kind(self) -> Kind:
        if self.requested is None or self.capacity is None:
            return "unknown"
        if self.unallocated is not None and self.unallocated >= self.requested:
            return "fragmentation"
        others = self.capacity - (self.free or 0.0) - self.process if self.process is not None else 0.0
        return "other process" if others > max(self.requested, 0.1 * self.capacity) else "shortage"

    def text(self) -> str:
        """What the numbers mean, in a sentence."""
        where = f" in {self.phase}" if self.phase else ""
        if self.requested is None:
            return f"ran out{where}" if where else ""
        asked = f"asked for {format_bytes(self.requested)}{where}"
        if self.kind == "fragmentation":
            return (
                f"{asked} while {format_bytes(self.unallocated or 0)} were reserved and held by no tensor: "
                "fragmentation, not a true shortage"
            )
        if self.kind == "other process":
            return f"{asked}; other processes hold much of the device: it is not this job's memory alone that is short"
        if self.allocated is None or self.capacity is None:
            return asked
        return (
            f"{asked} with {format_bytes(self.allocated)} allocated of {format_bytes(self.capacity)}: a true shortage"
        )

    def to_json(self) -> dict[str, Any]:
        names = ("requested", "capacity", "free", "process", "allocated", "unallocated")
        return {"kind": self.kind, "phase": self.phase} | {f"{name}_bytes": getattr(self, name) for name in names}


def read_shortage(text: str, frames: Sequence[str]) -> Shortage:
    values = {}
    for name, patterns in _PARTS.items():
        match = next((found for pattern in patterns if (found := re.search(pattern, text))), None)
        if match:
            values[name] = float(match[1]) * _UNITS[match[2]]
    reserved = values.pop("reserved", None)
    if reserved is not None and "allocated" in values and "unallocated" not in values:
        values["unallocated"] = reserved - values["allocated"]
    return Shortage(**values, phase=phase_of(frames))


def phase_of(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for pattern, phase in _PHASES:
            if re.search(pattern, frame, re.IGNORECASE):
                return phase
    return ""


Confidence = Literal["high", "medium", "low", "none"]
Status = Literal["died", "finished", "no death seen"]
_CAUSE, _SYMPTOM, _LINE, _AFTERMATH = range(4)
_VAGUE_LINES = 5  # a vague error gives way to one that says more and follows within so many lines
# What shells and their tools say about one command of a script: the script goes on, so it is no death by itself.
_SHELL_TOOL = re.compile(
    r"(?:/\S+/)?(?:rm|cp|mv|ln|ls|cat|mkdir|rmdir|chmod|chown|touch|tar|find|grep|sed|kill|df|du): "
)
_MEMORY = ("cuda-out-of-memory", "nccl-out-of-memory", "cublas-out-of-memory")


@dataclass
class Verdict:
    """The death of a job, with its evidence."""

    status: Status
    death: Death | None = None
    confidence: Confidence = "none"
    evidence: Sighting | None = None  # the line that names the death, or the first error
    first_error: Sighting | None = None  # where it is another one
    shortage: Shortage | None = None  # of device memory
    also: dict[str, set[int | None]] = field(default_factory=dict)  # other deaths -> ranks

    @property
    def slug(self) -> str:
        return self.death.slug if self.death else "unknown" if self.status == "died" else ""

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"status": self.status, "death": self.slug or None, "confidence": self.confidence}
        if self.death:
            value |= {name: getattr(self.death, name) for name in ("role", "cause", "confirm", "fix", "source")}
            value["fields"] = dict(self.death.fields)
        if self.shortage:
            value["memory"] = self.shortage.to_json()
        value["also"] = {slug: sorted(rank for rank in ranks if rank is not None) for slug, ranks in self.also.items()}
        return value


def judge(scans: Sequence[Scan]) -> Verdict:
    """The verdict on the logs of one job."""
    places = {scan.path.name: place for place, scan in enumerate(scans)}
    sightings = [one for scan in scans for one in scan.sightings]
    has_times = all(one.seconds is not None for one in sightings)
    root_ranks = {scan.root_rank for scan in scans} - {None}

    explained = {id(one) for one, other in pairwise(sightings) if _is_said_better(one, other)}

    def order(one: Sighting) -> tuple[float, ...]:
        time = (one.seconds or 0.0) if has_times and len(scans) > 1 else 0.0
        not_root = 0.0 if one.rank is not None and one.rank in root_ranks else 1.0
        line = one.line + (_VAGUE_LINES if id(one) in explained else 0)
        return (_weight(one), time, not_root if len(scans) > 1 and not has_times else 0.0, places[one.file], line)

    ranked = sorted(sightings, key=order)
    if not ranked or _is_normal_end(scans, ranked):
        return Verdict("finished" if _is_done(scans) else "no death seen")
    first = ranked[0]
    death = first.deaths[0] if first.deaths else None
    confidence = _confidence(first, ranked, len(scans) == 1 or has_times)
    found = Verdict("died", death, confidence, first)
    errors = [one for one in ranked if _weight(one) != _AFTERMATH]
    earliest = min(errors, key=lambda one: order(one)[1:], default=first)
    if death is None or death.role == "symptom":
        found.first_error = earliest if earliest is not first else None
    if death and death.slug in _MEMORY:
        found.shortage = read_shortage(first.text, first.frames)
    for one in ranked:
        for other in one.deaths[:1]:
            if death is None or other.slug != death.slug:
                found.also.setdefault(other.slug, set()).add(one.rank)
    return found


def _is_said_better(one: Sighting, following: Sighting) -> bool:
    """Whether an error says little, and the next one is of the same process and says more."""
    if not (one.deaths and one.deaths[0].is_vague and following.deaths and not following.deaths[0].is_vague):
        return False
    is_same = one.rank == following.rank or "what(): " in following.text
    return is_same and one.file == following.file and following.line - one.line < _VAGUE_LINES


def _weight(one: Sighting) -> int:
    """How much an error says: 0 most."""
    if one.deaths:
        if not one.is_exception and _SHELL_TOOL.match(one.text):
            return _LINE
        return {"cause": _CAUSE, "symptom": _SYMPTOM}.get(one.deaths[0].role, _AFTERMATH)
    if one.is_exception:
        return _CAUSE
    return _SYMPTOM if is_fatal(one.text) else _LINE


def _confidence(first: Sighting, ranked: Sequence[Sighting], is_ordered: bool) -> Confidence:
    if not first.deaths:
        return "none"
    if _weight(first) == _LINE or first.deaths[0].is_hinted:
        return "low"
    role = first.deaths[0].role
    if role == "cause":
        rivals = {one.deaths[0].slug if one.deaths else "" for one in ranked if _weight(one) == _CAUSE}
        is_sure = not first.deaths[0].is_vague and (is_ordered or len(rivals) == 1)
        return "high" if is_sure else "medium"
    return "medium" if role == "symptom" else "low"


def _is_done(scans: Sequence[Scan]) -> bool:
    return any(scan.is_finished or (scan.steps.total and scan.steps.last >= scan.steps.total) for scan in scans)


def _is_normal_end(scans: Sequence[Scan], ranked: Sequence[Sighting]) -> bool:
    """Whether the job ended as it should, and what follows are the noises of its end."""
    return _is_done(scans) and all(
        _weight(one) >= _LINE and not re.search(r"exitcode|failed", one.text) for one in ranked
    )
