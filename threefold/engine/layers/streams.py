"""Several residual streams of a token (manifold-constrained hyper-connections), side by side in the last dim.

`models/block.py` reads the streams before a part of a layer and writes to them after it. Weights of a token are
computed from all its streams, in fp32 or wider.

Shapes: B batch, S sequence, D model dim, N streams, X = N * D, W weights of a token that a write needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.recompute import recompute
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import StreamsSpec


class StreamWeights(nn.Module):
    """Linear weights of normed streams: factors, one for each kind of weight, and a bias."""

    def __init__(self, spec: StreamsSpec, dim: int, norm_eps: float, count: int, kinds: int) -> None:
        super().__init__()
        self.spec, self.norm_eps = spec, norm_eps
        self.weight = nn.Parameter(torch.empty(count, spec.count * dim))
        self.bias = nn.Parameter(torch.zeros(count))
        self.kind_scale = nn.Parameter(torch.ones(kinds))

    def mixes(self, x_BSX: Tensor) -> Tensor:
        """The weights before scale and bias."""
        dtype = fp32_or_wider(x_BSX.dtype)
        return F.linear(F.rms_norm(x_BSX.to(dtype), x_BSX.shape[-1:], None, self.norm_eps), self.weight.to(dtype))

    def read(self, x_BSX: Tensor, logits_BSN: Tensor) -> Tensor:
        """The weighted sum of the streams."""
        weight_BSN1 = (logits_BSN.sigmoid() + self.spec.eps)[..., None]
        return (weight_BSN1 * x_BSX.unflatten(-1, (self.spec.count, -1))).sum(dim=-2).to(x_BSX.dtype)


class StreamConnection(StreamWeights):
    """Sums the streams for a part of a layer, and weighs the write of its output to them."""

    def __init__(self, spec: StreamsSpec, dim: int, norm_eps: float) -> None:
        super().__init__(spec, dim, norm_eps, spec.num_weights, 3)

    def forward(self, x_BSX: Tensor) -> tuple[Tensor, Tensor]:
        """Recomputed in the backward at all times: the normed streams in fp32 and Sinkhorn's iterations would take more
        memory than all else that a layer saves of its streams."""
        both: tuple[Tensor, Tensor] = recompute(self._connect, x_BSX)
        return both

    def _connect(self, x_BSX: Tensor) -> tuple[Tensor, Tensor]:
        count = self.spec.count
        sizes = [count, count, count * count]
        mixes = self.mixes(x_BSX)
        scale, bias = self.kind_scale.to(mixes.dtype), self.bias.to(mixes.dtype)
        of_read, of_write, of_mix = (
            part * factor + shift
            for part, factor, shift in zip(mixes.split(sizes, dim=-1), scale, bias.split(sizes), strict=True)
        )
        mix_BSNN = self._doubly_stochastic(of_mix.unflatten(-1, (count, count)))
        weights_BSW = torch.cat([2 * of_write.sigmoid(), mix_BSNN.flatten(-2)], dim=-1)
        return self.read(x_BSX, of_read), weights_BSW

    def _doubly_stochastic(self, logits_BSNN: Tensor) -> Tensor:
        """Rows and columns that sum to one, by the iterations of Sinkhorn and Knopp."""
        eps, mix = self.spec.eps, logits_BSNN.softmax(dim=-1) + self.spec.eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.spec.sinkhorn_iters - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        return mix


def repeat_streams(x_BSD: Tensor, spec: StreamsSpec | None) -> Tensor:
    """The streams before the first layer, which are all equal."""
    return x_BSD if spec is None else x_BSD.repeat(1, 1, spec.count)


def write_streams(x_BSX: Tensor, weights_BSW: Tensor, y_BSD: Tensor) -> Tensor:
    """The streams, mixed, with `y_BSD` added to each by its weight."""
    count = x_BSX.shape[-1] // y_BSD.shape[-1]
    write_BSN, mix_BSX = weights_BSW.to(x_BSX.dtype).split([count, count * count], dim=-1)
    mixed = mix_BSX.unflatten(-1, (count, count)).transpose(-1, -2) @ x_BSX.unflatten(-1, (count, -1))
    written = write_BSN[..., None] * y_BSD[..., None, :]
    return written.flatten(-2) + mixed.flatten(-2)  # no view: FSDP's hooks are on what a block returns


class StreamNorm(RMSNorm):
    """The final norm: of the weighted sum of the streams."""

    def __init__(self, spec: StreamsSpec, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.streams = StreamWeights(spec, dim, eps, spec.count, 1)

    def forward(self, x_BSX: Tensor) -> Tensor:  # type: ignore[override]
        y_BSD = super().forward(recompute(self._sum, x_BSX))
        assert isinstance(y_BSD, Tensor)
        return y_BSD

    def _sum(self, x_BSX: Tensor) -> Tensor:
        streams = self.streams
        mixes = streams.mixes(x_BSX)
        return streams.read(x_BSX, mixes * streams.kind_scale.to(mixes.dtype) + streams.bias.to(mixes.dtype))
