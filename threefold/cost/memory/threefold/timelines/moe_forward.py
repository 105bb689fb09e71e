"""The forward of an MoE layer in our own engine, tensor by tensor: rows sent, received, sorted, computed and sent back.

It follows `engine/moe/layer.py` (`dispatch_and_combine`), the dispatchers and `engine/moe/experts.py`. `transients.py`
asks for the most bytes on top of what the layer saves. Small tensors (indices, router weights) are left out.

Words of sizes: `sent` are the rows of this rank's tokens, `received` the rows that arrive, and `gathered` the rows that
its experts work on, which with ETP are those of all ranks that hold slices of the same experts.

Mirrors `engine/moe/layer.py`, `engine/moe/experts.py`, `engine/dispatch/alltoall.py`, `engine/dispatch/flex_base.py`,
`engine/dispatch/received_rows.py`, `engine/dispatch/rows.py`, `engine/dispatch/local.py`,
`engine/dispatch/capacity.py`, `engine/dispatch/fp8_rows.py`.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from threefold.cost.memory.threefold.activations import expert_bytes, shared_expert_bytes
from threefold.cost.memory.threefold.local_sizes import SCALE_ROWS, LocalSizes
from threefold.cost.memory.threefold.timelines.norm_inputs import expert_norm_bytes
from threefold.cost.memory.threefold.timelines.timeline import Timeline

FP8_ROW = 1 + 1 / 128  # bytes of a number of a row that travels in FP8


@dataclass(frozen=True)
class MoeRows:
    """Bytes of the rows of one chunk of tokens, as they are sent, received and gathered."""

    local: LocalSizes
    fraction: float = 1.0  # of the tokens of the microbatch

    @cached_property
    def token_bytes(self) -> float:
        return self.local.element_bytes * self.local.model.dim

    @property
    def tokens(self) -> float:
        return self.token_bytes * self.local.tokens * self.fraction

    @property
    def sent(self) -> float:
        return self.token_bytes * self.local.dispatched_rows * self.fraction

    @property
    def received(self) -> float:
        return self.gathered / self.local.plan.layout.etp

    @property
    def gathered(self) -> float:
        return self.token_bytes * self.local.expert_rows * self.fraction

    @property
    def received_tokens(self) -> float:
        """Tokens that arrive with DeepEP, each once, however many of the rank's experts it visits."""
        model, ep = self.local.model, self.local.plan.layout.ep
        assert model.moe is not None
        num_elsewhere, top_k = model.num_experts - model.num_experts // ep, model.moe.top_k
        is_elsewhere = math.comb(num_elsewhere, top_k) / math.comb(model.num_experts, top_k)
        return min(1.0, (1 - is_elsewhere) * self.received / self.sent) * ep * self.tokens

    @property
    def packed(self) -> float:
        """Received rows in FP8, where they travel so; they are there until they are unpacked."""
        travels_in_fp8 = self.local.plan.knobs.fp8_dispatch and self.dispatcher == "alltoall" and self.is_exchanged
        return FP8_ROW / self.local.element_bytes * self.received if travels_in_fp8 else 0.0

    @property
    def hidden(self) -> float:
        """The activation of all rows."""
        local = self.local
        assert local.model.moe is not None
        width = local.model.moe.expert_dim / local.plan.layout.etp
        return local.element_bytes * width * local.expert_rows * self.fraction

    @property
    def is_exchanged(self) -> bool:
        return self.local.plan.layout.ep > 1

    @property
    def dispatcher(self) -> str:
        """The dispatcher that runs: with EP 1 rows are only permuted."""
        layout = self.local.plan.layout
        return self.local.plan.knobs.dispatcher if layout.ep > 1 else "alltoall"

    @property
    def is_sorted(self) -> bool:
        """Whether received rows are sorted by expert here: those of several ranks, for several experts. Fused experts
        read and store them where they arrived."""
        layout = self.local.plan.layout
        num_blocks = layout.etp * (layout.ep if self.dispatcher == "alltoall" else 1)
        has_slots = self.local.plan.expert_slots > 0  # rows of copies lie behind the others
        is_uneven = num_blocks > 1 and self.local.model.num_experts > layout.ep
        return has_slots or (is_uneven and not self.local.uses_fused_experts)


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Tensors of an MoE layer that are there while rows or gradients travel and another microbatch computes."""

    dispatch_start: float  # when the rows start to travel
    dispatch: float  # rows on their way to the experts
    combine: float  # results on their way back
    grads_start: float  # when gradients of results start to travel
    grads_to_experts: float  # gradients of results on their way
    grads_back: float  # gradients of the experts' input on their way back


NO_EXCHANGE = ExchangeBytes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def exchange_bytes(local: LocalSizes) -> ExchangeBytes:
    """What EP overlap holds of one pass at its stops."""
    rows, line = MoeRows(local), Timeline()
    received = _dispatch(line, rows)
    back = rows.sent if rows.dispatcher == "alltoall" else rows.tokens
    return ExchangeBytes(line.peak, received + rows.packed, back, back + received, received, back)


def overlapped_experts_peak(local: LocalSizes, weights: float = 0.0) -> float:
    """The most bytes of the shared and routed experts in a forward that stops at exchanges, from received rows on.

    `weights` are there only while the routed experts run.
    """
    rows, line = MoeRows(local), Timeline()
    received = _dispatch(Timeline(), rows)
    line.make(received, rows.packed)
    if local.model.moe and local.model.moe.shared_width:
        line.make(shared_expert_bytes(local), rows.tokens)
    line.free(rows.packed)
    _compute(line, rows, received, weights=weights)
    line.free(0.0 if is_saved_as_received(rows) else received)
    line.make(exchange_bytes(local).combine)
    return line.peak


def is_saved_as_received(rows: MoeRows) -> bool:
    """Whether FC1 saves the very tensor that arrived."""
    is_copy = rows.dispatcher == "deepep" or rows.local.plan.layout.etp > 1 or rows.is_sorted
    return not is_copy and saves_rows(rows.local)


def moe_forward_peak(
    local: LocalSizes,
    offloaded_rows: float = 0.0,
    offloaded_experts: float = 0.0,
    line: Timeline | None = None,
    is_recompute: bool = False,
) -> float:
    """The most bytes in the forward of an MoE layer behind its router, with what it saves and its output.

    `offloaded_rows` of the experts' input, and `offloaded_experts` of what they save inside, go to the host. A graph
    gives the `line` of its pool. A recompute ends with the last tensor that the backward needs.
    """
    moe, line = local.model.moe, line or Timeline()
    assert moe is not None
    rows = MoeRows(local, local.expert_chunk_fraction)
    shared, overlaps = shared_expert_bytes(local), local.plan.knobs.shared_expert_overlap
    if local.experts_read_in_place:
        _run_in_place(line, rows)
        if moe.shared_width:
            _run_shared(line, shared * rows.fraction, rows.tokens)
    else:
        received = _dispatch(line, rows)
        if is_recompute and _ends_with_experts(rows):
            _arrange(line, rows)
            _run_experts(line, rows, offloaded_experts * rows.fraction, stops_early=True)
            return line.peak
        if moe.shared_width and overlaps:
            line.make(shared * rows.fraction, rows.tokens)
        _compute(line, rows, received, offloaded_experts * rows.fraction)
        line.free(offloaded_rows * rows.fraction)
        _combine(line, rows, received)
        if moe.shared_width and overlaps:
            line.pass_through(rows.tokens)
        elif moe.shared_width:
            _run_shared(line, shared * rows.fraction, rows.tokens)
    line.make(expert_norm_bytes(local) * rows.fraction)  # behind the experts, and before the shared ones
    if rows.fraction < 1:  # outputs of all chunks, then joined
        whole = MoeRows(local).tokens
        saved = saved_bytes(local) * (0.0 if _recomputes_chunks(local) else 1 - rows.fraction)
        return max(line.peak + whole * (1 - rows.fraction) + saved, saved / (1 - rows.fraction) + 2 * whole)
    return line.peak


def _ends_with_experts(rows: MoeRows) -> bool:
    """Whether the last tensor that an MoE layer saves is an input of its experts' last GEMMs, which in low precision
    run one by one: HybridEP saves nothing behind them."""
    local, moe = rows.local, rows.local.model.moe
    is_last = moe is not None and not moe.shared_width and not moe.own_norms and not moe.bias
    return is_last and rows.dispatcher == "hybridep" and bool(local.quantized_bytes) and not local.uses_fused_experts


def saves_rows(local: LocalSizes) -> bool:
    """Whether FC1 or its adapter saves its rows as they are: not quantized, nor where both are frozen or absent."""
    is_quantized = bool(local.quantized_bytes) and not local.has_adapters
    return not is_quantized and "expert_rows" in local.saved_inputs


def saved_bytes(local: LocalSizes) -> float:
    """What `moe_forward_peak` counts of the tensors that the layer saves."""
    rows = MoeRows(local).gathered if saves_rows(local) and not local.experts_read_in_place else 0.0
    return rows + expert_bytes(local) + shared_expert_bytes(local) + expert_norm_bytes(local)


def _recomputes_chunks(local: LocalSizes) -> bool:
    return bool(local.recompute & {"moe", "full"})


def _run_shared(line: Timeline, saved: float, tokens: float) -> None:
    """Shared experts behind the routed ones: their saved tensors and output, and the sum of both outputs."""
    line.make(saved / 3, saved / 3, saved / 3, tokens)
    line.pass_through(tokens)
    line.free(tokens)


def _dispatch(line: Timeline, rows: MoeRows) -> float:
    """Rows to the ranks of their experts; the bytes of what has arrived."""
    if rows.dispatcher == "deepep":
        line.make(rows.received_tokens)
        return rows.received_tokens
    if rows.dispatcher == "hybridep":
        line.make(rows.received)
        return rows.received
    if not rows.is_exchanged:
        line.make(rows.received)
        return rows.received
    if rows.local.plan.knobs.fp8_dispatch:  # tokens are quantized into their rows
        packed = FP8_ROW / rows.local.element_bytes
        line.make(packed * rows.sent, packed * rows.received, rows.received)
        line.free(packed * rows.sent)
        line.free(packed * rows.received)
    else:
        line.make(rows.sent)
        line.replace(rows.received, rows.sent)
    return rows.received


def experts_peak(local: LocalSizes) -> float:
    """The most bytes while the experts run, on top of what the layer saves: FSDP has gathered their weights then."""
    line, rows = Timeline(), MoeRows(local)
    if not local.experts_read_in_place:
        _dispatch(line, rows)
        _arrange(line, rows)
        line.take_peak()
    _run_experts(line, rows)
    return line.take_peak() - saved_bytes(local) + shared_expert_bytes(local) + expert_norm_bytes(local)


def _arrange(line: Timeline, rows: MoeRows) -> None:
    """Rows by expert, beside those that arrived."""
    is_deepep, etp = rows.dispatcher == "deepep", rows.local.plan.layout.etp
    if is_deepep:
        line.make(rows.received)
    if etp > 1:  # copies for the ranks of etp; what they send back
        line.make(rows.gathered, rows.gathered)
        line.free(rows.gathered, rows.received if is_deepep else 0.0)
    if rows.is_sorted:
        line.replace(rows.gathered, rows.gathered if etp > 1 or is_deepep else 0.0)


def _compute(line: Timeline, rows: MoeRows, received: float, offloaded: float = 0.0, weights: float = 0.0) -> None:
    """From rows as they arrived to results that are ready to be sent back, which are left. So many bytes of what the
    experts save go to the host; `weights` are gathered for them."""
    local, is_deepep = rows.local, rows.dispatcher == "deepep"
    etp = local.plan.layout.etp
    _arrange(line, rows)
    line.make(weights)
    _run_experts(line, rows, offloaded)
    line.free(weights)
    if local.plan.expert_slots:  # results of owned experts and of copies are joined
        line.replace(rows.gathered, rows.gathered)
    if rows.is_sorted:  # results in the order in which rows arrived
        line.replace(rows.gathered, rows.gathered)
    if etp > 1:
        line.make(rows.gathered, rows.received)
        line.free(2 * rows.gathered)
    if is_deepep:
        line.replace(received, rows.received)
    # GEMMs in low precision save their input quantized, frozen ones save none, so that the rows are freed here.
    is_copy = is_deepep or etp > 1 or rows.is_sorted
    line.free(rows.gathered if is_copy and not saves_rows(local) else 0.0)


def _run_experts(line: Timeline, rows: MoeRows, offloaded: float = 0.0, stops_early: bool = False) -> None:
    """The experts; their results and saved tensors are left, without `offloaded` bytes that go to the host. The
    results of single experts are not joined where the forward ends with them (`stops_early`)."""
    local, hidden, low = rows.local, rows.hidden, rows.local.quantized_bytes / rows.local.element_bytes
    moe, model = local.model.moe, local.model
    assert moe is not None
    saves_quantized = "expert_rows" in local.saved_inputs and not local.has_adapters
    if local.uses_fused_experts:
        act = low * hidden if low else hidden
        if low:
            padded = SCALE_ROWS * moe.num_experts / local.plan.layout.ep * model.dim * local.quantized_bytes
            by_column = low * rows.gathered + padded if saves_quantized else 0.0  # for the weight gradient
            line.make(low * rows.gathered, by_column)
            line.replace(2 * hidden, low * rows.gathered)
        else:
            line.make(2 * hidden)
        line.make(act)
        line.make(rows.gathered)
        line.free(act + offloaded)
        return
    fc1, biased, num_experts = local.num_fc1, moe.bias, moe.num_experts / local.plan.layout.ep
    quantized_rows = low * rows.gathered if saves_quantized else 0.0
    if low:  # one expert after the other: each quantizes its rows; their results are joined
        line.make(quantized_rows, fc1 * hidden)
        line.pass_through(low * rows.gathered / num_experts)
        line.replace(fc1 * hidden, fc1 * hidden)
    else:
        line.make(fc1 * hidden)
    if biased and not low:  # of FC1, for every row
        line.make(fc1 * hidden, fc1 * hidden)
        line.free(2 * fc1 * hidden)
    adapted = local.expert_adapter_copies
    line.pass_through(adapted * fc1 * hidden)  # the adapters' part of FC1's output
    num_saved = 5 if model.activation == "clamped swiglu" else 2
    inside = [hidden] * num_saved
    line.make(*inside, hidden)
    if "moe_act" in local.recompute:
        line.free(*inside)
    # What FC1 and the activation have saved is on the host before FC2 runs.
    saved = quantized_rows + (fc1 + (num_saved if "moe_act" not in local.recompute else 0)) * hidden
    line.free(min(offloaded, saved))
    if low:
        saves_product = "expert_product" in local.saved_inputs and not local.has_adapters
        line.make(low * hidden if saves_product and "moe_act" not in local.recompute else 0.0, rows.gathered)
        line.pass_through(low * hidden / num_experts)
        if not stops_early:
            line.replace(rows.gathered, rows.gathered)
    else:
        line.make(rows.gathered)
    line.pass_through(adapted * rows.gathered)
    if biased:  # of FC2, saved for every row; times the router's weight; added
        line.make(rows.gathered, rows.gathered, rows.gathered)
        line.free(rows.gathered, rows.gathered)
    is_freed = low or "moe_act" in local.recompute or "expert_product" not in local.saved_inputs
    line.free(hidden if is_freed else 0.0, max(0.0, offloaded - saved))
    if fc1 == 1 and "moe_act" not in local.recompute:  # the positive part of FC1's output is saved in its place
        line.free(hidden)


def _run_in_place(line: Timeline, rows: MoeRows) -> None:
    """Fused kernels that read tokens by index: FC1's output, the activation, rows of results, their sums."""
    low = rows.local.quantized_bytes
    if low:
        _run_experts(line, rows)
    else:
        line.make(2 * rows.hidden, rows.hidden)
        line.make(rows.gathered)
    line.make(rows.tokens)
    line.free(rows.gathered, 0.0 if low else rows.hidden)


def _combine(line: Timeline, rows: MoeRows, received: float) -> None:
    """Results back to their tokens, and their sums, which are left."""
    local = rows.local
    # The rows as they arrived are held until the end, but where FC1 saves this very tensor.
    held = 0.0 if is_saved_as_received(rows) else received
    if rows.dispatcher in ("deepep", "hybridep"):
        line.make(rows.tokens)
        line.free(received if rows.dispatcher == "deepep" else rows.received)
    else:
        line.make(rows.sent if rows.is_exchanged else 0.0)
        unpermuted = 0.0 if local.has_fused_kernels else rows.sent
        line.make(rows.tokens + unpermuted)
        line.free(unpermuted, rows.received, rows.sent if rows.is_exchanged else 0.0)
    line.free(held)
