"""Whether a run of the threefold engine is sound: routers, losses, data and ranks, each as a finding with its remedy.

`judge_run` takes the record of a run (`profile/readers/run_record.py`) and the slow ranks that its effects name.
`diagnosis.py` tells it of folders of runs, whose logs it reads as logs; `report` and the end of `train` call it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from threefold.diagnose.files import Kind
from threefold.diagnose.logs.health import Column, Health, judge_columns, uneven_times
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.profile.expert_loads import LoadSummary, lost_text, summarize_load
from threefold.profile.readers.run_record import RunRecord, read_run
from threefold.remedies.catalogue import CATALOGUE
from threefold.safe_files import check_inside, read_json_object
from threefold.units import format_many

EFFECTS = "effects.json"
_WINDOW = 16  # steps at the end, after the warm-up, whose routers are judged
_LEAST_WINDOW = 8
_COLLAPSED = 0.5  # of the way from level to all tokens at the same top_k experts
_CHANCE = 5.0  # standard deviations of a count that chance explains
_STALLED = 0.1  # of the time of the steps
_MOST_RANKS = 8
_REMEDIES = {remedy.name: remedy.what for remedy in CATALOGUE}
_FROM_HERE = "in a new run from a checkpoint before it: `threefold train PLAN --from RUN --run NEW`"


def judge_run(
    run: RunRecord, slow_ranks: Sequence[Mapping[str, Any]] = (), redact: Redactor | None = None
) -> list[Finding]:
    """What is not as it should be."""
    hosts = redact or Redactor(raw=True)
    return [*_routers(run), *_spikes(run, run_steps(run)), *_data(run), *_slow(slow_ranks, hosts)]


def run_steps(run: RunRecord) -> Health:
    """The steps of a run by the judge of logs."""
    columns = run.columns
    named = {name: columns[name] for name in ("step", "seconds", "loss", "grad_norm", "tokens_per_second")}
    return judge_columns(named | {"tflops": columns["tflops_per_gpu"]})


def slow_ranks_of(folder: Path) -> list[Mapping[str, Any]]:
    """The slow ranks that the engine named at the end of a start; none where the file is absent or damaged."""
    try:
        times = read_json_object(folder / EFFECTS, within=folder).get("own_times")
    except (OSError, ValueError):
        return []
    found = times.get("slow") if isinstance(times, dict) else None
    known = ("own_seconds", "median_seconds")
    rows = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [
        one for one in rows if isinstance(one.get("rank"), int) and all(_is_positive(one.get(name)) for name in known)
    ]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _at(run: RunRecord) -> str:
    return f"step {run.last('step') or 0:.0f}"


def _routers(run: RunRecord) -> Iterator[Finding]:
    """Routers at the end of the run: one that collapsed, else experts that no token reaches."""
    plan, moe = run.plan, run.plan.model.moe
    if moe is None or plan.job.routing != "learned":
        return
    is_warm = run.columns["step"] > plan.job.warmup_steps
    most, idle = (_last(run.columns[name][is_warm]) for name in ("router/load_max", "router/idle_experts"))
    fair = plan.tokens_per_step * moe.top_k / moe.num_experts  # tokens of an expert in a step
    limit = 1 + max(_COLLAPSED * (moe.num_experts / moe.top_k - 1), _CHANCE / math.sqrt(fair))
    layers = sum(layer.ffn == "moe" for layer in plan.model.layers)
    by_chance = layers * moe.num_experts * math.exp(-fair)  # idle experts in a step of a level router
    if len(most) and (load := float(np.median(most))) > limit:
        yield Finding(
            rule="router-collapsed",
            severity="warning",
            at=_worst_layer(run) or _at(run),
            problem=f"the busiest expert gets {load:.1f} times the mean over the last {format_many(len(most), 'step')} "
            f"({moe.num_experts} experts, top {moe.top_k}; {moe.num_experts / moe.top_k:g} is all tokens at the same)",
            fix=_level(plan),
            kind="suggestion",
            advice=_balancing(plan),
        )
    elif len(idle) and (dead := float(idle.min())) > max(0.5, by_chance + _CHANCE * math.sqrt(by_chance)):
        yield Finding(
            rule="experts-idle",
            severity="warning",
            at=_idle_layer(run) or _at(run),
            problem=f"in each of the last {format_many(len(idle), 'step')} at least {dead:.0f} of "
            f"{layers * moe.num_experts} experts got no token, where each has {fair:.0f} on average",
            fix=_level(plan),
            kind="suggestion",
            advice=_balancing(plan),
        )


def _balancing(plan: Plan) -> str:
    if plan.job.lora_rank is not None:
        return "adapters leave the router frozen: `eval` says what it costs; training all weights moves it"
    return f"{_REMEDIES['balance-router']}; {_FROM_HERE}"


def _last(column: Column) -> Column:
    """The known values of the last steps; none where they are too few to judge."""
    known: Column = column[np.isfinite(column)][-_WINDOW:]
    return known if len(known) >= _LEAST_WINDOW else known[:0]


def _level(plan: Plan) -> dict[str, Any]:
    """Fields that make a router more level: none where adapters train and the router is frozen."""
    if plan.job.lora_rank is not None:
        return {}
    if plan.model.moe is not None and plan.model.moe.balance_bias:
        return {"job.bias_rate": min(0.01, max(0.001, 2 * plan.job.bias_rate))}
    return {"job.aux_loss": min(0.1, max(0.01, 10 * plan.job.aux_loss))}


def _worst_layer(run: RunRecord) -> str:
    skews = [max(row) * len(row) / sum(row) if sum(row) else 0.0 for row in run.loads]
    return f"MoE layer {int(np.argmax(skews))}" if skews else ""


def _idle_layer(run: RunRecord) -> str:
    idle = [row.count(0.0) for row in run.loads]
    return f"MoE layer {int(np.argmax(idle))}" if any(idle) else ""


def _spikes(run: RunRecord, health: Health) -> Iterator[Finding]:
    """Jumps of loss and gradient norm, steps that are not finite, steps that vary."""
    job = run.plan.job
    skipped = run.last("skipped_steps") or 0
    if skipped:
        yield Finding(
            rule="steps-skipped",
            severity="warning",
            at=_at(run),
            problem=f"{format_many(int(skipped), 'step')} had a loss or gradient that is not finite, and were skipped",
            fix={"job.lr": job.lr / 2},
            kind="suggestion",
            advice="look at the data of those steps first",
        )
    for rule, words, steps in (
        ("loss-spikes", "the loss jumps", health.loss_spikes),
        ("gradient-spikes", "the gradient norm is above ten times its median", health.norm_spikes),
    ):
        if steps:
            yield Finding(
                rule=rule,
                severity="warning",
                at=f"step {steps[0]}",
                problem=f"{words} at {format_many(len(steps), 'step')}: {', '.join(map(str, steps[:5]))}"
                + (" and later ones" if len(steps) > 5 else ""),
                advice="look at the data of those steps; then lower job.lr, lengthen job.warmup_steps, or lower "
                f"job.clip_norm (it is {job.clip_norm:g})",
            )


def _data(run: RunRecord) -> Iterator[Finding]:
    """Steps that wait for their data."""
    seconds, waited = run.columns["seconds"], run.columns["data_seconds"]
    known = np.isfinite(seconds) & np.isfinite(waited) & (seconds > 0)
    known[: min(2, len(known) // 2)] = False  # the first batches fill the queue
    if known.sum() < _LEAST_WINDOW:
        return
    seconds, waited = seconds[known], waited[known]
    share, often = waited.sum() / seconds.sum(), int((waited > _STALLED * seconds).sum())
    if share > _STALLED:
        worst = int(np.argmax(waited))
        yield Finding(
            rule="data-stalls",
            severity="warning",
            at=f"step {run.columns['step'][known][worst]:.0f}",
            problem=f"{share:.0%} of the steps' time is waiting for data, in {often} of {len(seconds)} steps more than "
            f"{_STALLED:.0%}; the longest wait was {waited[worst]:.2g} s",
            advice=_REMEDIES["feed-data"],
        )


def _slow(ranks: Sequence[Mapping[str, Any]], redact: Redactor) -> Iterator[Finding]:
    for one in ranks[:_MOST_RANKS]:
        median, own, error = one["median_seconds"], one["own_seconds"], one.get("error_seconds")
        noise = f" (+- {error / median:.0%})" if _is_positive(error) else ""
        host = redact.host(str(one.get("host", ""))[:100])
        yield Finding(
            rule="rank-is-slow",
            severity="warning",
            at=f"rank {one['rank']}" + (f" on {host}" if host else ""),
            problem=f"{own:.4g} s of its own a step, {own / median - 1:.0%}{noise} above the median of its peers",
            advice=_REMEDIES["slow-rank"],
        )


def run_lines(run: RunRecord, redact: Redactor) -> list[str]:
    """The run in a few lines."""
    health = run_steps(run)
    text = f"step {run.last('step') or 0:.0f} of {run.plan.job.steps}"
    if health.step_seconds is not None:
        text += f": {health.step_seconds:.3g} s a step"
        text += f" ({health.spread[0]:.3g} to {health.spread[1]:.3g})" if health.spread else ""
    if health.first_loss is not None and health.last_loss is not None:
        text += f", loss {health.first_loss:.4g} to {health.last_loss:.4g}"
    lines = [redact(text), *(f"  {warning}" for warning in uneven_times(health))]
    busiest = _last(run.columns["router/load_max"])
    if len(busiest):
        lines.append(f"routers: the busiest expert gets {np.median(busiest):.2f} times the mean at the end")
        load = recorded_load(run)
        lines += [f"  {text}" for text in lost_text(load)[:1]] if load else []
    return lines


def recorded_load(run: RunRecord) -> LoadSummary | None:
    """The loads that a run recorded; None where it recorded none."""
    try:
        return summarize_load(run.folder, run.plan)
    except (FindingsError, ValueError):
        return None


LOGS, PROFILE = "logs", "profile"
_MOST_LOGS = 4096


@dataclass
class RunPart:
    """The runs of a diagnosis."""

    runs: list[RunRecord] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return "run folder"

    def to_json(self) -> dict[str, Any]:
        return {"runs": [run_steps(run).to_json() for run in self.runs], "lines": self.lines}


def read_runs(paths: Sequence[Path], context: Context) -> RunPart:
    """Read what runs logged about their steps. A run that ended before its first step has no health."""
    part = RunPart()
    for path in paths:
        context.say(f"reading the run {path.name}")
        try:
            run = read_run(path)
        except FindingsError as error:
            part.lines += [context.redact(f"{one.at}: {one.problem}") for one in error.findings]
            continue
        part.runs.append(run)
        part.lines += run_lines(run, context.redact)
        if (path / PROFILE).is_dir():
            part.lines.append("it was profiled: `threefold profile RUN` reads its traces, `diagnose` its snapshots")
        part.findings += [*run.findings, *judge_run(run, slow_ranks_of(path), context.redact)]
    return part


def logs_of(folder: Path) -> list[Path]:
    """The logs of ranks that a run's folder holds. Links that lead out of it are left out."""
    found = []
    for path in sorted((folder / LOGS).glob("*.log"))[:_MOST_LOGS]:
        try:
            check_inside(path, folder)
        except OSError:
            continue
        found.append(path)
    return found
