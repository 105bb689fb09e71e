"""Activation recompute: only a function's inputs are saved; its backward runs the function once more.

`recompute` drops the tensors that the function saves inside. `recompute_output` also drops the function's outputs:
later functions inside the `with` block that saved such an output get the recomputed one (Megatron's output-discarding
checkpoint). `OutputScope` does this for a method whose output is consumed by the rest of its module:
`models/activation_memory.py` wraps methods with it, so that the module itself has no code for recompute.

Each function has the name by which a plan asks for its recompute: an observed step (`engine/effects/`) reports by name
how many bytes were not saved and how long the second runs took.

Outputs of attention inside a recomputed function can be saved all the same (`saved_tensors.py`).

The backward runs over the graph of the first forward, so that hooks, delayed weight gradients and collectives come in
the order that they have without recompute. No random state is stored: no module of the engine draws random numbers.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from threefold.engine.autograd.saved_tensors import (
    PackedOutputs,
    Placeholder,
    StridedView,
    reachable_handlers,
    saved_tensor_handler,
    storage_key,
)
from threefold.engine.context import context, override

Output = TypeVar("Output")


def recompute(
    function: Callable[..., Output],
    *inputs: Tensor,
    enabled: bool = True,
    name: str = "",
    save: Collection[str] = (),
) -> Output:
    """`function(*inputs)`, whose saved tensors are made again in the backward.

    Tensors that need a gradient must be inputs; a closure would hide them from autograd. `name` is that of the plan.
    `save` names functions inside whose outputs are saved and not made again (`saved_tensors.py`).
    """
    return _Region(function, inputs, name, save).run() if enabled and torch.is_grad_enabled() else function(*inputs)


def recompute_output(
    function: Callable[..., Output],
    *inputs: Tensor,
    enabled: bool = True,
    name: str = "",
    save: Collection[str] = (),
) -> AbstractContextManager[Output]:
    """`with recompute_output(norm, x) as y`: what is saved of y inside the block is made again in the backward."""
    if not (enabled and torch.is_grad_enabled()):
        return nullcontext(function(*inputs))
    region = _Region(function, inputs, name, save)
    return _discarding(region, region.run())


@contextmanager
def _discarding(region: "_Region", outputs: Any) -> Iterator[Any]:
    discarded = _DiscardedOutputs()
    discarded.add(region, outputs)
    with saved_tensor_handler(discarded):
        yield outputs


class OutputScope:
    """The methods of one module whose outputs are recomputed, and the method inside which their consumers run.

    `scope` wraps the outer method, `output` the ones that are recomputed. In this example what `down` saves of the
    activation is made again in the backward:

        outputs = OutputScope()
        experts.forward = outputs.scope(experts.forward)       # calls self.activate, then self.down_proj
        experts.activate = outputs.output(experts.activate)
    """

    def __init__(self) -> None:
        self._open: list[_DiscardedOutputs] = []

    def scope(self, function: Callable[..., Output]) -> Callable[..., Output]:
        """`function`, within which outputs are discarded."""

        def scoped(*args: Any, **kwargs: Any) -> Output:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            discarded = _DiscardedOutputs()
            self._open.append(discarded)
            try:
                with saved_tensor_handler(discarded):
                    return function(*args, **kwargs)
            finally:
                self._open.pop()

        return scoped

    def output(self, function: Callable[..., Output], name: str = "") -> Callable[..., Output]:
        """`function`, whose output is discarded and recomputed. Arguments that are no tensors are kept as they are."""

        def recomputed(*args: Any) -> Output:
            if not torch.is_grad_enabled():
                return function(*args)
            tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
            region = _Region(_with_constants(function, args), tensors, name)
            outputs = region.run()
            self._open[-1].add(region, outputs)
            return outputs

        return recomputed


def _with_constants(function: Callable[..., Output], args: Sequence[Any]) -> Callable[..., Output]:
    """`function` of its tensors alone; it must not hold on to the tensors, which autograd may free."""
    constants = [None if isinstance(arg, Tensor) else arg for arg in args]
    is_tensor = [isinstance(arg, Tensor) for arg in args]

    def call(*tensors: Tensor) -> Output:
        rest = iter(tensors)
        return function(*(next(rest) if here else value for value, here in zip(constants, is_tensor, strict=True)))

    return call


def is_recomputed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a discarded output: then whatever is made of it should be recomputed too."""
    return any(
        isinstance(handler, _DiscardedOutputs) and handler.find(tensor) is not None for handler in reachable_handlers()
    )


class _Region:
    """One call of a function. It packs everything that is saved inside, and runs the function again to unpack."""

    is_recompute = True

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], name: str, save: Collection[str] = ()
    ) -> None:
        self.function, self.given = function, tuple(map(_with_usual_strides, inputs))
        self.outputs: PackedOutputs | None = PackedOutputs(save)
        self.padding = context.padding
        observer = context.activation_observer
        self.name = name if observer is None else _reported_name(name, inputs)
        # Autograd saves the inputs, not this object: an offload around the region sees them, and they are freed with
        # the graph. Torch 2.11 frees a node's tensors with its result, so the result is kept here.
        with nullcontext() if observer is None else observer.saving_inputs(self.name):
            self.inputs: Any = _SaveInputs.apply(torch.empty(0, requires_grad=True), *inputs)
        self.placeholders: list[ref[Placeholder]] = []
        self.shapes: list[torch.Size] = []
        self.output_views: list[tuple[ref[Placeholder], int, StridedView]] = []  # of discarded outputs, by number
        self.restored: WeakKeyDictionary[Placeholder, Tensor] | None = None

    def run(self) -> Any:
        given, self.given = self.given, ()
        assert self.outputs is not None
        with self.outputs.while_recording(), saved_tensor_handler(self):
            return self.function(*given)

    def pack(self, tensor: Tensor) -> Placeholder:
        if context.activation_observer is not None:
            context.activation_observer.drop(self.name, tensor)
        placeholder = Placeholder(self.restore)
        self.placeholders.append(ref(placeholder))
        self.shapes.append(tensor.shape)
        return placeholder

    def restore(self, placeholder: Placeholder) -> Tensor:
        if self.restored is None:
            observer = context.activation_observer
            with nullcontext() if observer is None else observer.recomputing(self.name):
                self.restored = self._run_again()
            self.inputs = self.function = self.outputs = None  # type: ignore[assignment]
        return self.restored[placeholder]

    def _run_again(self) -> WeakKeyDictionary[Placeholder, Tensor]:
        saved = self.inputs.grad_fn.saved_tensors
        inputs = [_with_usual_strides(x.detach()).requires_grad_(x.requires_grad) for x in saved]
        second_run = _SecondRun(self)
        outputs: Any = ()
        assert self.outputs is not None
        with (
            torch.enable_grad(),
            override("padding", self.padding),
            self.outputs.while_replaying(),
            saved_tensor_handler(second_run, alone=True),
            suppress(_Enough),
        ):
            outputs = self.function(*inputs)
        num_saved = len(self.placeholders)
        assert second_run.count == num_saved, f"the second run saved {second_run.count} tensors, the first {num_saved}"
        for weak_placeholder, number, view in self.output_views:
            placeholder = weak_placeholder()
            if placeholder is not None:
                second_run.restored[placeholder] = view.apply(_as_tuple(outputs)[number])
        return second_run.restored


def _with_usual_strides(x: Tensor) -> Tensor:
    """`x` as a new tensor would lie in memory, where it lies so but for the strides of dims of size 1.

    `F.linear` with a frozen weight chooses its GEMM by the strides, and hooks that return a view of `x` in one of the
    runs alone (FSDP's) change them: the runs would save other tensors.
    """
    return x.view(x.shape) if 1 in x.shape and x.is_contiguous() else x


class _SecondRun:
    """Collects what the second run saves, in the order of the first, for the placeholders that still live."""

    is_recompute = True

    def __init__(self, region: _Region) -> None:
        self.region, self.name = region, region.name
        self.restored: WeakKeyDictionary[Placeholder, Tensor] = WeakKeyDictionary()
        self.count = 0

    def pack(self, tensor: Tensor) -> str:
        placeholders, shapes = self.region.placeholders, self.region.shapes
        same = self.count < len(placeholders) and tensor.shape == shapes[self.count]
        assert same, (
            f"tensor {self.count} of {len(placeholders)} is not what the first run saved: {tuple(tensor.shape)}"
        )
        placeholder = placeholders[self.count]()
        if placeholder is not None:
            self.restored[placeholder] = tensor.detach()
        self.count += 1
        if self.count == len(placeholders) and not self.region.output_views:
            raise _Enough
        return "recomputed"


class _Enough(Exception):  # noqa: N818
    """Raised where the rest of the function need not run."""


class _DiscardedOutputs:
    """Packs what is saved of the outputs of regions, and nothing else."""

    is_recompute = False

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[_Region, int, Tensor]] = {}  # by storage: the region, the output and its number

    def add(self, region: _Region, outputs: Any) -> None:
        for number, output in enumerate(_as_tuple(outputs)):
            self._outputs[storage_key(output)] = region, number, output

    def find(self, tensor: Tensor) -> tuple[_Region, int, Tensor] | None:
        place = self._outputs.get(storage_key(tensor))
        return place if place is not None and tensor.dtype == place[2].dtype else None

    def pack(self, tensor: Tensor) -> Placeholder | None:
        place = self.find(tensor)
        if place is None:
            return None
        region, number, output = place
        if context.activation_observer is not None:
            context.activation_observer.drop(region.name, tensor, is_output=True)
        placeholder = Placeholder(region.restore)
        region.output_views.append((ref(placeholder), number, StridedView.of(tensor, output)))
        return placeholder


def _reported_name(name: str, inputs: Sequence[Tensor]) -> str:
    """The name of the outermost region around, which would drop everything alone; else the region's own; else that of
    a discarded output among its inputs, because of which it is recomputed."""
    for outer in context.saved_tensor_handlers:
        if outer.is_recompute:
            return str(outer.name)
    if name:
        return name
    discarded = (handler for handler in reachable_handlers() if isinstance(handler, _DiscardedOutputs))
    places = (handler.find(x) for handler in discarded for x in inputs)
    return next((of[0].name for of in places if of is not None), "other")


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class _SaveInputs(torch.autograd.Function):
    """Makes autograd save tensors. Its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing depends on it")
