"""One call of a function, recorded as two or three CUDA graphs behind one autograd node.

The graphs are the forward, the backward and, where a schedule delays them (zero-bubble, `delay_wgrad`), the weight
gradients. The gradients of parameters come out of the replayed backward as from any autograd function, or out of the
schedule's `WgradQueue`, so that accumulation and the reduction over ranks see no difference. While a graph is recorded,
modules use aliases of their parameters: the graph then holds no autograd state of the parameters themselves.
`GraphedPart` makes and calls these.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from threefold.engine.autograd.delayed_wgrad import DelayedWgrad, WgradQueue, compute_wgrads, parameter_of
from threefold.engine.autograd.main_grad import share_main_grad
from threefold.engine.context import context, override
from threefold.engine.graphs.graph_slot import GraphSlot
from threefold.engine.graphs.recorder import Graph, Recorder, memory_address, record_work
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LinearPrecision
from threefold.engine.precision.weight_cache import WeightCache
from threefold.findings import Finding, FindingsError

Result = TypeVar("Result")
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
    """A parameter of its own that shares the memory of each trained parameter, and of its `main_grad`."""
    trained = (p for module in modules for p in module.parameters() if p.requires_grad)
    aliases = {p: nn.Parameter(p.detach()) for p in trained}
    for p, alias in aliases.items():
        share_main_grad(p, alias)
    return aliases


class GraphedFunction:
    """A recorded call. The backward is recorded when it first runs; the slot keeps two calls from overlapping."""

    def __init__(
        self,
        slot: GraphSlot,
        function: Function,
        modules: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        delays_wgrad: bool = False,
    ) -> None:
        self.slot, self._function, self._modules = slot, function, modules
        self._aliases = make_aliases(modules)
        self.weights = list(self._aliases)
        self._addresses = [p.data_ptr() for p in self.weights]
        self._static_inputs = [slot.make_static(x).requires_grad_(x.requires_grad) for x in inputs]
        self._live_outputs: Sequence[Tensor] = []
        self._queue = WgradQueue() if delays_wgrad else None
        refresh_weights(modules)
        self._outputs, self._forward = record_work(slot.recorder, self._run)
        self.outputs_need_grad = [x.requires_grad for x in self._live_outputs]
        self._late = dict.fromkeys(self._delayed_parameters())  # by identity: tensors have no equality
        slot.add_owned(self._outputs)
        self._backward: Graph | None = None
        self._static_output_grads: list[Tensor | None] = []
        self._static_grads: list[Tensor | None] = []
        # The delayed weight gradients, which hold what they are computed from: nothing else may use that memory.
        self._delayed: list[DelayedWgrad] = []
        self._wgrad: Graph | None = None
        self._static_wgrads: dict[nn.Parameter, Tensor] = {}

    @property
    def has_backward_graph(self) -> bool:
        return self._backward is not None

    def mismatch(self, inputs: Sequence[Tensor]) -> tuple[str, str] | None:
        """The reason and a detail where the graph cannot be replayed with these inputs; None where it can."""
        if len(inputs) != len(self._static_inputs):
            return "padding in some microbatches only", ""
        for x, static_input in zip(inputs, self._static_inputs, strict=True):
            if x.shape != static_input.shape:
                return "another shape", f"{tuple(x.shape)}, recorded with {tuple(static_input.shape)}"
            if x.dtype != static_input.dtype or x.device != static_input.device:
                return "another dtype or device", f"{x.dtype} on {x.device}"
            if x.requires_grad != static_input.requires_grad:
                return "another need of gradients", ""
        # Asking a pending parameter for its address waits for its update, which a replay could not do.
        if [p.data_ptr() for p in self.weights] != self._addresses:
            return "a parameter moved", ""
        return None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        queue = context.wgrad_queue
        # Autograd calls the hooks of every parameter that it is given, also if the gradient comes later.
        weights = [p for p in self.weights if queue is None or p not in self._late]
        made: tuple[Tensor, ...] = _Replay.apply(self, queue, *inputs, *weights)
        return made

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for x, static_input in zip(inputs, self._static_inputs, strict=False):
            _copy_into(static_input, x)
        refresh_weights(self._modules)
        self._forward.replay()
        if not any(self.outputs_need_grad):  # no backward gives the slot back: what is needed later must not lie in it
            return tuple(x.clone() for x in self._outputs)
        self.slot.num_in_flight += 1
        return tuple(x.detach() for x in self._outputs)

    def backward(self, grads: Sequence[Tensor | None], queue: WgradQueue | None) -> list[Tensor | None]:
        """The gradients of the inputs, then those of the weights, from the gradients of the outputs.

        Delayed weight gradients go into `queue`; without a queue they are computed here.
        """
        if self._backward is None:
            self._static_output_grads = [None if grad is None else self.slot.make_static(grad) for grad in grads]
            self._static_grads, self._backward = _record(self.slot.recorder, self._run_backward, "a backward")
            self.slot.add_owned(grad for grad in self._static_grads[: len(self._static_inputs)] if grad is not None)
        else:
            for static_grad, grad in zip(self._static_output_grads, grads, strict=True):
                assert static_grad is not None or grad is None, "a gradient where there was none when this was recorded"
                if static_grad is not None:
                    static_grad.zero_() if grad is None else _copy_into(static_grad, grad)
        self._backward.replay()
        made = [None if grad is None else grad.detach() for grad in self._static_grads]
        num_inputs = len(self._static_inputs)
        input_grads, by_weight = made[:num_inputs], dict(zip(self.weights, made[num_inputs:], strict=True))
        if not self._late:
            self.slot.num_in_flight -= 1
            return made
        replay = _WgradReplay(self, {p: by_weight[p] for p in self._late})
        if queue is None:
            return [*input_grads, *(replay.grad_of(p) if p in self._late else grad for p, grad in by_weight.items())]
        queue.pending += [(p, partial(replay.grad_of, p)) for p in self._late]
        return [*input_grads, *(grad for p, grad in by_weight.items() if p not in self._late)]

    def replay_wgrad(self) -> dict[nn.Parameter, Tensor]:
        """Compute the delayed weight gradients of the microbatch in the slot."""
        if self._wgrad is None:
            self._static_wgrads, self._wgrad = _record(
                self.slot.wgrad_recorder, self._run_wgrad, "delayed weight gradients"
            )
        self._wgrad.replay()
        self.slot.num_in_flight -= 1
        return self._static_wgrads

    def _delayed_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients the forward has left to a queue."""
        if self._queue is None:
            return []
        owners = {id(parameter_of(weight)) for weight in self._queue.weights}
        return [p for p, alias in self._aliases.items() if id(alias) in owners]

    def _run(self) -> tuple[Tensor, ...]:
        with override("wgrad_queue", self._queue), torch.enable_grad(), use_aliases(self._modules, self._aliases):
            self._live_outputs = self._function(*self._static_inputs)
        return tuple(x.detach() for x in self._live_outputs)

    def _run_backward(self) -> list[Tensor | None]:
        pairs = zip(self._live_outputs, self._static_output_grads, strict=True)
        outputs, output_grads = zip(*((x, grad) for x, grad in pairs if grad is not None), strict=True)
        self._live_outputs = []
        leaves = [x for x in (*self._static_inputs, *self._aliases.values()) if x.requires_grad]
        with override("wgrad_queue", self._queue):
            grads = iter(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True))
        if self._queue is not None:
            self._delayed, self._queue.pending = self._queue.pending, []
        input_grads = [next(grads) if x.requires_grad else None for x in self._static_inputs]
        return [*input_grads, *grads]

    def _run_wgrad(self) -> dict[nn.Parameter, Tensor]:
        grads = compute_wgrads(self._delayed)
        return {p: grads[alias] for p, alias in self._aliases.items() if alias in grads}

    def copy_grads_out(self) -> None:
        """Copy gradients of the last microbatch that still lie in the slot's memory, which the next one overwrites."""
        static_grads = dict(zip(self.weights, self._static_grads[len(self._static_inputs) :], strict=False))
        for written in (static_grads, self._static_wgrads):
            for p, static in written.items():
                if p.grad is not None and static is not None and memory_address(p.grad) == memory_address(static):
                    p.grad = p.grad.clone()


class _WgradReplay:
    """The delayed weight gradients of one microbatch: the first that is asked for replays the graph of all."""

    def __init__(self, graphed: GraphedFunction, early: Mapping[nn.Parameter, Tensor | None]) -> None:
        self._graphed, self._early = graphed, early  # parts of the gradients that the backward has computed
        self._late: dict[nn.Parameter, Tensor] | None = None

    def grad_of(self, p: nn.Parameter) -> Tensor | None:
        if self._late is None:
            self._late = self._graphed.replay_wgrad()
        early, late = self._early[p], self._late.get(p)
        return early if late is None else late.detach() if early is None else early + late


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: GraphedFunction, queue: WgradQueue | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed, ctx.queue = graphed, queue
        ctx.set_materialize_grads(False)
        outputs = graphed.forward(tensors)
        needs_grad = zip(outputs, graphed.outputs_need_grad, strict=True)
        ctx.mark_non_differentiable(*(x for x, needed in needs_grad if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphed.backward(grads, ctx.queue)


def _record(recorder: Recorder, work: Callable[[], Result], what: str) -> tuple[Result, Graph]:
    try:
        return record_work(recorder, work)
    except RuntimeError as error:
        problem = f"{what} could not be recorded: {str(error).partition(chr(10))[0]}"
        advice = "train without graphs: knobs.graphs = []"
        found = Finding(rule="graph-records-backward", at="knobs.graphs", problem=problem, advice=advice)
        raise FindingsError([found]) from error


def _copy_into(static_input: Tensor, x: Tensor) -> None:
    if memory_address(x) != memory_address(static_input):
        # Through `.data`, so that the version counter stays and a backward that is still to be recorded does not fail.
        static_input.data.copy_(x)


def weight_caches(modules: Iterable[nn.Module]) -> Iterator[WeightCache[Any]]:
    """The caches of all low-precision layers among the modules and inside of them."""
    for submodule in (submodule for module in modules for submodule in module.modules()):
        for value in vars(submodule).values():
            if isinstance(value, LinearPrecision):
                yield value.cache
            elif isinstance(value, LowPrecisionExperts):
                yield from value.weight_caches()


def refresh_weights(modules: Iterable[nn.Module]) -> None:
    """Quantize the weights that a graph reads at fixed addresses, once an optimizer step, by the first replay."""
    for cache in weight_caches(modules):
        cache.refresh()
