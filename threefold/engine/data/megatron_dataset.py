"""Megatron's indexed dataset, PREFIX.bin and PREFIX.idx: `open_sources` maps it, `tokenize_files` writes it.

PREFIX.bin is nothing but tokens. PREFIX.idx is little-endian: 9 bytes `MMIDIDX\\0\\0`, the version (uint64, 1), the
code of the dtype (uint8), the numbers of sequences and of document boundaries (uint64 each), the size of each sequence
in tokens (int32), where it begins in PREFIX.bin in bytes (int64), and the sequence at which each document begins, with
the number of sequences at the end (int64). The format names no tokenizer and has no loss mask. Each document that is
written is one sequence; the index appears last, because without it nobody takes the tokens for a dataset.
"""

import hashlib
import mmap
import os
import secrets
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from threefold.engine.data.shard_writer import AtomicWriter, close_quietly, unwritable
from threefold.engine.data.token_shard import CHUNK_BYTES, DIGITS, EDGE_BYTES, VERIFY_BYTES
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import MEGATRON_SUFFIXES
from threefold.safe_files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# The codes of megatron.core.datasets.indexed_dataset.DType.
CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
DTYPES: dict[int, "np.dtype[Any]"] = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
UINT16_VOCAB = 65500  # Megatron takes uint16 for vocabularies below it


def megatron_dtype(vocab: int) -> "np.dtype[Any]":
    """The dtype that Megatron chooses for a vocabulary."""
    return DTYPES[CODES["uint16" if vocab < UINT16_VOCAB else "int32"]]


class MegatronDataset:
    """A dataset on disk. Opening it checks the index; tokens are checked against `vocab` when they are read."""

    masked = False

    def __init__(self, prefix: str, vocab: int) -> None:
        self.path, self._index_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self.vocab = vocab
        index = _map(self._index_path)
        if len(index) < HEADER.size:
            raise self._refused(f"its index is cut off after {len(index)} bytes")
        magic, version, code, num_sequences, num_boundaries = HEADER.unpack(index[: HEADER.size])
        if magic != MAGIC or version != VERSION:
            raise self._refused("its index does not begin as version 1 of Megatron's format does")
        if code not in DTYPES:
            raise self._refused(f"its tokens have a dtype of code {code}; known are {min(DTYPES)} to {max(DTYPES)}")
        needed = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        # Multimodal datasets have one more byte a sequence, its mode, at the end.
        if len(index) not in (needed, needed + num_sequences):
            raise self._refused(f"its index has {len(index)} bytes, but tells of {needed}")
        self._dtype = DTYPES[code]
        self._index = index
        sizes = np.frombuffer(index, "<i4", num_sequences, HEADER.size).astype(np.int64)
        pointers = np.frombuffer(index, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        boundaries = np.frombuffer(index, "<i8", num_boundaries, HEADER.size + 12 * num_sequences)
        self.offsets = self._document_offsets(sizes, pointers, boundaries)
        self.num_tokens = int(self.offsets[-1])
        self._tokens_file = _map(self.path)
        if len(self._tokens_file) != self.num_tokens * self._dtype.itemsize:
            problem = f"{len(self._tokens_file)} bytes, but its index lists {self.num_tokens} tokens of {self._dtype}"
            raise self._refused(problem)
        self.tokens: NDArray[Any] = np.frombuffer(self._tokens_file, self._dtype)
        if len(self._tokens_file) <= VERIFY_BYTES:
            for first in range(0, self.num_tokens, CHUNK_BYTES):
                self.read(first, first + CHUNK_BYTES)

    def read(self, first: int, after: int) -> NDArray[np.int64]:
        stored = self.tokens[first:after]
        with np.errstate(invalid="ignore"):
            tokens = stored.astype(np.int64)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= self.vocab or np.any(tokens != stored):
            raise self._refused(f"it holds tokens past the vocabulary of {self.vocab}")
        return tokens

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        raise AssertionError("Megatron's format has no mask")

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the index and the tokens; of a large dataset, the ends of the tokens only."""
        digest = hashlib.sha256(self._index)
        size = len(self._tokens_file)
        if size <= VERIFY_BYTES:
            digest.update(self._tokens_file)
        else:
            digest.update(self._tokens_file[:EDGE_BYTES] + self._tokens_file[size - EDGE_BYTES :])
        return digest.hexdigest()

    def content(self) -> dict[str, Any]:
        name = "sha256" if len(self._tokens_file) <= VERIFY_BYTES else "sha256_of_ends"
        return {
            "dtype": self._dtype.name,
            "num_tokens": self.num_tokens,
            "num_documents": len(self.offsets) - 1,
            name: self.fingerprint[:DIGITS],
        }

    def _document_offsets(
        self, sizes: NDArray[np.int64], pointers: NDArray[Any], boundaries: NDArray[Any]
    ) -> NDArray[np.int64]:
        ends = np.cumsum(sizes, dtype=np.int64)
        starts = np.append(0, ends)
        if np.any(sizes < 0) or np.any(pointers != starts[:-1] * self._dtype.itemsize):
            raise self._refused("its sequences do not lie one after the other")
        last = len(sizes)
        ordered = len(boundaries) > 0 and boundaries[0] == 0 and boundaries[-1] == last
        if not ordered or np.any(np.diff(boundaries) < 0):
            raise self._refused("its documents do not span its sequences")
        return np.unique(starts[boundaries])  # documents without a token are left out

    def _refused(self, problem: str) -> FindingsError:
        return _refused(self._index_path, problem)


def _map(path: Path) -> Any:
    """A file as memory; an empty one cannot be mapped."""
    try:
        with open_regular(path) as file:
            return _map_open(file)
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _map_open(file: BinaryIO) -> Any:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""


def _refused(path: Path, problem: str) -> FindingsError:
    advice = "copy both files again, or make them again with Megatron's preprocess_data or threefold tokenize"
    return FindingsError([Finding(rule="megatron-readable", at=str(path), problem=problem, advice=advice)])


class MegatronWriter(AtomicWriter):
    """`with MegatronWriter("corpus.bin", vocab) as data: data.add(tokens)`, as `ShardWriter` is used.

    `dtype` is a name of `DTYPES`; None takes the one that Megatron chooses for the vocabulary.
    """

    masked = False

    def __init__(self, path: str | Path, vocab: int, tokenizer: str = "", dtype: str | None = None) -> None:
        name = str(path)
        self.prefix = name[:-4] if name.endswith(MEGATRON_SUFFIXES) else name
        self.path = Path(f"{self.prefix}.bin")
        self.vocab, self.tokenizer = vocab, tokenizer
        self.num_tokens = self.num_documents = 0
        self._dtype = megatron_dtype(vocab) if dtype is None else DTYPES[CODES[dtype]]
        self._sizes: list[int] = []
        self._digest = hashlib.sha256()
        self._partial = [Path(f"{self.prefix}{end}.{secrets.token_hex(4)}.partial") for end in MEGATRON_SUFFIXES]
        try:
            self._partial[0].parent.mkdir(parents=True, exist_ok=True)
            self._tokens = self._partial[0].open("wb")
        except OSError as error:
            raise unwritable(self.path, error) from error

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def add(self, tokens: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Add a document. Empty ones are skipped. The format has no loss mask."""
        array = np.asarray(tokens)
        if mask is not None and not np.all(mask):
            problem = "Megatron's format has no loss mask: it cannot hold conversations or completions"
            advice = "write a token shard (--out FILE.tok), or give plain text"
            raise FindingsError([Finding(rule="mask-has-a-place", at=self.prefix, problem=problem, advice=advice)])
        if not array.size:
            return
        if array.min() < 0 or array.max() >= self.vocab:
            raise ValueError(f"a token outside the vocabulary of {self.vocab}")
        written = array.astype(self._dtype)
        if np.any(written.astype(np.int64) != array):
            raise ValueError(f"a token that {self._dtype} does not hold")
        self._tokens.write(written.tobytes())
        self._digest.update(written.tobytes())
        self._sizes.append(array.size)
        self.num_tokens += array.size
        self.num_documents += 1

    def _discard(self) -> None:
        close_quietly(self._tokens)
        for path in self._partial:
            path.unlink(missing_ok=True)

    def _finish(self) -> None:
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        sizes = np.array(self._sizes, "<i4")
        pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * self._dtype.itemsize
        with self._partial[1].open("wb") as index:
            code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
            index.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(sizes), len(sizes) + 1))
            index.write(sizes.tobytes() + pointers.astype("<i8").tobytes())
            index.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
            index.flush()
            os.fsync(index.fileno())
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for partial, end in zip(self._partial, MEGATRON_SUFFIXES, strict=True):
            partial.replace(f"{self.prefix}{end}")
