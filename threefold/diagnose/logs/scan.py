"""One pass over a log: steps, errors, notices, and what the job printed about itself.

Lines that differ in their digits only share one template. A template is looked at a few times; that of a dull line
costs one lookup from then on, so that a log is read about as fast as its lines can be split.
"""

import re
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path

from threefold.diagnose.deaths.catalogue import Death, deaths_at, deaths_in, telling_words
from threefold.diagnose.deaths.expression_words import any_of
from threefold.diagnose.logs.lines import (
    MAX_LINE_BYTES,
    decode,
    prefix_like,
    rank_inside,
    rank_of_file,
    read_chunks,
    seconds_in,
    split_rank,
)
from threefold.diagnose.logs.printed import VERSION, WORDS, Printed
from threefold.diagnose.logs.sightings import (
    TRACEBACK,
    Ended,
    Sighting,
    Tracebacks,
    is_chained,
    is_error,
    is_harmless,
    is_raised,
    is_remark,
)
from threefold.diagnose.logs.steps import Parser, Steps, parser_for

_DIGITS = b"0123456789"
_MOST_TEMPLATES = 200_000
_MOST_TEMPLATE_BYTES = 2**26
_MOST_LOOKS = 48  # at lines of one template in which nothing was found
_MOST_FOUND = 2000  # lines of one template in which something was
# After so many looks, or bytes looked at, only tracebacks and what jobs print about themselves count.
_LOOKS_IN_ALL, _LOOKED_BYTES = 200_000, 2**25
_RANK_LINES, _RANK_STRIDE = 100_000, 16  # lines whose rank is noted: the first ones, and then one of so many
_BACK = 16  # lines before an error in which its time is looked for
_MOST_SIGHTINGS = 4000
_MOST_RANKS = 2**17
_MOST_CHARS = 1500
_KNOWN_HEADS = ("", "traceback :", "traceback:")  # torchrun's summary of failures has tracebacks too
_ROOT_LINES = 12  # of torchrun's summary of the first failure
_SURVIVED_STEPS = 3  # step lines after an error that say that the job went on
_ALWAYS = (b"Traceback (most", b"memory (", b"Root Cause", b" arguments ", b"Configuration Summary", b"Running with")
# Words of lines that report an error, whatever the catalogue says, and of what a job says at its end.
_ERROR_WORDS = (
    "error", "exception", "traceback", "assert", "fail", "fatal", "critical", "panic", "abort", "crash", "interrupt",
    "terminate called", "what():", "timeout", "refused", "training is done", "training completed", "first observed",
)  # fmt: skip
_RANK_HEAD = re.compile(rb"\s*[\[\d\x1b(>{]")  # a line that may begin with a rank, or something else of a launcher
_MOST_HEAD = 512
Handler = Parser | bool  # of a template: a parser of steps, True for lines to look at, False for dull ones


@cache
def _trigger() -> re.Pattern[bytes]:
    """What a line has to hold, in lower case, to be looked at."""
    words = any_of([*_ERROR_WORDS, *WORDS, *telling_words()])
    return re.compile(rf"{words}|\[[ef]\d{{3,4}} |{VERSION}".encode())


class Scan:
    """What one log says."""

    def __init__(self, path: Path, say: Callable[[int], None] = lambda done: None) -> None:
        self.path, self.say = path, say
        self.steps, self.printed = Steps(), Printed()
        self.sightings: list[Sighting] = []  # since the third-last step line
        self.notices: dict[str, tuple[Death, Sighting, int]] = {}
        self.ranks: set[int] = set()
        self.num_lines = 0
        self.is_finished = False
        self.is_cut = False  # a packed file that was not closed
        self.root_rank: int | None = None  # the rank that the launcher says failed first
        self._file_rank = rank_of_file(path)
        self._recent = deque[int](maxlen=_SURVIVED_STEPS)
        self._templates: dict[bytes, Handler] = {}
        self._template_bytes = 0
        self._num_looks = self._looked_bytes = 0
        self._chunk: list[bytes] = []
        self._chunk_start = 0
        self._looks: dict[bytes, int] = {}
        self._found: set[bytes] = set()  # templates in which errors or notices were found
        self._tracebacks = Tracebacks()
        self._clock: float | None = None
        self._in_root = 0
        self._prefix: re.Pattern[str] | None = None  # what an unknown launcher writes before each line

    def read(self) -> "Scan":
        try:
            for lines in read_chunks(self.path, self.say):
                self._read_lines(lines)
        except EOFError:
            self.is_cut = True
        if not self.sightings:
            self._keep_cut_tracebacks()
        return self

    def _keep_cut_tracebacks(self) -> None:
        """A log that ends inside of tracebacks says that its job died, and at which lines."""
        for rank, line, frames in self._tracebacks.cut():
            text = f"the log ends inside of a traceback, at {frames[-1]}"
            deaths = deaths_in("\n".join(frames[-3:])) or deaths_at(frames[-3:])
            sighting = self._sighting(line, rank, text, deaths, is_exception=True)
            sighting.frames = frames
            self._keep(sighting)

    def _read_lines(self, lines: list[bytes]) -> None:
        number, templates, tracebacks, printed = self.num_lines, self._templates, self._tracebacks, self.printed
        self._chunk, self._chunk_start = lines, number
        for raw in lines:
            number += 1
            if number < _RANK_LINES or not number % _RANK_STRIDE:
                self._note_rank(raw)
            if tracebacks.is_open and self._continue_traceback(number, raw):
                continue
            if printed.is_open and printed.take(self._split(decode(raw))[1]):
                continue
            key = raw.translate(None, _DIGITS)
            handler = templates.get(key)
            if handler is None:
                self._bound_templates(len(key))
                handler = templates[key] = parser_for(raw) or self._is_worth_a_look(raw)
            if handler is True or self._in_root:
                self._look(number, raw, key)
            elif handler is not False and handler(raw, self.steps):
                self._after_step(number, raw)
        self.num_lines = number

    def _bound_templates(self, num_bytes: int) -> None:
        """Forget all templates where they are too many: logs may be made so that no two lines are alike."""
        self._template_bytes += num_bytes
        if len(self._templates) >= _MOST_TEMPLATES or self._template_bytes > _MOST_TEMPLATE_BYTES:
            self._template_bytes = num_bytes
            for one in (self._templates, self._looks, self._found):
                one.clear()

    def _note_rank(self, raw: bytes) -> None:
        if _RANK_HEAD.match(raw) and len(self.ranks) < _MOST_RANKS:
            rank, _ = self._split(decode(raw[:_MOST_HEAD]))
            if rank is not None:
                self.ranks.add(rank)

    def _is_worth_a_look(self, raw: bytes) -> bool:
        if self._num_looks > _LOOKS_IN_ALL or self._looked_bytes > _LOOKED_BYTES:
            return any(sign in raw for sign in _ALWAYS)
        return _trigger().search(raw.lower()) is not None

    def _after_step(self, number: int, raw: bytes) -> None:
        """Forget errors that the job survived."""
        recent = self._recent
        recent.append(number)
        if self.sightings and len(recent) == _SURVIVED_STEPS:
            self.sightings = [one for one in self.sightings if one.line > recent[0]]
        self.is_finished = False

    def _look(self, number: int, raw: bytes, key: bytes) -> None:
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if looks > (_MOST_FOUND if key in self._found else _MOST_LOOKS) and not any(sign in raw for sign in _ALWAYS):
            self._templates[key] = False
            return
        self._num_looks += 1
        self._looked_bytes += min(len(raw), MAX_LINE_BYTES)
        text = decode(raw)
        rank, rest = self._split(text)
        if (seconds := seconds_in(text)) is not None:
            self._clock = seconds
        if self.printed.begins(raw):
            self._learn_prefix(self.printed.head(rest))
            self.printed.start(rest)
        elif TRACEBACK in rest:
            head, _, _ = rest.partition(TRACEBACK)
            if head.strip() not in _KNOWN_HEADS:
                self._learn_prefix(head)
                rest = TRACEBACK
            self._tracebacks.open(number, rank, rest)
        elif is_chained(rest):
            self._tracebacks.chain(rank)
        elif not self.printed.note(rest):
            self._note_end(number, rest)
            if self._note_error(number, rank, rest):
                self._found.add(key)

    def _split(self, text: str) -> tuple[int | None, str]:
        """The rank that a launcher wrote before a line, and the line without what launchers write."""
        rank, text = split_rank(text)
        if self._prefix and (match := self._prefix.match(text)):
            inner, text = split_rank(text[match.end() :])
            rank = inner if rank is None else rank
        return rank, text

    def _learn_prefix(self, head: str) -> None:
        if self._prefix is None:
            self._prefix = prefix_like(head)

    def _note_end(self, number: int, text: str) -> None:
        """What a launcher says about the first failure, and what a job says at its end."""
        if self._in_root:
            self._in_root -= 1
            if match := re.match(r"\s*rank\s*:\s*(\d{1,6})\b", text):
                self.root_rank = int(match[1])
        if "Root Cause (first observed failure)" in text:
            self._in_root = _ROOT_LINES
        if "after training is done" in text or text.rstrip().endswith("Training completed"):
            self.is_finished = True

    def _note_error(self, number: int, rank: int | None, text: str) -> bool:
        deaths, ends = deaths_in(text), is_raised(text)
        if is_remark(text) and not ends:
            deaths = [death for death in deaths if not (death.in_errors or death.is_vague) or death.role == "notice"]
        if not deaths and not ends and not is_error(text):
            return False
        if rank is None and self._in_root:
            rank = self.root_rank
        self._keep(self._sighting(number, rank, text, deaths, is_exception=ends))
        return True

    def _sighting(self, number: int, rank: int | None, text: str, deaths: list[Death], is_exception: bool) -> Sighting:
        for other in (rank_inside(text), self._file_rank):
            rank = other if rank is None else rank
        text = text.strip()[:_MOST_CHARS]
        return Sighting(text, rank, self.path.name, number, None, deaths, is_exception)

    def _time_of(self, number: int) -> float | None:
        """The time that a line says, else one shortly before it, else the last one that was looked at."""
        place = number - 1 - self._chunk_start
        for raw in reversed(self._chunk[max(0, place - _BACK) : place + 1]):
            if (seconds := seconds_in(decode(raw))) is not None:
                return seconds
        return self._clock

    def _keep(self, sighting: Sighting) -> None:
        notices = [death for death in sighting.deaths if death.role == "notice"]
        for death in notices:
            _, first, count = self.notices.get(death.slug, (death, sighting, 0))
            self.notices[death.slug] = (death, first, count + 1)
        sighting.deaths = [death for death in sighting.deaths if death.role != "notice"]
        is_unknown = not sighting.deaths and not sighting.is_exception
        if is_unknown and (notices or is_harmless(sighting.text)):
            return
        if len(self.sightings) < _MOST_SIGHTINGS:
            sighting.seconds = self._time_of(sighting.line)
            self.sightings.append(sighting)

    def _continue_traceback(self, number: int, raw: bytes) -> bool:
        rank, text = self._split(decode(raw))
        taken = self._tracebacks.take(number, rank, text)
        if not isinstance(taken, Ended):
            return taken
        if not taken.joins_cause():
            sighting = self._sighting(number, rank, taken.text, taken.deaths, is_exception=True)
            sighting.frames = taken.frames
            self._tracebacks.remember(rank, sighting)
            self._keep(sighting)
        return True
