"""Decides which parameters of a model train: adds LoRA adapters, and freezes what a job says.

`models/build.py` calls both functions on a model without memory, after low precision and before any sharding. A frozen
parameter has `requires_grad` False from then on; data parallelism gives it no gradient buffer and no optimizer state.
"""

from collections.abc import Iterator

from torch import nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.layers.mlp import Mlp
from threefold.engine.lora import LoraLinear, LoraSettings, is_adapter
from threefold.engine.model_options import Options
from threefold.engine.models.block import Block
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.layer import MoeLayer
from threefold.spec.parameter_names import is_frozen

# The linears of each mixer that get adapters. Step and decay of the delta rule (`ba`) have too few columns for one.
_LATENT_LINEARS = ("q", "q_down", "q_up", "kv_down", "kv_up", "out")
_MIXER_LINEARS: dict[type[nn.Module], tuple[str, ...]] = {
    GqaAttention: ("q", "k", "v", "out"),
    MlaAttention: _LATENT_LINEARS,
    SparseMlaAttention: _LATENT_LINEARS,
    CompressedAttention: ("q_down", "q_up", "kv", "out"),
    GatedDelta: ("qkvz", "out"),
    Mamba: ("in_proj", "out"),
}
_MLP_LINEARS = ("gate", "up", "down")


def add_adapters(model: Decoder, settings: LoraSettings) -> None:
    """Put adapters beside the targeted weights of all layers, in place. MTP depths get none."""
    for block in model.layers.values():
        assert isinstance(block, Block)
        for target, owner, names in _targets(block):
            if target not in settings.targets:
                continue
            for name in names:
                child = getattr(owner, name, None)
                if isinstance(child, nn.Linear):
                    setattr(owner, name, LoraLinear(child, settings))
        if isinstance(block.ffn, MoeLayer) and "experts" in settings.targets:
            block.ffn.experts.add_adapters(settings)


def _targets(block: Block) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The targets of a layer that are linears: the name in `job.lora_targets`, the module, and its linears."""
    if block.mixer is not None:
        yield "attention", block.mixer, _MIXER_LINEARS[type(block.mixer)]
    if isinstance(block.ffn, Mlp):
        yield "mlp", block.ffn, _MLP_LINEARS
    elif isinstance(block.ffn, MoeLayer) and block.ffn.shared is not None:
        yield "shared_experts", block.ffn.shared, _MLP_LINEARS


def freeze_parameters(model: nn.Module, options: Options) -> None:
    """Freeze what the options name, and beside adapters everything else."""
    for name, parameter in model.named_parameters():
        if is_frozen(name, options.freeze) or (options.lora is not None and not is_adapter(name)):
            parameter.requires_grad_(False)
