"""The same rank with real tensors: the collectives keep shapes and return at once, everything else is done.

Routing must be balanced by force: what other ranks would send is not known, and is taken to be what is sent to them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from threefold.dryrun.fewer import fewer_microbatches
from threefold.dryrun.step import step
from threefold.dryrun.where import Where
from threefold.dryrun.world import fake_ranks
from threefold.engine.build import Parts, build
from threefold.engine.dispatch import splits
from threefold.engine.mesh import Mesh
from threefold.plan.parse import change
from threefold.plan.plan import Plan


def balanced(plan: Plan) -> Plan:
    """The plan with experts in turn."""
    if plan.model.moe is None or plan.job.routing == "forced-balance":
        return plan
    return change(plan, {"job.routing": "forced-balance"})


@contextmanager
def real_rank(plan: Plan, rank: int, device: torch.device) -> Iterator[tuple[Parts, Plan]]:
    """Built, with the plan of the microbatches to run."""
    small = fewer_microbatches(balanced(plan), plan.layout.coordinate("pp", rank))
    with fake_ranks(rank, plan.layout.gpus), _counts_come_back():
        mesh = Mesh(small.layout, rank, device)
        yield build(small, mesh, with_data=False, with_weights=True), small


def real_step(parts: Parts, small: Plan, plan: Plan, where: Where | None = None) -> None:
    step(parts, small, where or Where(), plan.num_microbatches)


@contextmanager
def _counts_come_back() -> Iterator[None]:
    """Sizes are read from what an exchange brought: not every release of torch's fake group writes anything there."""
    before = splits.all_to_all

    def exchange(out: Tensor, x: Tensor, *rest: Any) -> Any:
        out.copy_(x)
        return before(out, x, *rest)

    with mock.patch.object(splits, "all_to_all", exchange):
        yield
