"""Events of a Chrome trace, decoded in pieces: the file may have gigabytes, memory holds a few megabytes of it.

A trace is `[event, ...]` or `{"traceEvents": [event, ...], ...}`. Each piece of the text is cut behind an event and
decoded by msgspec into structs that skip all other fields. Where to cut is guessed: behind the last `}` before `, {`.
A wrong guess lies inside an event or a string, leaves brackets or a string open, and cannot decode; then brackets are
counted exactly. `kineto.py` consumes the events.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from threefold.profile.readers.text_stream import MAX_EVENT_BYTES, unreadable

_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
# A string that the end of the text cuts off is one token too: brackets inside of it must not count.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,}\]]+(?=[\s,}\]])")
_SPACE = b" \t\r\n"
_TAIL_BYTES = 2**16  # of a piece in which a boundary is looked for
_TRUNCATED = "it is truncated: it ends before the trace does"
_KEPT_HEADERS = (
    "deviceProperties",
    "distributedInfo",
    "baseTimeNanoseconds",
    "host_name",
    "with_stack",
    "schemaVersion",
)
_MAX_HEADER_BYTES = 2**24
_MAX_FIELDS = 1000  # next to the events; a trace of torch has some ten


class Args(
    msgspec.Struct,
    gc=False,
    rename={
        "external": "External id",
        "operation": "Collective name",
        "group_name": "Process Group Name",
        "group_description": "Process Group Description",
        "group_ranks": "Process Group Ranks",
        "group_size": "Group size",
        "input_dims": "Input Dims",
        "input_types": "Input type",
        "allocated": "Total Allocated",
        "reserved": "Total Reserved",
        "device_type": "Device Type",
        "device_id": "Device Id",
        "num_bytes": "bytes",
        "recorded_by": "wait_on_cuda_event_record_corr_id",
    },
):
    """Arguments of an event that say something about walls. Their types are checked where they are used."""

    external: Any = None
    correlation: Any = None
    device: Any = None
    stream: Any = None
    operation: Any = None
    group_name: Any = None
    group_description: Any = None
    group_ranks: Any = None
    group_size: Any = None
    input_dims: msgspec.Raw = msgspec.Raw()
    input_types: msgspec.Raw = msgspec.Raw()
    allocated: Any = None
    reserved: Any = None
    device_type: Any = None
    device_id: Any = None
    num_bytes: Any = None
    wait_on_stream: Any = None
    recorded_by: Any = None


class Event(msgspec.Struct, gc=False):
    """An event of a Chrome trace; times are in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: Any = None
    tid: Any = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


_DECODER = msgspec.json.Decoder(list[Event])


class EventReader:
    """Reads one trace. `events()` yields lists of events; `headers` has the known fields beside them afterwards."""

    def __init__(self, path: Path, pieces: Iterator[bytes]) -> None:
        self.path, self._pieces = path, pieces
        self.headers: dict[str, Any] = {}
        self.end_of_events = 0  # the place of the bracket that closes the list of events, in the decompressed text
        self.num_events = 0
        self._buffer, self._done, self._offset = b"", False, 0  # the offset of the buffer in the text

    def events(self) -> Iterator[list[Event]]:
        first = self._skip_space()
        if first == b"[":
            self._drop(1)
            yield from self._array()
        elif first == b"{":
            self._drop(1)
            yield from self._object()
        else:
            raise self._problem("it is no trace: it begins with neither { nor [")
        if self._skip_space():
            raise self._problem("something follows the end of the trace")

    def _object(self) -> Iterator[list[Event]]:
        """The fields of the outermost object; events are those of `traceEvents`."""
        has_events, num_fields = False, 0
        while (byte := self._skip_space()) != b"}":
            if num_fields == _MAX_FIELDS:
                raise self._problem(f"it is no trace: it has more than {_MAX_FIELDS} fields")
            if num_fields:
                if byte != b",":
                    raise self._problem("malformed JSON: fields are not separated by commas" if byte else _TRUNCATED)
                self._drop(1)
                self._skip_space()
            num_fields += 1
            key = self._key()
            if key == "traceEvents":
                if self._skip_space() != b"[":
                    raise self._problem("traceEvents is no list")
                has_events = True
                self._drop(1)
                yield from self._array()
            else:
                value = self._value()
                if key in _KEPT_HEADERS and len(value) <= _MAX_HEADER_BYTES:
                    self.headers[key] = self._decoded(msgspec.json.Decoder(), value)
        self._drop(1)
        if not has_events:
            raise self._problem("it is no trace: it has no traceEvents")

    def _array(self) -> Iterator[list[Event]]:
        """Events up to the bracket that closes their list."""
        while True:
            if self._skip_space() == b"]":
                self.end_of_events = self._offset
                self._drop(1)
                return
            self._more()
            found = self._guessed()
            if found is None:
                found = self._counted()
            if found:
                self.num_events += len(found)
                yield found
            byte = self._skip_space()
            if byte == b"]":
                continue
            if byte != b",":
                raise self._problem("malformed JSON: events are not separated by commas" if byte else _TRUNCATED)
            self._drop(1)
            if self._skip_space() == b"]":
                raise self._problem("malformed JSON: a comma before ]")

    def _guessed(self) -> list[Event] | None:
        """Events up to the last boundary near the end of the buffer; None where the guess is wrong."""
        buffer = self._buffer
        cut = -1
        for match in _BOUNDARY.finditer(buffer, max(0, len(buffer) - _TAIL_BYTES)):
            cut = match.start() + 1
        if cut < 0:
            return None
        try:
            found = _DECODER.decode(b"[" + buffer[:cut] + b"]")
        except msgspec.ValidationError as error:
            raise self._problem(f"an event has fields of a wrong kind: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self._drop(cut)
        return found

    def _counted(self) -> list[Event]:
        """Events up to the last that is whole, by counting brackets; none where the list has ended."""
        while True:
            cut, is_end = _last_whole(self._buffer)
            if cut or is_end:
                break
            if not self._more():
                raise self._problem("it is truncated: it ends inside an event")
            if len(self._buffer) > MAX_EVENT_BYTES:
                raise self._problem(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
        found: list[Event] = self._decoded(_DECODER, b"[" + self._buffer[:cut] + b"]")
        self._drop(cut)
        return found

    def _key(self) -> str:
        while not (match := _STRING.match(self._buffer)):
            if self._buffer[:1] not in (b"", b'"') or not self._more_bounded():
                raise self._problem("malformed JSON: a field has no name" if self._buffer else _TRUNCATED)
        self._drop(match.end())
        key = self._decoded(msgspec.json.Decoder(str), match[0])
        if self._skip_space() != b":":
            raise self._problem(f"malformed JSON: no value behind {key[:40]!r}")
        self._drop(1)
        return str(key)

    def _value(self) -> bytes:
        """The text of the next value of any kind."""
        begins = self._skip_space()
        while True:
            if begins in (b"{", b"["):
                end = _value_end(self._buffer)
            else:
                match = (_STRING if begins == b'"' else _SCALAR).match(self._buffer)
                end = match.end() if match else 0
            if end:
                value = self._buffer[:end]
                self._drop(end)
                return value
            if not self._more_bounded():
                raise self._problem("it is truncated: it ends inside a value")

    def _decoded(self, decoder: Any, text: bytes) -> Any:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError as error:
            raise self._problem(f"an event has fields of a wrong kind: {error}") from None
        except msgspec.DecodeError as error:
            raise self._problem(f"malformed JSON: {error}") from None
        except UnicodeDecodeError as error:
            raise self._problem(f"it is no UTF-8 text: {error}") from None
        except RecursionError:
            raise self._problem("it is nested too deeply") from None

    def _skip_space(self) -> bytes:
        """The next byte that is no white space, at the start of the buffer; empty at the end of the file."""
        while True:
            stripped = self._buffer.lstrip(_SPACE)
            self._offset += len(self._buffer) - len(stripped)
            self._buffer = stripped
            if stripped or not self._more():
                return stripped[:1]

    def _more(self) -> bool:
        """Add a piece to the buffer."""
        if self._done:
            return False
        piece = next(self._pieces, b"")
        self._done = not piece
        self._buffer += piece
        return bool(piece)

    def _more_bounded(self) -> bool:
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise self._problem(f"a value has more than {MAX_EVENT_BYTES >> 20} MiB")
        return self._more()

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._offset += count

    def _problem(self, text: str) -> Exception:
        return unreadable(self.path, f"{text} (near byte {self._offset:,})")


def _last_whole(text: bytes) -> tuple[int, bool]:
    """Where the last whole event of a list ends, and whether the list's own bracket follows."""
    depth, cut = 0, 0
    for match in _TOKEN.finditer(text):
        byte = match[0]
        if byte in (b"{", b"["):
            depth += 1
        elif byte in (b"}", b"]"):
            depth -= 1
            if depth < 0:
                return match.start(), True
            if depth == 0:
                cut = match.end()
    return cut, False


def _value_end(text: bytes) -> int:
    """Where the object or list at the start of the text ends; 0 where it does not."""
    depth = 0
    for match in _TOKEN.finditer(text):
        if match[0] in (b"{", b"["):
            depth += 1
        elif match[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return match.end()
    return 0
