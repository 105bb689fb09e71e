"""CUDA graphs: which scopes the threefold engine records, and which are the next to compare. Rules, remedies and the
search ask here."""

from collections.abc import Iterator

from threefold.cost.format_support import runs_fused_experts
from threefold.plan.plan import Plan
from threefold.spec.candidates import dropless_graphs, first_graphs

WHOLE = "full_iteration"


def engine_scopes(plan: Plan, scopes: tuple[str, ...]) -> tuple[str, ...]:
    """The scopes among `scopes` that the engine records with the plan's other settings."""
    if any(excludes_graphs(plan)):
        return ()
    absent = {*absent_scopes(plan)}
    absent |= {"moe_preprocess"} if "moe_router" in absent else set()
    return tuple(scope for scope in scopes if scope not in absent)


def wider_graphs(plan: Plan) -> list[tuple[str, ...]]:
    """The sets of scopes to compare with the plan's own, the next A/B first: routing, then attention with it."""
    steps = [first_graphs(plan.model.is_moe), dropless_graphs(plan.model.is_moe)]
    if plan.target == "threefold":
        steps = [engine_scopes(plan, scopes) for scopes in steps]
    return [scopes for scopes in dict.fromkeys(steps) if set(scopes) > set(plan.knobs.graphs)]


def excludes_graphs(plan: Plan) -> Iterator[str]:
    if plan.knobs.data_parallel != "zero1":
        yield f"{plan.knobs.data_parallel}, which gathers weights to new addresses"
    if plan.model.streams is not None:
        yield f"the {plan.model.streams.count} residual streams of {plan.model.name}"


def absent_scopes(plan: Plan) -> dict[str, str]:
    """Scopes that the engine does not record, and why; one reason for each."""
    found: dict[str, str] = {}
    for scope, why in _no_graph_of(plan):
        found.setdefault(scope, why)
    return found


def _no_graph_of(plan: Plan) -> Iterator[tuple[str, str]]:
    layout, dispatcher, precision = plan.layout, plan.knobs.dispatcher, plan.knobs.precision
    yield "mamba", "at all"
    if precision == "nvfp4":
        scopes = ("attn", "mlp", "moe", WHOLE)
        yield from ((scope, "in nvfp4, whose tables come from the host") for scope in scopes)
    if plan.is_vlm:
        yield WHOLE, "with pictures, whose sizes differ"
    if layout.pp > 1:
        yield WHOLE, f"with PP {layout.pp}: its stages exchange between forward and backward"
    if layout.ep * layout.etp > 1 and plan.model.is_moe:
        sized = f"with EP {layout.ep} x ETP {layout.etp}, whose exchanges are sized on the host"
        yield "moe", sized
        if not plan.has_rank_capacity or layout.ep == 1:
            yield WHOLE, f"{sized} without a capacity per rank"
        elif dispatcher != "alltoall":
            yield WHOLE, f"with {dispatcher}, whose buffers are sized on the host"
        elif plan.knobs.expert_balance != "none":
            yield WHOLE, "with copies of experts, whose rows are counted on the host"
        elif plan.low_precision:
            yield WHOLE, f"with EP {layout.ep} in {precision}, whose scales would see rows of padding"
    if plan.low_precision and plan.model.is_moe and not runs_fused_experts(plan):
        alone = f"in {precision} without fused kernels: experts run one by one, with their sizes on the host"
        yield from ((scope, alone) for scope in ("moe", WHOLE))
    if dispatcher in ("deepep", "hybridep") and layout.ep > 1:
        yield "moe_preprocess", f"with {dispatcher}, which sorts by itself"
