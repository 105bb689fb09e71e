"""Tuning from the library and from `threefold tune`: changes of a plan, measured on this machine or from logs of jobs.

Torch loads with the function that measures here.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threefold.api.plans import for_our_engine, on_measured_chip
from threefold.api.trainings import training_errors
from threefold.compare.contract import PRECISION_FIELDS
from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.interop.megatron.export_plan import BRIDGE
from threefold.launch.slurm import Options
from threefold.machine.inventory import this_machine
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.tune.labels import ALL_RANKS, check_same_contract, contract_of, is_changeable
from threefold.tune.ledger import open_ledger
from threefold.tune.log_measurer import LogMeasurer
from threefold.tune.loop import Settings, Tuned, tune
from threefold.tune.measurement import Measurer
from threefold.tune.recalibrate import measured_plans, recalibrate
from threefold.tune.result import write_card, write_winner
from threefold.units import format_many


def tune_plan(
    plan: Plan,
    folder: str | Path,
    budget: float = 480.0,
    trials: int | None = None,
    tries: Sequence[Mapping[str, Any]] = (),
    keep: Iterable[str] = (),
    formats: bool = False,
    rank: int | None = None,
    launcher: Sequence[str] = (),
    job: Options | None = None,
    name: str = "plan.toml",
    command: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Measure changes of a plan one variable at a time, and keep what is certainly faster; the same call resumes.

    `budget` are seconds, `trials` the changes that are tried at most, `tries` changes of your own. `keep` are fields
    left alone; `formats` tries other formats of numbers too. `rank` runs alone with rehearsed peers; `launcher` are
    the words that start one process a rank on a cluster. A plan for Megatron Bridge is measured by jobs of Slurm
    (`job`), which have the plan's `name`; raises AwaitingLogs where their logs are not there yet. `command` is the
    command line, for a card of the result. Raises what the rules refuse.
    """
    is_foreign, tell, folder = plan.target == BRIDGE, say or (lambda line: None), Path(folder)
    plan = on_measured_chip(plan if is_foreign else for_our_engine(plan))
    if blocking := training_errors(plan):
        raise FindingsError(blocking)
    ranks = ALL_RANKS if is_foreign else _ranks(plan, rank, bool(launcher))
    here = None if is_foreign else this_machine(try_kernels=False)
    if problems := [finding for path in keep for finding in _unknown(path)]:
        raise FindingsError(problems)
    kept = frozenset(keep) | (frozenset() if formats else frozenset(PRECISION_FIELDS))
    # Foreign jobs run elsewhere, so that no budget of time applies.
    settings = Settings(math.inf if is_foreign else budget, trials, tuple(tries), kept)
    tell(f"trials are kept in {folder}")
    with open_ledger(folder) as ledger:
        contract = contract_of(plan, here, settings.screen, settings.confirm, plan.job.seed, ranks)
        if (before := ledger.contract) is None:
            ledger.set_fact("contract", contract)
        else:
            check_same_contract(before, json.loads(json.dumps(contract)), str(folder))
        measurer: Measurer = (
            LogMeasurer(folder, name, job or Options()) if is_foreign else _own_measurer(folder, rank, launcher)
        )
        try:
            found = tune(plan, contract, ledger, measurer, settings, tell)
        finally:
            measurer.close()
        write_winner(found, folder)
        if command and not is_foreign:  # nobody here can measure it again
            write_card(found, folder, command)
        if rank is None and not is_foreign and ledger.fact("calibrated") != len(found.trials):
            if said := recalibrate(plan.cluster.chip, measured_plans(ledger)):
                tell(said)
            ledger.set_fact("calibrated", len(found.trials))
    return found


def read_tuning(folder: str | Path) -> dict[str, Any]:
    """The contract, verdicts and trials in the folder of a tuning."""
    with open_ledger(Path(folder), create=False) as ledger:
        trials = [row.to_json() for row in ledger.trials()]
        return {"contract": ledger.contract, "verdicts": ledger.verdicts(), "trials": trials}


def _own_measurer(folder: Path, rank: int | None, launcher: Sequence[str]) -> Measurer:
    from threefold.tune.engine_measurer import EngineMeasurer

    return EngineMeasurer(folder / "processes", rank, list(launcher))


def _ranks(plan: Plan, rank: int | None, is_launched: bool) -> str:
    """Which ranks run, in the words of the contract. Each needs a device."""
    from threefold.engine.dist.join import check_ranks_start_here

    if rank is not None:
        if rank >= plan.cluster.gpus:
            problem = f"rank {rank} is not among {format_many(plan.cluster.gpus, 'rank')}"
            raise FindingsError(
                [Finding(rule="ranks-start-here", at="--rank", problem=problem, advice="choose another")]
            )
        return f"rank {rank} of {plan.cluster.gpus} with rehearsed peers"
    if not is_launched:
        advice = "run one rank with rehearsed peers (--rank 0), or all on a cluster (--launcher srun, threefold launch)"
        check_ranks_start_here(plan, advice)
    return ALL_RANKS


def _unknown(path: str) -> list[Finding]:
    """A finding where no trial changes the field, so that a misspelt one does not go unseen."""
    changeable = [name for name in FIELDS if is_changeable(name)]
    if path in changeable:
        return []
    advice = did_you_mean(path, changeable) or "name a field of layout, knobs or run, or job.micro_batch"
    return [Finding(rule="unknown-field", at="--keep", problem=f"{path} is no field that trials change", advice=advice)]
