"""Pipeline chunks: a decoder without the layers and ends that other chunks hold. `shard/order.py` extracts them.

Parameters keep their names, so that a checkpoint does not depend on how the model was split.
"""

from collections.abc import Sequence
from copy import copy

from torch import nn

from threefold.engine.models.decoder import Decoder
from threefold.layout.stages import Chunk
from threefold.spec.model import ModelSpec


def extract_chunk(whole: Decoder, chunks: Sequence[Chunk], number: int) -> Decoder:
    """The decoder of chunk `number`, which shares its modules with `whole`.

    The final norm belongs to the first chunk that needs its output: the one with the first MTP depth, or with the loss.
    """
    model = copy(whole)
    model._modules = dict(whole._modules)
    chunk = chunks[number]
    first_end = next(n for n, c in enumerate(chunks) if c.mtp or c.loss)
    first_depth = sum(c.mtp for c in chunks[:number])
    model.layers = nn.ModuleDict({str(n): whole.layers[str(n)] for n in chunk.layers})
    model.depths = range(first_depth, first_depth + chunk.mtp)
    model.later_depths = range(first_depth + chunk.mtp, whole.num_mtp)
    used = {min(depth, whole.num_mtp_sets - 1) for depth in model.depths}
    model.mtp = nn.ModuleDict({str(n): whole.mtp[str(n)] for n in sorted(used)})
    model.has_loss = chunk.loss
    if number != first_end:
        model.norm = None
    if not (chunk.embedding or chunk.mtp or (chunk.loss and whole.spec.tied)):
        model.embed = None
    if not chunk.loss:
        model.head = None
    if not chunk.embedding:
        model.vision = model.projector = None
        model.num_features = num_features_behind(whole.spec, chunks, number - 1)
        model.num_ahead = num_ahead_behind(whole.spec, chunks, number - 1)
    return model


def num_features_behind(spec: ModelSpec, chunks: Sequence[Chunk], number: int) -> int:
    """How many deepstack features later chunks than `number` still need: one for each of the first layers."""
    num_deepstack = min(len(spec.vision.deepstack), spec.num_layers) if spec.vision is not None else 0
    return max(0, num_deepstack - sum(len(chunk.layers) for chunk in chunks[: number + 1]))


def num_ahead_behind(spec: ModelSpec, chunks: Sequence[Chunk], number: int) -> int:
    """How many states with features of the pictures ahead MTP depths behind chunk `number` need: one each."""
    return 0 if spec.vision is None else sum(chunk.mtp for chunk in chunks[number + 1 :])


def num_hidden_states(spec: ModelSpec, chunks: Sequence[Chunk], number: int) -> int:
    """How many hidden states chunk `number` hands on: features of pictures for later layers and MTP depths, the main
    state, and one for each MTP depth so far."""
    features = num_features_behind(spec, chunks, number) + num_ahead_behind(spec, chunks, number)
    return features + 1 + sum(chunk.mtp for chunk in chunks[: number + 1])
