"""Parameters of the image encoder and the projector of our own engine, in order of registration.

`local_parameters.py` puts them behind the embedding of the first pipeline chunk; no rank holds a part of one.
"""

from collections.abc import Iterator

from threefold.spec.model import VisionSpec

_CHANNELS = 3


def vision_parameters(vision: VisionSpec, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each, where the decoder has the model dim `dim`."""
    patch_values = _CHANNELS * vision.temporal_patch * vision.patch**2
    yield from _linear("vision.embed.patch", patch_values, vision.dim)
    yield "vision.embed.positions.weight", (vision.num_positions, vision.dim)
    for number in range(vision.depth):
        path = f"vision.layers.{number}"
        yield from _norm(f"{path}.attention_norm", vision.dim)
        yield from _linear(f"{path}.attention.qkv", vision.dim, 3 * vision.dim)
        yield from _linear(f"{path}.attention.out", vision.dim, vision.dim)
        yield from _norm(f"{path}.mlp_norm", vision.dim)
        yield from _linear(f"{path}.mlp.up", vision.dim, vision.mlp_dim)
        yield from _linear(f"{path}.mlp.down", vision.mlp_dim, vision.dim)
    joined = vision.dim * vision.merge**2
    yield from _merger("projector.main", vision.dim, joined, dim)
    for number in range(len(vision.deepstack)):
        yield from _merger(f"projector.deepstack.{number}", joined, joined, dim)


def _merger(path: str, norm_dim: int, joined: int, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _norm(f"{path}.norm", norm_dim)
    yield from _linear(f"{path}.up", joined, joined)
    yield from _linear(f"{path}.down", joined, dim)


def _linear(path: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (outputs, inputs)
    yield f"{path}.bias", (outputs,)


def _norm(path: str, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (dim,)
    yield f"{path}.bias", (dim,)
