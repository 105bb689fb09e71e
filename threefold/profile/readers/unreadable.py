"""The finding about a trace that cannot be read, and the limits that a trace must keep."""

from pathlib import Path

from threefold.findings import Finding, FindingsError

MAX_TRACE_BYTES = 2**36  # 64 GiB of JSON after decompression
MAX_RATIO = 300  # of decompressed to compressed bytes; traces reach 40
MIN_BOMB_BYTES = 2**28  # a small file may compress as well as it likes
MAX_EVENT_BYTES = 2**26  # 64 MiB; a real event has some kilobytes
MAX_EVENTS = 40_000_000  # events that are kept
MAX_NAMES = 2_000_000  # different names of kernels, operators and annotations

RULE = "trace-readable"
ADVICE = "record the trace again, and let the profiler finish writing it"


def unreadable(path: Path, problem: str, advice: str = ADVICE) -> FindingsError:
    """The one finding about a trace that is damaged, hostile or of no known kind."""
    return FindingsError([Finding(rule=RULE, at=str(path), problem=problem, advice=advice)])
