"""Plans in the library: load, change, check, estimate. The commands call these functions too. No torch.

Bad input raises `FindingsError`, whose findings say what is wrong, where, and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.cost.chip_file import read_chip_file
from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import Estimate
from threefold.cost.estimate import estimate as estimate_step
from threefold.cost.training_run.training_run import TrainingRun, training_run
from threefold.findings import Finding, Findings, FindingsError, in_order, shown
from threefold.machine.own_chip_file import NO_CHIP_FILE, priced_here
from threefold.plan.file import read_plan
from threefold.plan.parse import Parsed, change, free_findings, normalize, parse
from threefold.plan.plan import Plan
from threefold.rules.all import PREDICTED, blockers, errors, judge, with_fixes
from threefold.rules.all import check as check_rules
from threefold.search.recompute import resolve_recompute
from threefold.search.sweep import Point, Sweep
from threefold.search.sweep import sweep as sweep_fields
from threefold.spec.chip_description import problem_with

OUR_ENGINE = "threefold"
MOST_TOKENS = 1e18


def open_plan(path: str, overrides: Sequence[str] = ()) -> tuple[Parsed, list[Finding]]:
    """The parsed plan and everything found on the way, for whoever also wants a plan that has errors. Fields that a
    draft leaves free are findings. Nothing is chosen or priced."""
    parsed = read_plan(path, overrides)
    return parsed, in_order([*parsed.findings, *free_findings(parsed.free)])


def with_choices(parsed: Parsed, findings: Sequence[Finding] = ()) -> tuple[Parsed, list[Finding]]:
    """The parsed plan as it is priced and run: names in place of a memory budget, and a choice in place of an open
    `cp_exchange`, with what was found on the way."""
    if parsed.readable is None:
        return parsed, list(findings)
    try:
        plan, more = resolve_recompute(resolve_exchange(parsed.readable))
    except FindingsError as error:
        bare = change(parsed.readable, {"knobs.recompute": None})  # for rules to judge the rest
        return replace(parsed, plan=None, readable=bare), in_order([*findings, *error.findings])
    return replace(parsed, plan=plan if parsed.plan else None, readable=plan), in_order([*findings, *more])


def load_plan(source: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a TOML file, or of a mapping with the same fields, with some fields changed.

    `changes` are dotted fields, such as {"layout.ep": 16}; None puts a field back to its default. Raises
    `FindingsError` where there is no plan to be had: an unreadable file, an unknown field, a draft. A memory budget
    becomes names. Whether its fields go together is for `check`.
    """
    parsed = parse(source, changes) if isinstance(source, Mapping) else read_plan(str(source), changes=changes)
    if parsed.plan is None or errors(parsed.findings):
        raise FindingsError(in_order([*parsed.findings, *free_findings(parsed.free)]))
    return resolve_recompute(resolve_exchange(parsed.plan))[0]


def for_our_engine(plan: Plan) -> Plan:
    """The plan as our engine runs it, whatever its target: with the choices made that only our engine has."""
    return plan if plan.target == OUR_ENGINE else resolve_exchange(change(plan, {"target": OUR_ENGINE}))


def on_measured_chip(plan: Plan, chip_file: str | None = None) -> Plan:
    """The plan with the facts and rates of a chip file, or with those that were measured on this machine.

    Raises where the file cannot be read or is about another chip. "none" leaves out what was measured here.
    """
    if chip_file is None:
        return priced_here(plan)
    if chip_file == NO_CHIP_FILE:
        return plan
    found, findings = read_chip_file(chip_file)
    if found is None or (findings := found.mismatch(plan.chip.plan_name)):
        raise FindingsError(in_order(findings))
    return found.applied(plan)


def check(plan: Plan, found: Iterable[Finding] = (), chip_file: str | None = None) -> Findings:
    """Every finding of the rules about a plan, errors first, each with a fix that was tried.

    `found` are findings of reading the plan, which are judged along; notes are left out where some of them are errors.
    `chip_file` is that of `estimate`.
    """
    before = list(found)
    plan = on_measured_chip(plan, chip_file)
    return Findings(in_order(with_fixes(plan, [*before, *judge(plan, notes=not errors(before))])))


def judged_estimate(plan: Plan, skew: float | None = None) -> tuple[Estimate, Findings]:
    """The estimate of a plan on its chip, and what the rules say about its memory. Raises what makes it impossible,
    because the estimate of an impossible plan misleads."""
    found = check_rules(plan)
    if blockers(found):
        raise FindingsError(in_order(found))
    return estimate_step(plan, skew=skew), Findings(one for one in found if one.rule in PREDICTED)


def estimate(plan: Plan, skew: float | None = None, chip_file: str | None = None) -> Estimate:
    """Memory by stage and term, time by term, throughput, and the wall, predicted.

    `skew` is the load of the busiest expert rank over the mean, in place of `job.load`. `chip_file` names measured
    facts and rates; without it those of `threefold calibrate` on this machine count, "none" leaves them out. Raises the
    rules' errors.
    """
    return judged_estimate(on_measured_chip(plan, chip_file), skew)[0]


def estimate_training(
    plan: Plan,
    tokens: float,
    price: float | None = None,
    assumed: Mapping[str, float] | None = None,
    chip_file: str | None = None,
) -> TrainingRun:
    """What a whole training takes: days, GPU-hours, energy, money, checkpoints, host memory, and what failures leave.

    `price` is of a GPU-hour, in any currency. `assumed` replaces figures about the cluster by name
    (`threefold.spec.chip_description.Operations`), such as {"gpu_mtbf_hours": 20_000}.
    """
    _check_figures(tokens, price, assumed or {})
    plan = on_measured_chip(plan, chip_file)
    return training_run(plan, judged_estimate(plan)[0], tokens, price, assumed)


def training_curve(
    plan: Plan,
    tokens: float,
    sizes: Sequence[int],
    price: float | None = None,
    assumed: Mapping[str, float] | None = None,
    chip_file: str | None = None,
) -> list[tuple[Point, TrainingRun | None]]:
    """The same training on clusters of other sizes: the plan there, and what it takes; None where rules refuse it.

    The layout stays, so that data parallelism grows. The global batch stays where it divides; elsewhere it is the
    nearest one that does.
    """
    _check_figures(tokens, price, assumed or {})
    points = sweep_fields(on_measured_chip(plan, chip_file), [{"cluster.gpus": size} for size in sizes]).points
    return [
        (point, training_run(point.plan, point.estimate, tokens, price, assumed) if point.estimate else None)
        for point in points
    ]


def sweep(plan: Plan, over: Mapping[str, Sequence[Any]], chip_file: str | None = None) -> Sweep:
    """Estimate a plan with one field at several values, such as {"job.seq_len": [4096, "32K"]}; a longer sequence takes
    more CP along. Raises where a value makes no plan, or where a memory budget of recompute is left open."""
    if len(over) != 1 or not all(over.values()):
        raise ValueError("one field is varied at a time, at one value at least")
    [(path, values)] = over.items()
    settings, findings = [], []
    for value in values:
        fields, wrong = normalize({path: value})
        settings.append(fields)
        if not (fields or wrong):
            problem = f"{shown(value)} sets no field of a plan, so there is nothing to vary"
            advice = "vary a field that `threefold schema` lists"
            wrong = [Finding(rule="known-value", at=path, problem=problem, advice=advice)]
        findings += [finding for finding in wrong if finding not in findings]
    if findings:
        raise FindingsError(in_order(findings))
    return sweep_fields(on_measured_chip(plan, chip_file), settings)


def _check_figures(tokens: float, price: float | None, assumed: Mapping[str, float]) -> None:
    if not 1 <= tokens <= MOST_TOKENS:  # false of NaN
        raise ValueError(f"{tokens} is no number of tokens")
    if price is not None and not 0 <= price <= 1e9:
        raise ValueError(f"{price} is no price of a GPU-hour")
    for name, value in assumed.items():
        if problem := problem_with(name, value):
            raise ValueError(f"{name}: {problem}")
