"""The index of image data: one pass over tar shards or JSONL, kept in the cache folder.

The pass reads the header of each image, encodes each record as a document, and writes

    images-KEY.tok          a token shard with a loss mask: the documents
    images-KEY.safetensors  which images each document has, their grids, and where their bytes are
    images-KEY.json         the files that offsets refer to, and what was skipped, with reasons

The key holds paths, sizes and times of the data, the tokenizer, the vision tokens and the patch rules. A record with a
image that cannot be used is skipped, counted and named. `image_source.py` reads the index.

Array columns: `documents` (D + 1) the first image of each document; `images` (I, 5) first frame, number of frames,
first token, height and width in patches; `frames` (F, 3) file, offset, bytes.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from threefold.engine.data.cache_files import cache_folder, locked, replaced
from threefold.engine.data.images.decode import BadImageError, ImageFile, image_size, require_pillow
from threefold.engine.data.images.encode_record import EncodedRecord, PlacedImage, RecordEncoder
from threefold.engine.data.images.patches import PatchRules
from threefold.engine.data.images.record_files import TarError, read_jsonl, read_tar
from threefold.engine.data.images.records import RawRecord, RecordError, parse_turns
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.data.token_shard import TokenShard
from threefold.findings import Finding, FindingsError
from threefold.safe_files import read_json_object
from threefold.spec.model import VisionTokens
from threefold.units import KIB

VERSION = 2  # of the files and of the encoding; part of the key
HEADER_BYTES = 64 * KIB  # read first; headers with large profiles are longer, and then the whole file is read
# What reading a missing or damaged index raises: then it is made anew.
ARRAYS = ".safetensors"
_DAMAGED = (FindingsError, OSError, ValueError, LookupError, TypeError, SafetensorError)
MAX_TABLE_BYTES = 2**33  # of our own JSON: some fifty million names of files
MAX_NAMED = 1000  # skipped records that are named; all are counted


@dataclass(frozen=True)
class ImageIndex:
    """The documents of image data and their images."""

    name: str
    shard: TokenShard
    rules: PatchRules
    vision_tokens: VisionTokens
    files: tuple[tuple[str, str | None], ...]  # path, and the folder that a link may not leave
    documents: NDArray[np.int64]
    images: NDArray[np.int64]
    frames: NDArray[np.int64]
    num_records: int
    num_skipped: int
    skipped: tuple[tuple[str, str], ...]  # place and reason of the first ones
    digest: str  # of all records and of the headers of their images

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def images_of(self, document: int) -> list[PlacedImage]:
        rows = self.images[self.documents[document] : self.documents[document + 1]]
        return [self._image(row) for row in rows]

    def vision_tokens_of(self) -> NDArray[np.int64]:
        """The number of image tokens of each document."""
        tokens = self.images[:, 3] * self.images[:, 4] // self.rules.merge**2
        total = np.concatenate([[0], np.cumsum(tokens)])
        return np.asarray(np.diff(total[self.documents]), np.int64)

    def _image(self, row: NDArray[np.int64]) -> PlacedImage:
        first_frame, num_frames, first_token, height, width = (int(value) for value in row)
        files = []
        for file, offset, num_bytes in self.frames[first_frame : first_frame + num_frames].tolist():
            path, within = self.files[file]
            files.append(ImageFile(path, offset, num_bytes, within))
        return PlacedImage(tuple(files), first_token, (height, width))


def open_image_index(
    name: str,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    vision_tokens: VisionTokens,
    rules: PatchRules,
    cache: str | Path | None = None,
    within: Path | None = None,
) -> ImageIndex:
    """The index of these tar shards or JSONL files, from the cache or made now. Other processes wait meanwhile.

    `within` is the folder that links of tar shards may not leave.
    """
    require_pillow()
    base = cache_folder(cache) / f"images-{_key(paths, tokenizer, vision_tokens, rules)}"
    with suppress(*_DAMAGED):
        return _read_index(name, base, vision_tokens, rules)
    with locked(base):
        with suppress(*_DAMAGED):
            return _read_index(name, base, vision_tokens, rules)
        _IndexWriter(name, base, tokenizer, vision_tokens, rules).write(paths, within)
        return _read_index(name, base, vision_tokens, rules)


def _key(paths: Sequence[Path], tokenizer: Tokenizer, vision_tokens: VisionTokens, rules: PatchRules) -> str:
    facts: list[Any] = [VERSION, tokenizer.label, tokenizer.end, asdict(vision_tokens), asdict(rules)]
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise _unreadable(path, f"cannot be read: {error.strerror or error}") from None
        facts.append([os.path.realpath(path), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read_index(name: str, base: Path, vision_tokens: VisionTokens, rules: PatchRules) -> ImageIndex:
    """The index, or an exception where a file is missing or damaged."""
    shard = TokenShard(base.with_suffix(".tok"), verify=True)
    facts = read_json_object(base.with_suffix(".json"), MAX_TABLE_BYTES)
    arrays = load_file(base.with_suffix(ARRAYS))
    documents, images, frames = (arrays[part].astype(np.int64) for part in ("documents", "images", "frames"))
    digest = _array_digest(documents, images, frames)
    if len(documents) != shard.header.num_documents + 1 or facts["arrays"] != digest:
        raise ValueError("the parts of the index do not belong together")
    return ImageIndex(
        name=name,
        shard=shard,
        rules=rules,
        vision_tokens=vision_tokens,
        files=tuple((path, within) for path, within in facts["files"]),
        documents=documents,
        images=images,
        frames=frames,
        num_records=int(facts["num_records"]),
        num_skipped=int(facts["num_skipped"]),
        skipped=tuple((at, reason) for at, reason in facts["skipped"]),
        digest=str(facts["digest"]),
    )


def _array_digest(*arrays: NDArray[np.int64]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


class _IndexWriter:
    """One pass over the data."""

    def __init__(
        self, name: str, base: Path, tokenizer: Tokenizer, vision_tokens: VisionTokens, rules: PatchRules
    ) -> None:
        self.name, self.base, self.tokenizer = name, base, tokenizer
        self.encoder = RecordEncoder(tokenizer, vision_tokens, rules, self._size_of)
        # A model's own ids may lie after those of a tokenizer of bytes.
        self.vocab = 1 + max(tokenizer.vocab - 1, *asdict(vision_tokens).values())
        self.digest = hashlib.sha256()
        self.files: dict[tuple[str, str | None], int] = {}
        self.documents: list[int] = [0]
        self.images: list[tuple[int, ...]] = []
        self.frames: list[tuple[int, ...]] = []
        self.num_records = self.num_skipped = 0
        self.skipped: list[tuple[str, str]] = []

    def write(self, paths: Sequence[Path], within: Path | None) -> None:
        with ShardWriter(self.base.with_suffix(".tok"), self.vocab, self.tokenizer.label) as writer:
            for path in paths:
                for at, record in _read(path, within):
                    self._add(writer, at, record)
            if len(self.documents) == 1:
                named = "".join(f"; {at}: {reason}" for at, reason in self.skipped[:1])
                raise _unreadable(self.name, f"none of {self.num_records} records can be used{named}")
            self._write_tables()

    def _add(self, writer: ShardWriter, at: str, found: RawRecord | str) -> None:
        self.num_records += 1
        try:
            if isinstance(found, str):
                raise RecordError(found)
            document = self.encoder.encode(parse_turns(found))
            if document.num_tokens < 2 or not any(mask.any() for mask in document.masks):
                raise RecordError("there is nothing to learn in it")
        except (RecordError, BadImageError) as problem:
            self.num_skipped += 1
            if len(self.skipped) < MAX_NAMED:
                self.skipped.append((at, str(problem)))
            self.digest.update(b"skipped\0")
            return
        tokens = np.concatenate(document.tokens)
        self.digest.update(tokens.tobytes())
        writer.add(tokens, np.concatenate(document.masks))
        self._add_images(document)

    def _add_images(self, document: EncodedRecord) -> None:
        for image in document.images:
            self.images.append((len(self.frames), len(image.files), image.first_token, *image.grid))
            for file in image.files:
                number = self.files.setdefault((file.path, file.within), len(self.files))
                assert file.num_bytes is not None
                self.frames.append((number, file.offset, file.num_bytes))
        self.documents.append(len(self.images))

    def _size_of(self, file: ImageFile) -> tuple[int, int]:
        """The size from the header, which also goes into the digest of the data."""
        data = file.read(HEADER_BYTES)
        try:
            size = image_size(data)
        except BadImageError:
            if len(data) < HEADER_BYTES:
                raise
            size = image_size(file.read())
        self.digest.update(f"{file.num_bytes} {zlib.crc32(data)} {size} ".encode())
        return size

    def _write_tables(self) -> None:
        """Written before the shard appears, so that whoever finds the shard finds them."""
        documents = np.array(self.documents, np.int64)
        images = np.array(self.images, np.int64).reshape(-1, 5)
        frames = np.array(self.frames, np.int64).reshape(-1, 3)
        facts = {
            "files": [list(each) for each in self.files],
            "num_records": self.num_records,
            "num_skipped": self.num_skipped,
            "skipped": [list(each) for each in self.skipped],
            "digest": self.digest.hexdigest(),
            "arrays": _array_digest(documents, images, frames),
        }
        with replaced(self.base.with_suffix(ARRAYS)) as aside:
            save_file({"documents": documents, "images": images, "frames": frames}, aside)
        with replaced(self.base.with_suffix(".json")) as aside:
            aside.write_text(json.dumps(facts))


def _read(path: Path, within: Path | None) -> Iterator[tuple[str, RawRecord | str]]:
    try:
        yield from read_tar(path, within) if path.suffix == ".tar" else read_jsonl(path)
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror or error}") from None
    except TarError as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(at: str | Path, problem: str) -> FindingsError:
    advice = "docs/reference/image-data.md has the formats"
    return FindingsError([Finding(rule="pictures-readable", at=str(at), problem=problem, advice=advice)])
