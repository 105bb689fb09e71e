"""Context parallelism as Megatron Core and Bridge validate it."""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, older
from threefold.spec.model import MambaSpec, MlaSpec
from threefold.spec.stacks import CORE_CONFIG


@megatron_refuses(CORE_CONFIG, "self.linear_num_key_heads=} must be a multiple of", rows="LC-CP")
def delta_heads_divide(plan: Plan) -> Iterator[Finding]:
    """TP x CP divides the key and value heads of the gated delta rule.

    Why: Megatron gives each of these ranks whole heads of a linear layer, over context parallelism as over tensors.
    Confirm: the heads in the message against layout.tp x layout.cp.
    Fix: a smaller CP or TP.
    """
    delta, layout = plan.model.delta, plan.layout
    if delta is None or layout.tp * layout.cp == 1:
        return
    shares = layout.tp * layout.cp
    if delta.num_k_heads % shares or delta.num_v_heads % shares:
        heads = f"{delta.num_k_heads} key heads and {delta.num_v_heads} value heads"
        degrees = [d for d in range(layout.cp, 0, -1) if layout.cp % d == 0]
        whole = [d for d in degrees if delta.num_k_heads % (layout.tp * d) == 0]
        fixes: list[Changes] = [{"layout.cp": d} for d in whole if delta.num_v_heads % (layout.tp * d) == 0]
        yield Finding(at="layout.cp", problem=f"{heads} over TP {layout.tp} x CP {layout.cp}", fixes=fixes)


@megatron_refuses(
    "core/ssm/mamba_context_parallel.py", "nheads must be evenly divisible by tp_size * cp_size", rows="LC-CP"
)
def mamba_heads_divide(plan: Plan) -> Iterator[Finding]:
    """TP x CP divides the heads of Mamba layers, and their groups where these are enough.

    Why: Megatron gives each of these ranks whole heads, whole groups over tensors, and over context parallelism whole
        groups or the copies of one.
    Confirm: the heads and groups in the message against layout.tp x layout.cp.
    Fix: a smaller CP or TP.
    """
    mamba, layout = plan.model.mamba, plan.layout
    if mamba is None or _mamba_divides(mamba, layout.tp, layout.cp):
        return
    fixes: list[Changes] = [
        {"layout.tp": tp, "layout.cp": cp}
        for tp in range(layout.tp, 0, -1)
        for cp in range(layout.cp, 0, -1)
        if layout.tp % tp == 0 and layout.cp % cp == 0 and _mamba_divides(mamba, tp, cp)
    ]
    what = f"{mamba.num_heads} heads in {mamba.num_groups} groups over TP {layout.tp} x CP {layout.cp}"
    yield Finding(at="layout.cp" if layout.cp > 1 else "layout.tp", problem=what, fixes=fixes)


def _mamba_divides(mamba: MambaSpec, tp: int, cp: int) -> bool:
    groups = mamba.num_groups // tp
    return mamba.num_heads % (tp * cp) == 0 and mamba.num_groups % tp == 0 and (groups % cp == 0 or cp % groups == 0)


@megatron_refuses("core/ssm/gated_delta_net.py", "# from .gated_delta_net_context_parallel import", rows="LC-CP")
def delta_rule_without_cp(plan: Plan) -> Iterator[Finding]:
    """Megatron Core before 0.18 runs the gated delta rule without context parallelism.

    Why: its layer has no exchange between ranks there, and its constructor refuses the type of one.
    Confirm: layout.cp and stack.release.
    Fix: CP 1, or a newer release.
    """
    if plan.model.delta is not None and plan.layout.cp > 1:
        yield Finding(at="layout.cp", problem=f"CP {plan.layout.cp} on {plan.model.name}", fix={"layout.cp": 1})


@megatron_refuses("core/ssm/gated_delta_net.py", "name: str | None = None,", rows="LC-CP")
def delta_rule_by_p2p(plan: Plan) -> Iterator[Finding]:
    """Megatron Core 0.18 takes no type of context-parallel communication for models with the gated delta rule.

    Why: a transformer layer hands the type to its mixer, and this one's constructor has no such argument (TypeError).
        An export leaves p2p out, which is what attention then does; it has no way to say another one.
    Confirm: knobs.cp_comm and stack.release.
    Fix: p2p, or a newer release.
    """
    if plan.model.delta is not None and plan.layout.cp > 1 and plan.knobs.cp_comm != "p2p":
        problem = f"cp_comm {plan.knobs.cp_comm} on {plan.model.name}"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": "p2p"})


@megatron_refuses(CORE_CONFIG, "is not supported by DSAttention!", rows="LC-CP")
def sparse_attention_without_cp(plan: Plan) -> Iterator[Finding]:
    """Megatron Core before 0.19 runs sparse attention without context parallelism.

    Why: its indexer chooses among the keys of one rank there.
    Confirm: layout.cp and stack.release.
    Fix: CP 1, or a newer release.
    """
    if _is_sparse(plan) and plan.layout.cp > 1:
        yield Finding(at="layout.cp", problem=f"CP {plan.layout.cp} on {plan.model.name}", fix={"layout.cp": 1})


def _is_sparse(plan: Plan) -> bool:
    spec = plan.model.attention
    return isinstance(spec, MlaSpec) and spec.indexer is not None


@megatron_refuses(CORE_CONFIG, "cp_comm_type=allgather only", rows="LC-CP")
def sparse_attention_gathers(plan: Plan) -> Iterator[Finding]:
    """Sparse attention exchanges keys over context parallelism by all-gather.

    Why: an indexer chooses among the keys of the whole sequence.
    Confirm: knobs.cp_comm.
    Fix: all_gather.
    """
    modes = {plan.knobs.cp_comm} if isinstance(plan.knobs.cp_comm, str) else set(plan.knobs.cp_comm)
    if _is_sparse(plan) and plan.layout.cp > 1 and modes != {"all_gather"}:
        problem = f"cp_comm {', '.join(sorted(modes))} on {plan.model.name}, whose attention is sparse"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": "all_gather"})


@megatron_refuses("core/extensions/transformer_engine.py", "must be >= 1.12.0 to support", rows="LC-HIERTE LC-CP-HIER")
def hierarchical_cp_needs_te(plan: Plan) -> Iterator[Finding]:
    """Hierarchical context parallelism needs Transformer Engine 1.12.

    Why: older releases have one context-parallel group and no exchange inside it.
    Confirm: print transformer_engine.__version__.
    Fix: p2p, or Transformer Engine 1.12.
    """
    is_nested = "a2a+p2p" in {plan.knobs.cp_comm, *plan.knobs.cp_comm}
    if is_nested and plan.layout.cp > 1 and older(plan.stack.te, "1.12"):
        problem = f"a2a+p2p on Transformer Engine {plan.stack.te}"
        fix: Changes = {"knobs.cp_comm": "p2p", "knobs.cp_inner": None}
        yield Finding(at="stack.te", problem=problem, fix=fix, advice="or run Transformer Engine 1.12 or newer")


@megatron_refuses("training/arguments.py", "Hybrid context parallelism not supported with", rows="LC-HYBCP LC-CP-DYN")
def hybrid_cp_on_target(plan: Plan) -> Iterator[Finding]:
    """Megatron shards each sequence by its length without graphs and without FSDP.

    Why: groups change from one microbatch to the next; a graph has one of them, and FSDP shards weights over all.
        Megatron also asks for a data loader of the kind `single` and a loss by token, which an export sets.
    Confirm: knobs.cp_dynamic with knobs.graphs and knobs.data_parallel.
    Fix: no graphs, zero1, or one CP degree for all sequences.
    """
    if not plan.knobs.cp_dynamic or plan.layout.cp == 1:
        return
    one: Changes = {"knobs.cp_dynamic": False}
    if plan.knobs.graphs:
        problem = "dynamic context parallelism with CUDA graphs"
        yield Finding(at="knobs.graphs", problem=problem, fixes=[{"knobs.graphs": []}, one])
    if plan.knobs.data_parallel != "zero1":
        zero1: Changes = {"knobs.data_parallel": "zero1", "layout.replicate": 1}
        problem = f"dynamic context parallelism with {plan.knobs.data_parallel}"
        yield Finding(at="knobs.data_parallel", problem=problem, fixes=[zero1, one])
