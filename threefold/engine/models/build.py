"""Build a decoder from a `ModelSpec`: on `meta` for the sharding, or with memory and initial weights for one rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.model_options import Options
from threefold.engine.models.activation_memory import apply_activation_memory, apply_to_layers
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.head import head_precision
from threefold.engine.models.init_weights import init_weights, materialize
from threefold.engine.models.low_precision import apply_low_precision
from threefold.engine.models.trainable import add_adapters, freeze_parameters
from threefold.findings import Finding, FindingsError
from threefold.spec.model import ModelSpec
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
