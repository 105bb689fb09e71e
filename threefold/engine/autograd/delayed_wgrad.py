"""Delayed weight gradients: the backward puts weight-gradient GEMMs into a queue, which the schedule runs later.

Zero-bubble schedules and `delay_wgrad` enter a `WgradQueue` around the passes of one microbatch and call `finish` when
there is time. torch's own split of the backward walks the autograd graph twice, and so it runs every custom Function
with a weight twice, with the collectives and the recompute inside. Here the backward runs once, and only the GEMMs of
weight gradients are left for later (`linear.py`, `linear.py`, `precision/low_precision_linear.py`,
`kernels/`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.engine.autograd.main_grad import main_grad_of
from threefold.engine.context import context, count_event

# A weight as the GEMM used it (a parameter or a view of one), and a function that computes its gradient. The function
# returns None where it has added the gradient to the weight's `main_grad`.
DelayedWgrad = tuple[Tensor, Callable[[], Tensor | None]]


class WgradQueue:
    """The delayed weight gradients of one microbatch.

    It is a context manager: weight gradients of forwards that run inside the `with` block go into `pending` during
    their backward. `finish` computes them, and the hooks of the weights fire then.
    """

    def __init__(self) -> None:
        self.pending: list[DelayedWgrad] = []
        self.weights: list[Tensor] = []  # of the forwards so far: those whose gradients come from here
        self._outer_queues: list[Any] = []  # a stack, as one queue may be entered while it is entered

    def __enter__(self) -> None:
        self._outer_queues.append(context.wgrad_queue)
        context.wgrad_queue = self

    def __exit__(self, *_: Any) -> None:
        context.wgrad_queue = self._outer_queues.pop()

    def finish(self) -> None:
        """Compute all gradients, one parameter after another: only one gradient and its inputs are alive at a time."""
        by_parameter = _group_by_parameter(self.pending)
        self.pending.clear()
        self.weights.clear()
        for delayed in by_parameter:
            with torch.enable_grad():
                roots = [_DelayedGrad.apply(*delayed.pop(0)) for _ in range(len(delayed))]
            # One call for all of them, so that the hook of a parameter that is used in several views fires once.
            torch.autograd.backward(roots, [root.detach() for root in roots])


def finish_in_backward(queue: WgradQueue, x: Tensor) -> Tensor:
    """`x`, in whose backward the queue is finished: after what used it, and before what made it."""
    return _FinishInBackward.apply(x, queue)


class _FinishInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: WgradQueue) -> Tensor:
        ctx.queue = queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        count_event("weight gradient", "during dispatch", len(ctx.queue.pending))
        ctx.queue.finish()
        return grad, None


def compute_wgrads(delayed: Sequence[DelayedWgrad]) -> dict[Tensor, Tensor]:
    """The gradients by parameter, without those that were added to a `main_grad`. `delayed` stays as it is."""
    grads: dict[Tensor, Tensor] = {}
    for group in _group_by_parameter(list(delayed)):
        parameter = parameter_of(group[0][0])
        assert parameter is not None
        with torch.enable_grad():
            roots = [_DelayedGrad.apply(*each) for each in group]
        ones = [root.detach() for root in roots]
        (grad,) = torch.autograd.grad(roots, [parameter], ones, allow_unused=True)
        if grad is not None:
            grads[parameter] = grad
    return grads


def _group_by_parameter(delayed: list[DelayedWgrad]) -> list[list[DelayedWgrad]]:
    groups: dict[int, list[DelayedWgrad]] = {}
    for weight, compute in delayed:
        groups.setdefault(id(parameter_of(weight)), []).append((weight, compute))
    return list(groups.values())


class _DelayedGrad(torch.autograd.Function):
    """A node whose backward computes a weight's gradient. Nothing else refers to the result, so autograd need not
    copy it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor | None]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        compute, ctx.compute = ctx.compute, None
        return compute(), None


def open_queue_for(x: Tensor, weight: Tensor) -> list[DelayedWgrad] | None:
    """The list that the weight gradient of `x @ weight` belongs in; None computes it inside the backward."""
    queue = context.wgrad_queue
    if queue is None or not _can_delay(x, weight):
        return None
    queue.weights.append(weight)
    pending: list[DelayedWgrad] = queue.pending
    return pending


def _can_delay(x: Tensor, weight: Tensor) -> bool:
    """Only the gradient of a parameter or of a view of one can be delayed: a cast or gathered weight has a backward of
    its own, which must still run."""
    base = parameter_of(weight)
    if base is None or not base.is_leaf or x.dim() < 2:
        return False
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


def parameter_of(weight: Tensor) -> Tensor | None:
    """The parameter that a weight is, or is a view of."""
    return weight._base if weight._is_view() else weight


class WgradTarget(NamedTuple):
    """The destination of the gradient of one weight."""

    queue: list[DelayedWgrad] | None  # computed later, from this queue; None computes it inside the backward
    weight: Tensor
    main_grad: Tensor | None  # added to this buffer; None hands it to autograd


def wgrad_targets(x: Tensor, *weights: Tensor) -> tuple[list[Tensor], list[WgradTarget]]:
    """-> (the weights to hand to an autograd Function, a target for each of them).

    A weight whose gradient is delayed comes back detached, so that autograd expects no gradient from the Function.
    """
    targets = [WgradTarget(open_queue_for(x, weight), weight, main_grad_of(weight)) for weight in weights]
    return [weight if queue is None else weight.detach() for queue, weight, _ in targets], targets


def compute_or_delay(
    target: WgradTarget, wanted: bool, compute: Callable[[Tensor | None], Tensor | None]
) -> Tensor | None:
    """Call `compute(main_grad)` now, if autograd wants the gradient, or queue the call. -> the gradient for
    autograd."""
    queue, weight, main_grad = target
    if queue is None:
        return compute(main_grad) if wanted else None
    queue.append((weight, partial(compute, main_grad)))
    return None
