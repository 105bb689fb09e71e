"""Dumps of PyTorch's flight recorder: a ring of the last collectives of one rank, as a pickle or as JSON.

The pickle is read as plain data (`inert_pickle.py`); nothing in it is imported or called. NCCL says of each
call whether it was scheduled, started or completed; gloo leaves `scheduled` there and marks a call as retired when it
is over. The rank is the number at the end of the file's name, which is where PyTorch writes it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.diagnose.files import open_content
from threefold.inert_pickle import read_inert
from threefold.safe_files import parse_json

MAX_DUMP_BYTES = 2**27  # 128 MiB; a ring of 20,000 calls with their stacks has some 40
_LIBRARY = re.compile(r"(?:^|/)torch/|<frozen|<string>|/threading\.py|/contextlib\.py")


@dataclass(frozen=True, slots=True)
class Call:
    """One entry of the ring: a collective or a point-to-point call that a rank started."""

    group: str
    number: int  # among the calls of its sort on its group, from 1
    operation: str  # such as all_reduce
    peers: tuple[int, int] | None  # ranks in the group from which and to which a point-to-point call sends
    input_sizes: tuple[Any, ...]
    output_sizes: tuple[Any, ...]
    is_over: bool
    has_started: bool  # on the device
    created_ns: int
    where: str  # the innermost source line that is not PyTorch's

    def __str__(self) -> str:
        return f"{self.operation} number {self.number}"


@dataclass(frozen=True, slots=True)
class Dump:
    """The ring of one rank."""

    rank: int
    calls: tuple[Call, ...]  # in the order in which they were started
    groups: Mapping[str, tuple[int, ...]]  # ranks of each group, where the backend says them
    descriptions: Mapping[str, str]


def read_dump(path: Path, rank: int = 0) -> Dump:
    """Read a dump. Raises OSError or ValueError where it is none. `rank` counts where the file's name has no number."""
    with open_content(path) as file:
        content = file.read(MAX_DUMP_BYTES + 1)
    if len(content) > MAX_DUMP_BYTES:
        raise ValueError(f"it has more than {MAX_DUMP_BYTES} bytes, too many for a dump of one rank")
    value = read_inert(content, lambda name: False, "a dump") if content[:1] == b"\x80" else parse_json(content)
    named = rank_of(path)
    try:
        return _dump(value, rank if named is None else named)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"it is no flight recorder dump that is known: {type(error).__name__}") from None


def rank_of(path: Path) -> int | None:
    """The rank in a file's name: the number behind `rank`, or the last one."""
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name if path.suffix else path.name
    found = re.findall(r"rank[-_.]?(\d{1,7})", path.name) or re.findall(r"(\d{1,7})(?=\D*$)", name)
    return int(found[-1]) if found else None


def _dump(value: Any, rank: int) -> Dump:
    groups, descriptions = {}, {}
    for name, entry in (value.get("pg_config") or {}).items():
        ranks = tuple(int(text) for text in re.findall(r"\d+", str(entry.get("ranks", ""))))
        if ranks:
            groups[str(name)] = ranks
        descriptions[str(name)] = str(entry.get("desc", ""))
    calls = []
    for entry in value["entries"]:
        group, description = (str(part) for part in entry["process_group"])
        descriptions.setdefault(group, description)
        calls.append(_call(entry, group))
    return Dump(rank, tuple(calls), groups, descriptions)


def _call(entry: Mapping[str, Any], group: str) -> Call:
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    is_p2p = bool(entry.get("is_p2p"))
    ends = re.search(r"(\d+)\s*(->|<-)\s*(\d+)", name)
    peers = None
    if ends:
        first, second = int(ends[1]), int(ends[3])
        peers = (first, second) if ends[2] == "->" else (second, first)
    state = str(entry.get("state"))
    return Call(
        group=group,
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        operation=name.partition(" ")[0],
        peers=peers,
        input_sizes=_frozen(entry.get("input_sizes")),
        output_sizes=_frozen(entry.get("output_sizes")),
        is_over=state == "completed" or bool(entry.get("retired")),
        has_started=state != "scheduled",
        created_ns=int(entry.get("time_created_ns") or 0),
        where=_where(entry.get("frames") or ()),
    )


def _frozen(sizes: Any) -> tuple[Any, ...]:
    return tuple(_frozen(size) if isinstance(size, list | tuple) else int(size) for size in sizes or ())


def _where(frames: Any) -> str:
    """The innermost frame of the user's code."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if not _LIBRARY.search(file):
            return f"{file}:{frame.get('line')} in {frame.get('name')}"
    return ""
