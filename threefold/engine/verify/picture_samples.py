"""Made-up pictures in the samples of the oracle, for vision-language models.

`oracle.synthetic_batch` calls `add_pictures`. Samples have two pictures, none or one by turns, of several sizes and
aspects, so that some ranks and microbatches have none. A picture lies in one document; its patches are random numbers.

Shapes: S sequence, B batch, P patches, C values of a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from threefold.engine.batch import Batch, Images
from threefold.engine.vision.encoder import CHANNELS
from threefold.engine.vision.positions import multimodal_positions
from threefold.spec.model import VisionSpec

_SIZES = ((2, 2), (1, 3), (2, 1), (1, 1))  # of pictures, in merged patches


@dataclass(frozen=True)
class PictureSample:
    """One sample: its tokens and documents with room for pictures, and the pictures."""

    tokens_S: Tensor
    documents_S: Tensor
    grids: list[tuple[int, int]]  # in patches
    patches_PC: Tensor
    positions_3S: Tensor


def make_picture_sample(
    vision: VisionSpec, tokens_S: Tensor, documents_S: Tensor, number: int, is_packed: bool
) -> PictureSample:
    """Sample `number` with as many pictures as are its turn and fit. Without packing a sample is one document."""
    draw = torch.Generator().manual_seed(5000 + number)
    tokens_S, documents_S = tokens_S.clone(), documents_S.clone()
    # Text that happens to be the id of a picture would be one.
    tokens_S[torch.isin(tokens_S, torch.tensor([vision.tokens.image, vision.tokens.video]))] = vision.tokens.start
    grids, at = [], 1 + number % 2
    for turn in range((2, 0, 1)[number % 3]):
        rows, columns = _SIZES[(number + turn) % len(_SIZES)]
        end = at + rows * columns
        if end > len(tokens_S):
            break
        tokens_S[at:end] = vision.tokens.video if (number + turn) % 4 == 1 else vision.tokens.image
        documents_S[at:end] = documents_S[at]
        grids.append((rows * vision.merge, columns * vision.merge))
        at = end + 2
    documents_S = documents_S.cummax(dim=0).values
    width = CHANNELS * vision.temporal_patch * vision.patch**2
    patches_PC = torch.randn(sum(h * w for h, w in grids), width, generator=draw)
    lengths = documents_S.unique_consecutive(return_counts=True)[1].tolist() if is_packed else [len(tokens_S)]
    positions_3S = _positions(vision, tokens_S, grids, lengths)
    return PictureSample(tokens_S, documents_S, grids, patches_PC, positions_3S)


def _positions(
    vision: VisionSpec, tokens_S: Tensor, grids: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> Tensor:
    """Positions that start again with each document."""
    ids, rest, parts = (vision.tokens.image, vision.tokens.video), list(grids), []
    for document_S in tokens_S.split(list(lengths)):
        tokens_left, here = int(torch.isin(document_S, torch.tensor(ids)).sum()), []
        while tokens_left > 0:
            here.append(rest.pop(0))
            tokens_left -= here[-1][0] * here[-1][1] // vision.merge**2
        parts.append(multimodal_positions(document_S, here, ids, vision.merge))
    return torch.cat(parts, dim=1)


def add_pictures(vision: VisionSpec, batch: Batch, first: int) -> Batch:
    """The batch with pictures in its samples, the first of which has the number `first`."""
    packed = batch.documents_BS is not None
    documents_BS = torch.zeros_like(batch.tokens_BS) if batch.documents_BS is None else batch.documents_BS
    rows = [
        make_picture_sample(vision, tokens_S, documents_S, first + n, packed)
        for n, (tokens_S, documents_S) in enumerate(zip(batch.tokens_BS, documents_BS, strict=True))
    ]
    tokens_BS = torch.stack([row.tokens_S for row in rows])
    grids = [grid for row in rows for grid in row.grids]
    is_picture = torch.isin(tokens_BS.flatten(), torch.tensor([vision.tokens.image, vision.tokens.video]))
    patches_PC = torch.cat([row.patches_PC for row in rows])
    images = Images(patches_PC, torch.tensor(grids), is_picture.nonzero().flatten()) if grids else None
    return replace(
        batch,
        tokens_BS=tokens_BS,
        documents_BS=torch.stack([row.documents_S for row in rows]) if packed else None,
        images=images,
        positions_3BS=torch.stack([row.positions_3S for row in rows], dim=1),
    )
