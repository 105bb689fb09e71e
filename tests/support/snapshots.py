"""Memory snapshots of known content, in the format that `torch.cuda.memory._dump_snapshot` writes."""

import pickle
from pathlib import Path
from typing import Any

Frames = list[dict[str, Any]]


def frames(*places: str) -> Frames:
    """Stacks as torch writes them, the innermost first: "path/file.py:12 name"."""
    found = []
    for place in places:
        where, _, name = place.partition(" ")
        file, _, line = where.rpartition(":")
        found.append({"name": name, "filename": file, "line": int(line)})
    return found


class SnapshotFile:
    """Records events of one device, and the segments that they lead to."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, Frames]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.reserved: dict[int, int] = {}
        self.at = 1_000_000

    def record(self, action: str, address: int, size: int, stack: Frames, **more: Any) -> None:
        self.at += 1000
        said = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.at, "frames": stack}
        self.events.append({**said, **more})

    def segment(self, address: int, size: int, is_recorded: bool = True) -> None:
        self.reserved[address] = size
        if is_recorded:
            self.record("segment_alloc", address, size, [])

    def alloc(self, address: int, size: int, stack: Frames, is_recorded: bool = True) -> None:
        self.live[address] = (size, stack)
        if is_recorded:
            self.record("alloc", address, size, stack)

    def free(self, address: int, is_completed: bool = True) -> None:
        size, stack = self.live[address]
        self.record("free_requested", address, size, stack)
        if is_completed:
            self.live.pop(address)
            self.record("free_completed", address, size, stack)

    def oom(self, size: int, free: int) -> None:
        self.record("oom", 0, size, [], device_free=free)

    def step(self, name: str, stage: str) -> None:
        self.annotations.append({"device": 0, "name": name, "stage": stage, "time_us": self.at + 1})
        self.at += 2

    def content(self) -> dict[str, Any]:
        segments = []
        for start, total in self.reserved.items():
            blocks, at = [], start
            for address in sorted(one for one in self.live if start <= one < start + total):
                if address > at:
                    blocks.append(_block(at, address - at, "inactive", []))
                size, stack = self.live[address]
                blocks.append(_block(address, size, "active_allocated", stack))
                at = address + size
            if at < start + total:
                blocks.append(_block(at, start + total - at, "inactive", []))
            used = sum(block["size"] for block in blocks if block["state"] != "inactive")
            same = {"device": 0, "stream": 0, "segment_type": "large", "frames": []}
            sizes = {"total_size": total, "allocated_size": used, "active_size": used}
            segments.append({**same, **sizes, "address": start, "blocks": blocks})
        return {
            "segments": segments,
            "device_traces": [self.events],
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": self.annotations,
        }

    def write(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self.content()))
        return path


def _block(address: int, size: int, state: str, stack: Frames) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": stack}
