"""Wait for what is on its way just before it is used.

A module may use parameters of a neighbour without calling it (the head's weight inside the loss, a tied embedding), so
each waits for more than its own: for all that was registered before it and for the module after it. Modules run about
in the order of registration, so that this costs next to nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import nn

Home = TypeVar("Home")


def when_used(root: nn.Module, homes: Mapping[nn.Parameter, Home], wait: Callable[[Sequence[Home]], None]) -> None:
    """Before a module's forward, `wait` for the homes of the parameters it may use."""
    order = list(root.parameters())
    place = {parameter: n for n, parameter in enumerate(order)}
    ends = _ends_of_holders(root, place)
    known: list[Home] = []  # in the order of first use
    until = []  # how many of them the parameters up to a place need
    for parameter in order:
        if parameter in homes and homes[parameter] not in known:
            known.append(homes[parameter])
        until.append(len(known))
    for module in root.modules():
        places = [place[parameter] for parameter in module.parameters()]
        if places:
            # What holds a list of layers begins with its first module; the others wait for themselves.
            end = ends[min(places)] if module is root or _holds_layers(module) else max(places)
            after = ends[min(end + 1, len(order) - 1)]
            module.register_forward_pre_hook(_waiting(known[: until[after]], wait))


def _waiting(wanted: list[Home], wait: Callable[[Sequence[Home]], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: object) -> None:
        wait(wanted)

    return hook


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.modules())


def _ends_of_holders(root: nn.Module, place: Mapping[nn.Parameter, int]) -> list[int]:
    """For each parameter, the last place of the module that holds it."""
    ends = list(range(len(place)))
    for module in root.modules():
        places = [place[parameter] for parameter in module.parameters(recurse=False)]
        for n in places:
            ends[n] = max(ends[n], *places)
    return ends
