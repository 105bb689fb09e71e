"""How the axes fold over ranks and links: which axis to use for what, and where its traffic goes."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.cost.fit import surely_fits
from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.rules.layout.batch import can_be_priced, pays
from threefold.spec.candidates import dispatcher_candidates
from threefold.spec.tensor_parallel import tp_fits
from threefold.units import format_many


@rule(severity="warning", rows="PF-ETPWARN")
def etp_only_when_ep_insufficient(plan: Plan) -> Iterator[Finding]:
    """Experts are spread by EP; ETP only where EP alone does not suffice.

    Why: ETP adds an all-gather and a reduce-scatter of tokens and makes each GEMM narrower.
    Confirm: EP x ETP over a smaller ETP divides the expert count, so EP could take a part of it or all.
    Fix: move as much of the degree to EP as divides the experts.
    """
    layout, experts = plan.layout, plan.model.num_experts
    if layout.etp == 1 or not experts or experts % layout.ep:
        return
    both = layout.ep * layout.etp
    smaller = [etp for etp in divisors(layout.etp)[:-1] if experts % (both // etp) == 0]
    if smaller:
        ep = both // smaller[0]
        yield Finding(
            at="layout.etp",
            problem=f"EP {layout.ep} x ETP {layout.etp} while EP {ep} would divide {experts} experts",
            fixes=[{"layout.ep": both // etp, "layout.etp": etp} for etp in smaller],
        )


@rule(severity="warning", rows="EP-OVER-TP")
def ep_before_tp(plan: Plan) -> Iterator[Finding]:
    """Expert layers use EP before more TP.

    Why: with EP 1 every rank of a stage keeps and reduces all experts; EP cuts their weights without
        cutting the GEMMs narrower.
    Confirm: `threefold show` prints the experts a rank holds.
    Fix: an EP that divides the experts and the ranks of a stage.
    """
    layout, experts = plan.layout, plan.model.num_experts
    if not experts or layout.ep > 1 or layout.tp * layout.etp == 1 or not layout.fits_ranks:
        return
    stage = layout.gpus // layout.pp // layout.etp
    fits = [ep for ep in divisors(experts) if stage % ep == 0 and ep * layout.etp <= plan.cluster.domain_ranks]
    if fits and fits[-1] > 1:
        problem = f"TP {layout.tp}, ETP {layout.etp} and EP 1: every rank keeps all {experts} experts"
        fixes = [{"layout.ep": ep} for ep in reversed(fits[1:])]
        yield Finding(at="layout.ep", problem=problem, fixes=fixes)


@rule(severity="warning", rows="TOPO")
def tp_inside_domain(plan: Plan) -> Iterator[Finding]:
    """TP stays inside the NVLink domain.

    Why: TP communicates several times a layer and cannot be hidden for long; the network is an order of
        magnitude slower than NVLink.
    Confirm: `threefold show` prints the link each axis crosses.
    Fix: a TP within the domain.
    """
    link = plan.link("tp")
    if link.link == "network":
        domain = plan.cluster.domain_ranks
        fits = [d for d in divisors(plan.layout.tp) if d <= domain and tp_fits(plan.model, d) is None]
        problem = f"TP {link.degree} leaves the NVLink domain of {format_many(domain, 'rank')}"
        yield Finding(at="layout.tp", problem=problem, fixes=[{"layout.tp": d} for d in reversed(fits or [1])])


@rule(severity="warning", rows="TOPO PW-COMMSIG")
def ep_traffic_hidden_or_inside(plan: Plan) -> Iterator[Finding]:
    """Expert traffic stays inside the NVLink domain, or is hidden, or goes over a faster dispatcher.

    Why: dispatch and combine move every token top-k times, four times a layer and step; over the network
        with plain all-to-all they are the communication wall.
    Confirm: `threefold show` prints the link of ep; in a trace, all-to-all stands alone.
    Fix: knobs.ep_overlap, EP within the domain, or an A/B with a flex dispatcher (dispatcher-candidates).
    """
    layout, experts = plan.layout, plan.model.num_experts
    if not experts or plan.knobs.ep_overlap or plan.knobs.dispatcher != "alltoall":
        return
    link = plan.link("ep")
    if link.link != "network":
        return
    fits = [d for d in divisors(experts) if d * layout.etp <= plan.cluster.domain_ranks and layout.ep % d == 0]
    overlap = {"knobs.ep_overlap": True, "knobs.shared_expert_overlap": False, "knobs.max_connections": 32}
    flex = dispatcher_candidates(plan.chip)[1:]
    yield Finding(
        at="layout.ep",
        problem=f"EP {link.degree} crosses the network: {link.in_domain} of {link.degree} ranks share a domain",
        fixes=[
            overlap,
            *({"layout.ep": ep} for ep in reversed(fits)),
            *({"knobs.dispatcher": one.value} for one in flex),
        ],
        advice="an A/B of each against this plan decides (2026-08-01)",
        otherwise=lambda: "hide it: knobs.ep_overlap, a flex dispatcher, or EP within the domain on more GPUs",
    )


@rule(severity="warning", rows="LC-CP-HIER TOPO LC-LINKS LC-CPMETHOD")
def cp_ring_leaves_domain(plan: Plan) -> Iterator[Finding]:
    """A context-parallel ring that leaves the NVLink domain trades heads inside it first.

    Why: in a plain ring every step waits for the one port that crosses a node boundary; the hierarchical kind
        exchanges heads over NVLink and sends keys and values over the network only once a node. Upstream's map by
        size (p2p for small and medium CP, all_gather for few key/value heads, a2a+p2p for very large CP) is a start;
        the price of this plan decides.
    Confirm: `threefold estimate` with both values of knobs.cp_comm: the `cp` term.
    Fix: a2a where CP divides the key/value heads over TP, else a2a+p2p, where predicted to be faster.
    """
    link, attention = plan.link("cp"), plan.model.attention
    if plan.knobs.cp_comm != "p2p" or link.link != "network" or link.in_domain == 1 or attention is None:
        return
    kind = "a2a" if _heads_divide(plan, plan.layout.tp * plan.layout.cp) else "a2a+p2p"
    traded = replace(plan, knobs=replace(plan.knobs, cp_comm=kind))
    if _heads_divide(plan, plan.layout.tp * link.in_domain) and pays(plan, traded):
        problem = f"CP {link.degree} as a plain ring: {link.in_domain} of {link.degree} ranks share a domain"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": kind})


def _heads_divide(plan: Plan, shards: int) -> bool:
    """Whether each of so many ranks gets whole heads of every kind of attention."""
    kinds = plan.model.attention_kinds
    return bool(kinds) and all(spec.num_heads % shards == spec.num_kv_heads % shards == 0 for spec in kinds)


@rule(severity="warning", rows="LC-HIERWHEN LC-PREFERA2A LC-CPMETHOD")
def hierarchical_cp_has_a_case(plan: Plan) -> Iterator[Finding]:
    """Hierarchical context parallelism is for CP over more ranks than key/value heads, on links of two speeds.

    Why: plain a2a needs one exchange and no ring, and takes any CP up to the key/value heads over TP. Where a larger TP
        makes room for it, TP 2 x CP 4 by a2a equals TP 1 x CP 16 by a2a+p2p and leaves memory (Bridge's skill on
        hierarchical context parallelism, read 2026-08-22). Inside one NVLink domain there is only one speed.
        Where the nested form is predicted to be faster, nothing is said.
    Confirm: the heads of `threefold models` over layout.tp; `threefold show` for the links. That Megatron uses the form
        is shown by HIERARCHICAL_CONTEXT_PARALLEL_GROUPS in its log; CONTEXT_PARALLEL_GROUP alone means that it is off.
    Fix: a2a, or p2p inside a domain; a larger TP with a smaller CP, where that is predicted to fit.
    """
    layout, link = plan.layout, plan.link("cp")
    modes = {plan.knobs.cp_comm} if isinstance(plan.knobs.cp_comm, str) else set(plan.knobs.cp_comm)
    if modes != {"a2a+p2p"} or layout.cp == 1:
        return
    a2a: Changes = {"knobs.cp_comm": "a2a", "knobs.cp_inner": None}
    if link.link != "network":
        problem = f"a2a+p2p with all {layout.cp} ranks in one NVLink domain"
        fixes = [a2a] if _heads_divide(plan, layout.tp * layout.cp) else []
        yield Finding(at="knobs.cp_comm", problem=problem, fixes=[*fixes, {**a2a, "knobs.cp_comm": "p2p"}])
    elif _heads_divide(plan, layout.tp * layout.cp):
        if not pays(replace(plan, knobs=replace(plan.knobs, cp_comm="a2a", cp_inner=None)), plan):
            problem = f"a2a+p2p where CP {layout.cp} divides the key/value heads over TP {layout.tp}: a2a suffices"
            yield Finding(at="knobs.cp_comm", problem=problem, fix=a2a)
    elif wider := [{"layout.tp": tp, "layout.cp": cp, **a2a} for tp, cp in _shards_of_heads(plan)]:
        problem = f"a2a+p2p over CP {layout.cp}, where a larger TP leaves whole heads to plain a2a"
        yield Finding(at="layout.cp", problem=problem, fixes=wider)


def _shards_of_heads(plan: Plan) -> Iterator[tuple[int, int]]:
    """Larger TP with a smaller CP that together divide the heads and are predicted to fit, least TP first."""
    layout = plan.layout
    for tp in (2, 4, 8):
        cps = [cp for cp in divisors(layout.cp)[1:-1] if _heads_divide(plan, tp * cp)]
        if tp <= layout.tp or tp > plan.cluster.domain_ranks or tp_fits(plan.model, tp) is not None or not cps:
            continue
        other = replace(plan, layout=replace(layout, tp=tp, cp=cps[-1]), knobs=replace(plan.knobs, cp_comm="a2a"))
        if other.layout.fits_ranks and can_be_priced(other) and surely_fits(other):
            yield tp, cps[-1]


@rule(severity="warning", rows="OV-TP OV-DP LC-CP-LAYER")
def axis_knobs_have_an_axis(plan: Plan) -> Iterator[Finding]:
    """A knob of an axis is set only where the axis is used.

    Why: a knob without effect misleads whoever reads the plan.
    Confirm: the degree of the axis is 1.
    Fix: delete the knob.
    """
    knobs, layout = plan.knobs, plan.layout
    if knobs.tp_overlap and layout.tp == 1:
        yield Finding(at="knobs.tp_overlap", problem="tp_overlap with TP 1", fix={"knobs.tp_overlap": None})
    if knobs.cp_comm != "p2p" and layout.cp == 1:
        yield Finding(at="knobs.cp_comm", problem=f"cp_comm {knobs.cp_comm} with CP 1", fix={"knobs.cp_comm": None})
    if knobs.data_parallel == "hsdp" and layout.replicate == 1:
        problem = "hsdp with one copy is fsdp"
        yield Finding(at="knobs.data_parallel", problem=problem, fix={"knobs.data_parallel": "fsdp"})
