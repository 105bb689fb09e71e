"""Positions of vision-language models: of tokens in the decoder (M-RoPE), and of patches in the encoder.

`data/images/` calls `multimodal_positions` for each document; `encoder.py` asks for the coordinates of patches and for
the rows of the learnt position table that each patch blends.

Patches stand in blocks of merge x merge, which become one token: a picture of 4 x 6 patches with merge 2 has six blocks
of four patches, block row by block row.

Shapes: S tokens of a document, P patches of all pictures, I pictures.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


def multimodal_positions(
    tokens_S: Tensor, grids: Sequence[tuple[int, int]], vision_tokens: Collection[int], merge: int
) -> Tensor:
    """The temporal, height and width position (3, S) of each token of one document, as transformers counts them.

    Text counts on in all three. A picture's tokens have one temporal position, and their row and column beside it; the
    text behind it goes on after the longer side.

    Args:
        tokens_S: the ids of the document.
        grids: height and width in patches of each picture, in the order of their tokens.
        vision_tokens: the ids that stand for a picture, such as those of images and of videos.
        merge: merge x merge patches are one token.
    """
    is_vision = torch.isin(tokens_S.cpu(), torch.tensor(sorted(vision_tokens))).tolist()
    parts, at, start, length = [], 0, 0, len(is_vision)  # `at` counts tokens, `start` positions
    for height, width in grids:
        first = is_vision.index(True, at)
        rows, columns = height // merge, width // merge
        parts += [_text(first - at, start), _picture(rows, columns, start + first - at)]
        start += first - at + max(rows, columns)
        at = first + rows * columns
        assert at <= length, f"a picture of {rows} x {columns} tokens is cut by the end of its document"
        assert all(is_vision[first:at]), f"a picture of {rows} x {columns} tokens has fewer of them"
    assert not any(is_vision[at:]), f"tokens of more than {len(grids)} pictures"
    return torch.cat([*parts, _text(length - at, start)], dim=1)


def _text(length: int, start: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, length)


def _picture(rows: int, columns: int, start: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column]).flatten(1) + start


def patch_coordinates(grids_I2: Tensor, merge: int) -> Tensor:
    """Row and column (P, 2) of each patch in its picture, in the order of blocks."""
    found = []
    for height, width in grids_I2.tolist():
        both = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        blocks = both.unflatten(1, (-1, merge)).unflatten(3, (-1, merge)).transpose(2, 3)
        found.append(blocks.reshape(2, -1).T)
    return torch.cat(found)


def blend_position_rows(coordinates_P2: Tensor, grids_I2: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four rows of a table of side x side positions that each patch blends, and their weights: (P, 4) each.

    The table is stretched over the picture so that corners meet corners (bilinear, `align_corners`).
    """
    size_P2 = grids_I2.repeat_interleave(grids_I2.prod(dim=1), dim=0)
    at_P2 = coordinates_P2.float() * (side - 1) / (size_P2 - 1).clamp(min=1)
    low_P2 = at_P2.floor()
    part_P2 = at_P2 - low_P2
    # Dims: patch, axis (row, column), neighbour (below, above).
    index_P22 = torch.stack([low_P2, low_P2 + 1], dim=2).long().clamp(max=side - 1)
    weight_P22 = torch.stack([1 - part_P2, part_P2], dim=2)
    index_P4 = index_P22[:, 0, :, None] * side + index_P22[:, 1, None, :]
    weight_P4 = weight_P22[:, 0, :, None] * weight_P22[:, 1, None, :]
    return index_P4.flatten(1), weight_P4.flatten(1)
