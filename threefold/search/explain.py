"""Reasons: why a candidate is what it is, in sentences that cite rules and terms."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from threefold.cost.estimate import Estimate
from threefold.cost.estimate import estimate as estimate_of
from threefold.plan.plan import Plan
from threefold.rules.layout.context import target_cp
from threefold.rules.vision import fsdp_or_3d, stage_of_work
from threefold.units import GIB, format_bytes, format_many, format_range, format_tokens

TERMS_NAMED = 3
LEAST_SHARE = 0.01  # of a step: what is shorter is not told
DEGREES_STATED = ("layout.tp", "layout.pp", "layout.ep")  # a draft that states them all leaves no layout to choose


@dataclass(frozen=True, slots=True)
class Reasons:
    """Sentences about one candidate, in the order in which a plan is made."""

    fit: tuple[str, ...]
    scale: tuple[str, ...]
    profile: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.fit, *self.scale, *self.profile)


def reasons(
    plan: Plan, priced: Estimate, first: Estimate | None = None, given: Collection[str] = frozenset()
) -> Reasons:
    """Why a candidate is what it is; beside the first one where it is another. `given`: what the draft states."""
    beside = (_beside(priced, first),) if first is not None else ()
    return Reasons(
        fit=(_memory(plan, priced), _ladder(plan, priced, given)),
        scale=(*_axes(plan, priced), *_vision(plan), *_held(given)),
        profile=(_time(priced), *_graphs(plan, priced), *beside),
    )


def _share(estimate: Estimate, term: str) -> str:
    """What a term takes, after a colon; nothing below 1 %."""
    share = estimate.time.terms[term] / estimate.time.step_seconds
    return f": {share:.0%} of the step ({term})" if share >= LEAST_SHARE else ""


def _memory(plan: Plan, estimate: Estimate) -> str:
    worst, have = estimate.memory.worst, plan.chip.memory_bytes
    parts = ", ".join(f"{name} {size / GIB:.0f}" for name, size in worst.by_size[:TERMS_NAMED])
    top = estimate.device_bytes_band[1]
    sure = "" if top <= have else ", which is too much at the top of the band"
    return (
        f"About {worst.device_bytes / GIB:.0f} GiB (up to {top / GIB:.0f}) of {have / GIB:.0f} on stage {worst.stage} "
        f"at {worst.moment}{sure}; largest: {parts}."
    )


def _held(given: Collection[str]) -> tuple[str, ...]:
    if any(path not in given for path in DEGREES_STATED):
        return ()
    held = [path for path in given if path.startswith("layout.") or path == "knobs.recompute"]
    return (f"The draft states {', '.join(held)}, and the search held them: {held[0]}=auto leaves one to it.",)


def _ladder(plan: Plan, estimate: Estimate, given: Collection[str]) -> str:
    knobs = plan.knobs
    if not knobs.recompute and not knobs.optimizer_offload:
        return "Nothing is recomputed or offloaded: the layout alone fits (selective-before-full, offload-comes-last)."
    again = _share(estimate, "recompute")
    is_stated, said = "knobs.recompute" in given, []
    if plan.full_recompute:
        but = ", with the outputs of attention saved" if knobs.recompute_save else ""
        why = "as the draft states" if is_stated else "because no selective set fits this layout"
        said.append(f"Full recompute{but}, {why} (selective-before-full){again}.")
    elif knobs.recompute:
        names = ", ".join(knobs.recompute)
        why = "as the draft states" if is_stated else "the cheapest set that fits"
        said.append(f"Recomputes {names}, {why} (selective-before-full){again}.")
    if knobs.optimizer_offload:
        is_given = "knobs.optimizer_offload" in given
        why = "as the draft states" if is_given else "because no selective recompute fits this layout alone"
        said.append(
            f"{knobs.optimizer_offload:.0%} of the optimizer states are on the host, {why} "
            f"(offload-comes-last){_share(estimate, 'offload')}."
        )
    return " ".join(said)


def _axes(plan: Plan, estimate: Estimate) -> list[str]:
    layout, said = plan.layout, []
    if layout.tp > 1:
        place = "inside the NVLink domain" if plan.link("tp").link == "domain" else "across the network"
        said.append(f"TP {layout.tp} {place} (tp-inside-domain){_share(estimate, 'tp')}.")
    if layout.cp > 1:
        wanted = target_cp(plan.job.seq_len)
        said.append(
            f"CP {layout.cp}, where {format_tokens(plan.job.seq_len)} / 4K is {wanted} (cp-from-shard-target), "
            f"by {cp_comm_text(plan)}{_share(estimate, 'cp')}."
        )
    if plan.model.is_moe and layout.ep > 1:
        said.append(_experts(plan, estimate))
    if layout.pp > 1:
        chunks = f" x VPP {layout.vpp}" if layout.vpp > 1 else ""
        said.append(
            f"PP {layout.pp}{chunks} with {format_many(plan.num_microbatches, 'microbatch')} (pipeline-bubble-small)"
            f"{_share(estimate, 'bubble')}."
        )
    sharded = "states" if plan.knobs.data_parallel == "zero1" else "weights and states"
    if layout.dp * layout.cp > 1:
        ranks = format_many(layout.dp * layout.cp, "rank")
        said.append(f"DP {layout.dp}, EDP {layout.edp}; {sharded} are sharded over {ranks}{_share(estimate, 'dp')}.")
    return said


def cp_comm_text(plan: Plan) -> str:
    """How context-parallel ranks communicate, in words."""
    kinds = plan.knobs.cp_comm
    if isinstance(kinds, str):
        return kinds
    used = dict.fromkeys(zip(kinds, (layer.mixer for layer in plan.model.layers), strict=False))
    return ", ".join(f"{kind} in {mixer} layers" for kind, mixer in used)


def _vision(plan: Plan) -> Iterator[str]:
    """For a vision-language model: why FSDP, 3D parallelism or neither, and what speaks for the other."""
    if not plan.is_vlm:
        return
    rule = "vlm-fsdp-before-pipeline"
    uneven = "the vision encoder makes pipeline stages uneven"
    ceiling = "3D parallelism (TP x PP x EP) has the higher ceiling once its stages are written (layout.stages)"
    advised, reason = fsdp_or_3d(plan)
    yield f"The recommended order has {advised} for {stage_of_work(plan)}: {reason} (vlm-fsdp-or-3d)."
    if plan.knobs.data_parallel != "zero1":
        yield f"FSDP, because {uneven}: it needs no cut and comes up first. {ceiling} ({rule})."
    elif plan.layout.pp > 1:
        stages = "with written stages" if plan.layout.stages else "but its stages are not written yet"
        yield f"3D parallelism {stages}: {uneven}. {ceiling}; FSDP with PP 1 needs no cut and comes up first ({rule})."
    else:
        yield (
            f"PP 1, because {uneven}, and without FSDP, because each rank has room for its weights: nothing is cut or "
            f"gathered. FSDP comes next where memory is short; {ceiling} ({rule})."
        )


def _experts(plan: Plan, estimate: Estimate) -> str:
    layout, knobs = plan.layout, plan.knobs
    place = "stay inside the NVLink domain" if plan.link("ep").link == "domain" else "cross the network"
    hidden = " and hide behind another microbatch" if knobs.ep_overlap else ""
    split = (
        f"ETP {layout.etp} on top, because EP alone does not suffice (etp-only-when-ep-insufficient)"
        if layout.etp > 1
        else "before any ETP (etp-only-when-ep-insufficient)"
    )
    here = plan.model.num_experts // layout.ep
    return (
        f"EP {layout.ep} leaves {here} expert{'s' if here > 1 else ''} a rank, {split}; exchanges by "
        f"{knobs.dispatcher} {place}{hidden} (ep-traffic-hidden-or-inside){_share(estimate, 'ep')}."
    )


def _time(estimate: Estimate) -> str:
    terms, step = estimate.time.terms, estimate.time.step_seconds
    shown = [name for name in sorted(terms, key=lambda name: -terms[name]) if terms[name] >= LEAST_SHARE * step]
    parts = ", ".join(f"{name} {terms[name] / step:.0%}" for name in shown)
    sure = "" if estimate.calibrated else "; uncalibrated here"
    assumed = "".join(f" Assumed: {text}." for text in estimate.assumed)
    uneven = (
        "".join(f" {text[0].upper()}{text[1:]}." for text in estimate.uneven.lines(step)) if estimate.uneven else ""
    )
    return f"A step takes {format_range(step, *estimate.seconds_band, ' s')}{sure}: {parts}.{uneven}{assumed}"


def _graphs(plan: Plan, graphed: Estimate) -> Iterator[str]:
    """For a plan with CUDA graphs: what they save, and what they hold."""
    scopes = plan.knobs.graphs
    if not scopes:
        return
    eager = estimate_of(replace(plan, knobs=replace(plan.knobs, graphs=())))
    gain = eager.time.step_seconds / graphed.time.step_seconds - 1
    host = eager.time.terms["host"] / eager.time.step_seconds
    held = graphed.memory.worst.terms.get("graphs", 0.0)
    whole = "full_iteration" in scopes
    what = "Forward and backward as one CUDA graph" if whole else f"CUDA graphs of {', '.join(scopes)}"
    them, they = ("it", "it holds") if whole else ("them", "they hold")
    yield (
        f"{what}: without {them} the GPU waits for the host for {host:.1%} of the step (host-wall), {gain:+.1%} "
        f"predicted throughput; {they} {format_bytes(held)} (graphs)."
    )


def _beside(estimate: Estimate, first: Estimate) -> str:
    speed = estimate.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu - 1
    spare = first.memory.device_bytes - estimate.memory.device_bytes
    room = f"{format_bytes(abs(spare))} {'less' if spare > 0 else 'more'} memory"
    return f"Beside the first: {speed:+.1%} predicted throughput with {room}."
