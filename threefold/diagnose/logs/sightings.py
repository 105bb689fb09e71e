"""Errors and notices in a log, and tracebacks, which are put together per rank because launchers mix their lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from threefold.diagnose.deaths.catalogue import Death, deaths_at, deaths_in

TRACEBACK = "Traceback (most recent call last)"
_FINAL = re.compile(  # the end of a traceback: an exception, with its message or without
    r"^\s{0,12}((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning|Timeout|Abort|Refused"
    r"|Iteration|Died|Failed|EOF|Overflow|Closed|Mismatch)\w*|[A-Za-z_][\w.]*\.(?:[A-Z]\w+|[a-z_]*error))"
    r"(?::(?: |$)|\s*$)"
)
_WARNING = re.compile(r"\s*[\w.]*Warning\b")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_ERROR_LINE = re.compile(
    r"(?:^|[\s:\[(])(?:ERROR|FATAL|CRITICAL|Error|error|fatal|Fatal|panic|Aborted|abort(?:ed|ing)?|Assertion)(?:[\s:\])!,]|$)"
    r"|\w(?:Error|Exception)\b|\[[EF]\d{3,4} |terminate called|what\(\):|[Cc]rash|[Ff]ailed\b|\bfailure\b"
)
_NO_ERROR = re.compile(
    r"\b(?:INFO|DEBUG|WARNING|WARN|Warning|UserWarning|FutureWarning|DeprecationWarning)\b|0 errors?\b|\[W\d{3,4} "
    r"|first observed failure|NO_OTHER_FAILURES|^Failures:|error_file|error file defined|no error|error_handler\.py"
    r"|pip's dependency resolver"
)
_FATAL = re.compile(r"\b(?:FATAL|Fatal|fatal|CRITICAL|panic)\b|\[F\d{3,4} ")
_MOST_CHARS = 1500
_MOST_FRAMES = 60
_MOST_SHOWN_FRAMES = 12
_OPEN_LINES = 4000  # lines of a log after which a traceback without an end is given up
_CLOSE_LINES = 400  # the same, where lines of its own rank have come that do not belong to it


@dataclass(slots=True)
class Sighting:
    """An error or notice in a log."""

    text: str
    rank: int | None
    file: str
    line: int
    seconds: float | None  # of the year, where the line or one before it says the time
    deaths: list[Death]  # the entries of the catalogue that it is; none: unknown
    is_exception: bool = False  # the end of a traceback, which is an error whatever it says
    frames: list[str] = field(default_factory=list)


def is_final(text: str) -> bool:
    """Whether a line is the exception at the end of a traceback."""
    return _FINAL.match(text) is not None


def is_raised(text: str) -> bool:
    """Whether a line outside of tracebacks is an exception, which a warning that stands alone is not."""
    return is_final(text) and not _WARNING.match(text)


def is_chained(text: str) -> bool:
    """Whether a line says that the next traceback comes from the one before it."""
    return _CHAINED.search(text) is not None


def is_error(text: str) -> bool:
    """Whether a line that the catalogue does not know reports an error."""
    return _ERROR_LINE.search(text) is not None and not is_harmless(text)


def is_fatal(text: str) -> bool:
    """Whether a line that the catalogue does not know says that its process ends."""
    return _FATAL.search(text) is not None


def is_harmless(text: str) -> bool:
    return _NO_ERROR.search(text) is not None


def is_remark(text: str) -> bool:
    """Whether a program says that a line of it is no error. NCCL calls all of its errors warnings."""
    return is_harmless(text) and "NCCL WARN" not in text


@dataclass(slots=True)
class _Block:
    """A traceback that is being put together."""

    line: int
    indent: int
    frames: list[str] = field(default_factory=list)
    cause: Sighting | None = None  # the exception that it says it comes from


@dataclass(slots=True)
class Ended:
    """A traceback that has come to its end."""

    text: str
    frames: list[str]
    deaths: list[Death]
    cause: Sighting | None

    def joins_cause(self) -> bool:
        """Whether it only repeats another exception in other words, which then has what both say."""
        if self.cause is None:
            return False
        if not self.cause.deaths or (self.cause.deaths[0].is_vague and self.deaths and not self.deaths[0].is_vague):
            self.cause.deaths = self.deaths
        return True


class Tracebacks:
    """The open tracebacks of a log, by rank."""

    def __init__(self) -> None:
        self._blocks: dict[int | None, _Block] = {}
        self._last: dict[int | None, Sighting] = {}
        self._chained: set[int | None] = set()

    @property
    def is_open(self) -> bool:
        return bool(self._blocks)

    def open(self, number: int, rank: int | None, text: str) -> None:
        is_listed = text.lstrip().startswith("traceback")  # in torchrun's summary, whose lines are indented
        cause = self._last.get(rank) if rank in self._chained else None
        self._chained.discard(rank)
        self._blocks[rank] = _Block(number, 4 if is_listed else len(text) - len(text.lstrip()), cause=cause)

    def chain(self, rank: int | None) -> None:
        """The next traceback of a rank comes from its last one."""
        self._chained.add(rank)

    def remember(self, rank: int | None, sighting: Sighting) -> None:
        self._last[rank] = sighting

    def take(self, number: int, rank: int | None, text: str) -> Ended | bool:
        """Take a line into the open traceback of a rank: True; its end; or False where it belongs to none."""
        block = self._blocks.get(rank)
        if block is None:
            self._drop_old(number)
            return False
        stripped, indent = text.strip(), len(text) - len(text.lstrip())
        if TRACEBACK in text:
            self.open(number, rank, text)
            return True
        if indent <= block.indent + 1 and (
            is_final(text) or (block.frames and re.fullmatch(r"[A-Za-z_][\w.]*", stripped))
        ):
            del self._blocks[rank]
            return Ended(
                stripped[:_MOST_CHARS], block.frames[-_MOST_SHOWN_FRAMES:], _deaths(stripped, block), block.cause
            )
        if stripped and indent > block.indent:
            block.frames = [*block.frames[-_MOST_FRAMES:], stripped[:300]]
            return True
        if number - block.line > _CLOSE_LINES:
            del self._blocks[rank]
        return False

    def cut(self) -> Iterator[tuple[int | None, int, list[str]]]:
        """Tracebacks without an end, where the log is over: rank, line and last frames."""
        for rank, block in self._blocks.items():
            if block.frames:
                yield rank, block.line, block.frames[-_MOST_SHOWN_FRAMES:]

    def _drop_old(self, number: int) -> None:
        for rank in [rank for rank, block in self._blocks.items() if number - block.line > _OPEN_LINES]:
            del self._blocks[rank]


def _deaths(text: str, block: _Block) -> list[Death]:
    """The entries that an exception is. One without a message says what it is by its last frames only; where nothing
    is known about a message, the frames give a hint."""
    found = deaths_in(text)
    if not found and ":" not in text:
        found = deaths_in("\n".join([text, *block.frames[-3:]]))
    return found or deaths_at(block.frames[-3:])
