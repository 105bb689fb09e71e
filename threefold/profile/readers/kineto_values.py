"""Values of a trace's arguments and headers, as far as they make sense: numbers, texts, ranks, devices, the capture.

`kineto.py` reads events with them.
"""

import json
import math
import re
from typing import Any

import numpy as np

from threefold.profile.trace import Capture, Collective, Device

_MAX_RANKS_TEXT = 100_000
_FIRST_EPOCH = 1e15  # microseconds since 1970 in 2001: a smaller time counts from the start of the machine


def numbers_of(values: list[Any]) -> Any:
    """Whole numbers of arguments, -1 for what is none."""
    try:
        return np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([number_of(value) for value in values], np.int64)


def number_of(value: Any) -> int:
    """A whole number from an argument; -1 where there is none. PyTorch's early releases wrote them as text."""
    if isinstance(value, int) and -(2**62) < value < 2**62:
        return value
    if isinstance(value, float) and math.isfinite(value) and abs(value) < 2**62:
        return int(value)
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdecimal():
        return int(value)
    return -1


def text_of(value: Any) -> str:
    return "" if value is None else str(value)[:200]


def ranks_of(value: Any) -> tuple[int, ...]:
    """The ranks of a process group, a list or its text; empty where the text was shortened."""
    if isinstance(value, str) and len(value) <= _MAX_RANKS_TEXT and re.fullmatch(r"\[[\d, ]*\]", value):
        return tuple(int(word) for word in re.findall(r"\d{1,9}", value))
    if isinstance(value, list) and all(isinstance(rank, int) for rank in value):
        return tuple(value)
    return ()


def from_headers(headers: dict[str, Any]) -> tuple[dict[str, Any], int | None, dict[str, Collective]]:
    """Properties of devices by id, the rank, and the process groups by name, as far as they make sense."""
    properties, info = headers.get("deviceProperties"), headers.get("distributedInfo")
    devices = {
        str(one["id"]): one
        for one in (properties if isinstance(properties, list) else [])
        if isinstance(one, dict) and "id" in one
    }
    info = info if isinstance(info, dict) else {}
    rank, listed = info.get("rank"), info.get("pg_config")
    if isinstance(listed, str) and len(listed) < 2**20:  # some releases write the list as text
        try:
            listed = json.loads(listed)
        except (ValueError, RecursionError):
            listed = None
    groups = {}
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict):
            name, said = text_of(one.get("pg_name")), text_of(one.get("pg_desc"))
            size = max(0, number_of(one.get("pg_size")))
            groups[name] = Collective("", name, said, ranks_of(one.get("ranks")), size)
    return devices, rank if isinstance(rank, int) and not isinstance(rank, bool) else None, groups


def device_of(key: Any, properties: Any) -> Device:
    known = properties if isinstance(properties, dict) else {}
    return Device(f"gpu {key}", text_of(known.get("name")), max(0, number_of(known.get("totalGlobalMem"))))


def capture_of(headers: dict[str, Any], first_microsecond: float) -> Capture:
    """What the headers say about the recording."""
    base, info = headers.get("baseTimeNanoseconds"), headers.get("distributedInfo")
    since = base if isinstance(base, int) and not isinstance(base, bool) else 0
    known = info if isinstance(info, dict) else {}
    size, is_absolute = known.get("world_size"), since > 0 or first_microsecond > _FIRST_EPOCH
    return Capture(
        profiler="PyTorch's profiler" if "schemaVersion" in headers else "",
        host=text_of(headers.get("host_name")),
        world_size=size if isinstance(size, int) and size > 0 else None,
        rank_source="trace" if isinstance(known.get("rank"), int) else "",
        epoch_nanoseconds=since + round(1e3 * first_microsecond) if is_absolute else None,
        call_stack_rate=1.0 if headers.get("with_stack") == 1 else None,
    )
