"""What verbs that rehearse share: the plan as the engine runs it, the loads of its experts. No torch before it runs."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.cli.inputs import OUR_ENGINE, for_our_engine
from threefold.findings import Finding, FindingsError, in_order
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.rules.all import blockers, check, promoted
from threefold.rules.stacks import ENGINE_LIMITS
from threefold.safe_files import read_json
from threefold.units import GIB

if TYPE_CHECKING:
    from threefold.dryrun.simulated.expert_load import ExpertLoads
    from threefold.search.search import Candidate

LOADS = "loads.json"  # in the folder of a run
MOST_TOKENS = 1e18  # of an expert; sums stay far from where a float gives out


def as_the_engine_runs(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with what the engine lacks put back to defaults, and what that was, in words; raises what is left."""
    said = []
    if plan.target != OUR_ENGINE:
        said.append(f"target: Threefold's own engine is rehearsed, not {plan.target}, for which the plan is")
    plan = for_our_engine(plan)
    for finding in [f for f in check(plan, notes=False) if f.rule in ENGINE_LIMITS and f.fix_data]:
        plan = change(plan, finding.fix_data or {})
        said.append(f"{finding.at}: {finding.problem}")
    if plan.job.packing:
        plan = change(plan, {"job.packing": None})
        said.append("job.packing: a sequence is rehearsed as one document")
    if plan.job.dynamic_length:
        plan = change(plan, {"job.dynamic_length": None})
        said.append("job.dynamic_length: every microbatch has its full length")
    # Whether it fits is for the rehearsal to say, and where the memory goes if it does not.
    if wrong := [
        finding for finding in blockers(promoted(check(plan, notes=False))) if finding.rule != "states-fit-memory"
    ]:
        raise FindingsError(in_order(wrong))
    return plan, said


def loads_from(path: str | None, skew: float, plan: Plan) -> "tuple[ExpertLoads | None, str]":
    """How tokens fall on the experts, or what is wrong with what was given."""
    from threefold.dryrun.simulated.expert_load import ExpertLoads

    num_experts, ep = plan.model.num_experts, plan.layout.ep
    if skew != 1 and path is not None:
        return None, "--skew and --loads both say how tokens fall on the experts: give one"
    if problem := skew_problem(skew, ep):
        return None, problem
    if skew != 1:
        each = num_experts // ep
        return ExpertLoads((skew,) * each + ((ep - skew) / max(1, ep - 1),) * (num_experts - each)), ""
    if path is None:
        return None, ""
    shares, problem = shares_from(path, num_experts)
    return (None, problem) if problem else (ExpertLoads(shares), "")


def shares_from(path: str, num_experts: int) -> tuple[tuple[float, ...], str]:
    """Tokens of each expert, from a file or the folder of a run; or what is wrong."""
    file = Path(path) / LOADS if Path(path).is_dir() else Path(path)
    try:
        rows = read_json(file)
    except OSError as error:
        return (), f"--loads {file}: {error.strerror or error}"
    except ValueError as error:
        return (), f"--loads {file}: {error}"
    by_layer = rows if isinstance(rows, list) and rows and isinstance(rows[0], list) else [rows]
    right = all(isinstance(row, list) and len(row) == num_experts and all(map(_is_load, row)) for row in by_layer)
    shares = tuple(float(sum(column)) for column in zip(*by_layer, strict=True)) if right else ()
    if not any(shares):
        return (), f"--loads {file} has no {num_experts} loads, one an expert: numbers from 0 to {MOST_TOKENS:g}"
    return shares, ""


def _is_load(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST_TOKENS  # false of NaN


def skew_problem(skew: float, ep: int) -> str:
    """What is wrong with a skew: the busiest rank has at least the mean, and at most what all have together."""
    return "" if 1 <= skew <= ep else f"--skew {skew:g} is not between 1 and EP {ep}"


def progress() -> Callable[[str], None] | None:
    """A line that is written over, where somebody looks."""
    if not sys.stderr.isatty():
        return None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def verdict_of(plan: Plan) -> list[Finding]:
    """What a rehearsal of every stage says; a warning for each thing it left out."""
    from threefold.dryrun.rehearse_plan import rehearse

    runs, said = as_the_engine_runs(plan)
    try:
        found = rehearse(runs, say=progress())
    finally:
        end_progress()
    left_out = [
        Finding(
            at=text.partition(":")[0], problem=f"left out of the rehearsal: {text}", severity="warning", rule=PARTLY
        )
        for text in said
    ]
    return [*found.findings, *left_out]


PARTLY = "rehearsal-is-whole"


@dataclass(frozen=True)
class Rehearsed:
    """A candidate's fullest stage, or why there is none."""

    place: int  # in the order of the search, from 1
    fits: bool
    device_bytes: float | None
    said: str

    def to_json(self) -> dict[str, Any]:
        size = None if self.device_bytes is None else round(self.device_bytes)
        return {"level": "rehearsed", "candidate": self.place, "fits": self.fits, "device_bytes": size, "at": self.said}


def rehearse_first(candidates: Sequence["Candidate"], count: int) -> tuple[list["Candidate"], list[Rehearsed]]:
    """The first `count`, each on the stage predicted to be the fullest; those that do not fit go last of them."""
    from threefold.dryrun.rehearse_plan import rehearse

    seen: list[tuple[Rehearsed, Candidate]] = []
    say = progress()
    for place, one in enumerate(candidates[:count], 1):
        if say:
            say(f"rehearsing candidate {place} of {min(count, len(candidates))}")
        try:
            plan, _ = as_the_engine_runs(one.plan)
            found = rehearse(plan, [one.estimate.memory.worst.stage * plan.layout.stride("pp")])
            verdict = Rehearsed(
                place, not found.findings, found.device_bytes, f"stage {found.worst.stage}: {found.worst.at}"
            )
        except FindingsError as error:
            verdict = Rehearsed(place, False, None, f"cannot be rehearsed: {error.findings[0].problem}")
        seen.append((verdict, one))
    end_progress()
    in_order = sorted(seen, key=lambda pair: not pair[0].fits)
    return [*(one for _, one in in_order), *candidates[count:]], [verdict for verdict, _ in in_order]


def rehearsed_text(seen: Sequence[Rehearsed], candidates: Sequence["Candidate"]) -> str:
    rows = []
    for place, (one, candidate) in enumerate(zip(seen, candidates, strict=False), 1):
        size = "-" if one.device_bytes is None else f"{one.device_bytes / GIB:.1f}"
        guess = f"{candidate.estimate.memory.device_bytes / GIB:.1f}"
        rows.append([str(place), str(one.place), size, guess, "fits" if one.fits else "does not fit", one.said])
    header = ["#", "was", "GiB rehearsed", "estimated", "", "where it is fullest"]
    return f"rehearsed on this engine\n{table(header, rows)}"
