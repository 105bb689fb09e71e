"""One call of a function, recorded as two CUDA graphs (forward and backward) behind one autograd node.

The gradients of parameters come out of the replayed backward as from any autograd function, so that accumulation and
the reduction over ranks see no difference. While a graph is recorded, modules use aliases of their parameters: the
graph then holds no autograd state of the parameters themselves. `GraphedPart` makes and calls these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.graphs.graph_slot import GraphSlot
from threefold.engine.graphs.recorder import Graph
from threefold.findings import Finding, FindingsError

Function = Callable[..., tuple[Tensor, ...]]


@contextmanager
def use_aliases(modules: Sequence[nn.Module], aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Let modules use the aliases of their parameters inside the `with` block."""
    every = [submodule for module in modules for submodule in module.modules()]
    replaced = [(owner, name, p) for owner in every for name, p in owner._parameters.items() if p is not None]
    replaced = [(owner, name, p) for owner, name, p in replaced if p in aliases]
    for owner, name, p in replaced:
        owner._parameters[name] = aliases[p]
    try:
        yield
    finally:
        for owner, name, p in replaced:
            owner._parameters[name] = p


def make_aliases(modules: Sequence[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """A parameter of its own that shares the memory of each trained parameter."""
    trained = (p for module in modules for p in module.parameters() if p.requires_grad)
    return {p: nn.Parameter(p.detach()) for p in trained}


class GraphedFunction:
    """A recorded call. The backward is recorded when it first runs; the slot keeps two calls from overlapping."""

    def __init__(
        self, slot: GraphSlot, function: Function, modules: Sequence[nn.Module], inputs: Sequence[Tensor]
    ) -> None:
        self.slot, self._function, self._modules = slot, function, modules
        self._aliases = make_aliases(modules)
        self.weights = list(self._aliases)
        self._addresses = [p.data_ptr() for p in self.weights]
        self._static_inputs = [slot.make_static(x).requires_grad_(x.requires_grad) for x in inputs]
        self._live_outputs: Sequence[Tensor] = []
        self._outputs, self._forward = slot.recorder.record(self._run)
        self.outputs_need_grad = [x.requires_grad for x in self._live_outputs]
        slot.add_owned(self._outputs)
        self._backward: Graph | None = None
        self._static_output_grads: list[Tensor | None] = []
        self._static_grads: list[Tensor | None] = []

    @property
    def has_backward_graph(self) -> bool:
        return self._backward is not None

    def mismatch(self, inputs: Sequence[Tensor]) -> tuple[str, str] | None:
        """The reason and a detail where the graph cannot be replayed with these inputs; None where it can."""
        for x, static_input in zip(inputs, self._static_inputs, strict=True):
            if x.shape != static_input.shape:
                return "another shape", f"{tuple(x.shape)}, recorded with {tuple(static_input.shape)}"
            if x.dtype != static_input.dtype or x.device != static_input.device:
                return "another dtype or device", f"{x.dtype} on {x.device}"
            if x.requires_grad != static_input.requires_grad:
                return "another need of gradients", ""
        if [p.data_ptr() for p in self.weights] != self._addresses:
            return "a parameter moved", ""
        return None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _Replay.apply(self, *inputs, *self.weights)
        return made

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for x, static_input in zip(inputs, self._static_inputs, strict=False):
            _copy_into(static_input, x)
        self._forward.replay()
        self.slot.num_in_flight += 1
        return tuple(x.detach() for x in self._outputs)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, then those of the weights, from the gradients of the outputs."""
        self.slot.num_in_flight -= 1
        if self._backward is None:
            self._static_output_grads = [None if grad is None else self.slot.make_static(grad) for grad in grads]
            self._static_grads, self._backward = self._record_backward()
            self.slot.add_owned(grad for grad in self._static_grads[: len(self._static_inputs)] if grad is not None)
        else:
            for static_grad, grad in zip(self._static_output_grads, grads, strict=True):
                assert static_grad is not None or grad is None, "a gradient where there was none when this was recorded"
                if static_grad is not None:
                    static_grad.zero_() if grad is None else _copy_into(static_grad, grad)
        self._backward.replay()
        return [None if grad is None else grad.detach() for grad in self._static_grads]

    def _run(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), use_aliases(self._modules, self._aliases):
            self._live_outputs = self._function(*self._static_inputs)
        return tuple(x.detach() for x in self._live_outputs)

    def _record_backward(self) -> tuple[list[Tensor | None], Graph]:
        try:
            return self.slot.recorder.record(self._run_backward)
        except RuntimeError as error:
            problem = f"a backward could not be recorded: {str(error).partition(chr(10))[0]}"
            advice = "train without graphs: knobs.graphs = []"
            found = Finding(rule="graph-records-backward", at="knobs.graphs", problem=problem, advice=advice)
            raise FindingsError([found]) from error

    def _run_backward(self) -> list[Tensor | None]:
        pairs = zip(self._live_outputs, self._static_output_grads, strict=True)
        outputs, output_grads = zip(*((x, grad) for x, grad in pairs if grad is not None), strict=True)
        self._live_outputs = []
        leaves = [x for x in (*self._static_inputs, *self._aliases.values()) if x.requires_grad]
        grads = iter(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True))
        input_grads = [next(grads) if x.requires_grad else None for x in self._static_inputs]
        return [*input_grads, *grads]

    def copy_grads_out(self) -> None:
        """Copy gradients of the last microbatch that still lie in the slot's memory, which the next one overwrites."""
        static_grads = self._static_grads[len(self._static_inputs) :]
        for p, static in zip(self.weights, static_grads, strict=self.has_backward_graph):
            if p.grad is not None and static is not None and p.grad.data_ptr() == static.data_ptr():
                p.grad = p.grad.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: GraphedFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        outputs = graphed.forward(tensors)
        needs_grad = zip(outputs, graphed.outputs_need_grad, strict=True)
        ctx.mark_non_differentiable(*(x for x, needed in needs_grad if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphed.backward(grads)


def _copy_into(static_input: Tensor, x: Tensor) -> None:
    if x.data_ptr() != static_input.data_ptr():
        # Through `.data`, so that the version counter stays and a backward that is still to be recorded does not fail.
        static_input.data.copy_(x)
