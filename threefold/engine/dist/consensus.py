"""Runs an action on ranks and makes all of them agree on its outcome: it succeeded, or all ranks raise the same error.

Checkpoints and the start of a run use this: one rank's full disk must end the run on every rank with one finding
(`threefold/findings.py`, the report of a problem to the user). The calls here are not observed by the watchdog, because
a slow disk is no hang. They need a group of their own on the CPU, because a background thread may send through it while
a step communicates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from threefold.engine.dist.mesh import Group
from threefold.findings import Finding, FindingsError


class RankFailedError(Exception):
    """An action failed on some rank. The message travels between ranks as text: exceptions cannot always be pickled."""


@dataclass(frozen=True)
class Outcome:
    """The result of an action, or how it failed."""

    value: Any = None
    problem: str | None = None  # the message of an unexpected error
    findings: tuple[Finding, ...] = ()  # of a FindingsError

    def result(self) -> Any:
        """Return the value, or raise what the action raised."""
        if self.findings:
            raise FindingsError(self.findings)
        if self.problem is not None:
            raise RankFailedError(self.problem)
        return self.value


def capture_outcome(group: Group, action: Callable[[], Any]) -> Outcome:
    """Run `action` on this rank only and keep what it returned or raised. No communication."""
    where = "" if group.is_trivial else f"rank {group.ranks[group.rank]}: "
    try:
        return Outcome(action())
    except FindingsError as error:
        return Outcome(findings=tuple(error.findings))
    except RankFailedError as error:
        return Outcome(problem=str(error))
    except Exception as error:
        cause = _system_error(error)
        return Outcome(problem=f"{where}{cause}" if str(cause) else f"{where}{type(cause).__name__}")


def run_on_first_rank(group: Group, action: Callable[[], Any]) -> Any:
    """Run `action` on the first rank of the group; all ranks return what it returned, or raise what it raised."""
    if group.is_trivial:
        return capture_outcome(group, action).result()
    outcomes = [capture_outcome(group, action) if group.rank == 0 else None]
    dist.broadcast_object_list(outcomes, src=group.ranks[0], group=group.handle)
    [outcome] = outcomes
    assert outcome is not None
    return outcome.result()


def run_on_all_ranks(group: Group, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank. The first rank returns all results in the order of ranks, the others an empty list.

    Where the action failed on a rank, all ranks raise that error.
    """
    if group.is_trivial:
        return [capture_outcome(group, action).result()]
    mine = capture_outcome(group, action)
    outcomes: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(mine, outcomes, dst=group.ranks[0], group=group.handle)
    values: list[Any] = []
    run_on_first_rank(group, lambda: values.extend(outcome.result() for outcome in outcomes or ()))
    return values


def check_alike_on_ranks(group: Group, what: str, at: str, look: Callable[[], Any]) -> None:
    """Raise on all ranks, as one finding, where what a rank sees is not what the first rank sees.

    What ranks read from disk decides how they continue; where they see other files they would continue differently.
    """
    seen = run_on_all_ranks(group, look)

    def compare() -> None:
        other = next((rank for rank, each in zip(group.ranks, seen, strict=True) if each != seen[0]), None)
        if other is not None:
            problem = f"rank {other} sees other {what} than rank {group.ranks[0]}"
            problem += _differing_keys(seen[0], seen[group.ranks.index(other)])
            advice = "put it where all ranks see the same files, or make the copies the same"
            raise FindingsError([Finding(rule="ranks-see-the-same", at=at, problem=problem, advice=advice)])

    run_on_first_rank(group, compare)


def _differing_keys(one: Any, other: Any) -> str:
    """The keys whose values differ, in words, of two dicts; nothing for other values."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    return f": {', '.join(sorted(key for key in {*one, *other} if one.get(key) != other.get(key)))}"


def _system_error(failure: BaseException) -> BaseException:
    """The operating system's error that caused a failure, such as a full disk: torch raises errors of its own on top."""
    error: BaseException | None = failure
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error or failure
