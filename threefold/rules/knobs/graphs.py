"""CUDA graphs: which scopes, with what, and only where shapes stand still."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.remedies.graph_scopes import wider_graphs
from threefold.rules.base import older, rule, without
from threefold.rules.layout.batch import pays
from threefold.spec.candidates import DENSE_GRAPHS, GRAPH_CANDIDATES, first_graphs
from threefold.spec.megatron import release_of
from threefold.spec.stacks import CORE_CONFIG


@rule(rows="CG-DROP")
def graph_needs_static_experts(plan: Plan) -> Iterator[Finding]:
    """A graph over the experts, or over the whole iteration, needs a fixed number of tokens an expert.

    Why: dropless routing gives each expert another number of tokens every time; a graph replays one size. For the whole
        iteration that is a fact of run time: Megatron's validation accepts it. Bridge 0.5 and later run it dropless
        by a paged stash: buffers of a capacity per rank, and an iteration that overflows is run once more without a
        graph, so that nothing is dropped. The threefold engine does the same with blocks of a fixed size. Upstream's
        skills still keep whole iterations for drop-and-pad; its recipes for GB200 and GB300 and the code do not. Where
        the threefold engine holds all experts on one rank, only their sum matters, and that is fixed.
    Confirm: job.capacity_factor is absent (dropless).
    Fix: the dropless scopes moe_router and moe_preprocess; a capacity factor; a capacity per rank.
    """
    wide = [scope for scope in plan.knobs.graphs if scope in ("moe", "full_iteration")]
    if plan.target == "threefold" and plan.layout.ep * plan.layout.etp == 1:
        return  # every copy of a token stays: their number is fixed, and kernels read on the device which are whose
    if wide and plan.model.is_moe and plan.job.capacity_factor is None:
        yield Finding(
            at="knobs.graphs",
            problem=f"{', '.join(wide)} with dropless experts",
            fixes=narrower(plan, without(plan.knobs.graphs, *wide)),
            advice=f"or set job.capacity_factor{_PAGED if plan.target == 'megatron-bridge' else _IN_BLOCKS}",
        )


_IN_BLOCKS = "=1.5 job.capacity_scope=rank, which drops nothing: what exceeds it runs without the graph"
# Factors of Bridge's recipes are 1.2 to 1.5 (0.6.2, perf_recipes/qwen).
_PAGED = (
    "; dropless by a paged stash: job.capacity_factor=1.5 job.capacity_scope=rank knobs.dispatcher=hybridep "
    "knobs.expert_fusion=true"
)


def narrower(plan: Plan, kept: list[str] | None = None) -> Iterator[dict[str, list[str]]]:
    """Routing next to the scopes that are kept, or attention, or nothing, and then none at all."""
    for scopes in (first_graphs(plan.model.is_moe), DENSE_GRAPHS, ()):
        yield {"knobs.graphs": list(dict.fromkeys([*(kept or []), *scopes]))}
    if kept:
        yield {"knobs.graphs": []}


@rule(
    rows="CG-DROP",
    target="megatron-bridge",
    follows="megatron-core 0.19.2, core/transformer/moe/token_dispatcher.py: rows are counted on the host",
)
def graph_of_experts_by_alltoall(plan: Plan) -> Iterator[Finding]:
    """Megatron captures the whole MoE layer with the alltoall dispatcher only.

    Why: the flex dispatchers size their buffers on the host in the middle of the layer.
    Confirm: knobs.graphs with knobs.dispatcher.
    Fix: scopes that end before dispatch, or alltoall.
    """
    if "moe" in plan.knobs.graphs and plan.knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1:
        problem = f"a graph of moe with {plan.knobs.dispatcher}"
        yield Finding(at="knobs.graphs", problem=problem, fixes=narrower(plan, without(plan.knobs.graphs, "moe")))


@rule(rows="CG-FULL")
def graph_full_iteration_alone(plan: Plan) -> Iterator[Finding]:
    """The full-iteration graph takes no other scope beside it.

    Why: it already captures everything. Upstream's skill and guide on graphs (2026-08) still say impl `local` with this
        scope; Megatron Core since 0.18 and its skill on recompute say impl `full_iteration` without scopes, as an
        export does for Bridge 0.5 and later.
    Confirm: knobs.graphs.
    Fix: one or the other.
    """
    if "full_iteration" in plan.knobs.graphs and len(plan.knobs.graphs) > 1:
        fix = {"knobs.graphs": without(plan.knobs.graphs, "full_iteration")}
        yield Finding(at="knobs.graphs", problem="full_iteration beside other scopes", fix=fix)


@rule(
    rows="CG-PREP CG-ROUTER",
    refused_in=(CORE_CONFIG, "moe_preprocess cuda graph is only supported with moe_router cuda graph."),
)
def graph_preprocess_needs_router(plan: Plan) -> Iterator[Finding]:
    """moe_preprocess is captured together with moe_router, and neither beside the whole moe.

    Why: preprocessing continues from the router's captured output; `moe` contains both.
    Confirm: knobs.graphs.
    Fix: add moe_router, or drop the scope that is contained.
    """
    scopes = plan.knobs.graphs
    if "moe" in scopes and ("moe_router" in scopes or "moe_preprocess" in scopes):
        fix = {"knobs.graphs": without(scopes, "moe_router", "moe_preprocess")}
        yield Finding(at="knobs.graphs", problem="moe already contains moe_router and moe_preprocess", fix=fix)
    elif "moe_preprocess" in scopes and "moe_router" not in scopes:
        both = {"knobs.graphs": [*without(scopes, "moe_preprocess"), "moe_router", "moe_preprocess"]}
        neither = {"knobs.graphs": without(scopes, "moe_preprocess")}
        yield Finding(at="knobs.graphs", problem="moe_preprocess without moe_router", fixes=[both, neither])


@rule(rows="CG-RECOMP", refused_in=(CORE_CONFIG, "full recompute is only supported with full iteration CUDA graph."))
def graph_excludes_full_recompute(plan: Plan) -> Iterator[Finding]:
    """Full recompute goes with the full-iteration graph only.

    Why: a graph over a part of the layer cannot be entered again by the recompute of the whole.
    Confirm: knobs.recompute and knobs.graphs.
    Fix: selective recompute with scoped graphs.
    """
    scoped = without(plan.knobs.graphs, "full_iteration")
    if plan.full_recompute and scoped:
        yield Finding(
            at="knobs.graphs",
            problem=f"full recompute with graph scopes {', '.join(scoped)}",
            fix={"knobs.graphs": []},
            advice="or recompute selectively",
        )


@rule(rows="CG-RECOMP", refused_in=(CORE_CONFIG, "moe recompute is not supported with moe_router CUDA graph with:"))
def graph_router_excludes_moe_recompute(plan: Plan) -> Iterator[Finding]:
    """A moe_router graph and recompute of `moe` exclude each other.

    Why: recomputing the MoE layer would replay the captured router with other inputs live.
    Confirm: knobs.recompute and knobs.graphs.
    Fix: moe_act instead of moe.
    """
    if "moe_router" in plan.knobs.graphs and "moe" in plan.knobs.recompute:
        kept = list(dict.fromkeys([*without(plan.knobs.recompute, "moe"), "moe_act"]))
        problem = "recompute of moe with a moe_router graph"
        fewer = {"knobs.graphs": without(plan.knobs.graphs, "moe_router", "moe_preprocess")}
        yield Finding(at="knobs.recompute", problem=problem, fixes=[{"knobs.recompute": kept}, fewer])


@rule(rows="CG-PREPSYNC", refused_in=(CORE_CONFIG, "moe_preprocess cuda graph is not supported when there are"))
def graph_preprocess_without_sync(plan: Plan) -> Iterator[Finding]:
    """With alltoall, moe_preprocess is captured only where it needs no host synchronization.

    Why: padding for quantized GEMMs makes the alltoall dispatcher read counts on the host during preprocessing, which
        no graph can hold. With drop-and-pad every expert has its capacity, and nothing is read. Our engine drops
        without padding, so that counts are read there.
    Confirm: knobs.dispatcher, job.capacity_factor, knobs.router_padding.
    Fix: leave moe_preprocess out.
    """
    has_capacity = plan.job.capacity_factor is not None and plan.job.capacity_scope == "expert"
    if plan.target == "threefold":  # which never pads
        reason = "a capacity factor" if has_capacity else ""
    else:
        padded = plan.low_precision and plan.knobs.router_padding and not has_capacity
        reason = "padding for quantized GEMMs" if padded else ""
    if "moe_preprocess" in plan.knobs.graphs and plan.knobs.dispatcher == "alltoall" and reason:
        fix = {"knobs.graphs": without(plan.knobs.graphs, "moe_preprocess")}
        yield Finding(at="knobs.graphs", problem=f"moe_preprocess with alltoall and {reason}", fix=fix)


@rule(rows="CG-STATIC CG-EAGER")
def graph_needs_static_lengths(plan: Plan) -> Iterator[Finding]:
    """Graphs need one sequence length and one microbatch size.

    Why: a graph replays fixed shapes; dynamic batches silently fall back or read stale memory.
    Confirm: job.dynamic_length.
    Fix: eager execution for dynamic batches, or pad to job.seq_len and keep the graphs.
    """
    if plan.knobs.graphs and plan.job.dynamic_length:
        problem = "graphs with lengths that vary between microbatches"
        fix: dict[str, object] = {"knobs.graphs": []}
        yield Finding(at="knobs.graphs", problem=problem, fix=fix, advice="or pad: job.dynamic_length = false")


@rule(severity="warning", rows="CG-EAGER CG-STATIC", target="threefold")
def graph_attention_with_packing(plan: Plan) -> Iterator[Finding]:
    """With packed documents attention stays outside the graph.

    Why: document boundaries are data of each batch; a captured attention keeps those of the batch it was
        captured with unless every kernel reads them from a static buffer.
    Confirm: job.packing with an attn or full_iteration scope.
    Fix: graphs without attention.
    """
    caught = [scope for scope in plan.knobs.graphs if scope in ("attn", "full_iteration")]
    if caught and plan.job.packing:
        problem = f"{', '.join(caught)} with packed documents"
        yield Finding(at="knobs.graphs", problem=problem, fix={"knobs.graphs": without(plan.knobs.graphs, *caught)})


@rule(rows="CG-EP", refused_in=(CORE_CONFIG, "CUDA graph scope on moe and mlp is not"))
def graph_leaves_exchange_free(plan: Plan) -> Iterator[Finding]:
    """With EP overlap graphs stop at dispatch.

    Why: the merged schedule cuts each layer at its exchanges and runs the feed-forward part as nodes of its own; a
        graph over a whole MoE or dense feed-forward layer hides them.
    Confirm: knobs.ep_overlap and knobs.graphs.
    Fix: attn, moe_router and moe_preprocess, which end before dispatch.
    """
    caught = [scope for scope in plan.knobs.graphs if scope in ("moe", "mlp")]
    if plan.knobs.ep_overlap and caught:
        problem = f"EP overlap with a graph of {' and '.join(caught)}"
        kept = without(plan.knobs.graphs, *caught)
        yield Finding(at="knobs.graphs", problem=problem, fixes=narrower(plan, kept))


@rule(severity="warning", rows="CG-WIDEN")
def graph_widen_after_stable(plan: Plan) -> Iterator[Finding]:
    """Graph scopes start narrow and widen after the run is stable.

    Why: a wide scope hides the first shape, routing or memory fault inside a replay; multimodal inputs make
        such faults likely. Our engine compares shapes and addresses before a replay, and on one GPU its whole
        iteration gave the losses of the eager one.
    Confirm: a run of this plan with narrower scopes that was sound.
    Fix: the scopes of the message first.
    """
    scopes = plan.knobs.graphs
    if "graphs" in plan.stack.measured:
        return
    if "full_iteration" in scopes:
        if plan.target == "threefold" and plan.layout.gpus == 1:
            return
        problem = "full_iteration before narrower scopes are known to be stable"
        since = f"the recommended order ({GRAPH_CANDIDATES[0].since}); published runs did use it"
        advice = f"{since}: stack.measured=graphs where yours was stable"
        yield Finding(at="knobs.graphs", problem=problem, fixes=narrower(plan), advice=advice)
    elif plan.is_vlm and len(scopes) > 1 and plan.is_synthetic:
        problem = f"{len(scopes)} graph scopes before the real-data path is stable"
        yield Finding(at="knobs.graphs", problem=problem, fixes=[{"knobs.graphs": [scope]} for scope in scopes])


@rule(severity="warning", rows="CG-ATTN CG-ROUTER")
def graph_scope_exists(plan: Plan) -> Iterator[Finding]:
    """Every graph scope is part of the model, and the chip has graphs.

    Why: a scope without a module captures nothing.
    Confirm: `threefold models` shows what the model is made of.
    Fix: delete the scopes that have no effect.
    """
    model, scopes = plan.model, plan.knobs.graphs
    if not scopes:
        return
    if plan.chip.architecture == "cpu":
        yield Finding(at="knobs.graphs", problem="CUDA graphs on cpu", fix={"knobs.graphs": []})
        return
    absent = [s for s in scopes if s == "mamba" and model.mamba is None]
    if plan.target == "threefold":  # else moe-graph-needs-experts and mlp-graph-needs-dense-layers
        absent += [s for s in scopes if s.startswith("moe") and not model.is_moe]
        absent += [s for s in scopes if s == "mlp" and all(layer.ffn != "dense" for layer in model.layers)]
    if absent:
        problem = f"{', '.join(absent)}: {model.name} has none"
        yield Finding(at="knobs.graphs", problem=problem, fix={"knobs.graphs": without(scopes, *absent)})


@rule(rows="OF-RULE OF-ACT CG-CPUOFF", refused_in=(CORE_CONFIG, "CUDA graphs not supported with CPU offloading."))
def graph_excludes_offload(plan: Plan) -> Iterator[Finding]:
    """Graphs and offload of what they touch exclude each other.

    Why: a graph replays fixed addresses; offload of whole layers moves saved tensors away between forward and
        backward. Megatron's offload by module orders its copies with the graph's stream; our engine's does not.
        Megatron Core 0.18 and later (2026) take both offloads of activations with a graph of the whole iteration,
        which its skills still refuse; offload of the optimizer never had a limit there, because that graph ends before
        the update. Our engine updates on the host beside the next forward, which would be inside of the graph.
    Confirm: knobs.graphs with knobs.activation_offload, activation_offload_layers or optimizer_offload.
    Fix: no graphs while offload is needed.
    """
    knobs, is_ours = plan.knobs, plan.target == "threefold"
    is_whole = "full_iteration" in knobs.graphs
    takes_whole = not is_ours and not older(release_of(plan.stack.release).bridge, "0.5")
    by_module = knobs.activation_offload if is_ours or (is_whole and not takes_whole) else ()
    by_layer = knobs.activation_offload_layers and not (is_whole and takes_whole)
    optimizer = is_ours and is_whole and knobs.optimizer_offload
    if knobs.graphs and (by_module or by_layer or optimizer):
        what = "activation offload" if by_module or by_layer else "optimizer offload"
        problem = f"graphs ({', '.join(knobs.graphs)}) with {what}"
        yield Finding(at="knobs.graphs", problem=problem, fix={"knobs.graphs": []})


@rule()
def compile_excludes_graphs(plan: Plan) -> Iterator[Finding]:
    """Parts are compiled by torch, or recorded as graphs.

    Why: compiled code looks at its inputs and may compile anew in the middle of a recording.
    Confirm: knobs.compile and knobs.graphs.
    Fix: graphs without compile; kernels of our own do what it would fuse.
    """
    if plan.knobs.compile and plan.knobs.graphs:
        problem = f"torch.compile with graphs ({', '.join(plan.knobs.graphs)})"
        yield Finding(at="knobs.compile", problem=problem, fix={"knobs.compile": False})


@rule(severity="warning", target="threefold")
def compile_finds_parts(plan: Plan) -> Iterator[Finding]:
    """torch.compile is asked for where it has something to fuse.

    Why: kernels of our own do norms, rotary embedding, router and activation on Hopper and later; what is left is the
        gated norm behind the delta rule or Mamba's scan.
    Confirm: knobs.compile, and `threefold env` for the kernels that run here.
    Fix: without compile.
    """
    ours = plan.chip.architecture in ("hopper", "blackwell")
    if plan.knobs.compile and ours and plan.model.delta is None and plan.model.mamba is None:
        problem = f"torch.compile finds nothing to fuse in {plan.model.name} on {plan.chip.name}"
        yield Finding(at="knobs.compile", problem=problem, fix={"knobs.compile": False})


@rule(severity="note", rows="PW-HOSTSIG CG-MEM CG-NARROW CG-PROFIT", needs_fix=True)
def small_launches_want_graphs(plan: Plan) -> Iterator[Finding]:
    """On Blackwell, small microbatches are compared with and without graphs where those are predicted to pay.

    Why: the GPU finishes a layer's kernels faster than the host launches them: gaps between kernels and
        launch-bound traces are the host wall. Capture is no gain by itself (one run replayed 1.5% slower than eager),
        so that since 2026-08-01 a run starts eager and an A/B decides; until then attn was in the default, too.
    Confirm: gaps between kernels in a trace before; steps after capture, without a profiler, on the final stack.
    Fix: moe_router with moe_preprocess first, attn by an A/B of its own, or a larger microbatch. Budget a few GB.
    """
    knobs, layout = plan.knobs, plan.layout
    tokens = plan.job.micro_batch * plan.job.seq_len / (layout.cp * layout.tp)
    blocked = knobs.activation_offload or knobs.activation_offload_layers or plan.full_recompute
    dynamic = plan.job.dynamic_length or plan.job.packing
    if plan.chip.architecture != "blackwell" or knobs.graphs or blocked or dynamic or tokens > 4096:
        return
    steps = wider_graphs(plan)
    paying = [scopes for scopes in steps if pays(plan, replace(plan, knobs=replace(knobs, graphs=scopes)))]
    if paying and "graphs" not in plan.stack.measured:
        problem = f"{tokens:.0f} tokens a microbatch and rank without graphs: launches may show"
        fixes = [{"knobs.graphs": list(scopes)} for scopes in paying]
        yield Finding(at="knobs.graphs", problem=problem, fixes=fixes, advice="an A/B decides, on the final stack")
