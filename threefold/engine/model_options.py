"""The options of a plan that a model's forward depends on: router losses, expert kernels, chunks, recompute, offload.

`engine/build.py` (`options_of`) makes them from a plan; tests make them directly. The model keeps them as
`model.options`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from threefold.engine.lora import LoraSettings
from threefold.engine.precision.recipes import Recipe
from threefold.plan.plan import INSIDE_MOE

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Options:
    aux_loss: float = 0.0  # weight of the load-balancing loss over a microbatch; 0 does not compute it
    seq_aux_loss: float = 0.0  # weight of the load-balancing loss within each sequence
    z_loss: float = 0.0  # weight of the loss that keeps router logits small
    mtp_loss: float = 0.3  # DeepSeek-V3 technical report, section 4.2: 0.3 for the first 10T tokens, then 0.1
    capacity_factor: float | None = None  # None drops no tokens
    block_factor: float | None = None  # capacity of the blocks in which a graph's rows travel; drops no tokens either
    forced_balance: bool = False  # experts take turns whatever the router says, for benchmarks
    wgrad_overlap: bool = False  # weight gradients of experts run while gradients of rows travel back
    shared_overlap: bool = False  # shared experts run while rows are dispatched
    expert_backend: Literal["auto", "grouped", "loop"] = "auto"
    expert_fusion: bool = False  # fused expert kernels, where the device has them
    expert_kernels: str | None = None  # the kind of fused kernels; None takes the fastest that was measured
    delta_kernels: str | None = None  # of the gated delta rule, "torch" or "fla"; None: fla where it is installed
    loss_chunk: int | None = None  # tokens of one chunk of the loss; None chooses by the size of the vocabulary
    ffn_chunk: int | None = None  # tokens of one chunk of a feed-forward network; None chooses by the size of its rows
    recipe: Recipe | None = None  # how GEMMs below sixteen bits are quantized
    fp8_output: bool = False  # the output head too, by the recipe
    cache_quantized_weights: bool = True  # quantized weights are kept for the whole step
    recompute: tuple[str, ...] = ()  # names of modules, or "full"
    recompute_method: str | None = None  # "uniform" or "block", with "full"
    recompute_layers: int | None = None
    recompute_save: tuple[str, ...] = ()  # modules inside of "full" whose outputs are saved and not recomputed
    vision_recompute: tuple[str, ...] = ()  # parts of the image encoder and projector, or "full"
    activation_offload: tuple[str, ...] = ()  # names of modules
    activation_offload_layers: int = 0  # the first layers, whose saved tensors are all offloaded
    graphs: tuple[str, ...] = ()  # scopes that are recorded as CUDA graphs, where the device can
    graph_memory_bytes: float | None = None  # the budget of their memory; None: any
    compile: bool = False  # norms, routers and dense MLPs run through torch.compile
    freeze: tuple[str, ...] = ()  # parts of the model, or patterns of parameter names, that do not train
    lora: LoraSettings | None = None  # adapters next to frozen weights

    @property
    def router_loss_weights(self) -> dict[str, float]:
        """The weights of the router losses that are computed at all."""
        named = {"aux": self.aux_loss, "seq_aux": self.seq_aux_loss, "z": self.z_loss}
        return {name: weight for name, weight in named.items() if weight}

    @property
    def router_losses(self) -> tuple[str, ...]:
        return tuple(self.router_loss_weights)

    @cached_property
    def recomputed_modules(self) -> frozenset[str]:
        """Modules that are recomputed one by one; a module inside another one is recomputed with it."""
        names = frozenset(self.recompute)
        if "full" in names:
            return frozenset()
        return names - INSIDE_MOE if "moe" in names else names

    def for_chunks(self, num_layers: Sequence[int]) -> Iterator["Options"]:
        """The options of each pipeline chunk of a rank. Numbers of layers count from the first chunk on."""
        recomputed = 1 if self.recompute_layers is None else self.recompute_layers
        offloaded = self.activation_offload_layers
        for size in num_layers:
            of_chunk = min(size, recomputed) if self.recompute_method == "block" else self.recompute_layers
            yield replace(self, recompute_layers=of_chunk, activation_offload_layers=min(size, offloaded))
            recomputed, offloaded = max(0, recomputed - size), max(0, offloaded - size)

    def layer_groups(self, layers: list[Layer]) -> Iterator[tuple[list[Layer], bool]]:
        """Groups of layers that run together, and whether each group is recomputed.

        Full recompute takes all layers in groups of `recompute_layers` ("uniform"), or the first `recompute_layers`
        one by one ("block").
        """
        size = 1 if self.recompute_layers is None else self.recompute_layers
        is_full, is_block = "full" in self.recompute, self.recompute_method == "block"
        if is_full and not is_block:
            yield from ((layers[n : n + size], True) for n in range(0, len(layers), size))
        else:
            yield from (([layer], is_full and n < size) for n, layer in enumerate(layers))
