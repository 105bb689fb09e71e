"""How a model is trained, as far as its forward must know."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from threefold.engine.precision.recipes import Recipe
from threefold.plan.plan import INSIDE_MOE

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Options:
    """Weights of the extra losses (0: not computed), how experts are chosen and run, what is kept for the backward."""

    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    z_loss: float = 0.0
    mtp_loss: float = 0.3  # DeepSeek-V3 technical report, section 4.2: 0.3 for the first 10T tokens, then 0.1
    capacity_factor: float | None = None
    forced_balance: bool = False
    shared_overlap: bool = False  # shared experts beside the dispatch
    expert_backend: Literal["auto", "grouped", "loop"] = "auto"
    expert_fusion: bool = False  # kernels of our own, where the device has them
    expert_kernels: str | None = None  # of the fused path, of one kind; None: the fastest that was measured
    loss_chunk: int | None = None  # tokens of one chunk of the loss; None: by the size of the vocabulary
    ffn_chunk: int | None = None  # tokens of one chunk of a feed-forward part; None: by the size of its rows
    recipe: Recipe | None = None  # of products below sixteen bits
    keep_low: bool = True  # weights stay in its format for a step
    recompute: tuple[str, ...] = ()
    recompute_method: str | None = None
    recompute_layers: int | None = None
    activation_offload: tuple[str, ...] = ()
    activation_offload_layers: int = 0
    graphs: tuple[str, ...] = ()  # scopes that are recorded and replayed, where the device can
    compile: bool = False  # norms, routers and dense MLPs by torch.compile

    @property
    def weights(self) -> dict[str, float]:
        """Of the routers' losses that are wanted at all."""
        named = {"aux": self.aux_loss, "seq_aux": self.seq_aux_loss, "z": self.z_loss}
        return {name: weight for name, weight in named.items() if weight}

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @cached_property
    def again(self) -> frozenset[str]:
        """Modules that are recomputed one by one; what lies inside another one is recomputed with it."""
        names = frozenset(self.recompute)
        if "full" in names:
            return frozenset()
        return names - INSIDE_MOE if "moe" in names else names

    def spread(self, sizes: Sequence[int]) -> Iterator["Options"]:
        """For chunks of so many layers on one rank: what is counted in layers begins with the first chunk."""
        again, away = 1 if self.recompute_layers is None else self.recompute_layers, self.activation_offload_layers
        for size in sizes:
            repeated = min(size, again) if self.recompute_method == "block" else self.recompute_layers
            yield replace(self, recompute_layers=repeated, activation_offload_layers=min(size, away))
            again, away = max(0, again - size), max(0, away - size)

    def units(self, layers: list[Layer]) -> Iterator[tuple[list[Layer], bool]]:
        """Layers that run together, and whether they are recomputed: full recompute takes them all in units of so
        many ("uniform"), or so many of the first one by one ("block")."""
        size = 1 if self.recompute_layers is None else self.recompute_layers
        full, block = "full" in self.recompute, self.recompute_method == "block"
        if full and not block:
            yield from ((layers[n : n + size], True) for n in range(0, len(layers), size))
        else:
            yield from (([layer], full and n < size) for n, layer in enumerate(layers))
