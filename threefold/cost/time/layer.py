"""Seconds of one layer for one microbatch, forward and backward together, by term.

`time/step.py` calls `layer_time` for each kind of layer; `search/price.py` orders choices by it. Compute is work
(`layer_work`) divided by a rate (`rates`); communication that EP overlap or attention hides is taken off.
"""

from dataclasses import dataclass, replace

from threefold.cost.expert_load import SkewLevel, load_of
from threefold.cost.format_support import (
    expert_gemm_precision,
    gemm_precision,
    runs_fused_experts,
    writes_gradients_once,
)
from threefold.cost.layer_work import BF16, LayerCase, Work, layer_case, layer_work
from threefold.cost.rates import Rates, gemm_rate, peak_flops, power_slowdown
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.stage_contents import NotRecomputedLayer
from threefold.cost.time.communication import (
    dispatch_seconds,
    expert_tensor_parallel_seconds,
    routing_map_seconds,
    tensor_parallel_seconds,
)
from threefold.cost.time.context_parallel import context_parallel_seconds, latent_expansion_seconds
from threefold.cost.time.delta_chunks import chunks_seconds
from threefold.cost.time.ep_overlap import LayerParts, PartSeconds, hidden_seconds
from threefold.cost.time.host_launches import (
    LAYER_SHARPNESS,
    closed_gap_seconds,
    host_seconds,
    host_wait,
    ramp_seconds,
    replay_seconds,
)
from threefold.cost.time.recompute import ForwardSeconds, recompute_seconds
from threefold.cost.trained_weights import gemms_per_weight
from threefold.plan.cores import num_threads
from threefold.plan.plan import Plan
from threefold.spec.flops import layer_flops
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec

THREADS_POWER = 0.8  # of the speed that threads of one rank add up to

MOST_QUERIES = 1024  # of a block of compressed attention (`engine/attention/sparse/compressed.py`)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer for one microbatch, forward and backward together, by term."""

    gemm: float  # dense GEMMs
    experts: float  # grouped GEMMs of the routed experts
    attention: float
    elementwise: float
    quantize: float
    recompute: float
    tp: float  # tensor-parallel collectives
    cp: float  # context-parallel communication that shows
    ep: float  # expert-parallel exchanges that show
    host: float  # waiting for the host
    launches: float  # launches of the host that run ahead of the GPU through the microbatch; `host_wait` judges them

    @property
    def total(self) -> float:
        busy = self.gemm + self.experts + self.attention + self.elementwise + self.quantize + self.recompute
        return busy + self.tp + self.cp + self.ep + self.host


def layer_time(plan: Plan, layer: Layer, rates: Rates, skew: float | None = None) -> LayerTime:
    """Forward and backward of one layer on the rank that is last. `skew` is the busiest expert rank's load over the
    balanced one; without it the mean over the load of the plan (`job.load`)."""
    if isinstance(layer, NotRecomputedLayer):
        plan = replace(plan, knobs=replace(plan.knobs, recompute=()))
    levels = load_of(plan).levels
    if skew is not None:
        levels = (SkewLevel.of(skew, plan.layout.ep, max(1, plan.link("ep").in_domain)),)
    elif layer.ffn != "moe":
        levels = levels[:1]
    times = [_time_at(plan, layer, rates, level) for level in levels]
    if len(times) == 1:
        return times[0]
    parts = [level.part for level in levels]
    rows = ([getattr(time, name) for time in times] for name in LayerTime.__slots__)
    return LayerTime(*(sum(part * n for part, n in zip(parts, row, strict=True)) for row in rows))


def _time_at(plan: Plan, layer: Layer, rates: Rates, skew: SkewLevel) -> LayerTime:
    case = layer_case(plan, layer, skew.rank)
    work = layer_work(case)
    knobs = plan.knobs
    passes, _ = gemms_per_weight(plan)
    around = _around_experts(plan, work, rates)
    slowed = power_slowdown(plan, rates)
    slower = cpu_slowdown(plan, rates) * slowed
    gemm_once = slower * work.dense_flops / gemm_rate(rates, plan, gemm_precision(plan), work.dense_rows)
    experts_once, experts = _expert_seconds(plan, work, rates)
    experts_once, experts = slower * experts_once, slower * experts
    attention = slower * _attention_seconds(plan, layer, work, rates)
    elementwise = slower * _elementwise_seconds(plan, case, work, around.moved_bytes, rates)
    quantize_once = 0.0
    if plan.low_precision:
        quantize_once = slowed * _quantize_seconds(
            plan,
            work.quant_elements + around.quant_elements + knobs.fp8_attention * work.attention_elements,
            rates,
        )
    sequence = tensor_parallel_seconds(plan, case, work, rates) * (0.5 if knobs.tp_overlap else 1.0)
    forward = ForwardSeconds(gemm_once, experts_once, attention / 3.5, elementwise / 3, quantize_once, sequence)
    gemm, quantize, tp = passes * gemm_once, passes * quantize_once, 2.5 * sequence
    context = context_parallel_seconds(plan, case, rates)
    cp = max(0.1 * context.hidden, context.hidden - attention) + context.exposed
    expansion = latent_expansion_seconds(plan, case, rates)
    gemm += expansion.gemm
    elementwise += expansion.moved_bytes * rates.passes / _memory_bandwidth(plan, rates)
    recompute = recompute_seconds(plan, layer, forward, work, rates) + expansion.recompute
    exchange = dispatch_seconds(plan, work, rates, skew)
    exchange += skew.rank * expert_tensor_parallel_seconds(plan, work, rates)
    ep = exchange * (6 if "moe" in knobs.recompute or plan.full_recompute else 4)
    if STACK_TRAITS[plan.target].waits_every_layer:
        ep += routing_map_seconds(plan, work, rates)
    busy = gemm + experts + attention + elementwise + quantize + recompute
    if knobs.ep_overlap and exchange:
        seconds = around.moved_bytes * rates.passes / _memory_bandwidth(plan, rates)
        seconds += _quantize_seconds(plan, around.quant_elements, rates) if plan.low_precision else 0.0
        parts = _layer_parts(plan, layer, forward, seconds, experts - experts_once, busy + tp + cp)
        hidden = hidden_seconds(plan, exchange, parts, rates.hidden)
        slowdown = rates.contention * (2.5 if knobs.dispatcher == "alltoall" else 1.0)
        ep += (slowdown - 1) * hidden
    elif knobs.wgrad_overlap:
        ep -= rates.hidden * min(exchange, (experts - experts_once) / 2)
    host, gpu = cpu_sharing(plan, rates) * host_seconds(plan, layer, rates), busy + tp + cp + ep
    waiting, syncs = 0.0, knobs.dispatcher == "alltoall" and plan.layout.ep > 1 and bool(work.grouped_flops)
    if syncs or STACK_TRAITS[plan.target].waits_every_layer:
        waiting, host = host_wait(plan, gpu, host, LAYER_SHARPNESS) + (rates.sync_seconds if syncs else 0.0), 0.0
    waiting += replay_seconds(plan, layer, rates)
    elementwise += ramp_seconds(plan, layer, rates)
    # The gaps that a graph closes are mostly before elementwise kernels, which are many and small.
    elementwise = max(0.3 * elementwise, elementwise - closed_gap_seconds(plan, layer, rates))
    return LayerTime(gemm, experts, attention, elementwise, quantize, recompute, tp, cp, ep, waiting, host)


def cpu_sharing(plan: Plan, rates: Rates) -> float:
    """How much longer everything takes a rank because ranks share a CPU: its caches, and the units of a core. While a
    pipeline fills and drains, its other ranks leave them alone."""
    if plan.chip.architecture != "cpu" or plan.layout.gpus == 1:
        return 1.0
    count = max(1, plan.num_microbatches)
    return 1 + (rates.cpu_sharing - 1) * count / (count + plan.layout.pp - 1)


def cpu_slowdown(plan: Plan, rates: Rates) -> float:
    """Seconds of a rank's kernels on a CPU over those of one thread that is alone there; large GEMMs have several."""
    if plan.chip.architecture != "cpu":
        return 1.0
    return cpu_sharing(plan, rates) / float(num_threads(plan, plan.chip.cores) ** THREADS_POWER)


def _memory_bandwidth(plan: Plan, rates: Rates) -> float:
    return plan.chip.memory_bandwidth * rates.memory


def _expert_seconds(plan: Plan, work: Work, rates: Rates) -> tuple[float, float]:
    """Grouped GEMMs of the routed experts: the forward, and forward with backward."""
    if not work.grouped_flops:
        return 0.0, 0.0
    passes, wgrads = gemms_per_weight(plan, "experts")
    bandwidth = _memory_bandwidth(plan, rates)
    full_rate = gemm_rate(rates, plan, expert_gemm_precision(plan), 1e9) * rates.grouped
    rate = full_rate * work.rows_per_expert / (work.rows_per_expert + rates.grouped_rows)
    forward = max(work.grouped_flops / rate, work.weight_bytes / bandwidth)
    accumulated = work.weight_bytes * (4 if plan.knobs.grad_dtype == "fp32" else 2)  # gradients read and written
    if writes_gradients_once(plan):
        accumulated = work.weight_bytes
    return forward, passes * forward + wgrads * accumulated / bandwidth


@dataclass(frozen=True, slots=True)
class AroundExperts:
    """Work of the forward around the experts' GEMMs: permutation, activation, quantization and copies."""

    moved_bytes: float
    quant_elements: float


def _around_experts(plan: Plan, work: Work, rates: Rates) -> AroundExperts:
    """What fusion leaves of the work around the experts' GEMMs."""
    fused = runs_fused_experts(plan)
    factor = rates.fusion if fused else 1.0
    gathers = fused and STACK_TRAITS[plan.target].fuses_permutation and plan.layout.ep * plan.layout.etp == 1
    permuted = work.permuted_bytes * (factor if gathers else 1.0)
    moved = (work.expert_moved_bytes * factor + permuted) * rates.expert_passes + _dispatcher_copies(plan, work)
    return AroundExperts(moved, work.expert_quant_elements * factor * rates.expert_quant)


def _dispatcher_copies(plan: Plan, work: Work) -> float:
    """Bytes of rows that the alltoall dispatcher copies before it sends them."""
    if plan.knobs.dispatcher != "alltoall" or plan.layout.ep <= 1 or not work.grouped_flops:
        return 0.0
    return 2 * work.dispatch_tokens * (plan.model.moe.top_k if plan.model.moe else 0) * BF16 * plan.model.dim


def _elementwise_seconds(plan: Plan, case: LayerCase, work: Work, around_experts: float, rates: Rates) -> float:
    """Memory-bound kernels, forward and backward, and the chunks of the delta rule."""
    bandwidth = _memory_bandwidth(plan, rates)
    moved = (
        work.moved_bytes
        - work.permuted_bytes
        + work.routed_bytes * rates.routing_passes
        + around_experts
        + work.latent_bytes * (rates.latent_passes - 1)
    )
    seconds = 3 * moved * rates.passes / bandwidth + 3 * work.scan_bytes * rates.scan / bandwidth
    return seconds + chunks_seconds(plan, case.layer, case.seq_len, rates)


def _quantize_seconds(plan: Plan, elements: float, rates: Rates) -> float:
    """Quantization of `elements` elements: 4 bytes each, read and written."""
    return elements * 4 * rates.quant_passes / _memory_bandwidth(plan, rates)


def _attention_seconds(plan: Plan, layer: Layer, work: Work, rates: Rates) -> float:
    """The attention kernel: forward once and backward 2.5 times, because the fused backward recomputes the scores."""
    fraction = rates.attention_blackwell if plan.chip.architecture == "blackwell" else rates.attention
    peak = peak_flops(plan.chip, "bf16") * (1.3 if plan.knobs.fp8_attention else 1.0)
    spec = plan.model.attention
    head = spec.head_dim if isinstance(spec, GqaSpec) else 160
    fraction *= rates.attention_latent if isinstance(spec, MlaSpec) else 1.0
    fraction *= rates.attention_sinks if isinstance(spec, GqaSpec) and spec.sinks else 1.0
    if layer.mixer == "window":
        fraction *= rates.attention_window
    else:  # a short sequence leaves many tiles of the kernel half empty
        parts = 1 if plan.knobs.cp_comm == "a2a" else plan.layout.cp  # a kernel sees one of them, or all in fewer heads
        fraction /= 1 + rates.attention_tokens * parts / plan.job.seq_len
    # The exponential of a score costs about as much as 64 columns of the head; small heads pay it more often. Blackwell
    # Ultra has twice the exponentials of Blackwell (NVIDIA, Inside Blackwell Ultra, 2025-08).
    columns = 32 if plan.chip.name in ("b300", "gb300") and STACK_TRAITS[plan.target].waits_every_layer else 64
    seconds = 3.5 * work.attention_flops * _masked_work(plan, layer) * (1 + columns / head) / 1.5 / (peak * fraction)
    if STACK_TRAITS[plan.target].sinks_slow_attention and not plan.knobs.fp8_attention:
        seconds += work.sink_bytes * rates.sink_passes / _memory_bandwidth(plan, rates)
    return seconds


def _masked_work(plan: Plan, layer: Layer) -> float:
    """FLOPs of attention with the keys that a query does not read, over those that it reads: keys that an indexer did
    not choose, and tokens beside the window of compressed attention, which blocks of queries read."""
    spec = plan.model.attention_of(layer)
    if not STACK_TRAITS[plan.target].scores_unchosen_keys:
        return 1.0
    if isinstance(spec, CompressedSpec):
        entries = plan.job.seq_len / spec.rate if spec.rate else 0.0
        counted = layer_flops(plan.model, layer, plan.job.seq_len).attention
        tokens = min(plan.job.seq_len, 2 * ((spec.window or 0) + MOST_QUERIES))  # counts are twice over
        return max(1.0, 2.0 * spec.q_dim * (tokens + entries) / counted)
    if not isinstance(spec, MlaSpec) or spec.indexer is None:
        return 1.0
    return max(1.0, plan.job.seq_len / (2 * spec.indexer.top_k))


def _layer_parts(
    plan: Plan, layer: Layer, forward: ForwardSeconds, around_experts: float, experts_backward: float, total: float
) -> LayerParts:
    """A layer that takes `total` seconds without its exchanges, cut into the parts that EP overlap places."""
    flops = layer_flops(plan.model, layer, plan.job.seq_len)
    shared = forward.gemm * flops.shared / max(1.0, flops.shared + flops.projections)
    passes, wgrads = gemms_per_weight(plan)
    experts = PartSeconds(
        forward.experts + around_experts,
        experts_backward + 2 * around_experts,
        gemms_per_weight(plan, "experts")[1] * experts_backward / 2,
    )
    mixer = forward.gemm - shared + forward.attention + forward.elementwise + forward.quantize + forward.tp
    mixer -= around_experts
    mixer_backward = total - mixer - passes * shared - experts.forward - experts.backward
    mixer_part = PartSeconds(mixer, mixer_backward, wgrads * (forward.gemm - shared))
    return LayerParts(mixer_part, experts, PartSeconds(shared, (passes - 1) * shared))
