"""The routed experts of one rank: fused kernels, grouped GEMMs over rows sorted by expert, or a loop over experts.

`moe/layer.py` calls them with the rows that a dispatcher brought. The fused kernels run where the plan asks for them
and the device has them, grouped GEMMs where `F.grouped_mm` works, and the loop elsewhere.

Shapes: R rows (token copies sorted by expert), D model dim, E experts, H expert dim, I and O dims in and out, r rank of
adapters.

A row's router weight w goes in before FC2: w (h W + b) = (w h) W + w b. The rows are then only summed on
the way back, and the backward needs no copy of FC2's output.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from threefold.engine.autograd.linear import grouped_gemm, linear
from threefold.engine.context import context, count_event
from threefold.engine.device import device_type, is_simulated
from threefold.engine.dist.host_sizes import host_sizes
from threefold.engine.kernels.elementwise.swiglu_torch import gated_activation
from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts, sum_by_expert
from threefold.engine.kernels.experts.kernel_choice import supports_experts
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.layers.mlp import gated_gelu, limited_swiglu, squared_relu
from threefold.engine.lora import LoraSettings
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.spec.stacks import FUSED_ACTIVATIONS

Backend = Literal["auto", "grouped", "loop"]
ADAPTERS = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")  # names of the adapters' parameters
_ALIGN_BYTES = 16  # grouped_mm wants strides of whole 16 bytes


def swiglu(gate_up_RX: Tensor) -> Tensor:
    gate_RH, up_RH = gate_up_RX.chunk(2, dim=-1)
    return F.silu(gate_RH) * up_RH


def clamped_swiglu(gate_up_RX: Tensor) -> Tensor:
    """GPT-OSS: both halves clamped, a steeper sigmoid, and 1 added to the linear half."""
    gate_RH, up_RH = gate_up_RX.chunk(2, dim=-1)
    return gated_activation(gate_RH, up_RH, clamped=True)


def gated_gelu_rows(gate_up_RX: Tensor) -> Tensor:
    return gated_gelu(*gate_up_RX.chunk(2, dim=-1))


def limited_swiglu_rows(limit: float, gate_up_RX: Tensor) -> Tensor:
    return limited_swiglu(limit, *gate_up_RX.chunk(2, dim=-1))


ACTIVATIONS = {
    "silu": swiglu,
    "clamped swiglu": clamped_swiglu,
    "relu2": squared_relu,
    "gelu_tanh": gated_gelu_rows,
}
UNGATED = ("relu2",)  # activations of experts that have an up projection alone


class Experts(nn.Module):
    """The routed experts of one rank.

    `gate_up` holds the rows of the gate and then those of the up projection, or the latter alone where the activation
    has no gate. Where ETP shards the expert width, each rank's result is a part of a sum, and only one rank adds the
    last bias. `models/activation_memory.py` wraps `up_proj` and `activate` where a plan recomputes or offloads them.
    """

    adds_bias = True
    fusion = False  # whether the fused kernels run, which save only the input and FC1's output
    kernels: str | None = None  # the kind of fused kernels; None takes the fastest that was measured
    low_precision: LowPrecisionExperts | None = None  # GEMMs below sixteen bits
    gate_up_lora_a: nn.Parameter | None
    gate_up_lora_b: nn.Parameter | None
    down_lora_a: nn.Parameter | None
    down_lora_b: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        dim: int,
        expert_dim: int,
        bias: bool = False,
        activation: str = "silu",
        backend: Backend = "auto",
        glu_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = (
            ACTIVATIONS[activation] if glu_limit is None else partial(limited_swiglu_rows, glu_limit)
        )
        self.backend, self.glu_limit = backend, glu_limit
        self.activation_name = activation
        fc1_dim = expert_dim if activation in UNGATED else 2 * expert_dim
        self.gate_up = nn.Parameter(torch.empty(num_experts, fc1_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, fc1_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, dim)) if bias else None
        for name in ADAPTERS:
            self.register_parameter(name, None)
        self.lora: LoraSettings | None = None

    def add_adapters(self, settings: LoraSettings) -> None:
        """Put a LoRA adapter of each expert next to FC1 and FC2. The fused kernels know nothing of them."""
        num_experts, dim, expert_dim = self.down.shape
        shapes = (
            (settings.rank, dim),
            (self.gate_up.shape[1], settings.rank),
            (settings.rank, expert_dim),
            (dim, settings.rank),
        )
        for name, shape in zip(ADAPTERS, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(self.down.new_empty(num_experts, *shape)))
        self.lora = settings

    def forward(self, x_RD: Tensor, weight_R: Tensor, count_E: Tensor, order: SortedRows | None = None) -> Tensor:
        """`count_E` rows belong to each expert in turn; the result of each row is already weighted.

        With `order`, which only the fused kernels take, the rows lie as it says, and so do those of the result.
        """
        if self.fuses(x_RD):
            count_event("experts", "fused")
            return self._forward_fused(x_RD, weight_R, count_E, order)
        assert order is None
        gate_up_RX = self.up_proj(x_RD, count_E)
        hidden_RH = self.activate(gate_up_RX, weight_R)
        del gate_up_RX  # where it is offloaded or recomputed its memory is free during FC2
        y_RD = self.down_proj(hidden_RH, count_E)
        if self.down_bias is None:
            return y_RD
        if not self.adds_bias:
            return y_RD + self.down_bias[:0].sum()  # nothing, with a gradient of zeros: every copy has one to sum
        return y_RD + scale_by_router_weight(gather_bias_rows(self.down_bias, count_E, len(x_RD)), weight_R)

    def up_proj(self, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """FC1: gate and up of every row by its expert."""
        count_event("experts", "plain" if self.low_precision is None else "one by one in low precision")
        run = self._linear(x_RD) if self.low_precision is None else self.low_precision.up
        gate_up_RX: Tensor = run(x_RD, self.gate_up, self.gate_up_bias, count_E)
        return self._add_adapter(gate_up_RX, x_RD, self.gate_up_lora_a, self.gate_up_lora_b, count_E)

    def activate(self, gate_up_RX: Tensor, weight_R: Tensor) -> Tensor:
        """The activation, times the router weight of each row."""
        return scale_by_router_weight(self.activation(gate_up_RX), weight_R)

    def down_proj(self, hidden_RH: Tensor, count_E: Tensor) -> Tensor:
        """FC2, without its bias."""
        run = self._linear(hidden_RH) if self.low_precision is None else self.low_precision.down
        y_RD: Tensor = run(hidden_RH, self.down, None, count_E)
        return self._add_adapter(y_RD, hidden_RH, self.down_lora_a, self.down_lora_b, count_E)

    def _add_adapter(
        self, y_RO: Tensor, x_RI: Tensor, a_ErI: Tensor | None, b_EOr: Tensor | None, count_E: Tensor
    ) -> Tensor:
        """The output of the frozen weights for `x_RI`, with that of each row's adapter added."""
        if self.lora is None or a_ErI is None or b_EOr is None:
            return y_RO
        run = self._linear(x_RI) if is_aligned(x_RI, self.lora.rank) else looped_linear
        hidden_Rr = run(x_RI, a_ErI, None, count_E)
        # In place, because rows of all experts are among the largest tensors; no GEMM's backward reads its output.
        return y_RO.add_(run(hidden_Rr, b_EOr, None, count_E), alpha=self.lora.scale)

    def _linear(self, x_RX: Tensor) -> Callable[..., Tensor]:
        use_grouped = self.backend == "grouped" or (self.backend == "auto" and can_use_grouped_mm(x_RX, self.down))
        return grouped_linear if use_grouped else looped_linear

    def _forward_fused(self, x_RD: Tensor, weight_R: Tensor, count_E: Tensor, order: SortedRows | None) -> Tensor:
        if self.low_precision is not None:
            clamped = self.activation is clamped_swiglu
            parameters = self.gate_up, self.down
            return self.low_precision.forward_rows(x_RD, weight_R, count_E, *parameters, clamped, order)
        bias = self.down_bias if self.adds_bias else None
        all_parameters = self.gate_up, self.down, self.gate_up_bias, bias
        y_RD = grouped_experts(x_RD, weight_R, count_E, *all_parameters, self.activation_name, self.kernels, order)
        return y_RD if self.adds_bias or self.down_bias is None else y_RD + self.down_bias[:0].sum()

    def forward_tokens(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, starts: ChunkStarts | None = None
    ) -> Tensor:
        """The fused experts where all of them are here: tokens in, tokens out, rows gathered as they are read."""
        count_event("experts", "fused")
        if self.low_precision is not None:
            clamped = self.activation is clamped_swiglu
            parameters = self.gate_up, self.down
            return self.low_precision.forward_tokens(x_TD, weight_TK, expert_TK, *parameters, clamped, starts)
        all_parameters = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return fused_experts(x_TD, weight_TK, expert_TK, *all_parameters, self.activation_name, self.kernels, starts)

    def fuses(self, x: Tensor) -> bool:
        """Return whether the fused kernels run. Not on a GPU that has none: their slow reference computes one expert
        after another, and torch's grouped GEMMs are far faster there. Nor with adapters, which come between the layers,
        nor with an activation that the kernels have not."""
        if self.lora is not None or self.activation_name not in FUSED_ACTIVATIONS:
            return False
        if self.low_precision is not None:
            return self.low_precision.can_fuse(self.down, biased=self.down_bias is not None)
        return self.fusion and (not x.is_cuda or supports_experts(x, *self.down.shape[1:]))


def scale_by_router_weight(x_RX: Tensor, weight_R: Tensor) -> Tensor:
    """Multiply rows by their router weights, in the fp32 of the weights, and round once."""
    return _Weigh.apply(x_RX, weight_R)


class _Weigh(torch.autograd.Function):
    """One pass over memory in each direction. Autograd would save the rows in fp32, which is twice the bytes."""

    @staticmethod
    def forward(ctx, x_RX, weight_R):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_RX, weight_R)
        return torch.mul(x_RX, weight_R[:, None], out=torch.empty_like(x_RX))

    @staticmethod
    def backward(ctx, grad_RX):  # type: ignore[no-untyped-def]
        x_RX, weight_R = ctx.saved_tensors
        x_grad = torch.mul(grad_RX, weight_R[:, None], out=torch.empty_like(x_RX))
        return x_grad, (grad_RX.to(weight_R.dtype) * x_RX).sum(dim=-1)


def gather_bias_rows(bias_EX: Tensor, count_E: Tensor, num_rows: int) -> Tensor:
    """The bias of each row's expert. The number of rows is given, so that the host does not wait for the device."""
    row_R = torch.arange(num_rows, device=count_E.device)
    expert_R = torch.searchsorted(count_E.cumsum(0), row_R, right=True)
    return _RowsOf.apply(bias_EX, expert_R, context.static_rows is not None)


class _RowsOf(torch.autograd.Function):
    """Gather rows of a bias, with a backward that sums in fp32 and in a fixed order.

    Autograd's own backward adds row by row in bf16, where a sum stops growing at 256 rows, and in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, bias_EX: Tensor, expert_R: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(expert_R)
        ctx.num_experts, ctx.padded = len(bias_EX), padded
        return bias_EX[expert_R.clamp(max=len(bias_EX) - 1) if padded else expert_R]

    @staticmethod
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor, None, None]:
        (expert_R,) = ctx.saved_tensors
        if ctx.padded:  # a grouped GEMM leaves anything in rows of padding
            grad_RX = grad_RX.masked_fill((expert_R == ctx.num_experts)[:, None], 0)
        return sum_by_expert(grad_RX, expert_R, ctx.num_experts), None, None


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
    if not len(
        x_RI
    ):  # not every device has a kernel for no rows; a GEMM of nothing gives the weights a gradient of zeros
        return linear(x_RI, weight_EOI[0], None if bias_EO is None else bias_EO[0])
    ends_E = count_E.cumsum(0).to(torch.int32)
    y_RO = grouped_gemm(x_RI, weight_EOI.transpose(-2, -1), ends_E)
    return y_RO if bias_EO is None else y_RO + gather_bias_rows(bias_EO, count_E, len(x_RI))


def looped_linear(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, count_E: Tensor) -> Tensor:
    """The reference for any dtype and size: one GEMM for each expert. It reads the counts on the host."""
    sizes = host_sizes(count_E, len(x_RI))
    *parts, padding_RI = x_RI.split([*sizes, len(x_RI) - sum(sizes)])
    biases = [None] * len(parts) if bias_EO is None else list(bias_EO)
    each = [linear(x, w, b) for x, w, b in zip(parts, weight_EOI, biases, strict=True)]
    return torch.cat([*each, padding_RI.new_zeros(len(padding_RI), weight_EOI.shape[1])])


def can_use_grouped_mm(x_RD: Tensor, down_EDH: Tensor) -> bool:
    """Return whether both GEMMs of these experts can use `F.grouped_mm` on this device."""
    aligned = is_aligned(x_RD, *down_EDH.shape[1:])
    if is_simulated():
        return aligned and x_RD.dtype != torch.float64
    return aligned and _probe(device_type(x_RD.device), x_RD.dtype)


def is_aligned(x: Tensor, *sizes: int) -> bool:
    """Return whether `F.grouped_mm` takes matrices of these sizes in the dtype of `x`."""
    return all(size * x.element_size() % _ALIGN_BYTES == 0 for size in sizes)


@cache
def _probe(device: str, dtype: torch.dtype) -> bool:
    """Try `F.grouped_mm` once: which dtypes have a kernel depends on device and torch release.

    The trial installs saved-tensor hooks of its own, so that a recompute or an offload around it does not see its
    tensors, and it calls torch directly, so that no schedule delays its weight gradient.
    """
    if dtype == torch.float64 or (device == "cpu" and dtype != torch.float32):
        return False  # no fp64 kernel; the bf16 one of the CPU is far slower than the loop
    try:
        with torch.enable_grad(), saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
            x = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([4, 16], device=device, dtype=torch.int32)
            y = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
            y.mul(1.0).backward(torch.ones(16, 16, device=device, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        warnings.warn(f"grouped_mm fails here in {dtype}: experts run one by one, far slower ({error})", stacklevel=2)
        return False
    return True
