"""Build a decoder from a `ModelSpec`: on `meta` for the sharding, or with memory and initial weights for one rank.

It also replaces linear layers for a low-precision recipe, adds LoRA adapters, and freezes what a job says.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
from threefold.engine.models.activation_memory import apply_activation_memory, apply_to_layers
from threefold.engine.models.block import Block
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.head import head_precision
from threefold.engine.models.init_weights import init_weights, materialize
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
from threefold.engine.precision.low_precision_linear import LowPrecisionLinear
from threefold.engine.precision.recipes import Recipe
from threefold.findings import Finding, FindingsError
from threefold.spec.model import ModelSpec
from threefold.spec.params import is_frozen
from threefold.spec.stacks import engine_lacks


def build_model(
    spec: ModelSpec,
    mtp: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    options: Options | None = None,
    seed: int | None = 0,
) -> Decoder:
    """The whole model for one rank, with recompute and offload applied.

    `mtp` is the number of depths to train; None takes all that the model has. Weights stay unset on the `meta` device
    and where `seed` is None.
    """
    options = options or Options()
    model = make_model(spec, mtp, dtype, options)
    apply_activation_memory(model, options)
    apply_to_layers(model, model.layers.values(), options)
    if torch.device(device).type == "meta":
        return model
    materialize(model, device)
    if seed is not None:
        init_weights(model, model.spec.init_std, seed)
    return model


def make_model(spec: ModelSpec, mtp: int | None, dtype: torch.dtype, options: Options) -> Decoder:
    """A model on the `meta` device: parameters have shapes and no memory. Low precision and adapters are applied."""
    problems = [Finding(rule="engine-family", at="model", problem=p, advice=a) for p, a in engine_lacks(spec)]
    if problems:
        raise FindingsError(problems)
    with _default_dtype(dtype), torch.device("meta"):
        model = Decoder(spec, spec.mtp_layers if mtp is None else mtp, options)
        for module in model.modules():
            if isinstance(module, GatedDelta):
                module.kernels = options.delta_kernels
        if options.recipe is not None:
            apply_low_precision(model, options.recipe, options.cache_quantized_weights)
            model.head_precision = head_precision(options)
        if options.lora is not None:
            add_adapters(model, options.lora)
        freeze_parameters(model, options)
        return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_KEPT_IN_BF16 = frozenset(
    {"ba"}
)  # step and decay of the delta rule: few columns, and an error reaches every later token


def apply_low_precision(model: nn.Module, recipe: Recipe, cache_weights: bool) -> None:
    """Replace layers. With `cache_weights` quantized weights live for a step; it is off where weights are gathered."""
    for module in list(model.modules()):
        if isinstance(module, CompressedAttention | GqaAttention | MlaAttention | GatedDelta | Mamba | Mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name not in _KEPT_IN_BF16:
                    setattr(
                        module,
                        name,
                        LowPrecisionLinear(child, recipe, cache_weights, _input_is_saved_anyway(module, name)),
                    )
        elif isinstance(module, Experts):
            module.low_precision = LowPrecisionExperts(recipe, cache_weights)


def _input_is_saved_anyway(module: nn.Module, name: str) -> bool:
    """Attention saves its output for its own backward; a gate between it and the projection makes another tensor."""
    if isinstance(module, GqaAttention):
        return name == "out" and not module.spec.gated
    return isinstance(module, MlaAttention) and name == "out"


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
