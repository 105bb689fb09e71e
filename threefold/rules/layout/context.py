"""Long context: how the sequence is cut, and what a short-context plan gets wrong at length."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import log2

from threefold.cost.delta_rule import heads_in_delta_layers
from threefold.cost.fit import fits, surely_fits
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.remedies.recompute_sets import fitting_sets
from threefold.rules.base import older, rule, without
from threefold.rules.layout.batch import batch_step, can_be_priced, pays
from threefold.spec.model import CompressedSpec, MlaSpec
from threefold.spec.tensor_parallel import tp_fits
from threefold.units import format_many, format_tokens

SHARD_TOKENS = 4096  # upstream's target: CP ~ sequence / 4096
BATCH_TOKENS = 2**26  # 64M tokens a step: twice what large pretraining runs use


def target_cp(seq_len: int) -> int:
    """The nearest power of two to seq_len / 4096, by ratio: 28 is nearer to 32 than to 16."""
    return int(2 ** max(0, round(log2(seq_len / SHARD_TOKENS)))) if seq_len > SHARD_TOKENS else 1


def _cp_options(plan: Plan) -> list[int]:
    """Powers of two that the sequence divides by, given TP."""
    seq, tp = plan.job.seq_len, plan.layout.tp
    return [2**i for i in range(20) if seq % ((2 * 2**i if i else 1) * tp) == 0]


@rule(severity="warning", rows="LC-CP-SIZE CP-WHEN LC-CP PF-SEQMAP LC-SHARD")
def cp_from_shard_target(plan: Plan) -> Iterator[Finding]:
    """At long context CP (with TP) cuts the sequence to about 4K tokens a rank.

    Why: past a few thousand tokens attention and activations dominate the memory of a rank; CP is the axis
        that cuts both. The usual first guess is CP = sequence / 4096, rounded to a power of two. Upstream's guides
        differ: its MoE guide and its card on long context divide by 4096 (32K: CP 8), its skill on parallelism
        (2026-04) takes CP 2 up to 32K and 4 to 8 above. What fits and what it costs is estimated either way.
    Confirm: `threefold show` prints the tokens a rank holds.
    Fix: the power of two the message names; on NVL72 TP may take a part of it.
    """
    layout, seq = plan.layout, plan.job.seq_len
    shard = seq / (layout.cp * layout.tp)
    if plan.is_long and shard > 2 * SHARD_TOKENS and not _needs_whole_sequences(plan):
        wanted = [cp for cp in _cp_options(plan) if seq / (cp * layout.tp) <= 2 * SHARD_TOKENS]
        nearest = sorted(wanted, key=lambda cp: abs(log2(cp * layout.tp / target_cp(seq))))
        yield Finding(
            at="layout.cp",
            problem=f"{shard:.0f} tokens a rank at {format_tokens(seq)}: the 4K shard target is CP {target_cp(seq)}",
            fixes=[{"layout.cp": cp} for cp in nearest],
            otherwise=lambda: _gpus_for_cp(plan, nearest),
        )


def _gpus_for_cp(plan: Plan, wanted: list[int]) -> str:
    """How many GPUs a larger CP asks for beside the plan's other degrees."""
    if not wanted:
        return "use a sequence length that powers of two divide"
    need = replace(plan.layout, cp=wanted[0]).min_gpus
    return f"CP {wanted[0]} beside the other degrees takes a multiple of {need} GPUs"


@rule(severity="warning", rows="CP-WHEN")
def cp_only_when_long(plan: Plan) -> Iterator[Finding]:
    """CP is for sequences that are long: a rank keeps at least 2K tokens.

    Why: below that, attention memory does not dominate, and the ring costs more than it saves; DP is the
        better use of the ranks.
    Confirm: divide job.seq_len by layout.cp.
    Fix: a smaller CP.
    """
    layout, seq = plan.layout, plan.job.seq_len
    if layout.cp > 1 and seq / layout.cp < SHARD_TOKENS / 2 and plan.cluster.chip != "cpu":
        fits = [cp for cp in _cp_options(plan) if cp == 1 or seq / cp >= SHARD_TOKENS / 2]
        if fits and fits[-1] < layout.cp:
            problem = f"CP {layout.cp} leaves {seq / layout.cp:.0f} tokens a rank"
            smaller = [{"layout.cp": cp} for cp in reversed(fits)]
            ring = [{"layout.cp": cp, "knobs.cp_comm": "p2p"} for cp in reversed(fits)]
            yield Finding(at="layout.cp", problem=problem, fixes=[*smaller, *ring])


@rule(severity="warning", rows="LC-TPxCP", needs_fix=True)
def tp_for_cp_on_rack(plan: Plan) -> Iterator[Finding]:
    """On NVL72 systems TP can take over a part of a large CP, where that is predicted to be faster or to fit.

    Why: NVLink reaches the whole rack, so TP stays fast at degrees that would leave an 8-GPU node; the
        published 128K plan for Qwen3-235B is TP 4 x CP 4.
    Confirm: compare both with `threefold estimate`, or measure.
    Fix: TP 4 (or 2) and CP divided by it.
    """
    layout = plan.layout
    if not (plan.chip.is_rack_scale and plan.is_long and layout.tp == 1 and layout.cp >= 8):
        return
    fixes = []
    for tp in (4, 2):
        other = replace(plan, layout=replace(layout, tp=tp, cp=layout.cp // tp))
        whole = layout.cp % tp == 0 and tp_fits(plan.model, tp) is None and other.layout.fits_ranks
        if whole and (pays(plan, other) or (not surely_fits(plan) and surely_fits(other))):
            fixes.append({"layout.tp": tp, "layout.cp": layout.cp // tp})
    if fixes:
        problem = f"CP {layout.cp} with TP 1 on {plan.chip.name}, where NVLink joins {plan.chip.domain} GPUs"
        yield Finding(at="layout.cp", problem=problem, fixes=fixes)


@rule(severity="warning", rows="LC-DP-ALIVE")
def dp_at_floor(plan: Plan) -> Iterator[Finding]:
    """Long-context plans keep DP above 1.

    Why: once CP, TP, PP and EP use every rank, a longer sequence needs more GPUs at once, the batch can
        only grow by accumulation, and one lost node stops everything.
    Confirm: `threefold show` prints DP.
    Fix: less model parallelism where memory allows, or more GPUs.
    """
    layout = plan.layout
    if plan.is_long and layout.gpus > 1 and layout.tp * layout.cp * layout.pp == layout.gpus:
        problem = f"TP {layout.tp} x CP {layout.cp} x PP {layout.pp} use all {layout.gpus} GPUs: DP is at its floor"
        less: list[dict[str, object]] = []
        if layout.pp % 2 == 0:
            chunks = {"layout.vpp": 2 * layout.vpp} if layout.vpp > 1 and layout.pp > 2 else {"layout.vpp": 1}
            less = [{"layout.pp": layout.pp // 2, **chunks, "layout.stages": None}]
        less += [{f"layout.{axis}": layout.degree(axis) // 2} for axis in ("cp", "tp") if layout.degree(axis) % 2 == 0]
        yield Finding(
            at="cluster.gpus",
            problem=problem,
            fixes=less,
            otherwise=lambda: f"{2 * layout.gpus} GPUs would give DP 2",
        )


@rule(severity="warning", rows="LC-GBS")
def batch_against_length(plan: Plan) -> Iterator[Finding]:
    """As sequences grow the global batch shrinks.

    Why: a batch size carried over from 4K multiplies the tokens of a step; with DP small it can only be
        reached by long accumulation.
    Confirm: tokens a step = job.global_batch x job.seq_len.
    Fix: a smaller global batch.
    """
    if plan.is_long and plan.tokens_per_step > BATCH_TOKENS:
        step = batch_step(plan)
        fewer = max(1, BATCH_TOKENS // 2 // plan.job.seq_len // step) * step
        count = plan.num_microbatches  # none where the grids do not divide the ranks
        deep = f", {format_many(count, 'microbatch')} deep" if count else ""
        if fewer * plan.job.seq_len <= BATCH_TOKENS:
            yield Finding(
                at="job.global_batch",
                problem=(
                    f"{plan.job.global_batch} x {format_tokens(plan.job.seq_len)} = "
                    f"{plan.tokens_per_step / 1e6:.0f}M tokens a step{deep}"
                ),
                fix={"job.global_batch": fewer},
            )


@rule(severity="warning", rows="LC-SDPA RC-ATTN")
def sdpa_recompute_at_length(plan: Plan) -> Iterator[Finding]:
    """Attention internals are not recomputed at long context.

    Why: recomputing attention repeats work that grows with the square of the length, and a fused kernel
        saves only its output and log-sum-exp, so next to nothing is won.
    Confirm: compare the peak with and without `core_attn` in a rehearsal.
    Fix: recompute norms, expert activations or MLPs instead.
    """
    # The delta rule and Mamba's scan save much, and their work is linear in the length.
    has_recurrence = plan.model.delta is not None or plan.model.mamba is not None
    recomputes_recurrence = has_recurrence and plan.target == "threefold"
    if "core_attn" in plan.knobs.recompute and plan.is_long and not recomputes_recurrence:
        yield Finding(
            at="knobs.recompute",
            problem=f"core_attn at {format_tokens(plan.job.seq_len)} repeats quadratic work for little memory",
            fix={"knobs.recompute": without(plan.knobs.recompute, "core_attn")},
        )


@rule(severity="warning", rows="LC-4KBASE")
def short_baseline_at_length(plan: Plan) -> Iterator[Finding]:
    """A plan for long context saves activation memory somewhere, unless it is predicted to fit without.

    Why: a layout that is good at 4K keeps everything; at length the recompute set, the offload and often
        the dispatcher have to be chosen again.
    Confirm: rehearse or estimate the plan at this length.
    Fix: begin with selective recompute of norms and the expert activation.
    """
    knobs = plan.knobs
    keeps_all = not (knobs.recompute or knobs.activation_offload or knobs.activation_offload_layers)
    if plan.is_long and keeps_all and not (can_be_priced(plan) and fits(plan)):
        first = ["layernorm", "moe_act"] if plan.model.is_moe else ["layernorm"]
        sets = fitting_sets(plan) if can_be_priced(plan) else ()
        yield Finding(
            at="knobs.recompute",
            problem=f"nothing is recomputed at {format_tokens(plan.job.seq_len)}: settings of a 4K baseline",
            fixes=({"knobs.recompute": names} for names in chain(sets, [first])),
        )


@rule(severity="warning", rows="LC-KERNEL")
def kernels_at_length(plan: Plan) -> Iterator[Finding]:
    """At 128K and beyond the software is recent.

    Why: long sequences lean on attention kernels, 64-bit indexing and fixes that older releases lack.
    Confirm: print the versions on the machine that runs the plan and compare with stack.torch, stack.te and
        stack.release. The container of release 26.02 is the first with PyTorch 2.11.
    Fix: a newer container; no field of the plan can cure it.
    """
    if plan.job.seq_len < 131_072:
        return
    stated_and_needed = (
        ("torch", plan.stack.torch, "2.11"),
        ("te", plan.stack.te, "2.6"),
        ("release", plan.stack.release, "26.02"),
    )
    for name, stated, need in stated_and_needed:
        if older(stated, need):
            yield Finding(
                at=f"stack.{name}",
                problem=f"{stated} is older than {need}, which 128K and beyond leans on",
                advice=f"run on {name} {need} or newer, then state it",
            )


@rule(rows="LC-CP-A2A LC-CP-HIER")
def cp_a2a_divides_heads(plan: Plan) -> Iterator[Finding]:
    """With all-to-all context parallel every rank takes whole heads.

    Why: a2a trades sequence shards for head shards, so TP x CP must divide the heads, and the key/value
        heads too. The hierarchical form needs it only inside the fast domain. A list by layer is judged by the layers
        that it gives each kind to: those of the delta rule need key heads that TP x CP divides.
    Confirm: divide the head counts by TP x CP.
    Fix: our engine keeps a2a in layers of the delta rule, where their heads divide; p2p works with any head count.
    """
    layout, model, kinds = plan.layout, plan.model, plan.knobs.cp_comm
    layers = zip([kinds] * model.num_layers if isinstance(kinds, str) else kinds, model.layers, strict=False)
    used = {(kind, "delta" if layer.mixer == "delta" else "attention") for kind, layer in layers}
    # Inside one domain the hierarchical form is a plain ring: no heads are traded.
    inner = plan.cp_inner if ("a2a+p2p", "attention") in used else 1
    shards = layout.tp * (layout.cp if ("a2a", "attention") in used else inner)
    if layout.cp == 1:
        return
    delta_heads = model.delta.num_k_heads if model.delta and ("a2a", "delta") in used else 0
    if delta_heads % (layout.tp * layout.cp):
        problem = f"{delta_heads} key heads of the delta rule do not divide into {layout.tp * layout.cp} shares"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": "p2p"})
        return
    for attention in model.attention_kinds:
        if shards > layout.tp and (attention.num_heads % shards or attention.num_kv_heads % shards):
            heads = f"{attention.num_heads} heads and {attention.num_kv_heads} key/value heads"
            yield Finding(
                at="knobs.cp_comm",
                problem=f"{heads} do not divide into {shards} shares",
                fixes=[{"knobs.cp_comm": kind} for kind in (heads_in_delta_layers(plan), "p2p") if kind],
            )
            return


@rule(rows="LC-CP-HIER")
def cp_inner_divides_cp(plan: Plan) -> Iterator[Finding]:
    """The ranks of a CP group form inner groups of one size.

    Why: in a2a+p2p the ranks of an inner group trade heads, and a ring joins the inner groups; with a size that does
        not divide CP one group would be smaller than the others.
    Confirm: divide layout.cp by knobs.cp_inner.
    Fix: the largest divisor that is not larger.
    """
    inner, cp = plan.knobs.cp_inner, plan.layout.cp
    if inner is None or inner == 1:
        return
    if "a2a+p2p" not in {plan.knobs.cp_comm, *plan.knobs.cp_comm}:
        problem = f"an inner size of {inner} with cp_comm {plan.knobs.cp_comm}, which has no inner groups"
        yield Finding(at="knobs.cp_inner", problem=problem, fix={"knobs.cp_inner": None})
    elif cp % inner:
        best = max(size for size in range(1, min(inner, cp) + 1) if cp % size == 0)
        yield Finding(
            at="knobs.cp_inner",
            problem=f"inner groups of {inner} ranks do not divide CP {cp}",
            fix={"knobs.cp_inner": best},
        )


@rule(severity="warning", rows="LC-CP-MLA")
def cp_exchange_has_latents(plan: Plan) -> Iterator[Finding]:
    """The exchange of context parallelism is a choice for MLA over several ranks in our engine.

    Why: other attention has no latents to exchange, and Megatron always exchanges expanded heads.
    Confirm: `threefold models NAME` shows the kind of attention.
    Fix: leave the field out.
    """
    knobs = plan.knobs
    if knobs.cp_exchange is None or plan.layout.cp == 1:
        return
    if not isinstance(plan.model.attention, MlaSpec):
        problem = f"cp_exchange {knobs.cp_exchange}: {plan.model.name} has no latents"
    elif plan.target != "threefold" and knobs.cp_exchange == "latents":
        problem = f"cp_exchange latents: {plan.target} exchanges expanded heads"
    else:
        return
    yield Finding(at="knobs.cp_exchange", problem=problem, fix={"knobs.cp_exchange": None})


@rule(rows="LC-CP-LAYER")
def cp_comm_per_layer(plan: Plan) -> Iterator[Finding]:
    """A list of context-parallel communication types has one entry a layer.

    Why: a shorter list would leave layers without a type.
    Confirm: count the entries.
    Fix: one name for all layers, or as many as layers.
    """
    modes, layers = plan.knobs.cp_comm, plan.model.num_layers
    if not isinstance(modes, str) and len(modes) != layers:
        filled = [modes[i % len(modes)] for i in range(layers)] if modes else "p2p"
        problem = f"{len(modes)} entries for {layers} layers"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": filled})


@rule(target="threefold")
def sparse_attention_on_whole_sequences(plan: Plan) -> Iterator[Finding]:
    """Attention to keys that an indexer chooses, or to entries of several tokens, is not spread over context-parallel
    ranks.

    Why: an indexer scores the keys of the whole sequence for each query, and the engine exchanges neither the
        indexer's keys nor the keys that it chose. Tokens of one entry (DeepSeek-V4) may lie on two ranks.
    Confirm: layout.cp; `threefold models` shows which models have an indexer or compressed attention.
    Fix: CP 1; TP shards the heads of long sequences.
    """
    if plan.layout.cp > 1 and _needs_whole_sequences(plan):
        problem = f"CP {plan.layout.cp} with the sparse attention of {plan.model.name}"
        yield Finding(at="layout.cp", problem=problem, fix={"layout.cp": 1})


def _needs_whole_sequences(plan: Plan) -> bool:
    """Whether the engine has no context parallelism for the model's attention."""
    spec = plan.model.attention
    has_indexer = isinstance(spec, CompressedSpec) or (isinstance(spec, MlaSpec) and spec.indexer is not None)
    return plan.target == "threefold" and has_indexer
