"""Turns the samples of a microbatch into a batch with images: their patches, and the positions of all tokens.

An image whose header is sound can still fail to decode. Its document then has no loss and sees a gray image, so that
shapes and all other documents stay as they are; it is counted and named. `loader.py` makes one `BatchImages` a rank.
`BalancedSteps` deals the samples of a step out to ranks and microbatches so that their image tokens are level: ranks
wait for each other, so the slowest encoder sets the pace. All ranks compute the same assignment from the same numbers;
which samples a step has does not change.

Shapes: B sequences of a microbatch, S tokens of a sequence, I images, P patches, C values of a patch, V tokens of
images.
"""

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from threefold.engine.batch import Batch, Images
from threefold.engine.data.images.decode import DecodePool, ResizeRequest
from threefold.engine.data.images.image_source import ImageSample, ImageSource, SampleImage
from threefold.engine.data.images.patches import PatchRules, write_patches
from threefold.engine.data.packing import IGNORED, Sample
from threefold.engine.vision import multimodal_positions
from threefold.spec.model import VisionTokens
from threefold.units import format_many


def assign_samples(loads: Sequence[int], samples_per_slot: int) -> list[list[int]]:
    """The samples of each slot (the microbatches of all ranks), each with `samples_per_slot` of them, in order.

    The largest sample goes next to the slot with the smallest load that has room; equal loads go to the first slot.
    With one sample in a slot the slots are therefore sorted by size: the ranks of one microbatch, which are
    neighboring slots, get similar samples, and the totals of two ranks differ by less than the largest sample.
    """
    num_slots, rest = divmod(len(loads), samples_per_slot)
    if rest:
        raise ValueError(f"{len(loads)} samples do not fill slots of {samples_per_slot}")
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    free = [(0, slot) for slot in range(num_slots)]  # sorted, so already a heap
    for sample in sorted(range(len(loads)), key=lambda number: -loads[number]):
        load, slot = heapq.heappop(free)
        slots[slot].append(sample)
        if len(slots[slot]) < samples_per_slot:
            heapq.heappush(free, (load + loads[sample], slot))
    return [sorted(members) for members in slots]


class BalancedSteps:
    """The samples of each slot of a step. The last steps are remembered, since each is asked for slot by slot."""

    def __init__(self, load_of: Callable[[int], int], global_batch: int, micro_batch: int) -> None:
        """`load_of` returns the image tokens of a sample by its number in the global sequence."""
        self.load_of, self.global_batch, self.micro_batch = load_of, global_batch, micro_batch
        self._assigned: dict[int, list[list[int]]] = {}

    def samples(self, first: int, slot: int) -> list[int]:
        """The samples of a slot of the step that begins at sample `first`."""
        slots = self._assigned.get(first)
        if slots is None:
            loads = [self.load_of(first + number) for number in range(self.global_batch)]
            slots = assign_samples(loads, self.micro_batch)
            # A new table: the prefetch thread and the training loop may both ask.
            self._assigned = dict([*list(self._assigned.items())[-3:], (first, slots)])
        return [first + number for number in slots[slot]]


MAX_NAMED = 10_000  # bad images that are remembered
MAX_LINES = 20  # that are printed


@dataclass(frozen=True)
class SkippedImages:
    """Records and images that cannot be used."""

    num_records: int  # left out when the data was indexed
    records: tuple[tuple[str, str, int], ...]  # place, reason and number of the first of them
    images: tuple[tuple[str, str], ...] = ()  # that could not be decoded; their documents have no loss

    @staticmethod
    def of(sources: Iterable[object], images: "BatchImages | None") -> "SkippedImages":
        """Collect those of the sources of a mixture and of the batches made so far."""
        num_records, named = 0, []
        for source in sources:
            while hasattr(source, "source"):  # the part of a source that trains, or that is held out
                source = source.source
            if isinstance(source, ImageSource):
                count, places = source.skipped()
                num_records += count
                named += places
        if images is None:
            return SkippedImages(num_records, tuple(named))
        with images.lock:
            return SkippedImages(num_records, tuple(named), tuple(images.bad.items()))

    @staticmethod
    def joined(ranks: Sequence["SkippedImages"]) -> "SkippedImages":
        """Join those of all ranks, which have the same records and decode different images."""
        images = dict(pair for rank in ranks for pair in rank.images)
        return replace(ranks[0], images=tuple(images.items()))

    def lines(self) -> list[str]:
        """Lines for the user; none where everything can be used."""
        count = self.num_records + len(self.images)
        if not count:
            return []
        named = (*((at, reason, 1) for at, reason in self.images), *self.records)[:MAX_LINES]
        kinds = {"record": self.num_records, "image": len(self.images)}
        head = " and ".join(format_many(number, kind) for kind, number in kinds.items() if number)
        others = count - sum(number for _, _, number in named)
        rest = [f"  and {others} more"] if others else []
        return [f"skipped {head} that cannot be used:", *(f"  {at}: {reason}" for at, reason, _ in named), *rest]


class BatchImages:
    """Adds images and positions to batches."""

    def __init__(self, rules: PatchRules, vision_tokens: VisionTokens, pool: DecodePool) -> None:
        self.rules, self.vision_tokens, self.pool = rules, vision_tokens, pool
        self.bad: dict[str, str] = {}  # place and reason of images that could not be decoded
        self.lock = threading.Lock()  # the prefetch thread counts, the training loop reads

    def add(self, batch: Batch, rows: Sequence[Sample]) -> Batch:
        """The batch with positions of three axes in place of one, and with the images of its rows."""
        length = batch.tokens_BS.shape[1]
        placed = [
            (number, image) for number, row in enumerate(rows) if isinstance(row, ImageSample) for image in row.images
        ]
        positions_3BS = torch.stack([self._positions(row, length) for row in rows], dim=1)
        batch = replace(batch, positions_BS=None, positions_3BS=positions_3BS)
        if not placed:
            return batch
        patches_PC, failed = self._decode([image for _, image in placed])
        for number, image in (placed[index] for index in failed):
            _ignore_document(batch.labels_BS[number], rows[number], image.document)
        token_index = [
            number * length + image.first_token + np.arange(self.rules.num_tokens(image.grid))
            for number, image in placed
        ]
        images = Images(
            patches_PC=patches_PC,
            grids_I2=torch.tensor([image.grid for _, image in placed]),
            token_index_V=torch.from_numpy(np.concatenate(token_index)),
        )
        return replace(batch, images=images, num_bad_images=len(failed))

    def _decode(self, images: Sequence[SampleImage]) -> tuple[Tensor, list[int]]:
        """The patches of all images, and the numbers of those that could not be decoded."""
        requests = [request for image in images for request in image.requests]
        decoded = self.pool.decode(requests)
        patches_PC = np.zeros((sum(h * w for h, w in (p.grid for p in images)), self.rules.patch_values), np.float32)
        failed, first_row, first_frame = [], 0, 0
        for number, image in enumerate(images):
            frames = decoded[first_frame : first_frame + len(image.requests)]
            after = first_row + image.grid[0] * image.grid[1]
            pixels = [frame for frame in frames if not isinstance(frame, str)]
            if len(pixels) == len(frames):
                write_patches(np.stack(pixels), self.rules, patches_PC[first_row:after])
            else:
                failed.append(number)
                self._count(image.requests, frames)
            first_row, first_frame = after, first_frame + len(frames)
        return torch.from_numpy(patches_PC), failed

    def _count(self, requests: Sequence[ResizeRequest], decoded: Sequence[object]) -> None:
        with self.lock:
            for request, outcome in zip(requests, decoded, strict=True):
                if isinstance(outcome, str) and len(self.bad) < MAX_NAMED:
                    self.bad[request.file.place] = outcome

    def _positions(self, row: Sample, length: int) -> Tensor:
        """Positions (3, S) of one row. They begin anew in each document; padding counts like text."""
        if not isinstance(row, ImageSample):
            positions_S = np.arange(length) if row.positions_S is None else row.positions_S[:length]
            return torch.from_numpy(np.ascontiguousarray(positions_S, np.int64)).expand(3, length)
        num_tokens = len(row.tokens_S) - row.num_padding
        ends = (*row.starts[1:], num_tokens)
        parts = []
        for number, (start, end) in enumerate(zip(row.starts, ends, strict=True)):
            grids = [image.grid for image in row.images if image.document == number]
            tokens = torch.from_numpy(row.tokens_S[start:end])
            ids = (self.vision_tokens.image, self.vision_tokens.video)
            parts.append(multimodal_positions(tokens, grids, ids, self.rules.merge))
        padding = torch.arange(length - num_tokens).expand(3, -1)
        if row.documents_S is None and parts and length > num_tokens:
            padding = padding + int(parts[-1].max()) + 1
        return torch.cat([*parts, padding], dim=1)


def _ignore_document(labels_S: Tensor, row: Sample, document: int) -> None:
    assert isinstance(row, ImageSample)
    ends = (*row.starts[1:], len(row.tokens_S) - row.num_padding)
    labels_S[row.starts[document] : ends[document]] = IGNORED
