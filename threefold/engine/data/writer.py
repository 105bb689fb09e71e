"""Writing a token shard: streamed in bounded memory, and there only when it is whole."""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from threefold.engine.data.shard import ALIGN, CHUNK_BYTES, HEADER, Header, content_fingerprint, token_dtype
from threefold.findings import Finding, FindingsError


class _Section:
    """Bytes that go to a file and into a digest."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, array: NDArray[Any]) -> None:
        self.file.write(array.tobytes())
        self.digest.update(array.tobytes())


class ShardWriter:
    """`with ShardWriter(path, vocab, tokenizer) as shard: shard.add(tokens)`.

    The file appears under its name when the block ends well, and not at all when it does not.
    """

    def __init__(self, path: str | Path, vocab: int, tokenizer: str) -> None:
        self.path = Path(path)
        self.vocab, self.tokenizer = vocab, tokenizer
        self.num_tokens = self.num_documents = 0
        self._dtype = token_dtype(vocab)
        if not self.path.name or self.path.is_dir():
            raise unwritable(self.path, IsADirectoryError(errno.EISDIR, "it is a folder"))
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens = _Section(self._partial.open("wb"))
            self._mask = _Section(tempfile.TemporaryFile(dir=self.path.parent))  # noqa: SIM115
            self._offsets = _Section(tempfile.TemporaryFile(dir=self.path.parent))  # noqa: SIM115
            self._tokens.file.write(bytes(HEADER.size))
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._masked = False
        self._offsets.write(np.zeros(1, "<u8"))

    def add(self, tokens: ArrayLike, mask: ArrayLike | None = None) -> None:
        """One document. `mask` has 1 for each token that is learned; absent: all are. Empty documents are not kept."""
        given = np.asarray(tokens)
        if not given.size:
            return
        if given.min() < 0 or given.max() >= self.vocab:
            raise ValueError(f"a token outside the vocabulary of {self.vocab}")
        if mask is not None and not self._masked:
            self._masked = True
            self._learn_all(self.num_tokens)
        self._tokens.write(given.astype(self._dtype))
        if mask is not None:
            self._mask.write(np.asarray(mask, np.uint8))
        elif self._masked:
            self._learn_all(given.size)
        self.num_tokens += given.size
        self.num_documents += 1
        self._offsets.write(np.array([self.num_tokens], "<u8"))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failed:
            raise unwritable(self.path, failed) from failed
        finally:
            for section in (self._tokens, self._mask, self._offsets):
                _close(section.file)
            self._partial.unlink(missing_ok=True)
        if isinstance(error, OSError):  # the disk filled up inside the block
            raise unwritable(self.path, error) from error

    def _learn_all(self, count: int) -> None:
        for start in range(0, count, CHUNK_BYTES):
            self._mask.write(np.ones(min(CHUNK_BYTES, count - start), np.uint8))

    def _finish(self) -> None:
        digests = [section.digest.digest() for section in (self._tokens, self._mask, self._offsets)]
        head = Header(
            token_bytes=self._dtype.itemsize,
            vocab=self.vocab,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokenizer=self.tokenizer,
            fingerprint=content_fingerprint(digests, self.vocab, self.tokenizer),
            masked=self._masked,
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


def _close(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # a full disk: what could not be written is thrown away anyway
        file.close()


def unwritable(path: Path, error: OSError) -> FindingsError:
    problem = f"cannot be written: {error.strerror or error}"
    advice = "give a folder that can be written and has room"
    return FindingsError([Finding(rule="file-writable", at=str(path), problem=problem, advice=advice)])
