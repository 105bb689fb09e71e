"""The inputs of a forward: tokens, positions and targets of a microbatch, sharded over context-parallel ranks.

`Decoder` and `schedule/microbatch_runners.py` call `make_inputs`. Labels of MTP depths and positions of packed
documents depend on neighboring tokens. They are derived from the whole sequence first, and then each rank takes its
shard.

Shapes: B batch, S sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.batch import Images, Padding
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.layers.input_linears import identity
from threefold.engine.layers.positions import Positions

ShardSequence = Callable[[Tensor], Tensor]  # takes this rank's shard of a whole sequence (B, S)


@dataclass(frozen=True)
class Target:
    """The tokens of one prediction depth and the labels that it predicts."""

    tokens_BS: Tensor  # on this rank
    labels_BS: Tensor  # on this rank
    num_labels: Tensor  # of the whole sequence


@dataclass(frozen=True)
class Inputs:
    tokens_BS: Tensor
    positions: Positions
    targets: tuple[Target, ...]  # the next token first, then each MTP depth; empty without labels
    images: Images | None = None  # of the whole sequences
    shape: tuple[int, int] = (0, 0)  # B and S of the whole sequences, to which `images.token_index_V` refers
    padding: Padding | None = None

    def targets_of_step(self, ratios: Tensor | None) -> tuple[Target, ...]:
        """The targets, where `ratios` are the labels of each MTP depth over those of the next token in a whole step.

        A microbatch is weighted by its share of the next token's labels. The sum over microbatches is the mean over all
        labels of a depth only if each is divided by the labels that it would have at the ratio of the step.
        """
        if ratios is None:
            return self.targets
        first, *others = self.targets
        return first, *(replace(t, num_labels=first.num_labels * r) for t, r in zip(others, ratios, strict=True))


def make_inputs(
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    documents_BS: Tensor | None,
    positions_BS: Tensor | None,
    depths: int,
    shard_sequence: ShardSequence,
    images: Images | None = None,
    positions_3BS: Tensor | None = None,
    num_useful_B: Tensor | None = None,
    shard_hidden: ShardSequence = identity,
) -> Inputs:
    """Build the inputs of this rank. Label i is the token after position i already; IGNORE where there is none."""
    if positions_3BS is not None:
        positions_BS = positions_3BS[0]
    whole = Positions.from_tokens(tokens_BS, documents_BS, positions_BS)
    targets = []
    for depth in range(depths + 1) if labels_BS is not None else ():
        assert labels_BS is not None
        wanted_BS = labels_ahead(labels_BS, documents_BS, depth)
        targets.append(
            Target(
                shard_sequence(shift_left(tokens_BS, depth, 0)), shard_sequence(wanted_BS), (wanted_BS != IGNORE).sum()
            )
        )
    positions = Positions(shard_sequence(whole.positions_BS), whole.documents_BS, whole.positions_BS)
    positions.tokens_BS = shard_sequence(tokens_BS)
    if positions_3BS is not None:
        positions.axes_3BS = torch.stack([shard_sequence(axis_BS) for axis_BS in positions_3BS])
    batch, length = tokens_BS.shape
    padding = None
    if num_useful_B is not None:
        is_padding_BS = torch.arange(length, device=tokens_BS.device) >= num_useful_B[:, None]
        padding = Padding(shard_hidden(shard_sequence(is_padding_BS)).contiguous(), num_useful_B)
    return Inputs(positions.tokens_BS, positions, tuple(targets), images, (batch, length), padding)


def labels_ahead(labels_BS: Tensor, documents_BS: Tensor | None, depth: int) -> Tensor:
    """The labels of an MTP depth; depth 0 is the next token."""
    wanted_BS = shift_left(labels_BS, depth, IGNORE)
    if depth and documents_BS is not None:
        # A token predicts nothing beyond the end of its document.
        wanted_BS = wanted_BS.masked_fill(shift_left(documents_BS, depth, -1) != documents_BS, IGNORE)
    return wanted_BS


def shift_left(x_BS: Tensor, steps: int, fill: int) -> Tensor:
    """Each position gets the value `steps` further on; beyond the end it gets `fill`."""
    return F.pad(x_BS[:, steps:], (0, min(steps, x_BS.shape[1])), value=fill) if steps else x_BS
