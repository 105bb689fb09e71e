"""Routed experts without dropping: one grouped product over rows sorted by expert, or a loop over experts.

Shapes: R rows (token copies sorted by expert), D model dim, E experts, H expert dim.

A row's router weight w goes in before FC2: w (h W + b) = (w h) W + w b. The rows are then only summed on
the way back, and the backward needs no copy of FC2's output.
"""

import warnings
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from threefold.engine.dispatch.splits import host_sizes
from threefold.engine.kernels.choose import takes
from threefold.engine.kernels.experts import fused_experts, grouped_experts, sum_by_expert
from threefold.engine.kernels.reference import activation
from threefold.engine.offload import away
from threefold.engine.precision.experts import LowExperts
from threefold.engine.products import grouped, linear
from threefold.engine.recompute import remade
from threefold.engine.ways import stood_for, way

Backend = Literal["auto", "grouped", "loop"]
_ALIGN_BYTES = 16  # grouped_mm wants strides of whole 16 bytes


def swiglu(gate_up_RX: Tensor) -> Tensor:
    gate_RH, up_RH = gate_up_RX.chunk(2, dim=-1)
    return F.silu(gate_RH) * up_RH


def clamped_swiglu(gate_up_RX: Tensor) -> Tensor:
    """GPT-OSS: both halves clamped, a steeper sigmoid, and 1 added to the linear half."""
    gate_RH, up_RH = gate_up_RX.chunk(2, dim=-1)
    return activation(gate_RH, up_RH, clamped=True)


ACTIVATIONS = {"silu": swiglu, "clamped swiglu": clamped_swiglu}


class Experts(nn.Module):
    """Where the width is cut over ranks, their results are parts of a sum: one of them adds the last bias."""

    adds_bias = True
    again: frozenset[str] = frozenset()
    fusion = False  # one pass that keeps only its input and FC1's output
    kernels: str | None = None  # of that pass, of one kind; None: the fastest that was measured
    low: LowExperts | None = None  # products below sixteen bits

    def __init__(
        self,
        num_experts: int,
        dim: int,
        expert_dim: int,
        bias: bool = False,
        activation: str = "silu",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.activation, self.backend = ACTIVATIONS[activation], backend
        self.activation_name = activation
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, 2 * expert_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, dim)) if bias else None

    def forward(self, x_RD: Tensor, weight_R: Tensor, count_E: Tensor) -> Tensor:
        """`count_E` rows belong to each expert in turn; the result of each row is already weighted."""
        fuses = self.fuses(x_RD)
        if self.low is not None and fuses:
            clamped = self.activation is clamped_swiglu
            return self.low.rows(x_RD, weight_R, count_E, self.gate_up, self.down, clamped)
        if fuses:
            bias = self.down_bias if self.adds_bias else None
            parameters = self.gate_up, self.down, self.gate_up_bias, bias
            y_RD = grouped_experts(x_RD, weight_R, count_E, *parameters, self.activation_name, self.kernels)
            return y_RD if self.adds_bias or self.down_bias is None else y_RD + self.down_bias[:0].sum()
        use_grouped = self.backend == "grouped" or (self.backend == "auto" and grouped_works(x_RD, self.down))
        apply = grouped_linear if use_grouped else looped_linear
        up, down = (apply, apply) if self.low is None else (self.low.up, self.low.down)
        with away("expert_fc1"):
            gate_up_RX = up(x_RD, self.gate_up, self.gate_up_bias, count_E)
        with away("moe_act"):
            act = remade(self._activate, gate_up_RX, weight_R, on="moe_act" in self.again)
        with act as act_RH:
            y_RD = down(act_RH, self.down, None, count_E)
        if self.down_bias is None:
            return y_RD
        if not self.adds_bias:
            return y_RD + self.down_bias[:0].sum()  # nothing, with a gradient of zeros: every copy has one to sum
        return y_RD + weigh(rows_of(self.down_bias, count_E, len(x_RD)), weight_R)

    def of_tokens(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """Where all experts are here: tokens in, tokens out, rows gathered as they are read."""
        if self.low is not None:
            clamped = self.activation is clamped_swiglu
            return self.low.tokens(x_TD, weight_TK, expert_TK, self.gate_up, self.down, clamped)
        parameters = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return fused_experts(x_TD, weight_TK, expert_TK, *parameters, self.activation_name, self.kernels)

    def fuses(self, x: Tensor) -> bool:
        """Whether all of it runs in one: not on a GPU that has no kernels for it, where torch's grouped products are
        far faster than one expert after another."""
        if self.low is not None:
            return self.low.fuses(self.down, biased=self.down_bias is not None)
        return self.fusion and (not x.is_cuda or takes(x, *self.down.shape[1:]))

    def _activate(self, gate_up_RX: Tensor, weight_R: Tensor) -> Tensor:
        return weigh(self.activation(gate_up_RX), weight_R)


def weigh(x_RX: Tensor, weight_R: Tensor) -> Tensor:
    """Multiplied in fp32, as the router's weights are; rounded once."""
    return _Weigh.apply(x_RX, weight_R)


class _Weigh(torch.autograd.Function):
    """One pass each way, and nothing of x kept in fp32: autograd on widened rows would hold twice the bytes."""

    @staticmethod
    def forward(ctx, x_RX, weight_R):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_RX, weight_R)
        return torch.mul(x_RX, weight_R[:, None], out=torch.empty_like(x_RX))

    @staticmethod
    def backward(ctx, grad_RX):  # type: ignore[no-untyped-def]
        x_RX, weight_R = ctx.saved_tensors
        x_grad = torch.mul(grad_RX, weight_R[:, None], out=torch.empty_like(x_RX))
        return x_grad, (grad_RX.to(weight_R.dtype) * x_RX).sum(dim=-1)


def rows_of(bias_EX: Tensor, count_E: Tensor, num_rows: int) -> Tensor:
    """Each row's bias. The size is known here, so that CUDA need not be asked for it."""
    expert_E = torch.arange(len(count_E), device=count_E.device)
    return _RowsOf.apply(bias_EX, expert_E.repeat_interleave(count_E, output_size=num_rows))


class _RowsOf(torch.autograd.Function):
    """Autograd's own backward adds row by row in the dtype of the bias, where bf16 stops growing at 256 rows, and in
    no fixed order."""

    @staticmethod
    def forward(ctx: Any, bias_EX: Tensor, expert_R: Tensor) -> Tensor:
        ctx.save_for_backward(expert_R)
        ctx.num_experts = len(bias_EX)
        return bias_EX[expert_R]

    @staticmethod
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor, None]:
        (expert_R,) = ctx.saved_tensors
        return sum_by_expert(grad_RX, expert_R, ctx.num_experts), None


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
    if not len(x_RI):  # no kernel for that everywhere; a product of nothing gives the weights zeros
        return linear(x_RI, weight_EOI[0], None if bias_EO is None else bias_EO[0])
    ends_E = count_E.cumsum(0).to(torch.int32)
    y_RO = grouped(x_RI, weight_EOI.transpose(-2, -1), ends_E)
    return y_RO if bias_EO is None else y_RO + rows_of(bias_EO, count_E, len(x_RI))


def looped_linear(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
    """The reference: any dtype and size, one product an expert; needs the counts on the host."""
    parts = x_RI.split(host_sizes(count_E, len(x_RI)))
    biases = [None] * len(parts) if bias_EO is None else list(bias_EO)
    return torch.cat([linear(x, w, b) for x, w, b in zip(parts, weight_EOI, biases, strict=True)])


def grouped_works(x_RD: Tensor, down_EDH: Tensor) -> bool:
    """Whether both products of these experts can use grouped_mm here."""
    sizes = down_EDH.shape[1:]
    aligned = all(size * x_RD.element_size() % _ALIGN_BYTES == 0 for size in sizes)
    if stood_for():
        return aligned and x_RD.dtype != torch.float64
    return aligned and _probe(way(x_RD.device), x_RD.dtype)


@cache
def _probe(device: str, dtype: torch.dtype) -> bool:
    """Try it once: which dtypes have a kernel depends on device and release.

    With hooks of its own and torch's own product: what it keeps is no part of a recompute or an offload that it happens
    to be in, and its weight gradient waits for no schedule.
    """
    if dtype == torch.float64 or (device == "cpu" and dtype != torch.float32):
        return False  # no fp64 kernel; the bf16 one of the CPU is far slower than the loop
    try:
        with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept.detach(), lambda kept: kept):
            x = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([4, 16], device=device, dtype=torch.int32)
            y = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
            y.mul(1.0).backward(torch.ones(16, 16, device=device, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        warnings.warn(f"grouped_mm fails here in {dtype}: experts run one by one, far slower ({error})", stacklevel=2)
        return False
    return True
