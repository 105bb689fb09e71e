"""One rank holds everything: no reduction, no buffers. The reference of every other way."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from threefold.engine.shard.owned import Owned, own, sum_of_squares, zero_of
from threefold.engine.shard.placement import Placement, whole


class DataParallel(Protocol):
    """Who keeps which weights and gradients. `owned` are this rank's alone; `updated` are what its optimizer steps."""

    @property
    def owned(self) -> list[Owned]: ...

    @property
    def updated(self) -> list[Owned]: ...

    def begin(self, passes: int) -> None: ...

    def finish(self) -> None: ...

    def squares(self) -> Tensor: ...

    def scale(self, factor: Tensor) -> None: ...

    def gather(self) -> None: ...

    def wait_gathered(self) -> None: ...

    def held(self) -> Iterator[tuple[str, Placement, Tensor, int | None]]: ...


class Whole:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def owned(self) -> list[Owned]:
        return [
            own(
                name,
                p,
                whole(p.shape, ()),
                0,
                p.detach().view(-1),
                None if p.grad is None else p.grad.view(-1),
                p.dtype,
            )
            for name, p in self.model.named_parameters()
        ]

    @property
    def updated(self) -> list[Owned]:
        return self.owned

    def begin(self, passes: int) -> None:
        self.model.zero_grad(set_to_none=True)

    def finish(self) -> None:
        pass

    def gather(self) -> None:
        pass

    def wait_gathered(self) -> None:
        pass

    def held(self) -> Iterator[tuple[str, Placement, Tensor, int | None]]:
        for name, p in self.model.named_parameters():
            yield name, whole(p.shape, ()), p, None

    @torch.no_grad()
    def squares(self) -> Tensor:
        first = next(self.model.parameters())
        return sum_of_squares(self._grads(), zero_of([first], first.device))

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        if grads := self._grads():
            torch._foreach_mul_(grads, factor)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]
