"""One run of a function, recorded forward and backward.

Gradients of parameters come out of a backward's replay as those of any function do, so that whoever waits for them
(accumulation, reduction over ranks) sees no difference. While it is recorded a parameter is seen through an alias:
nothing of the stream that trains gets into the graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.graphs.lane import Lane
from threefold.engine.graphs.record import Graph
from threefold.findings import Finding, FindingsError

Function = Callable[..., tuple[Tensor, ...]]


@contextmanager
def swapped(modules: Sequence[nn.Module], aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Modules use the aliases of their parameters."""
    every = [one for module in modules for one in module.modules()]
    held = [(one, name, p) for one in every for name, p in one._parameters.items() if p is not None and p in aliases]
    for one, name, p in held:
        one._parameters[name] = aliases[p]
    try:
        yield
    finally:
        for one, name, p in held:
            one._parameters[name] = p


def aliases_of(modules: Sequence[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    trained = (p for module in modules for p in module.parameters() if p.requires_grad)
    return {p: nn.Parameter(p.detach()) for p in trained}


class Recorded:
    """Its backward is recorded when it is first wanted. Two runs never overlap: the lane sees to that."""

    def __init__(self, lane: Lane, function: Function, modules: Sequence[nn.Module], given: Sequence[Tensor]) -> None:
        self.lane, self._function, self._modules = lane, function, modules
        self._aliases = aliases_of(modules)
        self.weights = list(self._aliases)
        self._addresses = [p.data_ptr() for p in self.weights]
        self._inputs = [lane.fixed(x).requires_grad_(x.requires_grad) for x in given]
        self._live: Sequence[Tensor] = []
        self._outputs, self._forward = lane.recorder.record(self._run)
        self.wants = [x.requires_grad for x in self._live]
        lane.own(self._outputs)
        self._backward: Graph | None = None
        self._grads: list[Tensor | None] = []
        self._made: list[Tensor | None] = []

    @property
    def complete(self) -> bool:
        return self._backward is not None

    def differs(self, given: Sequence[Tensor]) -> tuple[str, str] | None:
        """Reason and detail where the graph does not hold for these."""
        for x, fixed in zip(given, self._inputs, strict=True):
            if x.shape != fixed.shape:
                return "another shape", f"{tuple(x.shape)}, recorded with {tuple(fixed.shape)}"
            if x.dtype != fixed.dtype or x.device != fixed.device:
                return "another dtype or device", f"{x.dtype} on {x.device}"
            if x.requires_grad != fixed.requires_grad:
                return "another need of gradients", ""
        if [p.data_ptr() for p in self.weights] != self._addresses:
            return "a parameter moved", ""
        return None

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _Replay.apply(self, *given, *self.weights)
        return made

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for x, fixed in zip(given, self._inputs, strict=False):
            _fill(fixed, x)
        self._forward.replay()
        self.lane.in_flight += 1
        return tuple(x.detach() for x in self._outputs)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the inputs, then of the weights."""
        self.lane.in_flight -= 1
        if self._backward is None:
            self._grads = [None if grad is None else self.lane.fixed(grad) for grad in grads]
            self._made, self._backward = self._record_back()
            self.lane.own(grad for grad in self._made[: len(self._inputs)] if grad is not None)
        else:
            for fixed, grad in zip(self._grads, grads, strict=True):
                assert fixed is not None or grad is None, "a gradient where there was none when this was recorded"
                if fixed is not None:
                    fixed.zero_() if grad is None else _fill(fixed, grad)
        self._backward.replay()
        return [None if grad is None else grad.detach() for grad in self._made]

    def _run(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), swapped(self._modules, self._aliases):
            self._live = self._function(*self._inputs)
        return tuple(x.detach() for x in self._live)

    def _record_back(self) -> tuple[list[Tensor | None], Graph]:
        try:
            return self.lane.recorder.record(self._run_back)
        except RuntimeError as error:
            problem = f"a backward could not be recorded: {str(error).partition(chr(10))[0]}"
            advice = "train without graphs: knobs.graphs = []"
            found = Finding(rule="graph-records-backward", at="knobs.graphs", problem=problem, advice=advice)
            raise FindingsError([found]) from error

    def _run_back(self) -> list[Tensor | None]:
        ends = [(x, grad) for x, grad in zip(self._live, self._grads, strict=True) if grad is not None]
        self._live = []
        wanted = [x for x in (*self._inputs, *self._aliases.values()) if x.requires_grad]
        outputs, slopes = zip(*ends, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, slopes, allow_unused=True))
        inputs = [next(found) if x.requires_grad else None for x in self._inputs]
        return [*inputs, *found]

    def make_room(self) -> None:
        """Gradients of the microbatch before may still lie in the lane, whose memory the next one uses."""
        for p, made in zip(self.weights, self._made[len(self._inputs) :], strict=self.complete):
            if p.grad is not None and made is not None and p.grad.data_ptr() == made.data_ptr():
                p.grad = p.grad.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Recorded, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.one = one
        ctx.set_materialize_grads(False)
        outputs = one.forward(tensors)
        plain = [x for x, wants in zip(outputs, one.wants, strict=True) if not wants]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.one.backward(grads)


def _fill(fixed: Tensor, x: Tensor) -> None:
    if x.data_ptr() != fixed.data_ptr():
        fixed.data.copy_(x)  # unnoticed by autograd: a backward yet to be recorded finds its tensors unchanged
