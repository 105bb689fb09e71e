"""A chunk of a pipeline: the whole decoder with everything taken out that other chunks hold.

Parameters keep their names, so that a checkpoint does not know how the model was cut.
"""

from collections.abc import Sequence
from copy import copy

from torch import nn

from threefold.engine.models.decoder import Decoder
from threefold.layout.stages import Chunk


def prune(whole: Decoder, chunks: Sequence[Chunk], number: int) -> Decoder:
    """What chunk `number` holds, as a decoder that shares its parts with `whole`.

    The norm sits where the hidden state is first needed behind it.
    """
    model = copy(whole)
    model._modules = dict(whole._modules)
    chunk = chunks[number]
    first_end = next(n for n, c in enumerate(chunks) if c.mtp or c.loss)
    first_depth = sum(c.mtp for c in chunks[:number])
    model.layers = nn.ModuleDict({str(n): whole.layers[str(n)] for n in chunk.layers})
    model.depths = range(first_depth, first_depth + chunk.mtp)
    used = {min(depth, whole.num_mtp_sets - 1) for depth in model.depths}
    model.mtp = nn.ModuleDict({str(n): whole.mtp[str(n)] for n in sorted(used)})
    model.has_loss = chunk.loss
    if number != first_end:
        model.norm = None
    if not (chunk.embedding or chunk.mtp or (chunk.loss and whole.spec.tied)):
        model.embed = None
    if not chunk.loss:
        model.head = None
    return model


def states_behind(chunks: Sequence[Chunk], number: int) -> int:
    """Hidden states that chunk `number` hands on: the main one and those of the MTP depths so far."""
    return 1 + sum(chunk.mtp for chunk in chunks[: number + 1])
