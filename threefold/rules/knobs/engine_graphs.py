"""CUDA graphs of the threefold engine: which scopes it records beside what, and the memory that they may hold."""

from collections.abc import Iterator

from threefold.cost.format_support import runs_fused_experts
from threefold.cost.memory.threefold.graphs.pools import largest_pool
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import rule, without
from threefold.rules.layout.batch import can_be_priced
from threefold.spec.candidates import dropless_graphs, first_graphs
from threefold.units import GIB

_WHOLE = "full_iteration"


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
    beside = list(_beside_graphs(plan))
    for problem in beside:
        yield Finding(at="knobs.graphs", problem=f"the engine has no graphs with {problem}", fix={"knobs.graphs": []})
    absent = {} if beside else _absent_scopes(plan)
    for scope, why in absent.items():
        if scope in plan.knobs.graphs:
            fix = {"knobs.graphs": without(plan.knobs.graphs, *absent)}
            yield Finding(at="knobs.graphs", problem=f"the engine has no graph of {scope} {why}", fix=fix)


def engine_scopes(plan: Plan, scopes: tuple[str, ...]) -> tuple[str, ...]:
    """The scopes among `scopes` that our engine records beside the plan's other settings."""
    if any(_beside_graphs(plan)):
        return ()
    absent = {*_absent_scopes(plan)}
    absent |= {"moe_preprocess"} if "moe_router" in absent else set()
    return tuple(scope for scope in scopes if scope not in absent)


def wider_graphs(plan: Plan) -> list[tuple[str, ...]]:
    """The sets of scopes to compare with the plan's own, the next A/B first: routing, then attention with it."""
    steps = [first_graphs(plan.model.is_moe), dropless_graphs(plan.model.is_moe)]
    if plan.target == "threefold":
        steps = [engine_scopes(plan, scopes) for scopes in steps]
    return [scopes for scopes in dict.fromkeys(steps) if set(scopes) > set(plan.knobs.graphs)]


def _beside_graphs(plan: Plan) -> Iterator[str]:
    if plan.knobs.data_parallel != "zero1":
        yield f"{plan.knobs.data_parallel}, which gathers weights to new addresses"


def _absent_scopes(plan: Plan) -> dict[str, str]:
    """Scopes that the engine does not record, and why; one reason for each."""
    found: dict[str, str] = {}
    for scope, why in _no_graph_of(plan):
        found.setdefault(scope, why)
    return found


def _no_graph_of(plan: Plan) -> Iterator[tuple[str, str]]:
    layout, dispatcher, precision = plan.layout, plan.knobs.dispatcher, plan.knobs.precision
    yield "mamba", "at all"
    if precision == "nvfp4":
        scopes = ("attn", "mlp", "moe", _WHOLE)
        yield from ((scope, "in nvfp4, whose tables come from the host") for scope in scopes)
    if plan.is_vlm:
        yield _WHOLE, "with pictures, whose sizes differ"
    if layout.pp > 1:
        yield _WHOLE, f"with PP {layout.pp}: its stages exchange between forward and backward"
    if layout.ep * layout.etp > 1 and plan.model.is_moe:
        sized = f"with EP {layout.ep} x ETP {layout.etp}, whose exchanges are sized on the host"
        yield from ((scope, sized) for scope in ("moe", _WHOLE))
    if plan.low_precision and plan.model.is_moe and not runs_fused_experts(plan):
        alone = f"in {precision} without fused kernels: experts run one by one, with their sizes on the host"
        yield from ((scope, alone) for scope in ("moe", _WHOLE))
    if dispatcher in ("deepep", "hybridep") and layout.ep > 1:
        yield "moe_preprocess", f"with {dispatcher}, which sorts by itself"


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
