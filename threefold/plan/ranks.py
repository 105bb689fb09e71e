"""The rank that environment variables give this process, the memory of the machine that ranks on its CPU share, and a
plan moved to another number of ranks. No torch."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.units import format_many


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun or Slurm tells a process about itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this machine
    attempt: int = 0  # how often all ranks have been restarted
    agent_store: bool = False  # whether the agent that started this process hosts the store across restarts


def host_memory_bytes() -> int:
    """The memory of this machine; 0 where the system cannot be asked."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Read torchrun's variables, or those of a Slurm task; None in a process that neither of them started."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local = _number(environ, "LOCAL_RANK", rank)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The shell of a batch script has a SLURM_PROCID too, but only the tasks of srun have a step.
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
        local = _number(environ, "SLURM_LOCALID", 0)
        local_size = _tasks_here(environ) or size
        agent = False
    else:
        return None
    if not 0 <= rank < size:
        raise _refuse("RANK", f"rank {rank} is not among {format_many(size, 'rank')}")
    return RankEnvironment(
        rank, size, local, max(1, local_size), _number(environ, "TORCHELASTIC_RESTART_COUNT", 0), agent
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """The largest number of tasks on a node, from Slurm's notation such as `8(x4)` or `8,7`."""
    given = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return max((int(count) for count in re.findall(r"(?:^|,)(\d+)", given)), default=0)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    given = environ.get(name)
    if given is None and default is not None:
        return default
    if given is None or not given.strip().isdigit():
        problem = "not set, while its partner is" if given is None else f"{given!r} is no number"
        raise _refuse(name, problem)
    return int(given)


def _refuse(at: str, problem: str) -> FindingsError:
    advice = "let torchrun or srun set it, or unset it to train alone"
    return FindingsError([Finding(rule="ranks-meet", at=at, problem=problem, advice=advice)])


def on_ranks(plan: Plan, count: int, errors_of: Callable[[Plan], Iterable[Finding]]) -> Plan:
    """The plan on `count` ranks, if its layout and batch allow it. `errors_of` returns the rules' errors of a plan."""
    if count == plan.cluster.gpus:
        return plan
    unit = plan.layout.min_gpus
    if count < 1 or count % unit:
        near = sorted({max(unit, count // unit * unit), -(-max(1, count) // unit) * unit})
        advice = f"start {' or '.join(map(str, near))} ranks, or change the layout"
        raise _mismatch(plan, count, f"the layout takes whole multiples of {unit}", advice)
    changed = change(plan, {"cluster.gpus": count})
    before = {finding.rule for finding in errors_of(plan)}
    new = [finding for finding in errors_of(changed) if finding.rule not in before]
    if new:
        said = "; ".join(f"{finding.rule}: {finding.problem}" for finding in new)
        raise _mismatch(
            plan, count, said, f"start {format_many(plan.cluster.gpus, 'rank')}, or write a plan for {count}"
        )
    return changed


def _mismatch(plan: Plan, count: int, why: str, advice: str) -> FindingsError:
    problem = f"the plan is for {format_many(plan.cluster.gpus, 'rank')} and cannot run on {count}: {why}"
    return FindingsError([Finding(rule="ranks-match-plan", at="cluster.gpus", problem=problem, advice=advice)])
