"""What kind of file a job left behind, told by its content, not by its name. Called by `diagnosis.py`."""

import gzip
import zlib
from pathlib import Path
from typing import IO, Literal

from threefold.safe_files import open_regular

Kind = Literal["log", "flight recorder", "snapshot", "trace", "run folder"]

_HEAD_BYTES = 2**16
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\0"
_FLIGHT_RECORDER = (b"pg_config", b"pg_status", b"nccl_comm_state", b"collective_seq_id")
_SNAPSHOT = (b"device_traces", b"segments", b"allocator_settings")


def kind_of(path: Path) -> Kind:
    """The kind of a file or folder. Raises OSError where it cannot be read and ValueError where it is none of them."""
    if path.is_dir():
        if (path / "plan.toml").exists() or (path / "logs").is_dir():
            return "run folder"
        raise ValueError("it is a folder, and not that of a run of ours")
    head, tail = _ends(path)
    if head.startswith(_SQLITE):
        return "trace"
    if head[:1] == b"\x80":  # the first opcode of every pickle since protocol 2
        return _kind_of_pickle(head + tail)
    if head.lstrip()[:1] in (b"{", b"[") and (kind := _kind_of_json(head + tail)):
        return kind
    if head.count(0) > len(head) // 100:
        raise ValueError("it is neither text nor a pickle, a trace or a dump that is known")
    return "log"


def open_content(path: Path) -> IO[bytes]:
    """A regular file for reading, unpacked where it is packed by gzip. Read it in bounded parts."""
    file = open_regular(path)
    is_packed = file.read(2) == _GZIP
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[return-value]


def _ends(path: Path) -> tuple[bytes, bytes]:
    """The first bytes of a file's content and, of one that is not packed, the last ones."""
    with open_regular(path) as file:
        if file.read(2) != _GZIP:
            file.seek(0)
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, 2)
            file.seek(max(len(head), size - _HEAD_BYTES))
            return head, file.read(_HEAD_BYTES)
    try:
        with open_content(path) as content:
            return content.read(_HEAD_BYTES), b""
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it is no sound gzip file: {error}") from None


def _kind_of_pickle(content: bytes) -> Kind:
    if any(word in content for word in _FLIGHT_RECORDER):
        return "flight recorder"
    if any(word in content for word in _SNAPSHOT):
        return "snapshot"
    raise ValueError("it is a pickle, and neither a memory snapshot nor a flight recorder dump")


def _kind_of_json(content: bytes) -> Kind | None:
    """The kind of a JSON file, or None: the lines of a log may begin with a bracket too."""
    if b'"traceEvents"' in content or b'"schemaVersion"' in content:  # its header names process groups too
        return "trace"
    if any(word in content for word in _FLIGHT_RECORDER):
        return "flight recorder"
    return "trace" if b'"ph"' in content else None
