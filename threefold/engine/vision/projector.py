"""The projector: merge x merge patches become one feature of the decoder, for each hidden state that the encoder gives.

`models/decoder.py` runs it behind the encoder. The first feature takes the place of the embedding of a picture's token;
the others (deepstack) are added behind the first layers of the decoder, one a layer.

Shapes: P patches, V = P / merge^2 tokens of pictures, D encoder dim, M = D * merge^2, O model dim of the decoder.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.recompute import recompute
from threefold.engine.vision.encoder import EPS, trains
from threefold.spec.model import VisionSpec


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
