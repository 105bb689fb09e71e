"""A file, or several, that a `with` block writes: complete when it ends, and not there at all where it fails.

`shard_writer.py` and `megatron_writer.py` write datasets this way.
"""

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from threefold.findings import Finding, FindingsError


class AtomicWriter(ABC):
    """Writes beside the place of its files. What the disk refuses, inside the block or at its end, is a finding."""

    path: Path  # that a finding names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise unwritable(self.path, failure) from failure
        finally:
            self._discard()
        if isinstance(error, OSError):  # the disk filled up inside the block
            raise unwritable(self.path, error) from error

    @abstractmethod
    def _finish(self) -> None:
        """Complete the files and move them to their place."""

    @abstractmethod
    def _discard(self) -> None:
        """Close all files, and delete those that are not in their place."""


def close_quietly(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # on a full disk closing fails too, and the file is deleted anyway
        file.close()


def unwritable(path: Path, error: OSError) -> FindingsError:
    problem = f"cannot be written: {error.strerror or error}"
    advice = "give a folder that can be written and has room"
    return FindingsError([Finding(rule="file-writable", at=str(path), problem=problem, advice=advice)])
