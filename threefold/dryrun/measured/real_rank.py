"""Builds and runs one rank of a plan with real tensors, in a fake process group whose collectives do nothing.

`measure`, `measure_peak_breakdown` and the benchmarks use it. Routing is forced to be balanced: the other ranks do not
exist, so this rank is assumed to receive as many rows from each of them as it sends there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from threefold.dryrun.optimizer_step import run_step
from threefold.dryrun.representatives import reduce_microbatches
from threefold.dryrun.simulated.process_group import fake_process_group
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.build import Parts, build
from threefold.engine.dispatch import split_sizes
from threefold.engine.dist.collectives import all_to_all
from threefold.engine.dist.mesh import Mesh
from threefold.plan.parse import change
from threefold.plan.plan import Plan


def with_balanced_routing(plan: Plan) -> Plan:
    """The plan with `job.routing` set to forced-balance, which assigns tokens to experts in turn."""
    if plan.model.moe is None or plan.job.routing == "forced-balance":
        return plan
    return change(plan, {"job.routing": "forced-balance"})


@contextmanager
def real_rank(plan: Plan, rank: int, device: torch.device) -> Iterator[tuple[Parts, Plan]]:
    """The parts of the rank, and the plan with the microbatches to run."""
    reduced = reduce_microbatches(with_balanced_routing(plan), plan.layout.coordinate("pp", rank))
    with fake_process_group(rank, plan.layout.gpus), _echo_row_counts():
        mesh = Mesh(reduced.layout, rank, device)
        yield build(reduced, mesh, with_data=False, with_weights=True), reduced


def run_real_step(parts: Parts, reduced: Plan, plan: Plan, origins: OriginTracker | None = None) -> None:
    """Run the microbatches of the `reduced` plan, with all batches of `plan` on the device."""
    run_step(parts, reduced, origins or OriginTracker(), plan.num_microbatches)


@contextmanager
def _echo_row_counts() -> Iterator[None]:
    """Copy the row counts that this rank sends to where it expects those of the other ranks.

    The host reads split sizes from that tensor, and some releases of torch's fake process group leave it unwritten.
    """
    fake_all_to_all = split_sizes.all_to_all

    def copy_then_call(out: Tensor, x: Tensor, *rest: Any) -> Any:
        out.copy_(x)
        return fake_all_to_all(out, x, *rest)

    with mock.patch.object(split_sizes, all_to_all.__name__, copy_then_call):
        yield
