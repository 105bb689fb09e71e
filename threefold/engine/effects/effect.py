"""Judges which settings of a plan took effect, from what an observed step was counted doing on all ranks.

`recorder.py` calls `judge_effects` on the first rank with the counts of all ranks added up (`observe_step.py` lists the
kinds of counts) and with what recompute and offload did there. Each setting has one function, which returns an
`Effect`, or None where the plan does not ask for it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.engine.build import why_not_fused
from threefold.engine.effects.activation_bytes import ActivationUse
from threefold.engine.precision.recipes import RECIPES
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.units import format_bytes

_DISPATCHERS = {
    "LocalDispatcher": "local",
    "AllToAllDispatcher": "alltoall",
    "DeepEpDispatcher": "deepep",
    "HybridEpDispatcher": "hybridep",
}
_FSDP = "FSDP moves gradients and weights by itself, which is not observed"
_NO_PEER = "no other rank holds the same weights: nothing travels"


@dataclass(frozen=True, slots=True)
class Effect:
    """The fate of one setting."""

    knob: str  # the field of the plan, with the name in it where the field is a list: "recompute.moe_act"
    asked: str
    ran: str
    evidence: str
    took_effect: bool | None  # None where the step cannot show it
    is_chosen: bool = True  # the plan chooses it; False for a default

    def __str__(self) -> str:
        return f"knobs.{self.knob} = {self.asked} had no effect: {self.ran} ({self.evidence})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StepEvidence:
    """The counts of all ranks in the observed step."""

    plan: Plan
    counts: Mapping[tuple[str, str], int]
    recompute: Mapping[str, ActivationUse]
    offload: Mapping[str, ActivationUse]
    eager_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)  # which replayed no graph of a scope, by it

    def details(self, kind: str) -> Counter[str]:
        """The counts of one kind, by detail."""
        return Counter({detail: times for (of, detail), times in self.counts.items() if of == kind})

    @property
    def on_gpu(self) -> bool:
        return bool(self.details("device")["cuda"])

    def is_chosen(self, field: str) -> bool:
        return f"knobs.{field}" in dict(self.plan.written)


def judge_effects(seen: StepEvidence) -> list[Effect]:
    """The effect of every setting that the plan asks for."""
    single = [judge(seen) for judge in _SINGLE]
    lists = [effect for judge in _LISTS for effect in judge(seen)]
    return [*(effect for effect in single if effect is not None), *lists]


def _listed(details: Counter[str]) -> str:
    """`cuDNN 12, flash 4`; at most a few, the commonest first."""
    shown = [f"{detail} {times}" for detail, times in details.most_common(6)]
    return ", ".join(shown) + (", ..." if len(details) > 6 else "") if shown else "none"


def _dispatcher(seen: StepEvidence) -> Effect | None:
    asked, classes = seen.plan.knobs.dispatcher, seen.details("dispatcher")
    if not seen.plan.model.is_moe:
        return None
    ran = {_DISPATCHERS.get(name, name) for name in classes}
    calls = seen.details("package call") if asked in ("deepep", "hybridep") else seen.details("exchange on ep")
    evidence = f"{_listed(classes)} dispatches; {calls.total()} exchanges"
    if not ran and seen.details("experts")["fused"]:
        ran, evidence = {"local"}, "fused experts gather the rows of tokens themselves; 0 exchanges"
    if ran == {"local"} and asked != "local":
        evidence += "; every rank holds all experts"
    took = ran == {asked} and (asked == "local" or calls.total() > 0)
    return Effect("dispatcher", asked, ", ".join(sorted(ran)) or "none", evidence, took, seen.is_chosen("dispatcher"))


def _ep_overlap(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.ep_overlap:
        return None
    exchanges = seen.details("exchange of rows")
    overlapped, total = exchanges["overlapped"], exchanges.total()
    evidence = f"another microbatch computed during {overlapped} of {total} exchanges"
    if not total:
        evidence = "no rows were exchanged"
    elif not overlapped and seen.plan.num_microbatches == 1:
        evidence += "; a step has one microbatch"
    return Effect("ep_overlap", "true", f"{overlapped} of {total} overlapped", evidence, overlapped > 0)


def _delay_wgrad(seen: StepEvidence) -> Effect | None:
    knobs = seen.plan.knobs
    if not knobs.delay_wgrad:
        return None
    queued = seen.details("weight gradient")["queued"]
    evidence = f"{queued} weight gradients were queued"
    if not queued and knobs.data_parallel != "zero1":
        evidence += f"; {knobs.data_parallel} reduces gradients as the backward leaves a module"
    elif not queued and not knobs.ep_overlap:
        evidence += "; there is no exchange to run them with without knobs.ep_overlap"
    return Effect("delay_wgrad", "true", "queued" if queued else "computed at once", evidence, queued > 0)


def _wgrad_overlap(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.wgrad_overlap:
        return None
    during = seen.details("weight gradient")["during dispatch"]
    evidence = f"{during} weight gradients of experts were computed during exchanges of gradients"
    return Effect("wgrad_overlap", "true", "during dispatch" if during else "at once", evidence, during > 0)


def _precision(seen: StepEvidence) -> Effect | None:
    asked = seen.plan.knobs.precision
    if asked not in RECIPES:
        return None
    linears, experts = seen.details("low-precision linears"), seen.details("low-precision experts")
    fused = Counter({kind: n for kind, n in seen.details("expert kernels").items() if kind.startswith("fp8")})
    evidence = f"linears: {_listed(linears)}; experts: {_listed(experts + fused)}"
    emulated = linears["emulated"] + experts["emulated"] + fused["fp8 reference"]
    total = linears.total() + experts.total() + fused.total()
    if emulated and not seen.on_gpu:
        evidence += "; there is no GPU"
    elif emulated:
        evidence += "; the device has no kernel for these sizes or this format"
    ran = "kernels" if total else "nothing"
    if emulated:
        ran = "emulated" if emulated == total else f"{emulated} of {total} emulated"
    return Effect("precision", asked, ran, evidence, total > 0 and not emulated, seen.is_chosen("precision"))


def _expert_fusion(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.expert_fusion or not seen.plan.model.is_moe:
        return None
    calls, kernels = seen.details("experts"), seen.details("expert kernels")
    fused = calls["fused"]
    evidence = f"calls of experts: {_listed(calls)}; kernels: {_listed(kernels)}"
    if not fused and seen.plan.knobs.precision in RECIPES:
        evidence += "; no fused kernels for this precision, size or device"
    elif not fused:
        evidence += "; the device has no fused kernels for this dtype and these sizes"
    return Effect("expert_fusion", "true", "fused" if fused else "not fused", evidence, fused > 0)


def _expert_kernels(seen: StepEvidence) -> Effect | None:
    asked, kernels = seen.plan.knobs.expert_kernels, seen.details("expert kernels")
    if asked is None or not seen.plan.model.is_moe:
        return None
    evidence = f"kernels of fused experts: {_listed(kernels)}"
    if not kernels:
        evidence += "; experts were not fused"
    elif kernels["reference"] and not seen.on_gpu:
        evidence += "; there is no GPU"
    return Effect("expert_kernels", asked, ", ".join(sorted(kernels)) or "none", evidence, kernels[asked] > 0)


def _delta_kernels(seen: StepEvidence) -> Effect | None:
    asked, rules = seen.plan.knobs.delta_kernels, seen.details("delta rule")
    if asked is None or not any(layer.mixer == "delta" for layer in seen.plan.model.layers):
        return None
    ran = "fla" if rules["flash-linear-attention"] else "torch"
    return Effect("delta_kernels", asked, ran, f"calls of the delta rule: {_listed(rules)}", ran == asked)


def _grad_accum_fusion(seen: StepEvidence) -> Effect | None:
    knobs = seen.plan.knobs
    if not knobs.grad_accum_fusion:
        return None
    fused = seen.details("main_grad")["fused"]
    evidence = f"{fused} GEMMs of the step have a gradient buffer to add to"
    if not fused:
        is_low = knobs.precision in RECIPES
        other = "low-precision GEMMs leave it to autograd" if is_low else "gradients are summed in the weights' dtype"
        evidence += f"; {why_not_fused(seen.plan) or other}"
    ran = "added in the GEMM" if fused else "added by autograd"
    return Effect("grad_accum_fusion", "true", ran, evidence, fused > 0, seen.is_chosen("grad_accum_fusion"))


def _shared_expert_overlap(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.shared_expert_overlap:
        return None
    calls = seen.details("shared experts")
    evidence = f"rows traveled during {calls['overlapped']} of {calls.total()} calls of shared experts"
    if not calls:
        evidence = "the model has no shared experts"
    elif not calls["overlapped"] and not seen.details("exchange of rows"):
        evidence += "; no rows are exchanged"
    ran = "during dispatch" if calls["overlapped"] else "alone"
    return Effect("shared_expert_overlap", "true", ran, evidence, calls["overlapped"] > 0)


def _grad_reduce_overlap(seen: StepEvidence) -> Effect | None:
    return _data_parallel_overlap(
        seen, "grad_reduce_overlap", "gradient reduction", "during backward", "buckets of gradients reduced"
    )


def _param_gather_overlap(seen: StepEvidence) -> Effect | None:
    return _data_parallel_overlap(
        seen, "param_gather_overlap", "parameter gather", "left open", "buckets of weights gathered"
    )


def _data_parallel_overlap(seen: StepEvidence, knob: str, kind: str, wanted: str, what: str) -> Effect | None:
    if not getattr(seen.plan.knobs, knob):
        return None
    buckets, chosen = seen.details(kind), seen.is_chosen(knob)
    if seen.plan.knobs.data_parallel != "zero1":
        return Effect(knob, "true", "not observed", _FSDP, None, chosen)
    if not buckets:
        return Effect(knob, "true", "nothing to do", _NO_PEER, False, chosen)
    evidence = f"{what}: {_listed(buckets)}"
    return Effect(knob, "true", "overlapped" if buckets[wanted] else "alone", evidence, buckets[wanted] > 0, chosen)


def _attention(seen: StepEvidence) -> Effect | None:
    kernels = seen.details("attention")
    if not kernels:
        return None
    evidence = f"calls: {_listed(kernels)}"
    return Effect("attention", "fastest", kernels.most_common(1)[0][0], evidence, True, is_chosen=False)


def _compile(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.compile:
        return None
    calls = seen.details("compiled call")
    evidence = f"compiled calls: {_listed(calls)}"
    if not calls:
        evidence += "; the modules that would be compiled have kernels of their own here"
    return Effect("compile", "true", "compiled" if calls else "not compiled", evidence, bool(calls))


def _tp_overlap(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.tp_overlap:
        return None
    rings = seen.details("tensor-parallel ring")
    evidence = f"GEMMs in rings: {_listed(rings)}"
    if seen.plan.layout.tp == 1:
        evidence += "; layout.tp is 1"
    return Effect("tp_overlap", "true", "rings" if rings else "none", evidence, bool(rings))


def _fp8_dispatch(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.fp8_dispatch:
        return None
    sent = seen.details("rows in FP8")["sent"]
    evidence = f"{sent} dispatches sent rows in FP8"
    return Effect("fp8_dispatch", "true", "FP8" if sent else "as they are", evidence, sent > 0)


def _expert_balance(seen: StepEvidence) -> Effect | None:
    if seen.plan.knobs.expert_balance == "none":
        return None
    calls = seen.details("expert copies")["computed"]
    evidence = f"{calls} calls of copied experts"
    return Effect("expert_balance", "replicate", "copies" if calls else "none", evidence, calls > 0)


def _fp8_output(seen: StepEvidence) -> Effect | None:
    if not seen.plan.knobs.fp8_output:
        return None
    calls = seen.details("low-precision head")
    evidence = f"losses: {_listed(calls)}"
    if calls["emulated"]:
        evidence += "; the device has no kernel for these sizes or this format" if seen.on_gpu else "; there is no GPU"
    ran = "not quantized" if not calls else "emulated" if calls["emulated"] == calls.total() else "kernels"
    return Effect("fp8_output", "true", ran, evidence, bool(calls) and not calls["emulated"])


def _graphs(seen: StepEvidence) -> list[Effect]:
    replays, eager, fallbacks = (seen.details(f"graph {kind}") for kind in ("replay", "eager", "fallback"))
    effects = []
    for scope in seen.plan.knobs.graphs:
        # The rows are sorted in the graph of the router.
        part = "moe_router" if scope == "moe_preprocess" else scope
        of_part = (f"{part}: ", "microbatch: ")  # a microbatch without a slot replays no part
        reasons = Counter({text.partition(": ")[2]: n for text, n in fallbacks.items() if text.startswith(of_part)})
        evidence = f"{replays[scope]} replays, {eager[part]} eager runs"
        if reasons:
            evidence += f" ({_listed(reasons)})"
        if not replays[part] and not seen.on_gpu:
            evidence += "; there is no GPU"
        ran = "replayed" if replays[scope] else "eager"
        took: bool | None = replays[scope] > 0
        if scope != part and replays[part] and not replays[scope]:
            ran, took = "nothing to record", None
            evidence += "; fused experts sort rows as they read them, and experts in chunks sort each chunk"
        elif took and (ranks := seen.eager_ranks.get(part)):
            ran = "replayed on some ranks"
            evidence += f"; no replay on {name_ranks(ranks)}"
        effects.append(Effect(f"graphs.{scope}", scope, ran, evidence, took))
    return effects


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 5, 7 and 12 more`."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _recompute(seen: StepEvidence) -> list[Effect]:
    names, effects = seen.plan.knobs.recompute, []
    for name in names:
        inside = name in INSIDE_MOE and "moe" in names
        use = seen.recompute.get("moe" if inside else name, ActivationUse())
        evidence = f"{use.times} second runs" + (" of moe, which holds it" if inside else "")
        unseen = not use.times and seen.on_gpu and bool(seen.plan.knobs.graphs)
        if unseen:
            evidence += "; parts that are replayed as CUDA graphs are not seen"
        elif not use.times:
            evidence += "; no layer of the model runs it on its own"
        took = None if unseen else use.times > 0
        effects.append(Effect(f"recompute.{name}", name, "recomputed" if use.times else "saved", evidence, took))
    return effects


def _recompute_save(seen: StepEvidence) -> list[Effect]:
    effects, taken = [], seen.details("saved outputs")
    for name in seen.plan.knobs.recompute_save:
        evidence = f"second runs of layers took {taken[name]} outputs of the first run"
        ran = "saved" if taken[name] else "recomputed"
        effects.append(Effect(f"recompute_save.{name}", name, ran, evidence, taken[name] > 0))
    return effects


def _activation_offload(seen: StepEvidence) -> list[Effect]:
    knobs, effects = seen.plan.knobs, []
    wanted = [(f"activation_offload.{name}", name, name) for name in knobs.activation_offload]
    if knobs.activation_offload_layers:
        wanted.append(("activation_offload_layers", str(knobs.activation_offload_layers), "layers"))
    for knob, asked, name in wanted:
        use = seen.offload.get(name, ActivationUse())
        evidence = f"{use.times} copies, {format_bytes(use.kept_bytes)} of a microbatch off the device, over all ranks"
        if not use.times:
            evidence += "; nothing of it is saved, or its tensors are too small to copy"
        effects.append(Effect(knob, asked, "offloaded" if use.times else "kept", evidence, use.times > 0))
    return effects


_SINGLE: tuple[Callable[[StepEvidence], Effect | None], ...] = (
    _dispatcher,
    _ep_overlap,
    _delay_wgrad,
    _wgrad_overlap,
    _precision,
    _expert_fusion,
    _expert_kernels,
    _delta_kernels,
    _grad_accum_fusion,
    _shared_expert_overlap,
    _grad_reduce_overlap,
    _param_gather_overlap,
    _attention,
    _compile,
    _tp_overlap,
    _fp8_dispatch,
    _expert_balance,
    _fp8_output,
)
_LISTS: tuple[Callable[[StepEvidence], list[Effect]], ...] = (
    _graphs,
    _recompute,
    _recompute_save,
    _activation_offload,
)
