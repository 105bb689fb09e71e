"""What Megatron says of an export: accepted, refused with the file and line that refused it, or not judged.

An error is Megatron's verdict only where Megatron's own code, the exported script or the language raised it. An error
that stands on a stand-in, in another package, or on a limit says nothing about the plan.
"""

import json
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACCEPTED, REFUSED, NOT_JUDGED = "accepted", "refused", "not judged"
EXIT_CODES = {ACCEPTED: 0, REFUSED: 1, NOT_JUDGED: 3}
STAND_IN = "stand_in_for_"  # how the names of all stand-ins begin, so that a message shows them

_MEGATRON = re.compile(r".*[/\\](megatron[/\\](?:bridge|core|training)[/\\].*)")
_READERS = ("omegaconf", "hydra")  # packages that read overrides for Megatron: what they refuse, it refuses
# Torch in compiled code, where Python shows the line of Megatron that called it: no memory, no data, or no GPU.
_NO_DEVICE = re.compile(r"can't allocate memory|meta tensor|meta device|'meta'|CUDA|NVIDIA driver|no kernel", re.I)


@dataclass
class Verdict:
    """The verdict on one rank."""

    kind: str = ACCEPTED
    stage: str = ""  # where it came to: recipe, config, groups, ...
    error: str = ""  # the exception's name
    message: str = ""
    where: str = ""  # file and line inside Megatron
    rank: int = 0
    values: dict[str, Any] = field(default_factory=dict)  # fields of the plan as Megatron ended up with them
    stand_ins: list[str] = field(default_factory=list)

    def line(self) -> str:
        if self.kind == ACCEPTED:
            return f"rank {self.rank}: accepted"
        place = f" at {self.where}" if self.where else ""
        return f"rank {self.rank}: {self.kind} in {self.stage}{place}: {self.error}: {self.message}"


class NotJudgedError(Exception):
    """Raised where judging stops for a reason that is not the plan's."""


def verdict_of(error: BaseException, stage: str, script: str) -> Verdict:
    """`script` is the exported one: what it gets wrong is a refusal too."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((place for frame in reversed(frames) if (place := _place(frame))), "")
    message = re.sub(r"\s+", " ", str(error)).strip()
    if not message and frames:  # a bare `assert`: its source line
        message = frames[-1].line or ""
    kind = REFUSED if frames and _is_megatrons(error, message, frames[-1], script) else NOT_JUDGED
    return Verdict(kind, stage, type(error).__name__, message[:600], where)


def _place(frame: traceback.FrameSummary) -> str:
    found = _MEGATRON.fullmatch(frame.filename)
    return f"{found[1]}:{frame.lineno}" if found else ""


def _is_megatrons(error: BaseException, message: str, raised: traceback.FrameSummary, script: str) -> bool:
    """Whether an error is a verdict, from its kind and the innermost frame."""
    if isinstance(error, ImportError):  # a module of Megatron that is missing was named wrongly by the export
        return "megatron." in message and STAND_IN not in message
    if isinstance(error, NotJudgedError | MemoryError | OSError | RecursionError):
        return False
    if isinstance(error, AttributeError | TypeError | NameError) and _meets_stand_in(error, message, raised):
        return False
    is_said = (raised.line or "").startswith(("raise", "assert"))
    if isinstance(error, RuntimeError) and not is_said and _NO_DEVICE.search(message):
        return False
    return bool(_place(raised)) or raised.filename == script or _is_language(raised.filename)


def _meets_stand_in(error: Exception, message: str, raised: traceback.FrameSummary) -> bool:
    """Whether an attribute or type error may be a gap of a stand-in: on its object, in its code, or next to it.

    Megatron raises errors of constructors once more, with a longer message and without their object.
    """
    earlier: BaseException | None = error
    while earlier is not None:
        owner = getattr(earlier, "obj", None)
        names = (getattr(owner, "__name__", ""), type(owner).__name__, message)
        if any(STAND_IN in str(name) for name in names) or hasattr(type(owner), "is_stand_in"):
            return True
        earlier = earlier.__context__
    return "core/extensions/" in raised.filename.replace("\\", "/")


def _is_language(file: str) -> bool:
    """Python's own library (argparse, enum, dataclasses), or a package that reads overrides."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _READERS
    return file.startswith("<") or Path(json.__file__).parent.parent in Path(file).parents


def summary(job: dict[str, Any], ranks: list[dict[str, Any]], versions: dict[str, str]) -> dict[str, Any]:
    """The verdict on an export: the worst of its ranks, and the values that differ from the plan."""
    kinds = [rank["kind"] for rank in ranks]
    kind = next((kind for kind in (REFUSED, NOT_JUDGED) if kind in kinds), kinds[0])
    values: dict[str, Any] = next((rank["values"] for rank in ranks if rank["values"]), {})
    differing = {
        name: [wanted, values[name]]
        for name, wanted in job["expected"].items()
        if name in values and values[name] != wanted
    }
    used = sorted({name for rank in ranks for name in rank["stand_ins"]})
    device = job["device"]["name"]
    stood_in = [
        *used,
        f"{device} (its properties)",
        f"{job['gpus']} ranks (torch's fake process group)",
        *(f"config.json of {name} (written from the plan)" for name in job["configs"]),
    ]
    remark = ""
    wanted = {"core": job["core"], "bridge": job["bridge"]}
    # Megatron adds the commit of the folder that it runs in, after a plus sign.
    versions = {part: version.partition("+")[0] for part, version in versions.items()}
    if any(versions.get(part, wanted[part]) != wanted[part] for part in wanted):
        has = ", ".join(f"{part} {version}" for part, version in versions.items())
        remark = f"the export is for bridge {job['bridge']} with core {job['core']}; judged by {has}"
    return {
        "stack": job["stack"],
        "verdict": kind,
        "ranks": ranks,
        "differs": differing,
        "stood_in": stood_in,
        "remark": remark,
    }


def summary_text(found: dict[str, Any]) -> str:
    lines = [f"{found['stack']}: {found['verdict']}"]
    lines += [f"  {Verdict(**rank).line()}" for rank in found["ranks"]]
    lines += [f"  {found['remark']}"] if found["remark"] else []
    for name, (wanted, value) in found["differs"].items():
        lines.append(f"  {name}: the plan says {wanted}, Megatron ends up with {value}")
    if found["verdict"] == NOT_JUDGED:
        lines.append("  Nothing is known of the plan: this says what kept Megatron from judging it.")
    if found["stood_in"]:
        lines.append(f"  stood in for: {', '.join(found['stood_in'])}")
    return "\n".join(lines) + "\n"
