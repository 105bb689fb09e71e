"""Bytes of recurrent mixers in our own engine, the gated delta rule and Mamba-2: what they save, and the most that the
backward of Mamba-2 holds on top.

They are counted from `engine/attention/gated_delta.py` and `engine/attention/state_space/`, whose plain torch works in
fp32 and in chunks. `activations.py`, `attention_backward.py` and `transients.py` call it.

Mirrors `engine/attention/gated_delta.py`, `engine/attention/fused_delta.py`, `engine/attention/state_space/mamba.py`,
`engine/attention/state_space/chunk_scan.py`, `engine/attention/state_space/fused_scan.py`.
"""

from threefold.cost.delta_rule import DELTA_CHUNK, passes_delta_states, uses_fla
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes
from threefold.spec.model import DeltaSpec, MambaSpec

MAMBA_CHUNK = 64  # tokens of a chunk of Mamba's scan


def delta_saved_bytes(local: LocalSizes, spec: DeltaSpec) -> float:
    """What the gated delta rule saves for all tokens of a rank, without its input."""
    return _delta(local, spec) * local.gathered_tokens + _delta_ring_states(local, spec)


def _delta(local: LocalSizes, spec: DeltaSpec) -> float:
    """Bytes per token of the gated delta rule in plain torch: chunks of q, k and v in fp32 with all that their matmuls
    save, and the state of every chunk."""
    b, heads = local.element_bytes, spec.num_v_heads / local.tp
    k, v = spec.k_dim, spec.v_dim
    channels = (2 * spec.keys + spec.values) / local.tp
    inside = 40 * k + 8 * (k + v) + 4 * v + 4 * k * v / DELTA_CHUNK + 20 * DELTA_CHUNK
    passes_states = passes_delta_states(local.plan, local.cp_comm)
    if passes_states:
        # What every chunk does to a state that arrives from other ranks.
        inside += 4 * (k + v) * (1 + k / DELTA_CHUNK)
    if uses_fla(local.plan, local.cp_comm):
        inside = b * channels / heads + _fla_bytes(local)
    after_core = (1 if "gdn_norm_out" in local.recompute else 2) * b * v  # the rule's output, and its norm
    after_core += 0 if local.has_fused_kernels else FP32 * v  # plain torch saves the normalized output too
    projected = b * (channels + heads * v)  # with the output's gate
    if "core_attn" in local.recompute:
        return heads * (after_core - b * v) + projected + 2 * b * heads
    # Under CP: spans behind the last tokens of those before them, or fewer heads of all tokens.
    copies = b * channels if local.plan.layout.cp > 1 else 0.0
    return heads * (inside + after_core) + projected + copies + 8 * FP32 * heads


def _fla_bytes(local: LocalSizes) -> float:
    """What the package saves for each token and value head beside queries, keys and values: the inverse of each chunk's
    system, decay and step in fp32 and as they were projected."""
    return local.element_bytes * (DELTA_CHUNK + 2) + 2 * FP32


def fla_backward_peak(local: LocalSizes, spec: DeltaSpec) -> float:
    """The most bytes in the backward of the package's kernels: `w` and `u`, corrected values and states of chunks once
    more, gradients of all of these, and gradients of q and k by value head."""
    k, v, per_dim = spec.k_dim, spec.v_dim, local.element_bytes * spec.num_v_heads / local.tp * local.gathered_tokens
    return per_dim * (5 * k + 5 * v + 2 * k * v / DELTA_CHUNK)


def _delta_ring_states(local: LocalSizes, spec: DeltaSpec) -> float:
    """What the spans of all context-parallel ranks do to a state, and the states between them: the rank with the last
    span goes through all of them."""
    if not passes_delta_states(local.plan, local.cp_comm) or "core_attn" in local.recompute:
        return 0.0
    heads, num_spans = spec.num_v_heads / local.tp, 2 * local.plan.layout.cp
    each = FP32 * heads * spec.k_dim * (spec.k_dim + 2 * spec.v_dim)
    return local.plan.job.micro_batch * each * num_spans


def mamba_saved_bytes(local: LocalSizes, spec: MambaSpec) -> float:
    """What the mixer saves for all tokens of a rank, without its input."""
    per_token = _output_bytes(local, spec)
    if "core_attn" in local.recompute:  # what was projected; the output's gate is a part of it
        return (per_token + local.element_bytes * spec.projected_dim / local.tp) * local.gathered_tokens
    per_token += _core_bytes(local, spec)
    if not local.is_16_bit:  # the output's gate is a view of what was projected
        per_token += local.element_bytes * spec.projected_dim / local.tp
    return per_token * local.gathered_tokens + _ring_states(local, spec)


def _core_bytes(local: LocalSizes, spec: MambaSpec) -> float:
    """Bytes per token of convolution and scan: the inputs of the convolution and of its activation; heads in fp32 as
    they are, times their steps, copied for the GEMM of a chunk, decayed to its end, and read from the state; B and C;
    decays and scores inside of chunks; states between them, once by themselves and once for the GEMM that reads
    them."""
    inner, heads, states = (size / local.tp for size in (spec.inner_dim, spec.num_heads, _state_channels(spec)))
    channels, groups = spec.conv_dim / local.tp, spec.num_groups / local.tp
    copies = 2 * local.element_bytes * channels
    # In fp32 the heads are a view of all channels.
    in_fp32 = 4 * inner + states + (inner if local.is_16_bit else channels)
    squares = (2 * heads + groups) * MAMBA_CHUNK
    between = 2 * spec.state_dim * inner / MAMBA_CHUNK
    return copies + FP32 * (in_fp32 + squares + between + _STEPS * heads) + MAMBA_CHUNK


_STEPS = 7  # tensors with one number for each head and token: steps, and decays to and from the ends of chunks


def _output_bytes(local: LocalSizes, spec: MambaSpec) -> float:
    """Bytes per token behind the scan: its output, the gate, the gate's activation and the product in fp32, a statistic
    for each group; the norm and its product with the weight, which the output projection reads."""
    inner = spec.inner_dim / local.tp
    in_fp32 = 4 if local.is_16_bit else 3  # in fp32 the gate is a view of what was projected
    output = local.gemm_input_bytes if "attention_output" in local.saved_inputs else 0.0
    return (in_fp32 * FP32 + local.element_bytes + output) * inner + FP32 * spec.num_groups / local.tp


def _state_channels(spec: MambaSpec) -> int:
    """Channels of B and C of all groups."""
    return 2 * spec.num_groups * spec.state_dim


def passes_states(local: LocalSizes, spec: MambaSpec) -> bool:
    """Whether context-parallel ranks exchange states, instead of trading sequence for groups of heads."""
    cp = local.plan.layout.cp
    return cp > 1 and (local.cp_comm != "a2a" or bool(spec.num_groups // local.tp % cp))


def _ring_states(local: LocalSizes, spec: MambaSpec) -> float:
    """The states between the spans of all context-parallel ranks, with the factor of each, and once more for the terms
    of this rank's own spans: their chunks pass states twice."""
    if not passes_states(local, spec):
        return 0.0
    inner, num_spans = spec.inner_dim / local.tp, 2 * local.plan.layout.cp
    each = FP32 * inner * (2 * spec.state_dim + 1)
    own = FP32 * inner * spec.state_dim * local.gathered_tokens / MAMBA_CHUNK
    return local.plan.job.micro_batch * each * num_spans + own


def mamba_backward_peak(local: LocalSizes, spec: MambaSpec) -> float:
    """The most bytes in the backward of the scan, with the gradient of the residual stream: gradients of the scores of
    all chunks, of their decays, and of heads in fp32. What lies behind the scan is freed by then."""
    tokens, heads, inner = local.gathered_tokens, spec.num_heads / local.tp, spec.inner_dim / local.tp
    residual = local.element_bytes * local.model.dim * local.tokens
    freed = _output_bytes(local, spec) + FP32 * inner
    grads = FP32 * (3 * heads * MAMBA_CHUNK + 3 * inner + _state_channels(spec) / local.tp)
    grads += FP32 * spec.state_dim * inner / MAMBA_CHUNK
    again = 0.0
    if "core_attn" in local.recompute:  # a recompute of the scan ends with its outputs
        again = (2 * FP32 * inner + local.element_bytes * spec.conv_dim / local.tp) * tokens
    return max((grads - freed) * tokens, again, 0.0) + residual
