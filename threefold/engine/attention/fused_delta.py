"""The gated delta rule by the Triton kernels of the package flash-linear-attention, where it is installed.

`gated_delta.py` asks `fused_delta_rule` for every layer, and `shard/recurrent_context.py` for spans of a sequence. A
release that was not tried, or that does not import, counts as absent: the chunks of `delta_chunks.py` run in plain
torch instead, which is many times slower, and a warning says why.

Shapes: B batch, S sequence, K key heads, H value heads, k key dim, v value dim, N documents of all rows.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.attention.fused_delta_sizes import empty_results
from threefold.engine.context import count_event
from threefold.engine.device import is_simulated
from threefold.engine.kernels.mixers.fla_on_hopper import VERIFIED_DIM, mend_fla
from threefold.engine.layers.positions import document_bounds, document_starts
from threefold.findings import Finding, FindingsError
from threefold.spec.stacks import FLA_RELEASES

PACKAGE = "flash-linear-attention"
_DTYPES = (torch.bfloat16, torch.float16)  # its matmuls of fp32 numbers are in TF32


@dataclass(frozen=True)
class FusedDelta:
    """The kernels of the package. They repeat q and k over the value heads of a key head, and compute decay and step
    from their logits `a` and `b`. Queries and keys have length 1."""

    kernel: Callable[..., Any]

    def mix(
        self,
        q_BSKk: Tensor,
        k_BSKk: Tensor,
        v_BSHv: Tensor,
        a_BSH: Tensor,
        b_BSH: Tensor,
        a_log_H: Tensor,
        dt_bias_H: Tensor,
        edges_N: Tensor | None = None,
    ) -> Tensor:
        """The rule over whole sequences: the state starts at zero, with documents at the start of each. `edges_N` is
        where each starts in the flattened batch, and the end."""
        span = FusedSpan(self.kernel, (q_BSKk, k_BSKk, v_BSHv, a_BSH, b_BSH), a_log_H, dt_bias_H, edges_N)
        return span.run(v_BSHv)[0]

    def span(
        self,
        q_BSKk: Tensor,
        k_BSKk: Tensor,
        v_BSHv: Tensor,
        a_BSH: Tensor,
        b_BSH: Tensor,
        a_log_H: Tensor,
        dt_bias_H: Tensor,
        document_BS: Tensor | None = None,
        document_before_B: Tensor | None = None,
    ) -> "FusedSpan":
        """A span of a sequence, whose state before it comes from elsewhere: as `chunk_delta_rule` prepares one."""
        # The kernels run more than once over a span, and each time would copy what lies apart.
        inputs = tuple(x.contiguous() for x in (q_BSKk, k_BSKk, v_BSHv, a_BSH, b_BSH))
        if document_BS is None:
            return FusedSpan(self.kernel, inputs, a_log_H, dt_bias_H)
        edges_N = document_bounds(document_BS).cu_seqlens
        # With nothing before the span the state is zero, so that the first document may read it.
        continues_B = None if document_before_B is None else document_BS[:, 0] == document_before_B
        first_B = document_starts(document_BS).sum(dim=1).cumsum(dim=0)  # the number behind each row's documents
        last_B = first_B - 1
        first_B = torch.cat([first_B.new_zeros(1), first_B[:-1]])
        return FusedSpan(self.kernel, inputs, a_log_H, dt_bias_H, edges_N, RowDocuments(first_B, last_B, continues_B))


@dataclass(frozen=True)
class RowDocuments:
    """Which of all documents are the first and the last one of each row, and whether the first began before it."""

    first_B: Tensor
    last_B: Tensor
    continues_B: Tensor | None  # None: nothing lies before the rows


@dataclass(frozen=True)
class FusedSpan:
    """A span of tokens for the kernels, with the methods of `ChunkedDelta`."""

    kernel: Callable[..., Any]
    inputs: tuple[Tensor, ...]  # q, k, v, and the logits of decay and step
    a_log_H: Tensor
    dt_bias_H: Tensor
    edges_N: Tensor | None = None
    rows: RowDocuments | None = None

    def output(self, state_BHkv: Tensor | None = None) -> Tensor:
        """The span's output, given the state before it."""
        return self.run(self.inputs[2], state_BHkv)[0]

    def transition(self) -> Tensor:
        """The affine map from the state before the span to the state after it.

        (B, H, k, v + k): first the term (k x v) that it adds, then the factor (k x k) that it multiplies by. The factor
        is what becomes of the unit matrix where no values are written: k more values of 0.
        """
        v_BSHv, keys = self.inputs[2], self.inputs[1].shape[-1]
        batch, _, heads, values = v_BSHv.shape
        unit_kx = torch.eye(keys, dtype=torch.float32, device=v_BSHv.device)
        state_BHkx = F.pad(unit_kx, (values, 0)).expand(batch, heads, -1, -1)
        return self.run(F.pad(v_BSHv, (0, keys)), state_BHkx)[1]

    def run(self, v_BSHx: Tensor, state_BHkx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output, and the state behind each row. The latter has no meaning without a state before it."""
        inputs: tuple[Tensor, ...] = (*self.inputs[:2], v_BSHx, *self.inputs[3:])
        edges_N, state = self.edges_N, state_BHkx
        if edges_N is not None:
            edges_N = edges_N.long()
            inputs = tuple(x.flatten(0, 1)[None] for x in inputs)  # documents of all rows lie in one row
            state = None if state is None else self._by_document(state)
        q, k, v, a, b = inputs
        out, after = self.kernel(
            q,
            k,
            v,
            g=a,
            beta=b,
            initial_state=None if state is None else state.contiguous(),
            output_final_state=state is not None,
            use_gate_in_kernel=True,
            A_log=self.a_log_H,
            dt_bias=self.dt_bias_H,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=edges_N,
        )
        if self.rows is not None and after is not None:
            after = after[self.rows.last_B]
        return out.view_as(v_BSHx), after

    def _by_document(self, state_BHkx: Tensor) -> Tensor:
        """The state before each document: that of its row for the first one, if it began before the span."""
        assert self.rows is not None
        assert self.edges_N is not None
        if self.rows.continues_B is not None:
            state_BHkx = state_BHkx * self.rows.continues_B[:, None, None, None]
        zeros = state_BHkx.new_zeros(len(self.edges_N) - 1, *state_BHkx.shape[1:])
        return zeros.index_copy(0, self.rows.first_B, state_BHkx)


def fused_delta_rule(x_BSKX: Tensor, k_dim: int, v_dim: int, kernels: str | None = None) -> FusedDelta | None:
    """The kernels of the package for these projected columns, or None where plain torch runs.

    `kernels` is `knobs.delta_kernels`. A dry run takes the package's place only where the plan asks for it by name: the
    machine that trains may not have it, and plain torch needs more memory.
    """
    if kernels == "torch" or x_BSKX.dtype not in _DTYPES or not k_dim == v_dim == VERIFIED_DIM:
        return None
    if is_simulated():
        return FusedDelta(empty_results) if kernels == "fla" else None
    return load_kernels() if x_BSKX.is_cuda else None


def count_delta_rule(fused: FusedDelta | None) -> None:
    """Count which kernels a layer ran on, for `effects/`."""
    count_event("delta rule", "chunks in torch" if fused is None else "flash-linear-attention")


@cache
def load_kernels() -> FusedDelta | None:
    """The kernels of the package, or None where it is not installed or not usable."""
    found, problem = _load_kernel()
    if found is None:
        slow = "the gated delta rule runs in plain torch, many times slower"
        warnings.warn(f"{PACKAGE} is not used: {slow} ({problem})", stacklevel=2)
    return None if found is None else FusedDelta(found)


def require_delta_kernels(kernels: str | None, device: torch.device) -> None:
    """Raise a finding if the package was asked for by name and cannot be used on this GPU."""
    if kernels != "fla" or device.type != "cuda" or is_simulated():
        return
    found, problem = _load_kernel()
    if found is None:
        raise FindingsError(
            [
                Finding(
                    rule="kernels-are-installed",
                    at="knobs.delta_kernels",
                    problem=f"flash-linear-attention is asked for, but {problem}",
                    advice="pip install 'threefold[fla]', or delete knobs.delta_kernels",
                )
            ]
        )


def _load_kernel() -> tuple[Callable[..., Any] | None, str]:
    """The kernel of the package, or why there is none."""
    release = installed_release()
    if release is None:
        return None, "it is not installed"
    if not release.startswith(FLA_RELEASES):
        return None, f"release {release} was not tried, {' and '.join(name + '*' for name in FLA_RELEASES)} were"
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore

        mend_fla()
    except Exception as error:  # it imports much of torch, of Triton and of transformers
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return chunk_gated_delta_rule, ""


def installed_release() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None
