"""EP overlap and delayed weight gradients: every condition, with the diagnosis of its failure.

Upstream has two validators. Where they disagree the rule says which one its message follows:
`Bridge` is Megatron Bridge training/comm_overlap.py, `MCore` is Megatron-LM's own configuration check.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from threefold.cost.time.ep_overlap import unpaired_fraction
from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.remedies.recompute_sets import fitting_sets
from threefold.rules.base import divisors, megatron_refuses, older, rule, without
from threefold.rules.layout.batch import can_be_priced
from threefold.spec.candidates import dispatcher_candidates
from threefold.spec.model import GqaSpec
from threefold.spec.stacks import BRIDGE_COMM_OVERLAP, CORE_CONFIG, MEGATRON_ARGUMENTS
from threefold.units import format_many

_OFF: dict[str, object] = {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}


@rule(rows="EO-V1 EO-D1", refused_in=(BRIDGE_COMM_OVERLAP, "only supported when expert_model_parallel_size > 1"))
def ep_overlap_needs_ep(plan: Plan) -> Iterator[Finding]:
    """EP overlap needs EP above 1.

    Why: with all experts on the rank there is no exchange to hide.
    Confirm: layout.ep (Megatron: expert_model_parallel_size).
    Fix: EP above 1, or no overlap.
    """
    layout, experts = plan.layout, plan.model.num_experts
    if plan.knobs.ep_overlap and layout.ep == 1:
        stage = layout.gpus // layout.pp // layout.etp if layout.fits_ranks else 1
        degrees = [ep for ep in divisors(max(1, experts))[1:] if stage % ep == 0]
        inside = [ep for ep in degrees if ep * layout.etp <= plan.cluster.domain_ranks]
        fixes = [{"layout.ep": ep} for ep in [*reversed(inside), *degrees[len(inside) :]]]
        yield Finding(at="knobs.ep_overlap", problem="EP overlap with EP 1", fixes=fixes, resort=_OFF)


@rule(rows="EO-V2", refused_in=(BRIDGE_COMM_OVERLAP, "only supported when num_moe_experts > 1"))
def ep_overlap_needs_experts(plan: Plan) -> Iterator[Finding]:
    """EP overlap needs more than one routed expert.

    Why: a dense model has no dispatch.
    Confirm: `threefold models` (Megatron: num_moe_experts).
    Fix: no overlap.
    """
    if plan.knobs.ep_overlap and plan.model.num_experts <= 1:
        fix = {"knobs.ep_overlap": False, "knobs.delay_wgrad": False}
        problem = f"EP overlap on {plan.model.name}, which has {'one expert' if plan.model.is_moe else 'no experts'}"
        yield Finding(at="knobs.ep_overlap", problem=problem, fix=fix)


@rule(
    rows="EO-V3 EO-D2",
    refused_in=(BRIDGE_COMM_OVERLAP, "only supported when moe_token_dispatcher_type == 'alltoall' or 'flex'"),
)
def ep_overlap_dispatcher(plan: Plan) -> Iterator[Finding]:
    """EP overlap works with alltoall and the flex dispatchers.

    Why: the schedule needs dispatch and combine as phases that can run apart.
    Confirm: knobs.dispatcher (Megatron: moe_token_dispatcher_type).
    Fix: alltoall, deepep or hybridep.
    """
    if plan.knobs.ep_overlap and plan.knobs.dispatcher == "local":
        fixes = [{"knobs.dispatcher": one.value} for one in dispatcher_candidates(plan.chip)]
        yield Finding(at="knobs.dispatcher", problem="EP overlap with the local dispatcher", fixes=fixes)


@rule(rows="EO-V4", refused_in=(BRIDGE_COMM_OVERLAP, "disable moe_shared_expert_overlap when enabling"))
def ep_overlap_excludes_shared_overlap(plan: Plan) -> Iterator[Finding]:
    """EP overlap and shared-expert overlap exclude each other.

    Why: EP overlap places the shared experts itself, where they hide most.
    Confirm: knobs.shared_expert_overlap (Megatron: moe_shared_expert_overlap).
    Fix: shared_expert_overlap off.
    """
    if plan.knobs.ep_overlap and plan.knobs.shared_expert_overlap:
        problem = "EP overlap with shared_expert_overlap"
        yield Finding(at="knobs.shared_expert_overlap", problem=problem, fix={"knobs.shared_expert_overlap": False})


@megatron_refuses(BRIDGE_COMM_OVERLAP, "only supported when using bf16 or fp16 models", rows="EO-V5 EO-D3")
def ep_overlap_base_dtype(plan: Plan) -> Iterator[Finding]:
    """Megatron's EP overlap needs a bf16 or fp16 base.

    Why: its schedule nodes are written for 16-bit parameters; FP8 formats have a bf16 base and pass.
    Confirm: knobs.precision (Megatron: model.bf16, model.fp16).
    Fix: bf16.
    """
    if plan.knobs.ep_overlap and plan.knobs.precision == "fp32":
        yield Finding(at="knobs.precision", problem="EP overlap in fp32", fix={"knobs.precision": "bf16"})


@megatron_refuses(
    BRIDGE_COMM_OVERLAP, "A2A Overlap encounters hang issue with torch version < 2.6.0", rows="EO-V6 EO-D4"
)
def ep_overlap_torch(plan: Plan) -> Iterator[Finding]:
    """Megatron's EP overlap needs PyTorch 2.6.

    Why: with older releases the run hangs instead of failing.
    Confirm: print torch.__version__ where the plan runs; a hang without an error in the first steps.
    Fix: a container with PyTorch 2.6 or newer; no field of the plan can cure it.
    """
    if plan.knobs.ep_overlap and older(plan.stack.torch, "2.6"):
        problem = f"EP overlap hangs with torch {plan.stack.torch}"
        yield Finding(at="stack.torch", problem=problem, advice="run on torch 2.6.0 or newer, then state it")


@rule(rows="EO-V7 EO-D5", refused_in=(BRIDGE_COMM_OVERLAP, "must be specified when pipeline_model_parallel_size > 1"))
def ep_overlap_needs_vpp(plan: Plan) -> Iterator[Finding]:
    """With a pipeline, EP overlap needs several chunks a rank.

    Why: the forward of one microbatch is paired with the backward of another on the same rank; only an
        interleaved (or folded) pipeline offers such pairs in the steady state.
    Confirm: layout.pp and layout.vpp (Megatron: virtual_pipeline_model_parallel_size).
    Fix: VPP of at least 2.
    """
    layout = plan.layout
    if not plan.knobs.ep_overlap or layout.pp == 1 or layout.vpp > 1:
        return
    items = plan.model.num_layers + plan.mtp + 2
    chunks = [
        {"layout.vpp": vpp, "layout.stages": None, "layout.schedule": None}
        for vpp in (2, 4)
        if vpp * layout.pp <= items
    ]
    problem = f"EP overlap with PP {layout.pp} and VPP 1"
    yield Finding(at="layout.vpp", problem=problem, fixes=chunks, resort=_OFF)


@rule(target="threefold")
def ep_overlap_excludes_streams(plan: Plan) -> Iterator[Finding]:
    """EP overlap runs layers with one residual stream.

    Why: the pass that cuts a layer at its exchanges carries one stream across them, and no weights of streams.
    Confirm: `threefold models NAME`: streams.
    Fix: leave the overlap out.
    """
    if plan.knobs.ep_overlap and plan.model.streams is not None:
        problem = f"EP overlap with the {plan.model.streams.count} residual streams of {plan.model.name}"
        yield Finding(at="knobs.ep_overlap", problem=problem, fix=_OFF)


@rule(rows="EO-V8 EO-D6", refused_in=(BRIDGE_COMM_OVERLAP, "disable full recomputation when enabling"))
def ep_overlap_excludes_full_recompute(plan: Plan) -> Iterator[Finding]:
    """EP overlap and full recompute exclude each other.

    Why: redoing a whole layer redoes its exchanges, inside the backward that was to hide them. The branch dev of
        Megatron Core (d48bd6b, 2026-08) takes both at dropout 0 without delayed scaling; no release does.
    Confirm: knobs.recompute (Megatron: recompute_granularity).
    Fix: selective modules, not `moe`.
    """
    if plan.knobs.ep_overlap and plan.full_recompute:
        rest = {"knobs.recompute_method": None, "knobs.recompute_layers": None}
        sets = chain([["layernorm", "moe_act"], ["layernorm"]], _sets_that_fit(plan, "full"))
        fixes = ({"knobs.recompute": names or None, **rest} for names in sets)
        yield Finding(at="knobs.recompute", problem="EP overlap with full recompute", fixes=fixes, resort=_OFF)


def _sets_that_fit(plan: Plan, *gone: str) -> Iterator[list[str]]:
    """Selective sets without some names with which the plan is predicted to fit."""
    knobs = replace(plan.knobs, recompute=tuple(without(plan.knobs.recompute, *gone)))
    if can_be_priced(plan):
        yield from fitting_sets(replace(plan, knobs=knobs))


@megatron_refuses(BRIDGE_COMM_OVERLAP, "disable recomputation method when enabling", rows="EO-V9")
def ep_overlap_recompute_method(plan: Plan) -> Iterator[Finding]:
    """Megatron's EP overlap wants no recompute method.

    Why: the method belongs to full recompute, which the overlap excludes.
    Confirm: knobs.recompute_method (Megatron: recompute_method).
    Fix: delete it.
    """
    if plan.knobs.ep_overlap and plan.knobs.recompute_method:
        problem = f"EP overlap with recompute method {plan.knobs.recompute_method}"
        yield Finding(at="knobs.recompute_method", problem=problem, fix={"knobs.recompute_method": None})


@megatron_refuses(BRIDGE_COMM_OVERLAP, "recompute_num_layers must be None when enabling", rows="EO-V10")
def ep_overlap_recompute_layers(plan: Plan) -> Iterator[Finding]:
    """Megatron's EP overlap wants no number of recomputed layers.

    Why: the number belongs to full recompute, which the overlap excludes.
    Confirm: knobs.recompute_layers (Megatron: recompute_num_layers).
    Fix: delete it.
    """
    if plan.knobs.ep_overlap and plan.knobs.recompute_layers:
        problem = f"EP overlap with recompute_layers {plan.knobs.recompute_layers}"
        yield Finding(at="knobs.recompute_layers", problem=problem, fix={"knobs.recompute_layers": None})


@rule(rows="EO-V11", refused_in=(BRIDGE_COMM_OVERLAP, "mtp_num_layers"))
def ep_overlap_mtp(plan: Plan) -> Iterator[Finding]:
    """EP overlap works with at most one MTP depth.

    Why: the merged schedule has a place for one. The branch dev (d48bd6b, 2026-08), which also takes full recompute,
        wants `uniform` of one layer with it.
    Confirm: job.mtp (Megatron: mtp_num_layers).
    Fix: one depth, or none.
    """
    if plan.knobs.ep_overlap and plan.mtp > 1:
        fix = {"job.mtp": 1, "layout.stages": None}
        yield Finding(at="job.mtp", problem=f"EP overlap with {plan.mtp} MTP depths", fix=fix)


@rule(rows="EO-V12", refused_in=(CORE_CONFIG, "disable moe in recompute_modules when enabling"))
def ep_overlap_excludes_moe_recompute(plan: Plan) -> Iterator[Finding]:
    """EP overlap and recompute of `moe` exclude each other.

    Why: redoing the MoE layer would dispatch and combine once more inside the backward.
    Confirm: knobs.recompute (Megatron: recompute_modules).
    Fix: moe_act instead.
    """
    if plan.knobs.ep_overlap and "moe" in plan.knobs.recompute:
        kept = list(dict.fromkeys([*without(plan.knobs.recompute, "moe"), "moe_act"]))
        problem = "EP overlap with recompute of moe"
        fixes = ({"knobs.recompute": names} for names in chain([kept], _sets_that_fit(plan, "moe")))
        yield Finding(at="knobs.recompute", problem=problem, fixes=fixes, resort=_OFF)


@rule(severity="warning", rows="EO-NOPP")
def ep_overlap_needs_microbatches(plan: Plan) -> Iterator[Finding]:
    """EP overlap needs at least two microbatches; with a pipeline, more than it has stages.

    Why: it runs the forward of one beside the backward of another; with one there is no other, and a pipeline
        that is only filled and drained has no forwards left when its backwards begin.
    Confirm: `threefold show` prints the number of microbatches.
    Fix: a larger global batch.
    """
    count, pp = plan.num_microbatches, plan.layout.pp
    if plan.knobs.ep_overlap and plan.layout.ep > 1 and count and unpaired_fraction(plan) >= 1:
        fix = {"job.global_batch": -(-2 * pp // count) * plan.job.global_batch}
        smaller = [{"job.micro_batch": 1}] if plan.job.micro_batch > 1 else []
        where = f" on PP {pp}" if pp > 1 else ""
        problem = f"EP overlap with {'one microbatch' if count == 1 else f'{count} microbatches'}{where} hides nothing"
        yield Finding(at="job.global_batch", problem=problem, fixes=[*smaller, fix])


_FEW_RANKS, _FEW_NODES = 4, 2


@rule(severity="note", rows="EO-AVOID", follows="Bridge's skill on EP overlap (2026-07-25)")
def ep_overlap_small_exchange(plan: Plan) -> Iterator[Finding]:
    """EP overlap is for exchanges that cost something: not for EP up to 4 on one or two nodes with alltoall.

    Why: the exchange of few ranks is short, and the merged schedule has a price of its own: finer launches and two
        microbatches in memory. For the same reason it is no part of a bring-up.
    Confirm: the exposed exchange in a profile of the run without overlap.
    Fix: none; the A/B of `threefold overlap-ab` decides.
    """
    knobs, layout = plan.knobs, plan.layout
    nodes = -(-layout.gpus // plan.cluster.node)
    if knobs.ep_overlap and knobs.dispatcher == "alltoall" and 1 < layout.ep <= _FEW_RANKS and nodes <= _FEW_NODES:
        problem = f"EP overlap at EP {layout.ep} on {format_many(nodes, 'node')}: there is little to hide"
        yield Finding(at="knobs.ep_overlap", problem=problem, advice="an A/B without it first")


@rule(severity="warning", rows="EO-MAXCONN", follows=f"{MEGATRON_ARGUMENTS}: 1 before Blackwell with TP or CP")
def overlap_needs_connections(plan: Plan) -> Iterator[Finding]:
    """EP overlap needs more than one hardware queue.

    Why: on Hopper, TP and CP overlap want CUDA_DEVICE_MAX_CONNECTIONS=1, so that communication is queued
        before the GEMM it hides behind; with 1 the streams of EP overlap run one after the other.
    Confirm: print the variable in the run; in a trace, exchanges start only when compute ends.
    Fix: 32 for EP overlap; measure if TP overlap matters more.
    """
    knobs, layout = plan.knobs, plan.layout
    if not knobs.ep_overlap or plan.chip.architecture == "cpu":
        return
    launcher_sets_1 = (
        plan.target == "megatron-bridge"
        and plan.chip.architecture in ("ampere", "hopper")
        and (layout.tp > 1 or layout.cp > 1)
    )
    if knobs.max_connections == 1 or (knobs.max_connections is None and launcher_sets_1):
        problem = "EP overlap with CUDA_DEVICE_MAX_CONNECTIONS=1" + (
            "" if knobs.max_connections else ", which the launcher sets for TP or CP here"
        )
        advice = "published runs with both overlaps kept 1: measure both"
        yield Finding(at="knobs.max_connections", problem=problem, fix={"knobs.max_connections": 32}, advice=advice)


@rule(
    severity="warning",
    rows="EO-MAXCONN",
    target="megatron-bridge",
    follows=f"{MEGATRON_ARGUMENTS}: 1 before Blackwell with TP or CP",
)
def tp_and_cp_need_one_connection(plan: Plan) -> Iterator[Finding]:
    """Before Blackwell, TP and CP without EP overlap run with one hardware queue.

    Why: their communication hides behind GEMMs only if it is queued before them, which one queue guarantees.
    Confirm: print CUDA_DEVICE_MAX_CONNECTIONS in the run; in a trace, communication starts after the GEMM.
    Fix: 1, or leave it to the launcher.
    """
    knobs, layout = plan.knobs, plan.layout
    if knobs.ep_overlap or plan.chip.architecture not in ("ampere", "hopper") or layout.tp * layout.cp == 1:
        return
    if knobs.data_parallel != "zero1":  # fsdp-needs-connections
        return
    if knobs.max_connections is not None and knobs.max_connections > 1:
        problem = f"CUDA_DEVICE_MAX_CONNECTIONS={knobs.max_connections} with TP {layout.tp} x CP {layout.cp}"
        yield Finding(at="knobs.max_connections", problem=problem, fix={"knobs.max_connections": 1})


@rule(
    rows="EO-DISPBWD",
    follows="megatron-core 0.19.2, core/transformer/transformer_config.py: it excludes overlap and delayed wgrad",
)
def wgrad_overlap_alone(plan: Plan) -> Iterator[Finding]:
    """Weight gradients run during the backward of dispatch where nothing else places them.

    Why: EP overlap, delayed weight gradients and schedules that split the backward have an order of their own; FSDP
        reduces gradients as the backward leaves the experts, before the exchange begins; copies of experts have their
        gradients summed first. Without EP nothing travels.
    Confirm: knobs.wgrad_overlap with knobs.ep_overlap, delay_wgrad, data_parallel, expert_balance, layout.schedule, ep.
    Fix: without it.
    """
    knobs, layout = plan.knobs, plan.layout
    if not knobs.wgrad_overlap:
        return
    ours = plan.target == "threefold"
    in_the_way = {
        "ep_overlap": knobs.ep_overlap,
        "delay_wgrad": knobs.delay_wgrad,
        f"{knobs.data_parallel}": ours and knobs.data_parallel != "zero1",
        "copies of experts": ours and knobs.expert_balance != "none",
        f"the {layout.schedule} schedule": layout.schedule in ("zero-bubble", "dualpipev"),
        f"{knobs.dispatcher}, which the engine runs it without": ours and knobs.dispatcher not in ("alltoall", "local"),
        "EP 1, where nothing travels": layout.ep == 1 or not plan.model.is_moe,
    }
    if names := [name for name, is_there in in_the_way.items() if is_there]:
        problem = f"wgrad_overlap with {' and '.join(names)}"
        yield Finding(at="knobs.wgrad_overlap", problem=problem, fix={"knobs.wgrad_overlap": None})


@rule(
    rows="WG-V1 EO-D7",
    refused_in=(BRIDGE_COMM_OVERLAP, "overlap_moe_expert_parallel_comm is required for delay_wgrad_compute"),
)
def delay_wgrad_needs_ep_overlap(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients need EP overlap.

    Why: they are delayed to where they hide an exchange of the merged schedule.
    Confirm: knobs.ep_overlap (Megatron: overlap_moe_expert_parallel_comm).
    Fix: EP overlap, where it can run; else no delay.
    """
    if plan.knobs.delay_wgrad and not plan.knobs.ep_overlap:
        on: Changes = {"knobs.ep_overlap": True, "knobs.shared_expert_overlap": False}
        if plan.layout.pp > 1 and plan.layout.vpp == 1:
            on |= {"layout.vpp": 2, "layout.stages": None, "layout.schedule": None}
        queues = {**on, "knobs.max_connections": 32}
        off = {"knobs.delay_wgrad": False}
        problem = "delay_wgrad without ep_overlap"
        yield Finding(at="knobs.delay_wgrad", problem=problem, fixes=[on, queues, off])


@megatron_refuses(BRIDGE_COMM_OVERLAP, "required for overlap_grad_reduce when using", rows="WG-V2")
def delay_wgrad_grad_reduce_te(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients with overlapped gradient reduction need Transformer Engine 2.7.

    Why: the reduction of a bucket must wait for weight gradients that come late; older releases start it
        too early. The command line of Megatron-LM asks for 2.8, Bridge for 2.7 (read 2026-08): Bridge is followed.
    Confirm: print transformer_engine.__version__; knobs.grad_reduce_overlap.
    Fix: TE 2.7, or no overlap of the reduction.
    """
    knobs = plan.knobs
    if knobs.delay_wgrad and knobs.grad_reduce_overlap and older(plan.stack.te, "2.7"):
        problem = f"delay_wgrad with grad_reduce_overlap on Transformer Engine {plan.stack.te} (following Bridge)"
        fix = {"knobs.grad_reduce_overlap": False}
        advice = "or run Transformer Engine 2.7 or newer (2.8 for the command line of Megatron-LM)"
        yield Finding(at="stack.te", problem=problem, fix=fix, advice=advice)


@megatron_refuses(BRIDGE_COMM_OVERLAP, "required for gradient_accumulation_fusion when using", rows="WG-V3")
def delay_wgrad_fusion_te(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients with gradient-accumulation fusion need Transformer Engine 2.7.

    Why: the late weight gradient has to add into the main gradient buffer. The two upstream validators hold
        opposite conditions: Bridge asks for 2.7 with the fusion on, MCore with it off.
    Confirm: print transformer_engine.__version__; knobs.grad_accum_fusion.
    Fix: TE 2.7, or no delay: turning the fusion off satisfies Bridge but not MCore.
    """
    if plan.knobs.delay_wgrad and plan.knobs.grad_accum_fusion and older(plan.stack.te, "2.7"):
        problem = f"delay_wgrad with grad_accum_fusion on Transformer Engine {plan.stack.te} (following Bridge)"
        fix = {"knobs.delay_wgrad": False}
        yield Finding(at="stack.te", problem=problem, fix=fix, advice="or run Transformer Engine 2.7 or newer")


def _wgrad_in_graph(plan: Plan) -> str | None:
    """The graph scope that captures weight gradients, if any does."""
    moe = plan.model.moe
    if "attn" in plan.knobs.graphs:
        return "attn"
    if "moe_router" in plan.knobs.graphs and moe and moe.shared_width and not plan.knobs.shared_expert_overlap:
        return "moe_router (it captures the shared experts)"
    return None


@megatron_refuses(BRIDGE_COMM_OVERLAP, "CUDA graph with delay_wgrad_compute requires TE version", rows="WG-V4 WG-V7")
def delay_wgrad_graph_te(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients inside a CUDA graph need Transformer Engine 2.12.

    Why: the `attn` scope captures weight gradients, and so does `moe_router` where there are shared experts;
        older releases cannot split them off the graph. MCore skips this check unless gradient reduction
        overlaps.
    Confirm: print transformer_engine.__version__; knobs.graphs.
    Fix: TE 2.12, or scopes without weight gradients.
    """
    scope = _wgrad_in_graph(plan)
    if plan.knobs.delay_wgrad and scope and older(plan.stack.te, "2.12"):
        problem = f"delay_wgrad with graph scope {scope} on Transformer Engine {plan.stack.te} (following Bridge)"
        moe = plan.model.moe
        caught = ["attn"]
        if moe and moe.shared_width and not plan.knobs.shared_expert_overlap:
            caught += ["moe_router", "moe_preprocess"]
        fix = {"knobs.graphs": without(plan.knobs.graphs, *caught)}
        no_delay = {"knobs.delay_wgrad": False}
        advice = "or run Transformer Engine 2.12 or newer"
        yield Finding(at="stack.te", problem=problem, fixes=[fix, no_delay], advice=advice)


@megatron_refuses(CORE_CONFIG, "TE version >= 2.10.0 is required for delay_wgrad_compute with", rows="WG-V8")
def delay_wgrad_scoped_graph_te(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients beside any scoped graph need Transformer Engine 2.10.

    Why: older releases cannot split a captured backward, whatever its scope. Where the graph also captures weight
        gradients, Bridge asks for 2.12 (delay-wgrad-graph-te).
    Confirm: print transformer_engine.__version__; knobs.graphs.
    Fix: TE 2.10, no graphs, or no delay.
    """
    scopes = without(plan.knobs.graphs, "full_iteration")
    if plan.knobs.delay_wgrad and scopes and older(plan.stack.te, "2.10"):
        problem = f"delay_wgrad with graphs of {', '.join(scopes)} on Transformer Engine {plan.stack.te}"
        fixes: list[Changes] = [{"knobs.graphs": []}, {"knobs.delay_wgrad": False}]
        yield Finding(at="stack.te", problem=problem, fixes=fixes, advice="or run Transformer Engine 2.10 or newer")


@rule(
    rows="WG-V5 WG-V7 EO-D8",
    refused_in=(BRIDGE_COMM_OVERLAP, "CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion"),
)
def delay_wgrad_graph_fusion(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients inside a CUDA graph need gradient-accumulation fusion.

    Why: plain accumulation writes to a new address each time; a graph replays fixed ones.
    Confirm: knobs.grad_accum_fusion (Megatron: gradient_accumulation_fusion).
    Fix: the fusion on.
    """
    scope = _wgrad_in_graph(plan)
    if plan.knobs.delay_wgrad and scope and not plan.knobs.grad_accum_fusion:
        problem = f"delay_wgrad with graph scope {scope} and no gradient-accumulation fusion"
        stated = None if plan.target == "threefold" else True  # grad-accum-fusion-takes-effect
        yield Finding(at="knobs.grad_accum_fusion", problem=problem, fix={"knobs.grad_accum_fusion": stated})


@rule(rows="WG-V6 EO-D9", refused_in=(BRIDGE_COMM_OVERLAP, "does not support attention bias for now"))
def delay_wgrad_graph_bias(plan: Plan) -> Iterator[Finding]:
    """Delayed weight gradients in an `attn` graph need attention without bias.

    Why: the bias gradient stays in the captured backward while the weight gradient leaves it.
    Confirm: `threefold models` (Megatron: add_bias_linear, add_qkv_bias).
    Fix: no `attn` graph, or no delay; the bias belongs to the model.
    """
    attention = plan.model.attention
    biased = isinstance(attention, GqaSpec) and attention.bias
    if plan.knobs.delay_wgrad and "attn" in plan.knobs.graphs and biased:
        problem = f"delay_wgrad with an attn graph on {plan.model.name}, whose attention has biases"
        fix = {"knobs.graphs": without(plan.knobs.graphs, "attn")}
        yield Finding(at="knobs.graphs", problem=problem, fixes=[fix, {"knobs.delay_wgrad": False}])


@rule(rows="EO-1F1B", target="threefold")
def ep_overlap_schedule(plan: Plan) -> Iterator[Finding]:
    """With a pipeline, the engine merges forwards and backwards of the interleaved schedule and of DualPipeV.

    Why: a zero-bubble order has no pairs: its forwards and backwards depend on each other's neighbors.
    Confirm: layout.schedule.
    Fix: interleaved, or dualpipev.
    """
    layout = plan.layout
    if plan.knobs.ep_overlap and layout.pp > 1 and layout.vpp > 1 and layout.pipeline_schedule == "zero-bubble":
        problem = "EP overlap with the zero-bubble schedule"
        yield Finding(at="layout.schedule", problem=problem, fixes=[{"layout.schedule": "interleaved"}], resort=_OFF)


@rule(severity="warning", rows="EO-FSDP EO-WGRAD", target="threefold")
def delay_wgrad_needs_whole_gradients(plan: Plan) -> Iterator[Finding]:
    """With FSDP the engine does not delay weight gradients.

    Why: FSDP reduces the gradients of a unit when its backward ends; none may come later.
    Confirm: knobs.data_parallel.
    Fix: no delay, or zero1.
    """
    if plan.knobs.delay_wgrad and plan.knobs.data_parallel != "zero1":
        problem = f"delay_wgrad has no effect with {plan.knobs.data_parallel}"
        yield Finding(at="knobs.delay_wgrad", problem=problem, fix={"knobs.delay_wgrad": False})
