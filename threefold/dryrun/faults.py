"""What goes wrong in a rehearsal, as findings: where, why, and what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

from threefold.dryrun.where import Where
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan


@contextmanager
def told(plan: Plan, rank: int, where: Where) -> Iterator[None]:
    """An error of the engine or of torch becomes a finding that says where; findings pass."""
    try:
        yield
    except FindingsError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        finding = Finding(
            rule="rehearsal-runs",
            at=f"rank {rank}, stage {plan.layout.coordinate('pp', rank)}: {where.failed or where()}",
            problem=f"the engine stopped: {type(error).__name__}: {said[0][:300]}",
            advice="the plan cannot train as it is; change what the place names, or report it with the plan",
        )
        raise FindingsError([finding]) from error
