"""A ModelSpec becomes a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from threefold.engine.models.decoder import Decoder
from threefold.engine.models.deepseek_v3 import DeepseekV3
from threefold.engine.models.gpt_oss import GptOss
from threefold.engine.models.init import init_weights, materialize
from threefold.engine.models.llama import Llama
from threefold.engine.models.mixtral import Mixtral
from threefold.engine.models.qwen3_moe import Qwen3Moe
from threefold.engine.models.qwen3_next import Qwen3Next
from threefold.engine.moe.experts import ACTIVATIONS
from threefold.engine.options import Options
from threefold.engine.precision.lower import lower
from threefold.findings import Finding, FindingsError
from threefold.spec.model import MlaSpec, ModelSpec

FAMILIES: dict[str, type[Decoder]] = {
    "deepseek_v3": DeepseekV3,
    "gpt_oss": GptOss,
    "llama": Llama,
    "mixtral": Mixtral,
    "qwen3": Llama,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
}


def build_model(
    spec: ModelSpec,
    mtp: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    options: Options | None = None,
    seed: int | None = 0,
) -> Decoder:
    """`mtp`: depths to train; None: all the model has. Weights stay unset on `meta` and where `seed` is None."""
    model = make_model(spec, mtp, dtype, options or Options())
    if torch.device(device).type == "meta":
        return model
    materialize(model, device)
    if seed is not None:
        init_weights(model, type(model).init_std, seed)
    return model


def make_model(spec: ModelSpec, mtp: int | None, dtype: torch.dtype, options: Options) -> Decoder:
    """On `meta`: shapes without memory."""
    problems = [Finding(rule="engine-family", at="model", problem=p, advice=a) for p, a in _unsupported(spec)]
    if problems:
        raise FindingsError(problems)
    with _default_dtype(dtype), torch.device("meta"):
        model = FAMILIES[spec.family](spec, spec.mtp_layers if mtp is None else mtp, options)
        if options.recipe is not None:
            lower(model, options.recipe, options.keep_low)
        return model


def _unsupported(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Problem and advice for everything of the model that no code here runs."""
    if spec.family not in FAMILIES:
        yield f"the engine has no {spec.family} model", f"choose one of {', '.join(FAMILIES)}"
    if spec.vision is not None:
        yield "the engine has no vision encoder", "choose the text model"
    if isinstance(spec.attention, MlaSpec) and spec.attention.indexer:
        yield "the engine has no sparse attention", "choose a model without an indexer"
    if spec.activation not in ACTIVATIONS:
        yield f"the engine has no activation {spec.activation!r}", f"known: {', '.join(ACTIVATIONS)}"
    scaling = spec.attention.rope_scaling if spec.attention else None
    if scaling is not None and scaling.kind != "yarn":
        yield f"the engine has no rotary scaling {scaling.kind!r}", "use yarn or none"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
