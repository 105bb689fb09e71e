"""Opens files that may come from a stranger: regular files only, of bounded size, without links out of their folder.

Run folders, checkpoints, imports, token shards, tokenizers and text are read through it; docs/security.md says what is
promised. Every refusal is an `UnsafeFileError`, an OSError whose text is the reason, so that whoever reports an
unreadable file reports it too.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**26  # 64 MiB; the largest index of a published checkpoint has some 20 MiB
MAX_JSON_VALUES = 2**22  # what begins a value or follows one; Python takes up to 100 bytes for each: some 400 MiB
MAX_JSON_DEPTH = 100
MAX_LINE_BYTES = 2**20  # of a log; a line of metrics.jsonl has some 700
MAX_LOG_BYTES = 2**31  # of a run's metrics: some millions of steps


class UnsafeFileError(OSError):
    """A file that is not opened, and why."""


def open_regular(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading; never waits, as opening a FIFO or a device would.

    With `within`, a link that leads out of that folder is refused.
    """
    if within is not None:
        check_inside(path, within)
    try:
        _check_regular(path.stat().st_mode)  # before it is opened: opening a device can act on it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # the path contains a NUL
        raise UnsafeFileError(str(error)) from None
    try:
        _check_regular(os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_bounded(path: Path, most_bytes: int, within: Path | None = None) -> bytes:
    """The content of a regular file of at most `most_bytes`."""
    with open_regular(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(size + 1)  # room is taken for what is asked
    if size > most_bytes or len(content) > most_bytes:
        raise UnsafeFileError(f"it has more than {most_bytes} bytes, too many for such a file")
    return content


def read_lines(path: Path, within: Path | None = None) -> Iterator[bytes]:
    """The lines of a log, without their ends. One that is too long, which a crash can leave, is left out."""
    with open_regular(path, within) as file:
        if os.fstat(file.fileno()).st_size > MAX_LOG_BYTES:
            raise UnsafeFileError(f"it has more than {MAX_LOG_BYTES} bytes, too many for a log of steps")
        is_whole = True  # the part that is read begins a line
        while part := file.readline(MAX_LINE_BYTES):
            ends = part.endswith(b"\n")
            if is_whole and (ends or len(part) < MAX_LINE_BYTES):
                yield part.rstrip(b"\r\n")
            is_whole = ends


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES, within: Path | None = None) -> Any:
    """The value of a JSON file. Raises OSError or ValueError, also for one of too many or too deeply nested values."""
    return parse_json(read_bounded(path, most_bytes, within))


def parse_json(content: bytes | str) -> Any:
    """The value of JSON text. Raises ValueError, also for one of too many or too deeply nested values."""
    if isinstance(content, bytes):
        # One wide character makes four bytes of each character in its text.
        if len(content) > MAX_JSON_BYTES and (b"\\u" in content or not content.isascii()):
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes, and more than ASCII in them")
        content = content.decode(json.detect_encoding(content), "surrogatepass")
    if sum(map(content.count, ",[{")) > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES, within: Path | None = None) -> dict[str, Any]:
    value = read_json(path, most_bytes, within)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def check_inside(path: Path, folder: Path) -> None:
    """Raise where a path leads out of the folder over a link.

    A snapshot in Hugging Face's cache consists of links to the `blobs` of its own repository; these are followed.
    """
    try:
        target, root = (Path(os.path.realpath(each)) for each in (path, folder))
    except ValueError as error:
        raise UnsafeFileError(str(error)) from None
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if not any(target.is_relative_to(place) for place in (root, *blobs)):
        raise UnsafeFileError(f"it is a link out of {folder}")


def unsafe_entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each entry below a folder that is a link out of it, a device, a FIFO or a socket, with the reason."""
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(root, name)
            try:
                if path.is_symlink():
                    check_inside(path, folder)
                elif name not in folders:
                    _check_regular(path.lstat().st_mode)
            except UnsafeFileError as error:
                yield path, str(error)
            except OSError:  # gone since it was listed
                continue


def write_aside(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a new file in the place of whatever is there; a link that is there is removed, not followed."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def open_to_append(path: Path, mode: str = "a") -> Any:
    """Open a text file of our own to append to (`a`, or `a+` to read it too). A link is refused, not followed."""
    access = os.O_RDWR if "+" in mode else os.O_WRONLY
    flags = access | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise UnsafeFileError("it is a link")
    handle = os.open(path, flags, 0o666)
    try:
        _check_regular(os.fstat(handle).st_mode)
        return os.fdopen(handle, mode, encoding="utf-8")
    except OSError:
        os.close(handle)
        raise


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnsafeFileError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'special')}, not a regular file")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
