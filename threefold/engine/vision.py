"""Vision-language models: the image encoder, the projector, positions, and features put among the tokens.

Images of any size lie one after the other; a patch attends to the patches of its own image. `models/decoder.py` runs
the encoder and the projector where it embeds tokens: merge x merge patches become one feature of the decoder, for each
hidden state that the encoder returns. The first feature takes the place of the embedding of an image's token; the
others (deepstack) are added after the first layers of the decoder, one a layer. Ranks that share a sequence (context
and tensor parallelism) have the features of all its images (`shard/image_parallel.py`), and each takes those of its own
tokens.

`data/images/` calls `multimodal_positions` for each document (M-RoPE). Patches stand in blocks of merge x merge, which
become one token: an image of 4 x 6 patches with merge 2 has six blocks of four patches, block row by block row.

Shapes: P patches of all images, C values of a patch, I images, D encoder dim (model dim in `ImageFeatures`), H heads,
d head dim, F = d / 2 rotary frequencies, V = P / merge^2 tokens that stand for images, M = D * merge^2, O model dim of
the decoder, B batch, S whole sequence or document, s this rank's part of it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.picture_attention import PictureBounds, attend_within_pictures
from threefold.engine.autograd.recompute import recompute
from threefold.engine.batch import Images
from threefold.engine.layers.rope import frequencies, rotate
from threefold.spec.model import VisionSpec, VisionTokens


def multimodal_positions(
    tokens_S: Tensor, grids: Sequence[tuple[int, int]], vision_tokens: Collection[int], merge: int
) -> Tensor:
    """The temporal, height and width position (3, S) of each token of one document, as transformers counts them.

    Text counts on in all three. An image's tokens have one temporal position, and their row and column next to it; the
    text after it continues after the longer side.

    Args:
        tokens_S: the ids of the document.
        grids: height and width in patches of each image, in the order of their tokens.
        vision_tokens: the ids that stand for an image, such as those of images and of videos.
        merge: merge x merge patches are one token.
    """
    is_vision = torch.isin(tokens_S.cpu(), torch.tensor(sorted(vision_tokens))).tolist()
    parts, at, start, length = [], 0, 0, len(is_vision)  # `at` counts tokens, `start` positions
    for height, width in grids:
        first = is_vision.index(True, at)
        rows, columns = height // merge, width // merge
        parts += [_text(first - at, start), _image(rows, columns, start + first - at)]
        start += first - at + max(rows, columns)
        at = first + rows * columns
        assert at <= length, f"an image of {rows} x {columns} tokens is cut by the end of its document"
        assert all(is_vision[first:at]), f"an image of {rows} x {columns} tokens has fewer of them"
    assert not any(is_vision[at:]), f"tokens of more than {len(grids)} images"
    return torch.cat([*parts, _text(length - at, start)], dim=1)


def _text(length: int, start: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, length)


def _image(rows: int, columns: int, start: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column]).flatten(1) + start


def patch_coordinates(grids_I2: Tensor, merge: int) -> Tensor:
    """Row and column (P, 2) of each patch in its image, in the order of blocks."""
    coordinates = []
    for height, width in grids_I2.tolist():
        both = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        blocks = both.unflatten(1, (-1, merge)).unflatten(3, (-1, merge)).transpose(2, 3)
        coordinates.append(blocks.reshape(2, -1).T)
    return torch.cat(coordinates)


def blend_position_rows(coordinates_P2: Tensor, grids_I2: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four rows of a table of side x side positions that each patch blends, and their weights: (P, 4) each.

    The table is stretched over the image so that corners meet corners (bilinear, `align_corners`).
    """
    size_P2 = grids_I2.repeat_interleave(grids_I2.prod(dim=1), dim=0)
    at_P2 = coordinates_P2.float() * (side - 1) / (size_P2 - 1).clamp(min=1)
    low_P2 = at_P2.floor()
    part_P2 = at_P2 - low_P2
    # Dims: patch, axis (row, column), neighbor (below, above).
    index_P22 = torch.stack([low_P2, low_P2 + 1], dim=2).long().clamp(max=side - 1)
    weight_P22 = torch.stack([1 - part_P2, part_P2], dim=2)
    index_P4 = index_P22[:, 0, :, None] * side + index_P22[:, 1, None, :]
    weight_P4 = weight_P22[:, 0, :, None] * weight_P22[:, 1, None, :]
    return index_P4.flatten(1), weight_P4.flatten(1)


CHANNELS = 3  # colors of a pixel
EPS = 1e-6  # of every norm: Qwen3-VL's code states it, and no configuration does
_THETA = 10_000.0  # of the rotary positions of patches, likewise


@dataclass(frozen=True)
class ImageLayout:
    """The layout of all images, which every layer needs; computed once for a forward."""

    bounds: PictureBounds
    table: tuple[Tensor, Tensor]  # cosines and sines (1, P, F)


class PatchEmbedding(nn.Module):
    """A linear of the patch's values, plus its position: a learned square table, stretched over the image."""

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
    """Every patch attends to every patch of its image; rows turn one half of a head, columns the other."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.qkv = nn.Linear(spec.dim, 3 * spec.dim)
        self.out = nn.Linear(spec.dim, spec.dim)

    def forward(self, x_PD: Tensor, layout: ImageLayout) -> Tensor:
        q_1HPd, k_1HPd, v_1HPd = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)[None] for each in self.qkv(x_PD).chunk(3, dim=-1)
        )
        q_1HPd, k_1HPd = rotate(q_1HPd, layout.table), rotate(k_1HPd, layout.table)
        attended_1HPd = attend_within_pictures(q_1HPd, k_1HPd, v_1HPd, layout.bounds)
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

    def forward(self, x_PD: Tensor, layout: ImageLayout) -> Tensor:
        x_PD = x_PD + self._part("attn", partial(self._attend, layout), x_PD)
        return x_PD + self._part("mlp", self._feed_forward, x_PD)

    def _part(self, name: str, function: Callable[[Tensor], Tensor], x_PD: Tensor) -> Tensor:
        return recompute(function, x_PD, enabled=name in self.recomputed, name=f"vision {name}")

    def _attend(self, layout: ImageLayout, x_PD: Tensor) -> Tensor:
        y_PD: Tensor = self.attention(self.attention_norm(x_PD), layout)
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
        """The hidden states after the last layer, then those after each layer of `spec.deepstack`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains(self)):
            return self._encode(images)

    def _encode(self, images: Images) -> list[Tensor]:
        device, grids_I2 = images.token_index_V.device, images.grids_I2
        coordinates_P2 = patch_coordinates(grids_I2, self.spec.merge)
        blend = blend_position_rows(coordinates_P2, grids_I2, math.isqrt(self.spec.num_positions))
        index_P4, weight_P4 = (each.to(device, non_blocking=True) for each in blend)
        x_PD = self.embed(images.patches_PC.to(device, non_blocking=True), index_P4, weight_P4)
        layout = ImageLayout(
            PictureBounds.from_lengths(grids_I2.prod(dim=1).tolist(), device),
            axial_table(coordinates_P2.to(device, non_blocking=True), self.spec.dim // self.spec.num_heads),
        )
        states = []
        for number, layer in enumerate(self.layers):
            x_PD = recompute(partial(_run_layer, layer, layout), x_PD, enabled="full" in self.recomputed, name="full")
            if number in self.spec.deepstack:
                states.append(x_PD)
        return [x_PD, *states]


def _run_layer(layer: nn.Module, layout: ImageLayout, x_PD: Tensor) -> Tensor:
    y_PD: Tensor = layer(x_PD, layout)
    return y_PD


def axial_table(coordinates_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, P, F): the first half of the frequencies turns by row, the second by column."""
    freq_f = frequencies(head_dim // 2, _THETA, None, coordinates_P2.device)
    angle_1PF = (coordinates_P2.float()[:, :, None] * freq_f).flatten(1)[None]
    return angle_1PF.cos(), angle_1PF.sin()


def trains(module: nn.Module) -> bool:
    """Return whether some parameter of the module gets a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def blank_images(spec: VisionSpec, device: torch.device) -> Images:
    """The smallest image, which no token stands for.

    A rank whose microbatch has no image runs it, so that it takes part in the collectives of the encoder's
    parameters; its gradients are zeros.
    """
    width = CHANNELS * spec.temporal_patch * spec.patch**2
    return Images(
        patches_PC=torch.zeros(spec.merge**2, width, device=device),
        grids_I2=torch.tensor([[spec.merge, spec.merge]], device="cpu"),
        token_index_V=torch.empty(0, dtype=torch.int64, device=device),
    )


class Merger(nn.Module):
    """Two linears over the joined patches of a token. The norm is over each patch, or over the joined ones."""

    def __init__(self, spec: VisionSpec, dim: int, norm_joined: bool) -> None:
        super().__init__()
        joined_dim = spec.dim * spec.merge**2
        self.joined_dim, self.norm_joined = joined_dim, norm_joined
        self.norm = nn.LayerNorm(joined_dim if norm_joined else spec.dim, eps=EPS)
        self.up = nn.Linear(joined_dim, joined_dim)
        self.down = nn.Linear(joined_dim, dim)

    def forward(self, x_PD: Tensor) -> Tensor:
        x = self.norm(x_PD.view(-1, self.joined_dim)) if self.norm_joined else self.norm(x_PD)
        y_VO: Tensor = self.down(F.gelu(self.up(x.view(-1, self.joined_dim))))
        return y_VO


class Projector(nn.Module):
    """One merger for the encoder's output, and one for each deepstack layer. Frozen, it runs without autograd."""

    def __init__(self, spec: VisionSpec, dim: int, recomputed: Iterable[str] = ()) -> None:
        super().__init__()
        self.is_recomputed = bool({"full", "projector"} & set(recomputed))
        self.main = Merger(spec, dim, norm_joined=False)
        self.deepstack = nn.ModuleList(Merger(spec, dim, norm_joined=True) for _ in spec.deepstack)
        # Mergers stand in the order of the specification, hidden states come in the order of the encoder's layers.
        self._order = [spec.deepstack.index(layer) for layer in sorted(spec.deepstack)]

    def forward(self, states: list[Tensor]) -> list[Tensor]:
        needs_graph = trains(self) or any(x_PD.requires_grad for x_PD in states)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_graph):
            return [
                recompute(merger, x_PD, enabled=self.is_recomputed, name="vision projector")
                for merger, x_PD in zip([self.main, *(self.deepstack[n] for n in self._order)], states, strict=True)
            ]


@dataclass(frozen=True)
class ImageFeatures:
    """The features that the projector makes of the images of a microbatch, and where its tokens are."""

    main_VD: Tensor  # takes the place of the tokens' embeddings
    deepstack: list[Tensor]  # (V, D) each: added after the first layers of the decoder, one a layer
    token_index_V: Tensor  # among the flattened [B * S] tokens
    shape: tuple[int, int]  # B and S
    shard: Callable[[Tensor], Tensor]  # whole sequences (B, S, ...) -> this rank's part of them

    def merge(self, embed_BsD: Tensor, ahead: int = 0) -> Tensor:
        """Embedded tokens with the features of images in their place. The tokens may be those of `ahead` later."""
        mask_VO = torch.ones(len(self.token_index_V), 1, dtype=torch.bool, device=embed_BsD.device)
        return torch.where(self._place(mask_VO, ahead), self._place(self.main_VD, ahead).to(embed_BsD), embed_BsD)

    def dense_deepstack(self) -> list[Tensor]:
        """The deepstack features as hidden states (B, s, D) that are zeros at tokens of text."""
        return [self._place(feature_VD) for feature_VD in self.deepstack]

    def dense_ahead(self, depths: Iterable[int]) -> list[Tensor]:
        """The inputs of MTP depths, one a depth: the main features as hidden states (B, s, D) of the tokens
        that a depth embeds, zeros at tokens of text."""
        return [self._place(self.main_VD, depth + 1) for depth in depths]

    def _place(self, rows_VD: Tensor, ahead: int = 0) -> Tensor:
        batch, length = self.shape
        zeros_BSD = rows_VD.new_zeros(batch, length, rows_VD.shape[1])
        place = (self.token_index_V // length, self.token_index_V % length)
        # A blank image has rows that no token stands for.
        placed_BSD = zeros_BSD.index_put(place, rows_VD[: len(self.token_index_V)])
        if ahead:
            placed_BSD = F.pad(placed_BSD[:, ahead:], (0, 0, 0, min(ahead, length)))
        return self.shard(placed_BSD)


def stands_for_image(tokens_BS: Tensor, ids: VisionTokens) -> Tensor:
    """Return whether each token stands for a part of an image or of a video."""
    return (tokens_BS == ids.image) | (tokens_BS == ids.video)
