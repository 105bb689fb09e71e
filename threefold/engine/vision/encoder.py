"""The image encoder: patches of all pictures of a microbatch in, hidden states behind some of its layers out.

Pictures of any size lie one behind the other; a patch attends to the patches of its own picture. `models/decoder.py`
runs the encoder where it embeds tokens, and `projector.py` turns its hidden states into features of the decoder.

Shapes: P patches of all pictures, C values of a patch, D encoder dim, H heads, d head dim, F = d / 2 rotary
frequencies, I pictures.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.picture_attention import PictureBounds, attend_within_pictures
from threefold.engine.autograd.recompute import recompute
from threefold.engine.batch import Images
from threefold.engine.layers.rope import frequencies, rotate
from threefold.engine.vision.positions import blend_position_rows, patch_coordinates
from threefold.spec.model import VisionSpec

CHANNELS = 3  # colours of a pixel
EPS = 1e-6  # of every norm: Qwen3-VL's code states it, and no configuration does
_THETA = 10_000.0  # of the rotary positions of patches, likewise


@dataclass(frozen=True)
class Pictures:
    """What every layer needs to know of the pictures; computed once for a forward."""

    bounds: PictureBounds
    table: tuple[Tensor, Tensor]  # cosines and sines (1, P, F)


class PatchEmbedding(nn.Module):
    """A linear of the patch's values, plus its position: a learnt square table, stretched over the picture."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.patch = nn.Linear(CHANNELS * spec.temporal_patch * spec.patch**2, spec.dim)
        self.positions = nn.Embedding(
            spec.num_positions, spec.dim, _weight=torch.empty(spec.num_positions, spec.dim)
        )  # without first values, as in `models/decoder.py`

    def forward(self, patches_PC: Tensor, index_P4: Tensor, weight_P4: Tensor) -> Tensor:
        weight: Tensor = self.positions(index_P4)
        position_PD = (weight * weight_P4[..., None].to(weight.dtype)).sum(dim=1)
        return self.patch(patches_PC.to(weight.dtype)) + position_PD


class VisionAttention(nn.Module):
    """Every patch attends to every patch of its picture; rows turn one half of a head, columns the other."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.qkv = nn.Linear(spec.dim, 3 * spec.dim)
        self.out = nn.Linear(spec.dim, spec.dim)

    def forward(self, x_PD: Tensor, pictures: Pictures) -> Tensor:
        q_1HPd, k_1HPd, v_1HPd = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)[None] for each in self.qkv(x_PD).chunk(3, dim=-1)
        )
        q_1HPd, k_1HPd = rotate(q_1HPd, pictures.table), rotate(k_1HPd, pictures.table)
        attended_1HPd = attend_within_pictures(q_1HPd, k_1HPd, v_1HPd, pictures.bounds)
        y_PD: Tensor = self.out(attended_1HPd[0].transpose(0, 1).flatten(1))
        return y_PD


class VisionMlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, x_PD: Tensor) -> Tensor:
        y_PD: Tensor = self.down(F.gelu(self.up(x_PD), approximate="tanh"))
        return y_PD


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `recomputed` are the parts that a plan recomputes."""

    recomputed: frozenset[str] = frozenset()

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(spec.dim, eps=EPS), VisionAttention(spec)
        self.mlp_norm, self.mlp = nn.LayerNorm(spec.dim, eps=EPS), VisionMlp(spec.dim, spec.mlp_dim)

    def forward(self, x_PD: Tensor, pictures: Pictures) -> Tensor:
        x_PD = x_PD + self._part("attn", partial(self._attend, pictures), x_PD)
        return x_PD + self._part("mlp", self._feed_forward, x_PD)

    def _part(self, name: str, function: Callable[[Tensor], Tensor], x_PD: Tensor) -> Tensor:
        return recompute(function, x_PD, enabled=name in self.recomputed, name=f"vision {name}")

    def _attend(self, pictures: Pictures, x_PD: Tensor) -> Tensor:
        y_PD: Tensor = self.attention(self.attention_norm(x_PD), pictures)
        return y_PD

    def _feed_forward(self, x_PD: Tensor) -> Tensor:
        y_PD: Tensor = self.mlp(self.mlp_norm(x_PD))
        return y_PD


class VisionEncoder(nn.Module):
    """Patches to hidden states. An encoder whose parameters are all frozen runs without autograd."""

    def __init__(self, spec: VisionSpec, recomputed: Iterable[str] = ()) -> None:
        super().__init__()
        self.spec, self.recomputed = spec, frozenset(recomputed)
        self.embed = PatchEmbedding(spec)
        self.layers = nn.ModuleList(VisionBlock(spec) for _ in range(spec.depth))
        for layer in self.layers:
            assert isinstance(layer, VisionBlock)
            layer.recomputed = self.recomputed

    def forward(self, images: Images) -> list[Tensor]:
        """The hidden states behind the last layer, then those behind each layer of `spec.deepstack`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains(self)):
            return self._encode(images)

    def _encode(self, images: Images) -> list[Tensor]:
        device, grids_I2 = images.token_index_V.device, images.grids_I2
        coordinates_P2 = patch_coordinates(grids_I2, self.spec.merge)
        blend = blend_position_rows(coordinates_P2, grids_I2, math.isqrt(self.spec.num_positions))
        index_P4, weight_P4 = (each.to(device, non_blocking=True) for each in blend)
        x_PD = self.embed(images.patches_PC.to(device, non_blocking=True), index_P4, weight_P4)
        pictures = Pictures(
            PictureBounds.from_lengths(grids_I2.prod(dim=1).tolist(), device),
            axial_table(coordinates_P2.to(device, non_blocking=True), self.spec.dim // self.spec.num_heads),
        )
        states = []
        for number, layer in enumerate(self.layers):
            x_PD = recompute(partial(_run_layer, layer, pictures), x_PD, enabled="full" in self.recomputed, name="full")
            if number in self.spec.deepstack:
                states.append(x_PD)
        return [x_PD, *states]


def _run_layer(layer: nn.Module, pictures: Pictures, x_PD: Tensor) -> Tensor:
    y_PD: Tensor = layer(x_PD, pictures)
    return y_PD


def axial_table(coordinates_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, P, F): the first half of the frequencies turns by row, the second by column."""
    freq_f = frequencies(head_dim // 2, _THETA, None, coordinates_P2.device)
    angle_1PF = (coordinates_P2.float()[:, :, None] * freq_f).flatten(1)[None]
    return angle_1PF.cos(), angle_1PF.sin()


def trains(module: nn.Module) -> bool:
    """Whether some parameter of the module gets a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def blank_images(spec: VisionSpec, device: torch.device) -> Images:
    """The smallest picture, which no token stands for.

    A rank whose microbatch has no picture runs it, so that it takes part in the collectives of the encoder's
    parameters; its gradients are zeros.
    """
    width = CHANNELS * spec.temporal_patch * spec.patch**2
    return Images(
        patches_PC=torch.zeros(spec.merge**2, width, device=device),
        grids_I2=torch.tensor([[spec.merge, spec.merge]], device="cpu"),
        token_index_V=torch.empty(0, dtype=torch.int64, device=device),
    )
