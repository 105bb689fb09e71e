"""One microbatch of token ids as the loader hands it to a rank.

`data/loader.py` makes batches; `step.py` and `schedule/microbatch_runners.py` read them.

Shapes: B sequences of a microbatch, S tokens of a sequence, I images, P patches of all images, C values of a patch,
V tokens that stand for images.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """The images of one microbatch, in the order of their tokens. A video is one image for each pair of frames."""

    # Normalized values, channels x frames x height x width of a patch, in the image processor's order. On the host: the
    # encoder moves them, so that the device holds those of one microbatch at a time.
    patches_PC: Tensor
    grids_I2: Tensor  # int64 on the CPU: height and width of each image in patches, before merging
    token_index_V: Tensor  # int64: where the tokens of the images stand among the flattened [B * S] tokens


class Padding(NamedTuple):
    """The tokens of a microbatch that only fill up its sequences. They have no part in the statistics and balancing
    losses of routers, and no weight in the experts."""

    is_padding_BS: Tensor  # bool, of the tokens on this rank
    num_useful_B: Tensor  # tokens of each whole sequence that are no padding


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch of one rank, int64.

    Labels are shifted already: label i is the token after token i, and -100 where nothing is learned. With packed
    documents, `documents_BS` numbers the documents of each sequence from 0 and `positions_BS` restarts in each.
    `lengths` are the tokens of each sequence that are no padding; None where there is none. `num_useful_B` has the same
    for the device: padding is at the end. It is None where a job has sequences without padding.

    Vision-language models have `positions_3BS` (temporal, height, width; equal for text) instead of `positions_BS`, and
    `images`, which is None where the microbatch has no image. `num_bad_images` could not be decoded; they are gray,
    and their documents have no labels.

    With dynamic context parallelism `cp_degree` ranks share the microbatch, `lengths` are those of its documents, and
    an empty microbatch has none: its tokens stand for nothing. `sample_lengths` are the useful tokens of the sample
    that each document comes from.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    documents_BS: Tensor | None = None
    positions_BS: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    positions_3BS: Tensor | None = None
    images: Images | None = None
    num_bad_images: int = 0
    cp_degree: int | None = None  # None: all ranks of the CP group share the microbatch
    sample_lengths: tuple[int, ...] | None = None  # one for each of `lengths`; None: they are the same
    num_useful_B: Tensor | None = None

    def pin(self, device: torch.device) -> "Batch":
        """The batch in pinned memory, from which it can be copied to this device while the host continues.

        Patches of images stay where they are: they are many, and the encoder moves them.
        """
        names = ("tokens_BS", "labels_BS", "documents_BS", "positions_BS", "positions_3BS", "num_useful_B")
        with torch.cuda.device(device):  # another thread than the one that trains may have another device
            pinned = {name: x.pin_memory() for name in names if (x := getattr(self, name)) is not None}
            if self.images is None:
                return replace(self, **pinned)
            images = self.images._replace(token_index_V=self.images.token_index_V.pin_memory())
            return replace(self, **pinned, images=images)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute: other ranks have work, and this one takes part in their
        collectives."""
        return self.cp_degree is not None and not self.lengths
