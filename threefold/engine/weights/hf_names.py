"""Maps each tensor of the engine to the Hugging Face tensors that hold its values.

An engine tensor can consist of several Hugging Face tensors, such as one for each expert. An `HfTensor` names one of
them and the view of the engine tensor with the same values, so that one table serves reading and writing, and bits are
only moved. For example, the engine's `layers.3.ffn.experts.down` is written as
`model.layers.3.mlp.experts.0.down_proj.weight` and so on, one for each expert. `read_hf` and `write_hf` call
`hf_layouts`.

Shapes: E experts, D model dim, H expert dim, X = 2H (gate and up), W convolution channels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from torch import Tensor

from threefold.spec.model import Layer, MlaSpec, ModelSpec


def _whole(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor, and the part of an engine tensor that has its values."""

    key: str  # its name in the checkpoint
    view: Callable[[Tensor], Tensor] = _whole  # engine tensor -> the part with these values
    merge: int | None = None  # this dim of the view and the next are one dim of the Hugging Face tensor
    stored: Literal["plain", "mxfp4"] = "plain"

    def write(self, engine_tensor: Tensor, value: Tensor) -> None:
        """Copy the values of the Hugging Face tensor into the engine tensor."""
        target = self.view(engine_tensor)
        target.copy_(value.reshape(target.shape))

    def shape(self, engine_tensor: Tensor) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        sizes = list(self.view(engine_tensor).shape)
        if self.merge is not None:
            sizes[self.merge : self.merge + 2] = [sizes[self.merge] * sizes[self.merge + 1]]
        return tuple(sizes)

    def read(self, engine_tensor: Tensor) -> Tensor:
        """The Hugging Face tensor, made from the engine tensor."""
        return self.view(engine_tensor).reshape(self.shape(engine_tensor)).contiguous()


_GQA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
}
_MLA = {
    "q": "self_attn.q_proj",
    "q_down": "self_attn.q_a_proj",
    "q_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "out": "self_attn.o_proj",
}
_DELTA = {
    "qkvz": "linear_attn.in_proj_qkvz",
    "ba": "linear_attn.in_proj_ba",
    "conv": "linear_attn.conv1d.weight",
    "dt_bias": "linear_attn.dt_bias",
    "a_log": "linear_attn.A_log",
    "norm": "linear_attn.norm",
    "out": "linear_attn.out_proj",
}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_ROUTER = {"gpt_oss": "mlp.router", "mixtral": "block_sparse_moe.gate"}
_SHARED = {"qwen3_next": "mlp.shared_expert"}
_MTP = {
    "deepseek_v3": {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"},
    "qwen3_next": {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "join": "fc"},
}


Layout = Sequence[HfTensor]


class _OfExperts(Sequence[HfTensor]):
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


def hf_layouts(name: str, spec: ModelSpec) -> list[Layout]:
    """The layouts in which a checkpoint may hold the engine tensor `name`, each a list of tensors.

    The first layout is the one that is written. Others are the stacked experts of newer transformers, and MXFP4.
    """
    if name in _TOP:
        return [[HfTensor(_TOP[name])]]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        number = int(match[1])
        return _layer_layouts(match[2], f"model.layers.{number}.", spec.layers[number], spec)
    match = re.fullmatch(r"mtp\.(\d+)\.(?:layers\.(\d+)\.)?(.+)", name)
    assert match, name
    return _mtp_layouts(int(match[1]), match[2], match[3], spec)


def _mtp_layouts(depth: int, layer: str | None, rest: str, spec: ModelSpec) -> list[Layout]:
    """MTP depths: Qwen3-Next has one under `mtp.`; other families follow DeepSeek and add layers after the last."""
    if spec.family == "qwen3_next":
        if layer is not None:
            return _layer_layouts(rest, f"mtp.layers.{depth}.", spec.mtp_depth[int(layer)], spec)
        prefix, table = "mtp.", _MTP["qwen3_next"]
    else:
        prefix, table = f"model.layers.{spec.num_layers + depth}.", _MTP["deepseek_v3"]
        if layer is not None:
            return _layer_layouts(rest, prefix, spec.mtp_depth[int(layer)], spec)
    part, _, end = rest.partition(".")
    return [[HfTensor(f"{prefix}{table.get(part, part)}.{end}")]]


def duplicated_keys(spec: ModelSpec, mtp: int) -> dict[str, str]:
    """Hugging Face key -> engine tensor that it repeats: DeepSeek's MTP layers contain copies of embedding and head."""
    if spec.family == "qwen3_next":
        return {}
    head = "embed.weight" if spec.tied else "head.weight"
    found: dict[str, str] = {}
    for depth in range(mtp):
        prefix = f"model.layers.{spec.num_layers + depth}."
        found |= {f"{prefix}embed_tokens.weight": "embed.weight", f"{prefix}shared_head.head.weight": head}
    return found


def _layer_layouts(rest: str, prefix: str, layer: Layer, spec: ModelSpec) -> list[Layout]:
    part, _, inner = rest.partition(".")
    if part == "mixer_norm":
        return [[HfTensor(f"{prefix}input_layernorm.{inner}")]]
    if part == "ffn_norm":
        return [[HfTensor(f"{prefix}post_attention_layernorm.{inner}")]]
    if part == "mixer":
        return [[_mixer_tensor(inner, prefix, layer, spec)]]
    if layer.ffn == "dense":
        return [[HfTensor(f"{prefix}mlp.{_translate(inner, _MLP)}")]]
    return _moe_layouts(inner, prefix, spec)


def _translate(name: str, table: Mapping[str, str]) -> str:
    first, _, rest = name.partition(".")
    return f"{table[first]}.{rest}" if rest else table[first]


def _mixer_tensor(name: str, prefix: str, layer: Layer, spec: ModelSpec) -> HfTensor:
    if layer.mixer == "delta":
        view = (lambda p_WT: p_WT[:, None]) if name == "conv" else _whole
        return HfTensor(prefix + _translate(name, _DELTA), view)
    return HfTensor(prefix + _translate(name, _MLA if isinstance(spec.attention, MlaSpec) else _GQA))


def _moe_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    part, _, inner = name.partition(".")
    if part == "experts":
        return _expert_layouts(inner, prefix, spec)
    if part == "router":
        inner = "e_score_correction_bias" if inner == "balance_bias" else inner
        paths = dict.fromkeys([_ROUTER.get(spec.family, "mlp.gate"), "mlp.gate"])
        return [[HfTensor(f"{prefix}{path}.{inner}")] for path in paths]
    if part == "shared":
        return [[HfTensor(f"{prefix}{_SHARED.get(spec.family, 'mlp.shared_experts')}.{_translate(inner, _MLP)}")]]
    return [[HfTensor(f"{prefix}mlp.shared_expert_gate.{inner}")]]


def _expert_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    if spec.family == "gpt_oss":
        return _gpt_oss_expert_layouts(name, f"{prefix}mlp.experts.")
    assert spec.moe is not None
    gate, up, down = ("w1", "w3", "w2") if spec.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    experts_prefix = f"{prefix}{'block_sparse_moe' if spec.family == 'mixtral' else 'mlp'}.experts."
    stacked = [HfTensor(f"{prefix}mlp.experts.{name}_proj")]
    count = spec.moe.num_experts
    if name == "down":
        of_expert = _OfExperts(count, lambda e: HfTensor(f"{experts_prefix}{e}.{down}.weight", _expert_view(e)))
        return [of_expert, stacked]

    def half_of_expert(number: int) -> HfTensor:
        expert, half = divmod(number, 2)
        return HfTensor(f"{experts_prefix}{expert}.{(gate, up)[half]}.weight", _expert_view(expert, half))

    return [_OfExperts(2 * count, half_of_expert), stacked]


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


def stored_keys(tensor: HfTensor) -> Sequence[str]:
    """The keys in the safetensors files that hold one Hugging Face tensor."""
    return (f"{tensor.key}_blocks", f"{tensor.key}_scales") if tensor.stored == "mxfp4" else (tensor.key,)
