"""CUDA graphs of the threefold engine: which scopes it records beside what, and the memory that they may hold."""

from collections.abc import Iterator

from threefold.cost.memory.threefold.graphs.pools import largest_pool
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.remedies.graph_scopes import absent_scopes, excludes_graphs
from threefold.rules.base import rule, without
from threefold.rules.layout.batch import can_be_priced
from threefold.units import GIB


@rule(severity="warning", rows="CG-ATTN CG-ROUTER CG-PREP CG-FULL", target="threefold")
def engine_has_graphs(plan: Plan) -> Iterator[Finding]:
    """The threefold engine records what has fixed sizes and addresses.

    Why: a graph replays the addresses and sizes with which it was recorded, and never asks the host. Collectives are
        recorded like kernels, and weights below sixteen bits are quantized in place. FSDP gathers weights to new
        addresses; exchanges of tokens between ranks are sized on the host; DeepEP and HybridEP sort by themselves.
    Confirm: the names in the message.
    Fix: other scopes, or none.
    """
    if not plan.knobs.graphs:
        return
    beside = list(excludes_graphs(plan))
    for problem in beside:
        yield Finding(at="knobs.graphs", problem=f"the engine has no graphs with {problem}", fix={"knobs.graphs": []})
    absent = {} if beside else absent_scopes(plan)
    for scope, why in absent.items():
        if scope in plan.knobs.graphs:
            fix = {"knobs.graphs": without(plan.knobs.graphs, *absent)}
            yield Finding(at="knobs.graphs", problem=f"the engine has no graph of {scope} {why}", fix=fix)


@rule(severity="warning", rows="CG-MEM", target="threefold")
def graphs_fit_their_budget(plan: Plan) -> Iterator[Finding]:
    """CUDA graphs need no more memory than the plan gives them.

    Why: graphs keep the activations, inputs and gradients of their scopes for the whole run, once for each microbatch
        in flight; other tensors cannot use that memory. Microbatches for which the budget has no memory run eagerly.
    Confirm: `graphs/memory_bytes` in metrics.jsonl; knobs.graph_memory_gb.
    Fix: fewer scopes, or a larger budget.
    """
    budget = plan.knobs.graph_memory_gb
    if budget is None or not plan.knobs.graphs or plan.chip.architecture == "cpu" or not can_be_priced(plan):
        return
    held = largest_pool(plan) / GIB
    if held > budget:
        problem = f"graphs would hold {held:.1f} GiB, the budget is {budget:g} GiB: some microbatches run eagerly"
        scopes = plan.knobs.graphs
        fewer = [{"knobs.graphs": list(scopes[:count])} for count in range(len(scopes) - 1, -1, -1)]
        yield Finding(at="knobs.graph_memory_gb", problem=problem, fixes=fewer)
