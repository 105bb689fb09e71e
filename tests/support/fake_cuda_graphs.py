"""A recorder for a device that has none: what is recorded runs once, its results are hidden until the first replay,
and each replay after that runs the work again and writes to the same addresses.

Graphs of one pool use again what those before them have freed: a replay may overwrite what any graph recorded later
has made, and here it does. As on a GPU, a collective that is started while something is recorded must be waited for
before the recording ends.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from threefold.engine.dist.collectives import CallListener, CollectiveCall, observe_collectives


class _Unjoined(CallListener):
    """Counts the collectives that nothing has waited for yet."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, call: CollectiveCall) -> "_Unjoined":
        self.count += 1
        return self

    def on_end(self) -> None:
        self.count -= 1


def _tensors(made: Any) -> list[Tensor]:
    found: Iterable[Any] = made.values() if isinstance(made, dict) else made
    return [x for x in found if x is not None]


class Again:
    def __init__(self, work: Callable[[], Any], made: Any) -> None:
        self.work, self.made = work, made
        self.later: list[Again] = []
        self.first: list[Tensor] | None = [x.clone() for x in _tensors(made)]
        self.poison()

    def poison(self) -> None:
        for x in _tensors(self.made):
            x.data.fill_(float("nan") if x.is_floating_point() else -9)

    def replay(self) -> None:
        for one in self.later:
            one.poison()
        now = self.first if self.first is not None else _tensors(self.work())
        self.first = None
        for fixed, x in zip(_tensors(self.made), now, strict=True):
            fixed.data.copy_(x)


class StandIn:
    num_bytes = 1000

    def __init__(self) -> None:
        self.graphs: list[Again] = []

    def prepare(self) -> None:
        pass

    def record(self, work: Callable[[], Any]) -> tuple[Any, Again]:
        unjoined = _Unjoined()
        with observe_collectives(unjoined):
            made = work()
        if unjoined.count:
            raise RuntimeError("capturing stream has unjoined work")
        graph = Again(work, made)
        for one in self.graphs:
            one.later.append(graph)
        self.graphs.append(graph)
        return made, graph


class Refusing(StandIn):
    """As a device that meets something it cannot record."""

    after = 0  # so many that it can

    def record(self, work: Callable[[], Any]) -> tuple[Any, Again]:
        if len(self.graphs) == self.after:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(work)


class RefusingBackward(Refusing):
    """Records the forwards of a model of two layers."""

    after = 2
