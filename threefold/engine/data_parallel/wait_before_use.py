"""Forward hooks that wait for an all-gather of parameters just before a module uses them. ZeRO-1 registers them.

A module may use parameters of a neighbour without calling it (the head's weight inside the loss, a tied embedding), so
each module waits for more than its own: for all parameters that were registered before it, and for those of the module
after it. Modules run about in the order of registration, so that this costs next to nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

Source = TypeVar("Source")


def wait_before_use(
    root: nn.Module, sources: Mapping[nn.Parameter, Source], wait: Callable[[Sequence[Source]], None]
) -> None:
    """Before a module's forward, `wait` for the sources (such as buckets) of the parameters that it may use."""
    order = list(root.parameters())
    index = {parameter: n for n, parameter in enumerate(order)}
    ends = _last_index_in_module(root, index)
    known: list[Source] = []  # in the order of first use
    num_needed = []  # how many of `known` the parameters up to an index need
    for parameter in order:
        if parameter in sources and sources[parameter] not in known:
            known.append(sources[parameter])
        num_needed.append(len(known))
    for module in root.modules():
        indices = [index[parameter] for parameter in module.parameters()]
        if indices:
            # A module with a list of layers waits for its first module only: the layers have hooks of their own.
            end = ends[min(indices)] if module is root or _holds_layers(module) else max(indices)
            after = ends[min(end + 1, len(order) - 1)]
            module.register_forward_pre_hook(_WaitHook(known[: num_needed[after]], wait))


@dataclass(frozen=True)
class _WaitHook(Generic[Source]):
    wanted: list[Source]
    wait: Callable[[Sequence[Source]], None]

    def __call__(self, *_: object) -> None:
        self.wait(self.wanted)


def wait_for_parameters(module: nn.Module) -> None:
    """Wait as a call of the module would: for code that uses its parameters without calling it."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _WaitHook):
            hook()


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.modules())


def _last_index_in_module(root: nn.Module, index: Mapping[nn.Parameter, int]) -> list[int]:
    """The index of the last parameter of the module that holds a parameter, for each parameter."""
    ends = list(range(len(index)))
    for module in root.modules():
        indices = [index[parameter] for parameter in module.parameters(recurse=False)]
        for n in indices:
            ends[n] = max(ends[n], *indices)
    return ends
