"""Features of the pictures of a microbatch, put at the tokens that stand for them.

`models/decoder.py` makes them where it embeds tokens. Ranks that share a sequence (context and tensor parallelism) have
the features of all its pictures (`shard/picture_parallel.py`), and each takes those of its own tokens.

Shapes: V tokens that stand for pictures, B batch, S whole sequence, s this rank's part of it, D model dim.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.spec.model import VisionTokens


@dataclass(frozen=True)
class PictureFeatures:
    """What the projector gives for the pictures of a microbatch, and where its tokens are."""

    main_VD: Tensor  # takes the place of the tokens' embeddings
    deepstack: list[Tensor]  # (V, D) each: added behind the first layers of the decoder, one a layer
    token_index_V: Tensor  # among the flattened [B * S] tokens
    shape: tuple[int, int]  # B and S
    shard: Callable[[Tensor], Tensor]  # whole sequences (B, S, ...) -> this rank's part of them

    def merge(self, embed_BsD: Tensor, ahead: int = 0) -> Tensor:
        """Embedded tokens with the features of pictures in their place. The tokens may be those of `ahead` later."""
        mask_VO = torch.ones(len(self.token_index_V), 1, dtype=torch.bool, device=embed_BsD.device)
        return torch.where(self._place(mask_VO, ahead), self._place(self.main_VD, ahead).to(embed_BsD), embed_BsD)

    def dense_deepstack(self) -> list[Tensor]:
        """The deepstack features as hidden states (B, s, D) that are zeros at tokens of text."""
        return [self._place(feature_VD) for feature_VD in self.deepstack]

    def dense_ahead(self, depths: Iterable[int]) -> list[Tensor]:
        """What MTP depths read of pictures, one a depth: the main features as hidden states (B, s, D) of the tokens
        that a depth embeds, zeros at tokens of text."""
        return [self._place(self.main_VD, depth + 1) for depth in depths]

    def _place(self, rows_VD: Tensor, ahead: int = 0) -> Tensor:
        batch, length = self.shape
        zeros_BSD = rows_VD.new_zeros(batch, length, rows_VD.shape[1])
        place = (self.token_index_V // length, self.token_index_V % length)
        # A blank picture has rows that no token stands for.
        placed_BSD = zeros_BSD.index_put(place, rows_VD[: len(self.token_index_V)])
        if ahead:
            placed_BSD = F.pad(placed_BSD[:, ahead:], (0, 0, 0, min(ahead, length)))
        return self.shard(placed_BSD)


def stands_for_picture(tokens_BS: Tensor, ids: VisionTokens) -> Tensor:
    """Whether each token stands for a part of an image or of a video."""
    return (tokens_BS == ids.image) | (tokens_BS == ids.video)
