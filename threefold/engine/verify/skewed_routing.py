"""Routers whose logits are shifted by the log shares of `job.load`, so that natural routing is as uneven as the load.

The oracle does so on both of its sides. A constant in the logits changes no gradient but by the choice that it makes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from threefold.engine.build import Parts
from threefold.plan.load import expert_shares
from threefold.plan.plan import Plan

_LEAST = 1e-4  # of the share of an expert, so that its logit is a number


class SkewedRouters:
    """Shifts the logits of all routers of a rank.

    The source rank of a token is the rank of its microbatch in data parallelism. One rank has the microbatches of all
    `num_sources` of them in turn, and counts them from the beginning of a step.
    """

    def __init__(self, parts: Parts, plan: Plan, num_sources: int) -> None:
        self.plan, self.num_sources, self.step = plan, num_sources, 0
        self._calls: list[list[int]] = []  # of each router, since the step began
        self.source = parts.mesh.coordinate("dp") if plan.layout.gpus > 1 else None
        for model in parts.chunks.values():
            for number, router in zip(model.router_numbers, model.routers(), strict=True):
                self._calls.append([0])
                router.logits = partial(  # type: ignore[method-assign]
                    self._shifted, router.logits, number, self._calls[-1]
                )
                self.num_experts, self.top_k = router.spec.num_experts, router.spec.top_k
        if parts.copies:
            first = parts.chunks[min(parts.chunks)]
            means = [self._mean_shares(number) for number in range(first.num_routers)]
            parts.copies.observe([[round(1e6 * share) for share in row] for row in means])

    def begin_step(self, step: int) -> None:
        """Count from here on: an evaluation may lie between two steps, with other microbatches."""
        self.step = step
        for calls in self._calls:
            calls[0] = 0

    def _mean_shares(self, number: int) -> list[float]:
        rows = [self._shares(number, source) for source in range(self.num_sources)]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def _shares(self, number: int, source: int) -> list[float]:
        return expert_shares(self.plan.job.load, self.num_experts, number, self.step, source, self.top_k)

    def _shifted(self, logits: Callable[[Tensor], Tensor], number: int, calls: list[int], x_TD: Tensor) -> Tensor:
        source = calls[0] % self.num_sources if self.source is None else self.source
        calls[0] += 1
        shares_E = torch.tensor(self._shares(number, source), dtype=torch.float64).clamp(min=_LEAST)
        y_TE = logits(x_TD)
        return y_TE + (shares_E * len(shares_E)).log().to(y_TE)


def skew_routers(parts: Parts, plan: Plan, num_sources: int) -> SkewedRouters | None:
    """Shift the logits by the load of the plan; None where it is balanced or no router chooses."""
    is_skewed = plan.job.load != "balanced" and plan.model.is_moe and plan.job.routing == "learned"
    return SkewedRouters(parts, plan, num_sources) if is_skewed else None
