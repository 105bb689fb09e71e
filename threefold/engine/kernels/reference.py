"""Every step of the experts as plain torch, one expert after another: any device and dtype, slow, waits for the counts.

Shapes: T tokens, R rows (token copies sorted by expert), D model dim, E experts, H expert dim, X = 2 H, K experts of a
token; x_XD and grad_XD have a row for each token where `rows` are given, else for each row.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from threefold.engine.dispatch.splits import host_sizes
from threefold.engine.kernels.sort import Rows
from threefold.engine.sinks import add_product

CLAMP, ALPHA = 7.0, 1.702  # GPT-OSS: transformers GptOssConfig swiglu_limit, swiglu_alpha


def activation(gate_RH: Tensor, up_RH: Tensor, clamped: bool) -> Tensor:
    if not clamped:
        return gate_RH * gate_RH.sigmoid() * up_RH
    gate_RH, up_RH = gate_RH.clamp(max=CLAMP), up_RH.clamp(-CLAMP, CLAMP)
    return gate_RH * (ALPHA * gate_RH).sigmoid() * (up_RH + 1)


class Reference:
    """`ends_E`: the end of each expert's rows."""

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped = clamped
        sizes = host_sizes(ends_E.diff(prepend=ends_E.new_zeros(1)), num_rows)
        self.parts = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]

    def up(
        self, x_XD: Tensor, rows: Rows | None, weight_R: Tensor, gate_up_EXD: Tensor, bias_EX: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> (FC1's output, the activation times the router weight)."""
        gate_up_RX = self._each(_rows(x_XD, rows), gate_up_EXD.mT)
        if bias_EX is not None:
            for expert, part in enumerate(self.parts):
                gate_up_RX[part] += bias_EX[expert]
        return gate_up_RX, self._weighted(gate_up_RX, weight_R)[1]

    def down(self, act_RH: Tensor, down_EDH: Tensor) -> Tensor:
        return self._each(act_RH, down_EDH.mT)

    def act_grad(
        self, grad_XD: Tensor, rows: Rows | None, weight_R: Tensor, down_EDH: Tensor, gate_up_RX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (gradient of FC1's output, the weighted activation, the gradient of the router weights)."""
        grad_RH = self._each(_rows(grad_XD, rows), down_EDH)
        with torch.enable_grad():
            gate_up_RX, weight_R = gate_up_RX.detach().requires_grad_(), weight_R.detach().requires_grad_()
            wide_RH, act_RH = self._weighted(gate_up_RX, weight_R)
            grads = torch.autograd.grad(wide_RH, (gate_up_RX, weight_R), grad_RH.to(wide_RH.dtype))
        return grads[0], act_RH.detach(), grads[1]

    def input_grad(self, grad_RX: Tensor, gate_up_EXD: Tensor) -> Tensor:
        return self._each(grad_RX, gate_up_EXD)

    def up_grad(self, grad_RX: Tensor, x_XD: Tensor, rows: Rows | None, sink: Tensor | None = None) -> Tensor | None:
        """With a sink it is added there, and nothing comes back."""
        return self._weight_grad(grad_RX, _rows(x_XD, rows), sink)

    def down_grad(
        self, grad_XD: Tensor, rows: Rows | None, act_RH: Tensor, sink: Tensor | None = None
    ) -> Tensor | None:
        return self._weight_grad(_rows(grad_XD, rows), act_RH, sink)

    def _weight_grad(self, left_RM: Tensor, right_RN: Tensor, sink: Tensor | None) -> Tensor | None:
        if sink is None:
            return torch.stack([left_RM[part].mT @ right_RN[part] for part in self.parts])
        for total, part in zip(sink, self.parts, strict=True):
            add_product(total, left_RM[part].mT, right_RN[part], sink.dtype)
        return None

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD[row_TK].sum(dim=1)

    def _each(self, a_RI: Tensor, weight_EIO: Tensor) -> Tensor:
        return torch.cat([a_RI[part] @ weight for part, weight in zip(self.parts, weight_EIO, strict=True)])

    def _weighted(self, gate_up_RX: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
        """In the router's precision, and rounded once to that of the rows."""
        gate_RH, up_RH = gate_up_RX.to(weight_R.dtype).chunk(2, dim=-1)
        act_RH = activation(gate_RH, up_RH, self.clamped) * weight_R[:, None]
        return act_RH, act_RH.to(gate_up_RX.dtype)


def _rows(x_XD: Tensor, rows: Rows | None) -> Tensor:
    return x_XD if rows is None else x_XD[rows.token_R]
