"""Lines of logs: read as a stream, and what launchers write before the text: rank, time, colors."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from threefold.diagnose.files import open_content

CHUNK_BYTES = 2**22
MOST_BYTES = 50 * 2**30  # of a log's content; a packed file may hold any number
MAX_LINE_BYTES = 2**15  # longer lines are cut
_COLOR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
# torchrun's `[rank3]:`, `[default3]:` (also twice), srun -l's ` 3: `, glog's `[rank3]:[E...]`, and
# mpirun's `[1,3]<stderr>:`.
_RANK = re.compile(
    r"^\s*(?:\[(?:rank|default|trainer|worker)\s?(\d{1,6})\][:,]?|(\d{1,6}):(?=\s|\[|$)|\[\d+,(\d{1,6})\]<std(?:out|err)>:)\s?"
)
_JSON_KEYS = ("log", "message", "msg")  # Docker's and others'
_JSON_LINE = re.compile(r'\{"[^{}\[\]]{0,200}"?(?:log|message|msg)"\s*:|\{"(?:log|message|msg)"\s*:')
_MOST_PREFIX = 160  # characters of what an unknown launcher writes before each line
# What Kubernetes and others write first.
_CLOCK = re.compile(
    r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s(?:std(?:out|err) [FP] )?"
)
_INSIDE = re.compile(
    r"\[Rank (\d{1,6})\]|\bRank (\d{1,6})[:\]]|\brank\s*:\s*(\d{1,6})\b|^rank (\d{1,6}) of \d+ "
    r"|: rank (\d{1,6}) did not "
)
_DATE = re.compile(r"(?:20\d\d-)(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"\b[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_GLOG_SHORT = re.compile(r"\[[IWEF](\d{3,4}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")


def read_chunks(path: Path, say: Callable[[int], None]) -> Iterator[list[bytes]]:
    """Lists of lines without their ends. `say` is told the number of bytes read so far."""
    rest, done = b"", 0
    with open_content(path) as file:
        while done < MOST_BYTES and (chunk := file.read(CHUNK_BYTES)):
            done += len(chunk)
            say(done)
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()[:MAX_LINE_BYTES]
            yield lines
    if rest:
        yield [rest]


def decode(raw: bytes) -> str:
    """The text of a line, without colors; of a container's JSON log, the text inside."""
    text = _COLOR.sub(b"", raw[:MAX_LINE_BYTES]).decode("utf-8", "replace").rstrip("\r")
    if text.startswith("{") and _JSON_LINE.match(text):
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            return text
        said = next((entry[key] for key in _JSON_KEYS if isinstance(entry.get(key), str)), text)
        return said.rstrip("\r\n")
    return text


def split_rank(text: str) -> tuple[int | None, str]:
    """The rank that a launcher wrote before a line, and the line without it."""
    rank = None
    text = _CLOCK.sub("", text, count=1)
    while match := _RANK.match(text):
        rank = int(match[1] or match[2] or match[3])
        text = text[match.end() :]
    return rank, text


def prefix_like(head: str) -> re.Pattern[str] | None:
    """What matches the text that an unknown launcher wrote before a line: the same text with other numbers."""
    if not head.strip() or len(head) > _MOST_PREFIX:
        return None
    return re.compile("".join(r"\d+" if part.isdigit() else re.escape(part) for part in re.findall(r"\d+|\D+", head)))


def rank_inside(text: str) -> int | None:
    """The rank that a message names itself."""
    match = _INSIDE.search(text)
    return int(next(filter(None, match.groups()))) if match else None


def rank_of_file(path: Path) -> int | None:
    """The rank whose log a file is, by its name or, as torchrun names them, by its folder."""
    if match := re.search(r"rank[-_.]?(\d{1,6})", path.name):
        return int(match[1])
    return int(path.parent.name) if path.name in ("stdout.log", "stderr.log") and path.parent.name.isdigit() else None


def seconds_in(text: str) -> float | None:
    """The time in a line, in seconds since the year began; only differences are meant."""
    if match := _DATE.search(text) or _GLOG.search(text):
        month, day, hour, minute, second = map(int, match.groups()[:5])
        fraction = match[6]
    elif match := _GLOG_SHORT.search(text):  # PyTorch does not pad the month: E1105 and E429
        month, day = divmod(int(match[1]), 100)
        hour, minute, second = int(match[2]), int(match[3]), int(match[4])
        fraction = match[5]
    else:
        return None
    days = (month - 1) * 31 + day
    return days * 86400.0 + hour * 3600 + minute * 60 + second + float(f"0.{fraction or 0}")
