"""The token shard: a memory-mapped file that holds documents as tokens.

docs/reference/data-format.md describes the format. The file is little-endian and has a header of 128 bytes, the tokens,
the loss mask if there is one, and the document offsets. Each section begins at a multiple of 8 bytes. `TokenShard`
opens a file, `ShardWriter` writes one.
"""

import hashlib
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular
from threefold.units import KIB, MIB

MAGIC = b"3FTOKENS"
VERSION = 1
SUFFIX = ".tok"
HEADER = struct.Struct("<8sIIIIQQQ32s32s12sI")
HAS_MASK = 1
ALIGN = 8
VERIFY_BYTES = 64 * MIB  # a shard of at most this size is verified when it is opened, in about 0.1 s
CHUNK_BYTES = 4 * MIB
EDGE_BYTES = 64 * KIB  # at the start and the end of a larger shard that `content` reads
DIGITS = 16  # of a digest in the contract of a run
# In the mask of a document's first token, which nothing predicts: the document belongs to the conversation of the one
# before it. The two are never held out without each other.
CONTINUES = 2


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of a shard."""

    token_bytes: int  # 2 or 4
    vocab: int
    num_tokens: int
    num_documents: int
    tokenizer: str  # "bytes", or "hf-" and 16 hex digits of the tokenizer file's SHA-256
    fingerprint: str  # 64 hex digits over the content, see `content_fingerprint`
    masked: bool  # whether there is a loss mask

    def pack(self) -> bytes:
        """The header as bytes, with its checksum at the end."""
        body = HEADER.pack(
            MAGIC,
            VERSION,
            self.token_bytes,
            HAS_MASK if self.masked else 0,
            0,
            self.vocab,
            self.num_tokens,
            self.num_documents,
            bytes.fromhex(self.fingerprint),
            self.tokenizer.encode("ascii"),
            b"",
            0,
        )[:-4]
        return body + struct.pack("<I", zlib.crc32(body))

    @property
    def tokens_offset(self) -> int:
        return HEADER.size

    @property
    def mask_offset(self) -> int:
        return round_up_to_alignment(self.tokens_offset + self.num_tokens * self.token_bytes)

    @property
    def offsets_offset(self) -> int:
        return round_up_to_alignment(self.mask_offset + self.num_tokens) if self.masked else self.mask_offset

    @property
    def file_bytes(self) -> int:
        return self.offsets_offset + 8 * (self.num_documents + 1)


def round_up_to_alignment(position: int) -> int:
    return -(-position // ALIGN) * ALIGN


def token_dtype(vocab: int) -> "np.dtype[Any]":
    """The smallest dtype that holds every token of the vocabulary."""
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def content_fingerprint(digests: list[bytes], vocab: int, tokenizer: str) -> str:
    """A digest of the digests of tokens, mask and offsets, so that a writer can stream the three sections."""
    metadata = f"{vocab} {tokenizer}".encode("ascii")
    return hashlib.sha256(b"".join(digests) + metadata).hexdigest()


class TokenShard:
    """A shard on disk, memory-mapped. Opening it checks the header; `verify` reads the whole file."""

    def __init__(self, path: str | Path, verify: bool | None = None, within: Path | None = None) -> None:
        """With `verify` None a shard of at most VERIFY_BYTES is verified. No link may lead out of `within`."""
        self.path = Path(path)
        try:
            with open_regular(self.path, within) as file:
                size = file.seek(0, 2)
                file.seek(0)
                self.header = _parse_header(self.path, file.read(HEADER.size))
                if size != self.header.file_bytes:
                    raise refused(self.path, f"{size} bytes, but its header tells of {self.header.file_bytes}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise refused(self.path, problem, "give the path of a shard") from error
        head, kind = self.header, token_dtype(self.header.vocab)
        self.tokens: NDArray[Any] = np.frombuffer(self._map, kind, head.num_tokens, head.tokens_offset)
        self.mask: NDArray[np.uint8] | None = (
            np.frombuffer(self._map, np.uint8, head.num_tokens, head.mask_offset) if head.masked else None
        )
        self.offsets: NDArray[np.uint64] = np.frombuffer(self._map, "<u8", head.num_documents + 1, head.offsets_offset)
        if self.offsets[0] != 0 or self.offsets[-1] != head.num_tokens:
            raise refused(self.path, "its document offsets do not span its tokens")
        if verify or (verify is None and size <= VERIFY_BYTES):
            self.verify()

    def __len__(self) -> int:
        return self.header.num_documents

    @property
    def num_tokens(self) -> int:
        return self.header.num_tokens

    @property
    def masked(self) -> bool:
        return self.header.masked

    @property
    def fingerprint(self) -> str:
        return self.header.fingerprint

    def read(self, first: int, after: int) -> NDArray[np.int64]:
        """The tokens of a range. A shard that is too large to be verified when it is opened is checked here."""
        tokens = self.tokens[first:after].astype(np.int64)
        if tokens.max(initial=0) >= self.header.vocab:
            raise refused(self.path, f"it holds tokens past its vocabulary of {self.header.vocab}")
        return tokens

    def read_mask(self, first: int, after: int) -> NDArray[np.uint8]:
        """1 for each token of a range that is learned. Only a shard with a mask is asked."""
        assert self.mask is not None
        return self.mask[first:after]

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document, as a view of the file."""
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def content(self) -> dict[str, Any]:
        """Facts that identify the content, wherever the file lies. Of a large shard only the ends are read."""
        head = self.header
        facts: dict[str, Any] = {
            "tokenizer": head.tokenizer,
            "vocab": head.vocab,
            "num_tokens": head.num_tokens,
            "num_documents": head.num_documents,
            "sha256": head.fingerprint[:DIGITS],
        }
        if head.file_bytes > VERIFY_BYTES:  # its header is believed: nobody compared it with the whole content
            ends = self._map[:EDGE_BYTES] + self._map[-EDGE_BYTES:]
            facts["sha256_of_ends"] = hashlib.sha256(ends).hexdigest()[:DIGITS]
        return facts

    def verify(self) -> None:
        """Check that the content has its fingerprint, offsets rise, and tokens are in the vocabulary."""
        head = self.header
        digests = [_digest(self.tokens), _digest(self.mask), _digest(self.offsets)]
        if content_fingerprint(digests, head.vocab, head.tokenizer) != head.fingerprint:
            raise refused(self.path, "its content does not have the fingerprint of its header")
        if any(np.any(part[1:] <= part[:-1]) for part in _chunks(self.offsets, overlap=1)):
            raise refused(self.path, "its document offsets do not rise")
        if any(part.max(initial=0) >= head.vocab for part in _chunks(self.tokens)):
            raise refused(self.path, f"it holds tokens past its vocabulary of {head.vocab}")


def _parse_header(path: Path, raw: bytes) -> ShardHeader:
    if raw[: len(MAGIC)] != MAGIC:
        problem = "the file is empty" if not raw else "this is no token shard"
        raise refused(path, problem, f"make one: threefold tokenize {path} --out FILE{SUFFIX}")
    if len(raw) < HEADER.size:
        raise refused(path, f"its header is cut off after {len(raw)} bytes")
    _, version, token_bytes, flags, _, vocab, tokens, documents, fingerprint, tokenizer, _, crc = HEADER.unpack(raw)
    if crc != zlib.crc32(raw[:-4]):
        raise refused(path, "its header is damaged: the checksum differs")
    if version != VERSION:
        raise refused(path, f"format version {version}, this program reads {VERSION}")
    label = tokenizer.rstrip(b"\0")
    if not label.isascii() or not label.decode("ascii").isprintable():
        raise refused(path, "the name of its tokenizer is no ASCII text")
    head = ShardHeader(
        token_bytes=token_bytes,
        vocab=vocab,
        num_tokens=tokens,
        num_documents=documents,
        tokenizer=label.decode("ascii"),
        fingerprint=fingerprint.hex(),
        masked=bool(flags & HAS_MASK),
    )
    if token_bytes != token_dtype(vocab).itemsize or flags & ~HAS_MASK:
        raise refused(path, f"tokens of {token_bytes} bytes for a vocabulary of {vocab}, flags {flags}")
    return head


def refused(path: Path, problem: str, advice: str = "") -> FindingsError:
    advice = advice or "copy the shard again, or make it again with threefold tokenize"
    return FindingsError([Finding(rule="shard-readable", at=str(path), problem=problem, advice=advice)])


def _chunks(array: NDArray[Any], overlap: int = 0) -> Iterator[NDArray[Any]]:
    step = CHUNK_BYTES // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step + overlap]


def _digest(array: NDArray[Any] | None) -> bytes:
    digest = hashlib.sha256()
    for part in () if array is None else _chunks(array):
        digest.update(part.data)
    return digest.digest()
