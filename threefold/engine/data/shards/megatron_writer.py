"""Writes Megatron's PREFIX.bin and PREFIX.idx: each document is one sequence. `tokenize_files` uses it.

The two files appear when both are complete, the index last: without it nobody takes the tokens for a dataset.
"""

import hashlib
import os
import secrets
import struct
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from threefold.engine.data.shards.atomic_writer import AtomicWriter, close_quietly, unwritable
from threefold.engine.data.shards.megatron_dataset import CODES, DTYPES, MAGIC, VERSION, megatron_dtype
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import MEGATRON_SUFFIXES


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
