"""How the axes fold over ranks and links: which axis to use for what, and where its traffic goes."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.rules.layout.batch import pays
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


@rule(severity="warning", rows="LC-CP-HIER TOPO")
def cp_ring_leaves_domain(plan: Plan) -> Iterator[Finding]:
    """A context-parallel ring that leaves the NVLink domain trades heads inside it first.

    Why: in a plain ring every step waits for the one port that crosses a node boundary; the hierarchical kind
        exchanges heads over NVLink and sends keys and values over the network only once a node.
    Confirm: `threefold estimate` with both values of knobs.cp_comm: the `cp` term.
    Fix: a2a+p2p, where the heads divide and it is predicted to be faster.
    """
    link, attention = plan.link("cp"), plan.model.attention
    if plan.knobs.cp_comm != "p2p" or link.link != "network" or link.in_domain == 1 or attention is None:
        return
    shards = plan.layout.tp * link.in_domain
    traded = replace(plan, knobs=replace(plan.knobs, cp_comm="a2a+p2p"))
    if attention.num_heads % shards == 0 and attention.num_kv_heads % shards == 0 and pays(plan, traded):
        problem = f"CP {link.degree} as a plain ring: {link.in_domain} of {link.degree} ranks share a domain"
        yield Finding(at="knobs.cp_comm", problem=problem, fix={"knobs.cp_comm": "a2a+p2p"})


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
