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
from threefold.diagnose.deaths.memory_shortage import Shortage, read_shortage
from threefold.diagnose.logs.scan import Scan
from threefold.diagnose.logs.sightings import Sighting, is_fatal

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
    is_same = "what(): " in following.text or (one.rank is not None and one.rank == following.rank)
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
