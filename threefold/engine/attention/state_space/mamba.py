"""The Mamba-2 layer (Nemotron-H): one input projection, a short convolution, the scan, a gated norm by groups.

`models/mixers.py` makes it as the mixer of a layer. Its parameters have the order of transformers' checkpoints: the
input projection yields the gate of all heads, then the channels of the convolution (x of all heads, B and C of all
groups), then the step of each head. Tensor parallelism takes whole groups out of each of these parts.

Shapes: B batch, S sequence, D model dim, H heads, p head dim, G groups, n state dim, I = H * p inner channels, W
channels of the convolution, T taps.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.gated_delta import document_numbers, short_conv
from threefold.engine.attention.state_space.chunk_scan import ScanInputs, chunk_scan
from threefold.engine.attention.state_space.fused_scan import fused_scan
from threefold.engine.context import count_event
from threefold.engine.device import is_simulated
from threefold.engine.layers.input_linears import InputLinears, apply_linears
from threefold.engine.layers.norm import GroupedGatedRMSNorm
from threefold.engine.layers.positions import Positions
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import MambaSpec


class Mamba(nn.Module):
    def __init__(self, spec: MambaSpec, dim: int, eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(dim, spec.projected_dim, bias=False)
        self.conv = nn.Parameter(torch.empty(spec.conv_dim, spec.conv))
        self.conv_bias = nn.Parameter(torch.zeros(spec.conv_dim))
        self.dt_bias = nn.Parameter(torch.ones(spec.num_heads))
        self.a_log = nn.Parameter(torch.zeros(spec.num_heads))
        self.skip = nn.Parameter(torch.ones(spec.num_heads))  # D of the papers
        self.norm = GroupedGatedRMSNorm(spec.inner_dim, spec.inner_dim // spec.num_groups, eps)
        self.out = nn.Linear(spec.inner_dim, dim, bias=False)
        self.input_linears: InputLinears = apply_linears
        self.mix_over_ranks: MixFn | None = None

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        gate_BSI, mixed_BSW, step_BSH = self.project(x_BSD)
        out_BSI = self.core(mixed_BSW, step_BSH, positions.documents_BS)
        return self.project_out(self.normalize_output(out_BSI, gate_BSI))

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output's gate, the channels of the convolution and the steps, of the heads that the weights hold."""
        (projected_BSX,) = self.input_linears(x_BSD, (self.in_proj,))
        heads, channels = len(self.a_log), len(self.conv)
        gate_BSI, mixed_BSW, step_BSH = projected_BSX.split([heads * self.spec.head_dim, channels, heads], dim=-1)
        return gate_BSI, mixed_BSW, step_BSH

    def core(self, mixed_BSW: Tensor, step_BSH: Tensor, documents_BS: Tensor | None) -> Tensor:
        """Convolution and scan over whole sequences, on this rank or over the ranks of context parallelism."""
        mix = Mamba.mix if self.mix_over_ranks is None else self.mix_over_ranks
        return mix(self, mixed_BSW, step_BSH, documents_BS)

    def mix(
        self, mixed_BSW: Tensor, step_BSH: Tensor, documents_BS: Tensor | None, weights: "HeadWeights | None" = None
    ) -> Tensor:
        """Over whole sequences, before the norm; of the heads that the weights or a share of them belong to."""
        weights = weights or self.head_weights()
        convolved_BSW = weights.activate(short_conv(mixed_BSW, weights.conv_WT, documents_BS))
        inputs = self.scan_inputs(convolved_BSW, step_BSH, weights)
        document_BS = None if documents_BS is None else document_numbers(documents_BS)
        scan = fused_scan() if mixed_BSW.is_cuda and not is_simulated() else None
        count_event("mamba", "chunks in torch" if scan is None else "mamba-ssm")
        out_BSHp = chunk_scan(inputs, document_BS).output() if scan is None else scan(inputs, document_BS)
        return out_BSHp.flatten(2)

    def scan_inputs(self, convolved_BSW: Tensor, step_BSH: Tensor, weights: "HeadWeights") -> ScanInputs:
        """What the scan reads: the convolved channels by head and by group, and steps behind their softplus."""
        spec, heads = self.spec, len(weights.a_log_H)
        inner = heads * spec.head_dim
        states = (convolved_BSW.shape[-1] - inner) // 2
        x_BSI, write, read = convolved_BSW.split([inner, states, states], dim=-1)
        dtype = fp32_or_wider(step_BSH.dtype)
        step_BSH = F.softplus(step_BSH.to(dtype) + weights.dt_bias_H.to(dtype)).clamp(min=spec.time_step_min)
        return ScanInputs(
            x_BSI.unflatten(-1, (heads, -1)),
            step_BSH,
            -weights.a_log_H.to(dtype).exp(),
            write.unflatten(-1, (-1, spec.state_dim)),
            read.unflatten(-1, (-1, spec.state_dim)),
            weights.skip_H,
        )

    def normalize_output(self, out_BSI: Tensor, gate_BSI: Tensor) -> Tensor:
        normed_BSI: Tensor = self.norm(out_BSI, gate_BSI)
        return normed_BSI

    def project_out(self, out_BSI: Tensor) -> Tensor:
        y_BSD: Tensor = self.out(out_BSI)
        return y_BSD

    def channel_parts(self) -> list[int]:
        """Channels of the convolution by part, as held here: x, B and C."""
        inner = len(self.a_log) * self.spec.head_dim
        states = (len(self.conv) - inner) // 2
        return [inner, states, states]

    def head_weights(self, rank: int = 0, degree: int = 1) -> "HeadWeights":
        """The weights of all groups held here, or of an even part of them."""
        if degree == 1:
            return HeadWeights(self.conv, self.conv_bias, self.dt_bias, self.a_log, self.skip)
        conv_WT, bias_W = (
            torch.cat([part.chunk(degree)[rank] for part in whole.split(self.channel_parts())])
            for whole in (self.conv, self.conv_bias)
        )
        dt_bias_H, a_log_H, skip_H = (whole.chunk(degree)[rank] for whole in (self.dt_bias, self.a_log, self.skip))
        return HeadWeights(conv_WT, bias_W, dt_bias_H, a_log_H, skip_H)


class MixFn(Protocol):
    """`Mamba.mix`, or what takes its place where a sequence is spread over ranks; documents are of the whole."""

    def __call__(self, layer: Mamba, mixed_BSW: Tensor, step_BSH: Tensor, documents_BS: Tensor | None, /) -> Tensor: ...


@dataclass(frozen=True)
class HeadWeights:
    """Weights of some heads, with the groups that they belong to."""

    conv_WT: Tensor
    conv_bias_W: Tensor
    dt_bias_H: Tensor
    a_log_H: Tensor
    skip_H: Tensor

    def activate(self, convolved_BSW: Tensor) -> Tensor:
        """The convolution's bias and activation."""
        return F.silu(convolved_BSW + self.conv_bias_W)
