"""Writes a token shard: documents are streamed in bounded memory, and the file appears only when it is complete.

`text/tokenize_files.py` and `embedded_corpus.py` write shards; `megatron_dataset.py` has a second `AtomicWriter`.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from threefold.engine.data.token_shard import (
    ALIGN,
    CHUNK_BYTES,
    HEADER,
    ShardHeader,
    content_fingerprint,
    token_dtype,
)
from threefold.findings import Finding, FindingsError


class AtomicWriter(ABC):
    """Writes next to the place of its files. What the disk refuses, inside the block or at its end, is a finding."""

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


class _Section:
    """One section of the shard: a file, and the digest of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, array: NDArray[Any]) -> None:
        self.file.write(array.tobytes())
        self.digest.update(array.tobytes())


class ShardWriter(AtomicWriter):
    """`with ShardWriter(path, vocab, tokenizer) as shard: shard.add(tokens)`.

    If the block raises an exception no file appears, and a file that was there stays.
    """

    def __init__(self, path: str | Path, vocab: int, tokenizer: str) -> None:
        self.path = Path(path)
        self.vocab, self.tokenizer = vocab, tokenizer
        self.num_tokens = self.num_documents = 0
        self.fingerprint = ""  # of the content, once the shard is written
        self._dtype = token_dtype(vocab)
        if not self.path.name or self.path.is_dir():
            raise unwritable(self.path, IsADirectoryError(errno.EISDIR, "it is a folder"))
        if self.path.exists() and not self.path.is_file():  # a shard takes its place, which root may do to /dev/null
            raise unwritable(self.path, OSError(errno.EINVAL, "it is a device or a pipe"))
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens = _Section(self._partial.open("wb"))
            self._mask = _Section(tempfile.TemporaryFile(dir=self.path.parent))  # noqa: SIM115
            self._offsets = _Section(tempfile.TemporaryFile(dir=self.path.parent))  # noqa: SIM115
            self._tokens.file.write(bytes(HEADER.size))
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.masked = False
        self._offsets.write(np.zeros(1, "<u8"))

    def add(self, tokens: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Add a document. `mask` is 1 for each token that is learned; None means all. Empty documents are skipped."""
        array = np.asarray(tokens)
        if not array.size:
            return
        if array.min() < 0 or array.max() >= self.vocab:
            raise ValueError(f"a token outside the vocabulary of {self.vocab}")
        if mask is not None and not self.masked:
            self.masked = True
            self._extend_mask(self.num_tokens)
        self._tokens.write(array.astype(self._dtype))
        if mask is not None:
            self._mask.write(np.asarray(mask, np.uint8))
        elif self.masked:
            self._extend_mask(array.size)
        self.num_tokens += array.size
        self.num_documents += 1
        self._offsets.write(np.array([self.num_tokens], "<u8"))

    def _discard(self) -> None:
        for section in (self._tokens, self._mask, self._offsets):
            close_quietly(section.file)
        self._partial.unlink(missing_ok=True)

    def _extend_mask(self, count: int) -> None:
        """Mark `count` tokens as learned: those of documents without a mask."""
        for start in range(0, count, CHUNK_BYTES):
            self._mask.write(np.ones(min(CHUNK_BYTES, count - start), np.uint8))

    def _finish(self) -> None:
        digests = [section.digest.digest() for section in (self._tokens, self._mask, self._offsets)]
        self.fingerprint = content_fingerprint(digests, self.vocab, self.tokenizer)
        head = ShardHeader(
            token_bytes=self._dtype.itemsize,
            vocab=self.vocab,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokenizer=self.tokenizer,
            fingerprint=self.fingerprint,
            masked=self.masked,
        )
        file = self._tokens.file
        for section in (self._mask, self._offsets):
            file.write(bytes(-file.tell() % ALIGN))
            section.file.seek(0)
            shutil.copyfileobj(section.file, file, CHUNK_BYTES)
        file.seek(0)
        file.write(head.pack())
        file.flush()
        os.fsync(file.fileno())
        self._partial.replace(self.path)
