"""An estimate as text: memory by stage and term, time by term, throughput, traffic; simulated steps and trainings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from threefold.cost.estimate import WALLS, Estimate
from threefold.cost.memory.stage_memory import StageMemory
from threefold.cost.traffic.transfers import Transfer
from threefold.cost.training_run.training_run import TrainingRun
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.plan.terms import MEMORY_TERMS, RESERVE_TERMS
from threefold.remedies.advise import Advice
from threefold.report.terminal import advice_text, cut_lines, findings_summary, table
from threefold.search.explain import LEAST_SHARE
from threefold.search.sweep import Point
from threefold.spec.chip_description import SOURCES
from threefold.units import GIB, format_bytes, format_count, format_number, format_tokens

if TYPE_CHECKING:  # numpy comes with it
    from threefold.cost.time.simulation import Simulation

STAGES_ABREAST = 8  # columns that fit a terminal
_WALL = {term: wall for wall, terms in WALLS.items() for term in terms}


def estimate_text(
    plan: Plan,
    found: Estimate,
    ledger: Sequence[Transfer],
    overfull: Sequence[Finding] = (),
    pieces: Sequence[Advice] = (),
) -> str:
    """All of it; `overfull` is what the rules say about the peak, with the advice, which stands alone where the plan
    surely fits."""
    parts = [
        head_text(plan, found),
        memory_text(plan, found),
        time_text(plan, found),
        "\n".join(verdict_lines(plan, found)),
    ]
    if ledger:
        parts.append(traffic_text(ledger))
    if overfull:
        parts.append("\n".join(map(str, overfull)))
    elif not found.fits:
        parts.append(misfit_text(plan, found))
    else:
        parts.append(advice_text(pieces))
    return "\n\n".join(filter(None, parts))


def head_text(plan: Plan, found: Estimate) -> str:
    job = plan.job
    return (
        f"estimated for {plan.target}, {'calibrated' if found.calibrated else 'uncalibrated'}: {plan.model_name}, "
        f"{plan.layout.gpus} x {plan.chip.name}, {plan.knobs.precision}, "
        f"{job.global_batch} x {format_tokens(job.seq_len)} tokens a step"
        f"{', each sequence at its full length (cp_dynamic)' if plan.shards_dynamically else ''}"
    )


def memory_text(plan: Plan, found: Estimate) -> str:
    """Terms down, stages across; stages that are alike share a column."""
    columns = _folded(found.memory.stages)
    blocks = [columns[i : i + STAGES_ABREAST] for i in range(0, len(columns), STAGES_ABREAST)]
    worst, (low, high) = found.memory.worst, found.bytes_band
    peak = (
        f"peak at stage {worst.stage}, {worst.moment}: {format_bytes(worst.peak_bytes)} "
        f"({_gib(low)} to {_gib(high)}), {format_bytes(worst.device_bytes)} on the device; "
        f"headroom {format_bytes(found.headroom_bytes)} of {format_bytes(plan.chip.memory_bytes)}"
    )
    return "\n\n".join([*(_memory_table(plan, block) for block in blocks), peak])


def _folded(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Runs of neighbors with the same printed numbers, with the name of the run."""
    runs: list[list[StageMemory]] = []
    for stage in stages:
        if runs and _printed(runs[-1][0]) == _printed(stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return [
        (f"stage {run[0].stage}" if len(run) == 1 else f"stages {run[0].stage}-{run[-1].stage}", run[0]) for run in runs
    ]


def _printed(stage: StageMemory) -> list[str]:
    parts = {**stage.terms, **stage.reserve}
    return [_gib(parts.get(name, 0.0)) for name in (*MEMORY_TERMS, *RESERVE_TERMS)]


def _memory_table(plan: Plan, columns: Sequence[tuple[str, StageMemory]]) -> str:
    stages = [stage for _, stage in columns]
    terms = [name for name in MEMORY_TERMS if any(stage.terms.get(name) for stage in stages)]
    reserve = [name for name in RESERVE_TERMS if any(stage.reserve.get(name) for stage in stages)]
    rows = [[name, *(_gib(stage.terms.get(name, 0.0)) for stage in stages)] for name in terms]
    rows.append(["= allocated", *(_gib(stage.peak_bytes) for stage in stages)])
    rows += [[name, *(_gib(stage.reserve.get(name, 0.0)) for stage in stages)] for name in reserve]
    rows.append(["= on the device", *(_gib(stage.device_bytes) for stage in stages)])
    rows.append([f"of {plan.chip.name}", *[_gib(plan.chip.memory_bytes)] * len(stages)])
    return table(["memory, GiB", *(name for name, _ in columns)], rows)


def time_text(plan: Plan, found: Estimate) -> str:
    """Terms that take time, longest first, with the wall each belongs to, and those below 1 % together; of a pipeline
    those of its slowest rank."""
    step = found.time.step_seconds
    spent = sorted(((value, name) for name, value in found.time.terms.items() if value > 0), reverse=True)
    small = [value for value, _ in spent if value < LEAST_SHARE * step]
    if len(small) > 1:
        spent = [*spent[: -len(small)], (sum(small), f"{len(small)} smaller terms")]
    rows = [[name, format_number(value), f"{value / step:.1%}", _WALL.get(name, "")] for value, name in spent]
    rows.append(["= step", format_number(step), "100.0%", ""])
    text = table(["time", "seconds", "share", "wall"], rows)
    pp, stage = plan.layout.pp, found.time.stage
    return text if pp == 1 else f"{text}\nterms of layers are those of stage {stage} of 0 to {pp - 1}, the slowest"


def wall_text(plan: Plan, found: Estimate) -> str:
    """The limit that binds, and where that is memory also where the time goes: the two do not exclude each other."""
    step = found.time.step_seconds
    spent = sum(found.time.terms[name] for name in WALLS[found.time_wall])
    if found.wall != "memory":
        return f"{found.time_wall}, {spent / step:.0%} of the time"
    full = found.memory.device_bytes / plan.chip.memory_bytes
    why = f"{full:.0%} of it needed" if not plan.full_recompute else "whole layers are recomputed"
    return f"memory ({why}: it keeps faster settings out); {found.time_wall} takes {spent / step:.0%} of the time"


def verdict_lines(plan: Plan, found: Estimate) -> list[str]:
    """Throughput, wall, band and what the numbers rest on."""
    low, high = found.seconds_band
    rows = [
        ["throughput", f"{format_number(found.tokens_per_second_per_gpu)} tokens/s/GPU, {_tflops(found)}"],
        ["wall", wall_text(plan, found)],
        [
            "band",
            f"step {format_number(low)} to {format_number(high)} s, "
            f"peak {_gib(found.bytes_band[0])} to {_gib(found.bytes_band[1])} GiB",
        ],
        *(["load", text] for text in (found.uneven.lines(found.time.step_seconds) if found.uneven else ())),
        ["basis", found.basis],
        *(["assumed", text] for text in found.assumed),
    ]
    if not found.calibrated:
        rows.append(["", "uncalibrated: nothing near this plan was among the runs, so the band is wide"])
    return [f"{name:10} {text}" for name, text in rows]


def _tflops(found: Estimate) -> str:
    return (
        f"{format_number(found.model_tflops_per_gpu)} TFLOP/s/GPU; "
        f"MFU {found.mfu:.1%} of {found.mfu_peak} ({format_number(found.peak_tflops)} TFLOP/s)"
    )


def traffic_text(ledger: Sequence[Transfer]) -> str:
    """What an average rank sends in a step."""
    rows = [
        [
            entry.axis,
            entry.operation,
            format_bytes(entry.bytes),
            format_number(entry.count),
            format_bytes(entry.total_bytes),
            entry.link,
        ]
        for entry in ledger
    ]
    title = "traffic of a rank in a step, pipeline ranks averaged"
    return f"{title}\n{table(['axis', 'operation', 'bytes a call', 'calls', 'bytes a step', 'link'], rows)}"


def misfit_text(plan: Plan, found: Estimate) -> str:
    """One line for a plan that runs out of memory."""
    worst, (name, size) = found.memory.worst, found.memory.worst.by_size[0]
    top = format_bytes(found.device_bytes_band[1])
    return (
        f"does not fit: stage {worst.stage} needs {format_bytes(worst.device_bytes)} (up to {top}) of "
        f"{format_bytes(plan.chip.memory_bytes)}; the largest term is {name}, {format_bytes(size)}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def estimate_summary(plan: Plan, found: Estimate, overfull: Sequence[Finding] = ()) -> list[str]:
    low, high = found.device_bytes_band
    fits = "fits" if found.fits else "does not fit"
    memory = (
        f"{fits}: {format_bytes(found.memory.device_bytes)} ({format_bytes(low)} to {format_bytes(high)}) of "
        f"{format_bytes(plan.chip.memory_bytes)}, on stage {found.memory.worst.stage}"
    )
    return cut_lines([head_text(plan, found), memory, *verdict_lines(plan, found), *findings_summary(overfull)[1:]])


Curve = Sequence[tuple[Point, TrainingRun | None]]
LARGEST_USUAL = 100_000


def usual_sizes(plan: Plan) -> list[int]:
    """The plan's own size and its doublings and halvings, from the smallest that its layout allows to 100,000 GPUs."""
    sizes, floor = {plan.layout.gpus}, plan.layout.min_gpus
    size = plan.layout.gpus
    while size % 2 == 0 and size // 2 >= floor:
        size //= 2
        sizes.add(size)
    size = plan.layout.gpus
    while size * 2 <= LARGEST_USUAL:
        size *= 2
        sizes.add(size)
    largest = LARGEST_USUAL // floor * floor
    return sorted(sizes | ({largest} if largest else set()))


def training_text(plan: Plan, found: TrainingRun, curve: Curve = ()) -> str:
    """All of it: what it takes, what was assumed, and the curve where one was asked for."""
    head = (
        f"estimated for {plan.target}, {found.level}: {plan.model_name}, {format_count(found.tokens)} tokens on "
        f"{found.gpus} x {plan.chip.name}, {plan.knobs.precision}"
    )
    parts = [head, table(*found.table()), _assumed(found)]
    return "\n\n".join([*parts, *([curve_text(curve)] if curve else [])])


def _assumed(found: TrainingRun) -> str:
    rows = []
    for name, source in SOURCES.items():
        value = found.spare_nodes if name == "spare_nodes" else getattr(found.operations, name)
        rows.append([name, format_number(value), "given" if name in found.replaced else source])
    return table(["assumed", "value", "source"], rows)


def curve_text(curve: Curve) -> str:
    """One row for each size. Where the rules refuse the plan, the row says which."""
    rows = []
    for point, run in curve:
        row = [str(point.value), str(point.plan.job.global_batch)]
        if run is None or not point.is_right:
            rows.append([*row, *["-"] * 6, point.verdict])
            continue
        energy = "-" if run.energy_mwh is None else run.rounded(run.energy_mwh)
        cost = "-" if run.cost is None else run.rounded(run.cost)
        figures = [run.rounded(run.days), run.rounded(run.paid_gpu_hours), f"{run.goodput.useful:.1%}"]
        rows.append([*row, *figures, str(run.save_steps), energy, cost, point.verdict])
    return table(["GPUs", "batch", "days", "GPU-hours", "goodput", "save steps", "MWh", "cost", ""], rows)


def point_json(point: Point, run: TrainingRun | None) -> dict[str, Any]:
    return {
        "gpus": point.value,
        "global_batch": point.plan.job.global_batch,
        "verdict": point.verdict,
        "training": run.to_json() if run else None,
    }


def training_summary(plan: Plan, found: TrainingRun) -> list[str]:
    return cut_lines(training_text(plan, found).splitlines())


def simulation_text(simulated: "Simulation", jitter: float) -> str:
    """The median and the longest step, over those of equal ranks and of the closed form."""
    slower = simulated.median_seconds / simulated.even_seconds - 1
    median, longest = format_number(simulated.median_seconds), format_number(simulated.seconds[-1])
    even, closed = format_number(simulated.even_seconds), format_number(simulated.closed_seconds)
    return (
        f"simulated  {len(simulated.seconds)} steps of {simulated.num_ranks:,} ranks in {simulated.num_groups:,} "
        f"groups, each pass off by {jitter:.1%}:\n"
        f"           median {median} s ({slower:+.1%} over equal ranks), longest {longest} s; equal ranks {even} s, "
        f"closed form {closed} s"
    )
