"""The folder for files that can be made again, and how processes share it: one makes a file, which appears complete.

It holds the embedded corpus, drawn scenes, indexes of images, and shards made from text and records.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.findings import Finding, FindingsError


def cache_folder(folder: str | Path | None = None) -> Path:
    """The given folder, or `threefold` in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    if folder is not None:
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is invalid and is ignored.
    return (Path(home) if home.startswith("/") else Path("~/.cache").expanduser()) / "threefold"


ADVICE = "free space, or set XDG_CACHE_HOME to a folder that can be written"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `path` when the block ends without an exception."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield aside
        aside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@contextmanager
def locked(base: Path) -> Iterator[None]:
    """Keep other processes from making the same files at once. Without locks they do, and the last one's stay."""
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        file = base.with_name(f"{base.name}.lock").open("a")
    except OSError as error:
        raise _unwritable(base.parent, error) from error
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unwritable(path: Path, error: OSError) -> FindingsError:
    problem = f"cannot be written: {error.strerror or error}"
    return FindingsError([Finding(rule="file-writable", at=str(path), problem=problem, advice=ADVICE)])
