"""What a message about missing device memory says: how much was asked for, held and free, and in which phase."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
