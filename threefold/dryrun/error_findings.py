"""Turns an exception of the engine or of torch during a rehearsal into a finding that says where it happened."""

from collections.abc import Iterator
from contextlib import contextmanager

from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan


@contextmanager
def errors_as_findings(plan: Plan, rank: int, origins: OriginTracker) -> Iterator[None]:
    """Raise any exception of the block as a `FindingsError` with rank, stage, phase and module; findings pass."""
    try:
        yield
    except FindingsError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        finding = Finding(
            rule="rehearsal-runs",
            at=f"rank {rank}, stage {plan.layout.coordinate('pp', rank)}: {origins.failed_at or origins.current()}",
            problem=f"the engine stopped: {type(error).__name__}: {lines[0][:300]}",
            advice="the plan cannot train as it is; change what the place names, or report it with the plan",
        )
        raise FindingsError([finding]) from error
