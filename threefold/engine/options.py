"""How a model is trained, as far as its forward must know."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

_INSIDE_MOE = frozenset({"moe_act", "shared_experts"})


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
    loss_chunk: int | None = None  # tokens of one chunk of the loss; None: by the size of the vocabulary
    recompute: tuple[str, ...] = ()
    recompute_method: str | None = None
    recompute_layers: int | None = None
    activation_offload: tuple[str, ...] = ()
    activation_offload_layers: int = 0

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
        return names - _INSIDE_MOE if "moe" in names else names
