"""A checklist for the first plan of a request: what a reader of the recommended order would ask of it.

`plan_requests.py --log` writes a row of Markdown for each request. A cell is empty where nothing is to be said.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from threefold.api.searches import with_defaults
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.remedies.recompute_sets import recomputable_modules
from threefold.report.search import degrees_text, knobs_text
from threefold.search.price import Priced
from threefold.search.rank import LITTLE_ROOM, pair_band, resort, why_after
from threefold.search.search import Candidate, SearchResult, search
from threefold.units import format_tokens

Request = tuple[str, int, str, int]  # model, GPUs, chip, sequence length
HEAD = (
    "| request | CPU s | chosen | TFLOP/s | GiB | group | checklist | nearest published layout, and where they differ |"
)


def ask(request: Request, target: str, top: int, **fields: object) -> SearchResult:
    model, gpus, chip, seq_len = request
    draft = {"model": model, "cluster.chip": chip, "cluster.gpus": gpus, "job.seq_len": seq_len, "target": target}
    return search(with_defaults({**draft, **fields})[0], top=top)


def write_rows(path: Path, target: str, requests: Sequence[Request]) -> None:
    """Write a row for each request that the file has none of: a run that was cut off goes on there."""
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        file.write("" if written else f"{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}\n")
        for request in requests:
            if f"| {name_of(request)} |" not in written:
                file.write(row(request, target) + "\n")
                file.flush()


def name_of(request: Request) -> str:
    model, gpus, chip, seq_len = request
    return f"{model}, {gpus} x {chip}, {format_tokens(seq_len)}"


def row(request: Request, target: str) -> str:
    start = time.process_time()
    found = ask(request, target, 5)
    seconds = time.process_time() - start
    name = name_of(request)
    if not found.candidates:
        reason = found.finding.problem.split(": ", 1)[-1] if found.finding else ""
        return f"| {name} | {seconds:.1f} | no plan | | | | | {reason} |"
    best, group = found.candidates[0], found.group
    assert group is not None
    plan, guess = best.plan, best.estimate
    faults = [*checklist(found), *_milder(request, target, best), *_with_ep(request, target, best)]
    faults += neighbor(request, target, plan)
    top = guess.device_bytes_band[1] / plan.chip.memory_bytes
    told = [f"{degrees_text(plan)}, microbatch {plan.job.micro_batch}", plan.knobs.precision, knobs_text(plan)]
    size = f"{group.size}" + (f", the fastest {group.fastest:+.0%}" if group.fastest > 0.05 else "")
    cells = [name, f"{seconds:.1f}", "; ".join(filter(None, told)), f"{guess.model_tflops_per_gpu:.0f}"]
    cells += [f"{top:.0%}", size, "; ".join(faults) or "all hold", group.published]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def checklist(found: SearchResult) -> Iterator[str]:
    """What does not hold of the first candidate."""
    best, group = found.candidates[0], found.group
    plan, layout = best.plan, best.plan.layout
    members = [one for one in found.candidates[: group.size if group else 1] if not one.after.startswith("a step ")]
    room = 1 - best.estimate.device_bytes_band[1] / plan.chip.memory_bytes
    if room < LITTLE_ROOM:
        yield f"{room:.1%} of memory left at the top of the band"
    if resort(plan) and any(not resort(one.plan) for one in members):
        yield "another member needs neither full recompute nor offload"
    if layout.etp > 1:
        yield f"ETP {layout.etp} at EP {layout.ep} of {plan.model.num_experts} experts"
    if layout.tp > 1 and plan.link("tp").link == "network":
        yield "TP leaves the NVLink domain"
    if layout.ep > 1 and plan.link("ep").link == "network":
        yield "EP leaves the NVLink domain" + (", hidden by overlap" if plan.knobs.ep_overlap else "")
    if group and group.anchor and group.anchor_distance and "put after" in group.why_not:
        yield f"not the published degrees: {group.why_not.split('because of ')[-1]}"


def _milder(request: Request, target: str, best: Candidate) -> Iterator[str]:
    """What a plan with full recompute or offload says for itself: a search of its own, with as much selective recompute
    as there is and nothing else, finds no layout, or one that is slower by more than the band."""
    plan, knobs = best.plan, best.plan.knobs
    if not (plan.full_recompute or knobs.optimizer_offload):
        return
    what = ["full recompute"] * plan.full_recompute + ["offload"] * (knobs.optimizer_offload > 0)
    told = " and ".join(what) + ("" if resort(plan) else ", as published")
    names = [name for name in recomputable_modules(plan) if name not in INSIDE_MOE] + ["moe"] * plan.model.is_moe
    fixed: dict[str, object] = {"knobs.recompute": names, "knobs.optimizer_offload": 0.0}
    lean = ask(request, target, 1, **fixed).candidates
    if not lean:
        yield f"{told}: no selective set fits without"
        return
    longer = lean[0].estimate.time.step_seconds / best.estimate.time.step_seconds - 1
    inside = "INSIDE the band" if longer <= pair_band(plan) else "more than the band"
    yield f"{told}: without, {degrees_text(lean[0].plan)} takes {longer:.0%} longer, {inside}"


def _with_ep(request: Request, target: str, best: Candidate) -> Iterator[str]:
    """By how much experts that are spread are slower, where a plan of a MoE model spreads them over no ranks."""
    if not best.plan.model.is_moe or best.plan.layout.ep > 1:
        return
    spread = ask(request, target, 1, **{"layout.ep": 8}).candidates
    if spread:
        longer = spread[0].estimate.time.step_seconds / best.estimate.time.step_seconds - 1
        yield f"no EP: {degrees_text(spread[0].plan)} takes {longer:.0%} longer"


def neighbor(request: Request, target: str, plan: Plan) -> Iterator[str]:
    """Whether half the length gets the same degrees, but for CP; and why it does not."""
    model, gpus, chip, seq_len = request
    near = ask((model, gpus, chip, seq_len // 2), target, 1)
    if not near.candidates:
        yield f"no plan at {format_tokens(seq_len // 2)}"
        return
    other, layout = near.candidates[0].plan, plan.layout
    steps = sum(
        abs(layout.degree(axis).bit_length() - other.layout.degree(axis).bit_length()) for axis in ("tp", "pp", "ep")
    )
    cp = max(1, layout.cp // 2)
    if steps == 0 and other.layout.cp in (cp, layout.cp):
        return
    where = f"{format_tokens(seq_len // 2)} gets {degrees_text(other)}"
    fixed = {f"layout.{axis}": layout.degree(axis) for axis in ("tp", "pp", "ep", "etp")}
    for degree in dict.fromkeys((cp, layout.cp)):
        kept = ask((model, gpus, chip, seq_len // 2), target, 1, **fixed, **{"layout.cp": degree})
        if kept.candidates:
            yield f"{where}; these degrees come after, because of {_why(kept.candidates[0], near.candidates[0])}"
            return
    yield f"{where}, where these degrees do not fit"


def _why(one: Candidate, first: Candidate) -> str:
    return why_after(_priced(one), _priced(first))


def _priced(one: Candidate) -> Priced:
    seconds = one.estimate.time.step_seconds
    speed = one.plan.tokens_per_step / seconds
    return Priced(one.plan, one.estimate.device_bytes_band[1], speed, speed, one.estimate.time.terms)
