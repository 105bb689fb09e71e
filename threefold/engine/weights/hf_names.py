"""Maps each tensor of the engine to the Hugging Face tensors that hold its values.

An engine tensor can consist of several Hugging Face tensors, such as one for each expert. An `HfTensor` names one of
them and the view of the engine tensor with the same values, so that one table serves reading and writing, and bits are
only moved. For example, the engine's `layers.3.ffn.experts.down` is written as
`model.layers.3.mlp.experts.0.down_proj.weight` and so on, one for each expert. `read_hf` and `write_hf` call
`hf_layouts`.

Shapes: E experts, D model dim, H expert dim, X = 2H (gate and up), W convolution channels.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from threefold.engine.vision import CHANNELS
from threefold.spec.families import FAMILIES
from threefold.spec.families.qwen_vision import PATCH_WEIGHT, encoder_key, is_encoder_name
from threefold.spec.family import DELTA_NAMES, INDEXER_NAMES, WeightNames
from threefold.spec.model import DeltaSpec, Layer, ModelSpec, VisionSpec

View = Callable[[Tensor], Tensor]  # an engine tensor -> a part of it


def whole(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor, and the part of an engine tensor that has its values."""

    key: str  # its name in the checkpoint
    view: View = whole  # engine tensor -> the part with these values
    merge: int | None = None  # this dim of the view and the next are one dim of the Hugging Face tensor
    stored: Literal["plain", "mxfp4"] = "plain"
    more: tuple[View, ...] = ()  # further parts, which follow along the first dim of the Hugging Face tensor

    def write(self, engine_tensor: Tensor, value: Tensor) -> None:
        """Copy the values of the Hugging Face tensor into the engine tensor."""
        shapes = [self._merged_shape(target) for target in self._views(engine_tensor)]
        parts = value.split([shape[0] for shape in shapes]) if self.more else [value]
        for target, part in zip(self._views(engine_tensor), parts, strict=True):
            target.copy_(part.reshape(target.shape))

    def shape(self, engine_tensor: Tensor) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        shapes = [self._merged_shape(part) for part in self._views(engine_tensor)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if self.more else shapes[0]

    def read(self, engine_tensor: Tensor) -> Tensor:
        """The Hugging Face tensor, made from the engine tensor."""
        parts = [part.reshape(self._merged_shape(part)) for part in self._views(engine_tensor)]
        return (torch.cat(parts) if self.more else parts[0]).contiguous()

    def num_elements(self, engine_tensor: Tensor) -> int:
        return sum(part.numel() for part in self._views(engine_tensor))

    def _views(self, engine_tensor: Tensor) -> Iterator[Tensor]:
        return (view(engine_tensor) for view in (self.view, *self.more))

    def _merged_shape(self, part: Tensor) -> tuple[int, ...]:
        sizes = list(part.shape)
        if self.merge is not None:
            sizes[self.merge : self.merge + 2] = [sizes[self.merge] * sizes[self.merge + 1]]
        return tuple(sizes)


Layout = Sequence[HfTensor]


class TensorsOfExperts(Sequence[HfTensor]):
    """One tensor for each expert or half of one, made when it is asked for: a config.json may tell of any number."""

    def __init__(self, count: int, make: Callable[[int], HfTensor]) -> None:
        self._numbers, self._make = range(count), make

    @overload
    def __getitem__(self, index: int) -> HfTensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[HfTensor]: ...

    def __getitem__(self, index: int | slice) -> HfTensor | Sequence[HfTensor]:
        found = self._numbers[index]
        return self._make(found) if isinstance(found, int) else [self._make(number) for number in found]

    def __len__(self) -> int:
        return len(self._numbers)


def stored_keys(tensor: HfTensor) -> Sequence[str]:
    """The keys in the safetensors files that hold one Hugging Face tensor."""
    return (f"{tensor.key}_blocks", f"{tensor.key}_scales") if tensor.stored == "mxfp4" else (tensor.key,)


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MTP = {  # what belongs to an MTP depth, by where its layers are
    "behind": {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"},
    "one": {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "join": "fc"},
    "layers": {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "final_layernorm"},
}


def names_of(family: str) -> WeightNames:
    """The names of a family's weights."""
    return FAMILIES[family].names


def hf_layouts(name: str, spec: ModelSpec) -> list[Layout]:
    """The layouts in which a checkpoint may hold the engine tensor `name`, each a list of tensors.

    The first layout is the one that is written. Others are the stacked experts of newer transformers, and MXFP4.
    """
    found = layouts_in_memory(name, spec)
    return [*(_renamed(found[0], table) for table in names_of(spec.family).stored_as), *found]


def _renamed(layout: Layout, table: Sequence[tuple[str, str]]) -> Layout:
    """The layout under the names of a kind of checkpoint."""

    def rename(tensor: HfTensor) -> HfTensor:
        key = tensor.key
        for pattern, stored in table:
            key = re.sub(pattern, stored, key)
        return replace(tensor, key=key)

    if isinstance(layout, TensorsOfExperts):
        return TensorsOfExperts(len(layout), lambda number: rename(layout[number]))
    return [rename(tensor) for tensor in layout]


def layouts_in_memory(name: str, spec: ModelSpec) -> list[Layout]:
    """The layouts by the names of the family: those of transformers in memory, where checkpoints have others."""
    if name.startswith("head."):
        return [[HfTensor(f"lm_{name}")]]
    if spec.vision is not None and is_encoder_name(name):
        return [[_encoder_tensor(name, spec.vision)]]
    names = names_of(spec.family)
    prefixes = list(names.prefixes) if spec.vision is None else ["model.language_model."]
    if names.published_with_pictures:
        prefixes.append("model.language_model.")
    part, _, leaf = name.partition(".")
    if own := names.own.get(name):
        return [[HfTensor(f"{model}{own}")] for model in prefixes]
    if part in ("embed", "norm"):
        return [[HfTensor(f"{model}{names.embed if part == 'embed' else names.norm}.{leaf}")] for model in prefixes]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        number = int(match[1])
        return [
            layout
            for model in prefixes
            for layout in _layer_layouts(match[2], f"{model}layers.{number}.", spec.layers[number], spec)
        ]
    match = re.fullmatch(r"mtp\.(\d+)\.(?:layers\.(\d+)\.)?(.+)", name)
    assert match, name
    return _mtp_layouts(int(match[1]), match[2], match[3], spec)


def _encoder_tensor(name: str, spec: VisionSpec) -> HfTensor:
    """The Hugging Face tensor with the values of an engine tensor of the image encoder or the projector."""
    sizes = (CHANNELS, spec.temporal_patch, spec.patch, spec.patch)
    view: View = (lambda p_DC: p_DC.unflatten(1, sizes)) if name == PATCH_WEIGHT else whole
    return HfTensor(encoder_key(name), view)


def _mtp_layouts(depth: int, layer: str | None, rest: str, spec: ModelSpec) -> list[Layout]:
    """MTP depths: Qwen3-Next has one under `mtp.`, Nemotron-H a list of layers, of which the first has what belongs to
    the depth and the last its norm; other families follow DeepSeek and add layers after the last."""
    kind, size = names_of(spec.family).mtp, len(spec.mtp_depth)
    part, _, end = rest.partition(".")
    if kind == "layers":
        number = int(layer) if layer is not None else size - 1 if part == "norm" else 0
        prefix = f"mtp.layers.{depth * size + number}."
    elif kind == "one":
        prefix = "mtp." if layer is None else f"mtp.layers.{depth}."
    else:
        prefix = f"model.layers.{spec.num_layers + depth}."
    if layer is not None:
        return _layer_layouts(rest, prefix, spec.mtp_depth[int(layer)], spec)
    return [[HfTensor(f"{prefix}{_MTP[kind].get(part, part)}.{end}")]]


def duplicated_keys(spec: ModelSpec, mtp: int) -> dict[str, str]:
    """Hugging Face key -> engine tensor that it repeats: DeepSeek's MTP layers contain copies of embedding and head."""
    if names_of(spec.family).mtp != "behind":
        return {}
    head = "embed.weight" if spec.tied else "head.weight"
    found: dict[str, str] = {}
    for depth in range(mtp):
        prefix = f"model.layers.{spec.num_layers + depth}."
        found |= {f"{prefix}embed_tokens.weight": "embed.weight", f"{prefix}shared_head.head.weight": head}
    return found


def _layer_layouts(rest: str, prefix: str, layer: Layer, spec: ModelSpec) -> list[Layout]:
    part, _, inner = rest.partition(".")
    names = names_of(spec.family)
    if own := names.own.get(rest):
        return [[HfTensor(f"{prefix}{own}")]]
    if part in ("mixer_norm", "ffn_norm"):
        return [[HfTensor(f"{prefix}{names.layer_norms[part == 'ffn_norm']}.{inner}")]]
    if part == "mixer":
        return [_mixer_tensors(inner, prefix + names.mixers[layer.mixer], layer, spec)]
    if layer.ffn == "dense":
        return [[HfTensor(f"{prefix}{names.dense}.{_translate(inner, _MLP)}")]]
    return _moe_layouts(inner, prefix, spec)


def _translate(name: str, table: Mapping[str, str]) -> str:
    first, _, rest = name.partition(".")
    return f"{table[first]}.{rest}" if rest else table[first]


def _mixer_tensors(name: str, prefix: str, layer: Layer, spec: ModelSpec) -> Layout:
    names = names_of(spec.family)
    if name.startswith("indexer."):
        return [HfTensor(f"{prefix}indexer.{_translate(name.removeprefix('indexer.'), INDEXER_NAMES)}")]
    if names.qkvz_by_part and name in ("qkvz.weight", "ba.weight"):
        assert spec.delta is not None
        return _separate_projections(name, prefix, spec.delta)
    table = {"delta": DELTA_NAMES, "mamba": names.mamba}.get(layer.mixer, names.attention)
    view: View = (lambda p_WT: p_WT[:, None]) if name == "conv" else whole
    return [HfTensor(prefix + _translate(name, table), view)]


def _separate_projections(name: str, prefix: str, delta: DeltaSpec) -> Layout:
    """Qwen3.5 has one projection for queries, keys and values, and one each for gate, step and decay. The engine's
    rows go by key head: in each its query, key, values and gates, or its steps and decays."""
    values_per_key = delta.num_v_heads // delta.num_k_heads

    def of_each_head(start: int, width: int) -> View:
        return lambda p_XD: p_XD.unflatten(0, (delta.num_k_heads, -1))[:, start : start + width]

    if name == "ba.weight":
        step, decay = of_each_head(0, values_per_key), of_each_head(values_per_key, values_per_key)
        return [HfTensor(f"{prefix}in_proj_b.weight", step, 0), HfTensor(f"{prefix}in_proj_a.weight", decay, 0)]
    width, keys = values_per_key * delta.v_dim, delta.k_dim
    query, key, value, gate = (
        of_each_head(start, size)
        for start, size in ((0, keys), (keys, keys), (2 * keys, width), (2 * keys + width, width))
    )
    return [
        HfTensor(f"{prefix}in_proj_qkv.weight", query, 0, more=(key, value)),
        HfTensor(f"{prefix}in_proj_z.weight", gate, 0),
    ]


def _moe_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    part, _, inner = name.partition(".")
    names = names_of(spec.family)
    if part == "experts":
        return _expert_layouts(inner, prefix, spec)
    if inner == "balance_bias":
        view: View = (lambda p_E: p_E[None]) if names.balance_bias_has_groups else whole
        return [[HfTensor(f"{prefix}{path}", view)] for path in names.balance_bias]
    if part == "router":
        return [[HfTensor(f"{prefix}{path}.{inner}")] for path in names.router]
    if part == "shared":
        return [[HfTensor(f"{prefix}{path}.{_translate(inner, _MLP)}")] for path in names.shared]
    return [[HfTensor(f"{prefix}{names.shared_gate}.{inner}")]]


def _expert_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    names = names_of(spec.family)
    if names.input_dim_first == "interleaved":
        return _gpt_oss_expert_layouts(name, f"{prefix}{names.experts}.")
    assert spec.moe is not None
    gate, up, down = names.expert_parts
    experts_prefix = f"{prefix}{names.experts}."
    which = 0 if name == "gate_up" else 1
    stacked = [HfTensor(prefix + names.stacked_experts[which])]
    if names.stacked_on_disk is not None:
        return [[HfTensor(prefix + names.stacked_on_disk[which])], stacked]
    if names.input_dim_first == "published":
        return [stacked, [HfTensor(stacked[0].key, lambda p: p.transpose(1, 2))]]
    count = spec.moe.num_experts
    if name == "down" or not spec.glu:
        part = down if name == "down" else up
        of_expert = TensorsOfExperts(count, lambda e: HfTensor(f"{experts_prefix}{e}.{part}.weight", _expert_view(e)))
        return [of_expert, stacked]

    def half_of_expert(number: int) -> HfTensor:
        expert, half = divmod(number, 2)
        return HfTensor(f"{experts_prefix}{expert}.{(gate, up)[half]}.weight", _expert_view(expert, half))

    return [TensorsOfExperts(2 * count, half_of_expert), stacked]


def _expert_view(number: int, half: int | None = None) -> Callable[[Tensor], Tensor]:
    """The view of one expert, or of its gate (`half` 0) or up (`half` 1) projection."""
    if half is None:
        return lambda p_EDH: p_EDH[number]
    return lambda p_EXD: p_EXD[number].chunk(2)[half]


def _gpt_oss_expert_layouts(name: str, experts_prefix: str) -> list[Layout]:
    """GPT-OSS stores the input dim first, and gate and up rows alternate. In MXFP4 the output dim is first."""
    key = experts_prefix + name.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
    if name == "down_bias":
        return [[HfTensor(key)]]
    if name == "gate_up_bias":
        return [[HfTensor(key, lambda p_EX: p_EX.unflatten(1, (2, -1)).transpose(1, 2), merge=1)]]
    if name == "down":
        return [[HfTensor(key, lambda p_EDH: p_EDH.transpose(1, 2))], [HfTensor(key, stored="mxfp4")]]
    return [
        [HfTensor(key, lambda p_EXD: p_EXD.unflatten(1, (2, -1)).permute(0, 3, 2, 1), merge=2)],
        [HfTensor(key, lambda p_EXD: p_EXD.unflatten(1, (2, -1)).transpose(1, 2), merge=1, stored="mxfp4")],
    ]
