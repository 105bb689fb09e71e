"""The names of Nemotron-H's checkpoints: one module a layer, called `mixer` whatever it is. `hf_names.py` calls it.

Published checkpoints, and what transformers writes, have the prefix `backbone.` and a tensor for each expert. In memory
transformers has `model.` and stacked experts; both are read.

Shapes: E experts, D model dim, W convolution channels.
"""

import re
from collections.abc import Callable

from torch import Tensor

from threefold.engine.weights.hf_tensor import HfTensor, Layout, TensorsOfExperts, View, whole
from threefold.spec.model import Layer, ModelSpec

_TOP = {"embed.weight": "embeddings.weight", "norm.weight": "norm_f.weight"}
_PARTS = {
    "attention": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"},
    "mamba": {
        "in_proj": "in_proj",
        "conv": "conv1d.weight",
        "conv_bias": "conv1d.bias",
        "dt_bias": "dt_bias",
        "a_log": "A_log",
        "skip": "D",
        "norm": "norm",
        "out": "out_proj",
    },
}
_MLP = {"up": "up_proj", "down": "down_proj"}
# An MTP depth under `mtp.layers.`: what belongs to the depth lies in its first layer, but the last norm.
_MTP_FIRST = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj"}
PREFIXES = ("backbone.", "model.")


def nemotron_layouts(name: str, spec: ModelSpec) -> list[Layout]:
    """The layouts of one engine tensor; the first is the one that is written."""
    if name in _TOP:
        return [[HfTensor(prefix + _TOP[name])] for prefix in PREFIXES]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        layer = spec.layers[int(match[1])]
        prefixes = [f"{prefix}layers.{match[1]}." for prefix in PREFIXES]
        return [layout for prefix in prefixes for layout in _layer_layouts(match[2], prefix, layer, spec)]
    match = re.fullmatch(r"mtp\.(\d+)\.(?:layers\.(\d+)\.)?(.+)", name)
    assert match, name
    depth, number, rest = int(match[1]), match[2], match[3]
    size = len(spec.mtp_depth)
    if number is not None:
        prefix = f"mtp.layers.{depth * size + int(number)}."
        return _layer_layouts(rest, prefix, spec.mtp_depth[int(number)], spec)
    part, _, end = rest.partition(".")
    if part == "norm":
        return [[HfTensor(f"mtp.layers.{depth * size + size - 1}.final_layernorm.{end}")]]
    return [[HfTensor(f"mtp.layers.{depth * size}.{_MTP_FIRST[part]}.{end}")]]


def _layer_layouts(rest: str, prefix: str, layer: Layer, spec: ModelSpec) -> list[Layout]:
    part, _, inner = rest.partition(".")
    if part in ("mixer_norm", "ffn_norm"):
        return [[HfTensor(f"{prefix}norm.{inner}")]]
    prefix = f"{prefix}mixer."
    first, _, end = inner.partition(".")
    if part == "mixer":
        view: View = _with_empty_dim if inner == "conv" else whole
        return [[HfTensor(_join(prefix + _PARTS[layer.mixer][first], end), view)]]
    if layer.ffn == "dense":
        return [[HfTensor(f"{prefix}{_MLP[first]}.{end}")]]
    if first == "experts":
        return _expert_layouts(end, f"{prefix}experts.", spec)
    if first == "router":
        return [[HfTensor(f"{prefix}gate.{'e_score_correction_bias' if end == 'balance_bias' else end}")]]
    name, _, end = end.partition(".")
    return [[HfTensor(f"{prefix}shared_experts.{_MLP[name]}.{end}")]]


def _expert_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    assert spec.moe is not None
    key = {"gate_up": "up_proj", "down": "down_proj"}[name]
    each = TensorsOfExperts(spec.moe.num_experts, lambda n: HfTensor(f"{prefix}{n}.{key}.weight", _expert(n)))
    return [each, [HfTensor(prefix + key)]]


def _expert(number: int) -> Callable[[Tensor], Tensor]:
    return lambda p_EXX: p_EXX[number]


def _with_empty_dim(p_WT: Tensor) -> Tensor:
    return p_WT[:, None]


def _join(key: str, end: str) -> str:
    return f"{key}.{end}" if end else key
