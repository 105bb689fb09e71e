"""Ranks that act and then know the same: either it went well on all of them, or all raise the same.

For what happens outside steps, such as checkpoints. These calls are not observed: a slow disk is no hang, and what a
background thread sends belongs to no step. They need a group of their own, on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from threefold.engine.mesh import Group
from threefold.findings import Finding, FindingsError


class ElsewhereError(Exception):
    """Something went wrong on a rank, in words: exceptions themselves do not always travel."""


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    problem: str | None = None
    findings: tuple[Finding, ...] = ()

    def get(self) -> Any:
        if self.findings:
            raise FindingsError(self.findings)
        if self.problem is not None:
            raise ElsewhereError(self.problem)
        return self.value


def attempt(group: Group, act: Callable[[], Any]) -> Outcome:
    where = "" if group.alone else f"rank {group.ranks[group.rank]}: "
    try:
        return Outcome(act())
    except FindingsError as error:
        return Outcome(findings=tuple(error.findings))
    except ElsewhereError as error:
        return Outcome(problem=str(error))
    except Exception as error:
        cause = _cause(error)
        return Outcome(problem=f"{where}{cause}" if str(cause) else f"{where}{type(cause).__name__}")


def first(group: Group, act: Callable[[], Any]) -> Any:
    """The first rank acts; all return what it returned."""
    if group.alone:
        return attempt(group, act).get()
    told = [attempt(group, act) if group.rank == 0 else None]
    dist.broadcast_object_list(told, src=group.ranks[0], group=group.handle)
    [outcome] = told
    assert outcome is not None
    return outcome.get()


def each(group: Group, act: Callable[[], Any]) -> list[Any]:
    """Every rank acts; the first returns what all returned, by rank, the others nothing."""
    if group.alone:
        return [attempt(group, act).get()]
    mine = attempt(group, act)
    told: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(mine, told, dst=group.ranks[0], group=group.handle)
    values: list[Any] = []
    first(group, lambda: values.extend(outcome.get() for outcome in told or ()))
    return values


def _cause(failure: BaseException) -> BaseException:
    """What the system said, such as a full disk: torch's archive fails over it once more."""
    error: BaseException | None = failure
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error or failure
