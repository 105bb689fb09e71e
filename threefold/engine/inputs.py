"""A microbatch as the model sees it. What looks along the sequence is derived from the whole of it, then cut.

Shapes: B batch, S sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from threefold.engine.loss import IGNORE
from threefold.engine.places import Places

Cut = Callable[[Tensor], Tensor]  # (B, S) of a whole sequence to this rank's share of it


@dataclass(frozen=True)
class Target:
    """What to read and to predict: `num_labels` counts the whole sequence, whatever this rank's share of it."""

    tokens_BS: Tensor
    labels_BS: Tensor
    num_labels: Tensor


@dataclass(frozen=True)
class Inputs:
    tokens_BS: Tensor
    places: Places
    targets: tuple[Target, ...]  # of the next token, then of each MTP depth; empty without labels


def make_inputs(
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    documents_BS: Tensor | None,
    positions_BS: Tensor | None,
    depths: int,
    cut: Cut,
) -> Inputs:
    """`labels_BS` are the next tokens already: label i belongs to position i; IGNORE where there is none."""
    whole = Places.of(tokens_BS, documents_BS, positions_BS)
    targets = []
    for depth in range(depths + 1) if labels_BS is not None else ():
        assert labels_BS is not None
        wanted_BS = ahead(labels_BS, depth, IGNORE)
        if depth and documents_BS is not None:
            # Beyond the end of its document a token predicts nothing.
            other_BS = ahead(documents_BS, depth, -1) != documents_BS
            wanted_BS = wanted_BS.masked_fill(other_BS, IGNORE)
        targets.append(Target(cut(ahead(tokens_BS, depth, 0)), cut(wanted_BS), (wanted_BS != IGNORE).sum()))
    places = Places(cut(whole.positions_BS), whole.documents_BS)
    return Inputs(cut(tokens_BS), places, tuple(targets))


def ahead(x_BS: Tensor, steps: int, fill: int) -> Tensor:
    """Each position sees what stands `steps` further on; beyond the end, `fill`."""
    return F.pad(x_BS[:, steps:], (0, min(steps, x_BS.shape[1])), value=fill) if steps else x_BS
