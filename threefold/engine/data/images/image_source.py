"""Opens the entries of `job.data` that have images, and makes sequences of whole documents of them.

Entries are scenes, tar shards, folders of them, and JSONL with image files; the data of a vision-language model that is
JSONL is always read here, also where a line has no image. A document is never split, because an image cannot be. One
that is longer than a sequence is left out and counted. Images are not decoded here: a sample says which they are, and
`batch_images.py` decodes those of a whole batch. `open_sources.py` calls `open_images`.

Shapes: S tokens of a sequence, N tokens of it that are not padding.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.images.decode import ResizeRequest
from threefold.engine.data.images.encode_record import PlacedImage
from threefold.engine.data.images.image_index import ImageIndex, open_image_index
from threefold.engine.data.images.patches import PatchRules, patch_rules
from threefold.engine.data.images.scenes import scene_shards
from threefold.engine.data.packing import IGNORED, Sample, pack_documents, pad_sample
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.data.token_shard import DIGITS
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import SCENES
from threefold.plan.plan import Job
from threefold.spec.model import VisionSpec
from threefold.units import format_many


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image of a sequence: its frames to decode, and its place."""

    requests: tuple[ResizeRequest, ...]
    grid: tuple[int, int]  # height and width in patches
    first_token: int  # in the sequence
    document: int  # of the sequence, from 0


@dataclass(frozen=True, slots=True)
class ImageSample(Sample):
    """One sequence with images, in the order of their tokens."""

    starts: tuple[int, ...] = ()  # where its documents begin
    images: tuple[SampleImage, ...] = ()


class ImageSource:
    """The sequences of one index. Fine-tuning (`sft`) learns answers; pretraining learns all text."""

    benchmark_only = False

    def __init__(self, index: ImageIndex, seq_len: int, packing: bool, sft: bool) -> None:
        self.index, self.seq_len, self.packing, self.sft = index, seq_len, packing, sft
        self.name = index.name
        sizes = np.diff(index.shard.offsets.astype(np.int64))
        used = np.flatnonzero(sizes <= seq_len)
        self.num_too_long = len(sizes) - len(used)
        if not len(used):
            problem = f"every document of {self.name} is longer than {seq_len} tokens; the shortest has {sizes.min()}"
            advice = "images need room: a longer job.seq_len, or smaller images with job.max_pixels"
            raise FindingsError([Finding(rule="data-empty", at="job.data", problem=problem, advice=advice)])
        order, starts = pack_documents(sizes[used], seq_len) if packing else _one_each(len(used))
        self._documents, self._starts = used[order], starts
        vision_tokens = np.concatenate([[0], np.cumsum(index.vision_tokens_of()[self._documents])])
        self._vision_tokens = np.diff(vision_tokens[self._starts])

    @property
    def num_samples(self) -> int:
        return len(self._starts) - 1

    @property
    def rules(self) -> PatchRules:
        return self.index.rules

    def num_vision_tokens(self, index: int) -> int:
        """The image tokens of a sample: the load by which `balance.py` deals samples out."""
        return int(self._vision_tokens[index])

    def sample(self, index: int) -> ImageSample:
        members = self._documents[self._starts[index] : self._starts[index + 1]].tolist()
        tokens, labels, starts, images, at = [], [], [], [], 0
        for number, document in enumerate(members):
            document_tokens, document_labels = self._document(document)
            tokens.append(document_tokens)
            labels.append(document_labels)
            starts.append(at)
            placed = self.index.images_of(document)
            images += [sample_image(image, self.rules, at, number) for image in placed]
            at += len(document_tokens)
        boundaries = np.array(starts) if self.packing else None
        padded = pad_sample(np.concatenate(tokens), np.concatenate(labels), self.seq_len, boundaries)
        return ImageSample(
            padded.tokens_S,
            padded.labels_S,
            padded.documents_S,
            padded.positions_S,
            padded.num_padding,
            starts=tuple(starts),
            images=tuple(images),
        )

    def skipped(self) -> tuple[int, list[tuple[str, str, int]]]:
        """The number of records that cannot be used; place, reason and number of those that are named."""
        named = [(at, reason, 1) for at, reason in self.index.skipped]
        if count := self.num_too_long:
            too_long = f"{format_many(count, 'document')} longer than job.seq_len ({self.seq_len})"
            named.append((self.name, too_long, count))
        return self.index.num_skipped + self.num_too_long, named

    def fingerprint(self) -> str:
        facts = f"{self.index.digest} {self.index.shard.header.fingerprint} {self.index.rules}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        index = self.index
        counts = {"num_pictures": len(index.images), "num_skipped": index.num_skipped}
        return {**index.shard.content(), **counts, "pictures_sha256": index.digest[:DIGITS]}

    def _document(self, document: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shard = self.index.shard
        first, after = (int(offset) for offset in shard.offsets[document : document + 2])
        tokens = shard.read(first, after)
        labels = np.append(tokens[1:], IGNORED)
        if self.sft:
            labels[:-1][shard.read_mask(first + 1, after) == 0] = IGNORED
        else:
            ids = self.index.vision_tokens
            labels[np.isin(labels, (ids.start, ids.end, ids.image, ids.video))] = IGNORED
        return tokens, labels


def sample_image(image: PlacedImage, rules: PatchRules, start: int = 0, document: int = 0) -> SampleImage:
    """An image of a document that begins at token `start` of its sequence."""
    height, width = (side * rules.patch for side in image.grid)
    requests = tuple(ResizeRequest(file, height, width) for file in image.files)
    return SampleImage(requests, image.grid, start + image.first_token, document)


def _one_each(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.arange(count), np.arange(count + 1)


SUFFIX = ".tar"


def holds_images(name: str, vision: VisionSpec | None) -> bool:
    """Return whether this entry is read as image data."""
    if name in SCENES or name.endswith(SUFFIX):
        return True
    path = Path(name)
    if path.is_dir():
        return next(path.glob(f"*{SUFFIX}"), None) is not None
    return vision is not None and name.endswith(".jsonl")


def open_images(
    name: str, job: Job, vision: VisionSpec | None, tokenizer: Tokenizer, cache: str | Path | None
) -> ImageSource:
    """The source of one entry."""
    if vision is None:
        problem, advice = f"{name} has images, and the model has no vision part", "train a vision-language model"
        raise FindingsError([Finding(rule="data-fits-model", at="job.data", problem=problem, advice=advice)])
    path = Path(name)
    if name in SCENES:
        paths = scene_shards(name, cache)
    else:
        paths = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    rules, within = patch_rules(vision, job.max_pixels), path if path.is_dir() else None
    index = open_image_index(name, paths, tokenizer, vision.tokens, rules, cache, within)
    return ImageSource(index, job.seq_len, job.packing, sft=job.task == "sft")
