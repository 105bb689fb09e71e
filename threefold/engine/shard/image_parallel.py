"""Ranks that share sequences share the encoding of their images: each encodes some and gathers the features of all.

The ranks are those of context and tensor parallelism, which hold the same images. `order.py` calls `shard_images`.
Every rank knows all sizes, so that who encodes what needs no message. Gradients of encoder and projector are then those
of a rank's own images, a part of the sum over these ranks.

Shapes: V tokens that stand for images, D model dim, K features of a token, P patches, C values of a patch.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.batch import Images
from threefold.engine.dist.collectives import gather_along
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.models.decoder import Decoder
from threefold.engine.vision import blank_images
from threefold.spec.model import VisionSpec


def shard_images(model: Decoder, mesh: Mesh) -> None:
    """Let the model encode the images of a microbatch over the ranks that share its sequences."""
    group = mesh.group("cp", "tp")
    if model.spec.vision is not None and not group.is_trivial:
        model.share_pictures = ImageSharing(group, model.spec.vision)


class ImageSharing:
    """Encodes this rank's images with `encode` and returns the features of all, in the order of the images."""

    def __init__(self, group: Group, vision: VisionSpec) -> None:
        self.group, self.vision = group, vision

    def __call__(self, encode: Callable[[Images], list[Tensor]], images: Images) -> list[Tensor]:
        num_patches = images.grids_I2.prod(dim=1).tolist()
        num_tokens = [patches // self.vision.merge**2 for patches in num_patches]
        owned = deal_out(num_patches, self.group.size)
        rows = [sum(num_tokens[number] for number in numbers) for numbers in owned]
        features = encode(self._own_images(images, owned[self.group.rank], num_patches))
        own_VX = torch.cat([feature_VD[: rows[self.group.rank]] for feature_VD in features], dim=1)
        padded = F.pad(own_VX, (0, 0, 0, max(rows) - len(own_VX)))
        gathered = gather_along(padded, self.group, dim=0)
        order_V = torch.tensor(_row_order(owned, num_tokens, max(rows)), device="cpu")
        all_VX = gathered.index_select(0, order_V.to(gathered.device, non_blocking=True))
        return list(all_VX.chunk(len(features), dim=1))

    def _own_images(self, images: Images, numbers: Sequence[int], num_patches: Sequence[int]) -> Images:
        """The images of this rank; a blank one, of which no feature is used, where it has none."""
        device = images.token_index_V.device
        if not numbers:
            return blank_images(self.vision, device)
        parts = images.patches_PC.split(list(num_patches))
        patches_PC = torch.cat([parts[number] for number in numbers])
        return images._replace(patches_PC=patches_PC, grids_I2=images.grids_I2[list(numbers)])


def deal_out(num_patches: Sequence[int], size: int) -> list[list[int]]:
    """The numbers of the images of each rank: the largest first, each to the rank with the fewest patches so far."""
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for number in sorted(range(len(num_patches)), key=lambda number: -num_patches[number]):
        rank = loads.index(min(loads))
        owned[rank].append(number)
        loads[rank] += num_patches[number]
    return [sorted(numbers) for numbers in owned]


def _row_order(owned: Sequence[Sequence[int]], num_tokens: Sequence[int], padded: int) -> list[int]:
    """The row of each image's tokens among the gathered rows, `padded` of each rank."""
    first: dict[int, int] = {}
    for rank, numbers in enumerate(owned):
        at = rank * padded
        for number in numbers:
            first[number] = at
            at += num_tokens[number]
    return [first[number] + token for number, count in enumerate(num_tokens) for token in range(count)]
