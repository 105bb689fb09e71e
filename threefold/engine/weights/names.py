"""Engine names <-> Hugging Face names.

An engine tensor is covered by pieces. A piece names one Hugging Face tensor and gives the view of the engine
tensor that it fills, so that one table serves both directions, and bits are only ever moved.

Shapes: E experts, D model dim, H expert dim, W convolution channels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from threefold.spec.model import Layer, MlaSpec, ModelSpec


def _whole(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Piece:
    """`view(engine tensor)`, with the dims from `merge` to the next merged into one, is the Hugging Face tensor."""

    key: str
    view: Callable[[Tensor], Tensor] = _whole
    merge: int | None = None
    stored: Literal["plain", "mxfp4"] = "plain"

    def write(self, into: Tensor, value: Tensor) -> None:
        target = self.view(into)
        target.copy_(value.reshape(target.shape))

    def shape(self, of: Tensor) -> tuple[int, ...]:
        sizes = list(self.view(of).shape)
        if self.merge is not None:
            sizes[self.merge : self.merge + 2] = [sizes[self.merge] * sizes[self.merge + 1]]
        return tuple(sizes)

    def read(self, of: Tensor) -> Tensor:
        return self.view(of).reshape(self.shape(of)).contiguous()


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


def covers(name: str, spec: ModelSpec) -> list[list[Piece]]:
    """Every way a checkpoint may hold the engine tensor `name`; the first is the one written."""
    if name in _TOP:
        return [[Piece(_TOP[name])]]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        number = int(match[1])
        return _block(match[2], f"model.layers.{number}.", spec.layers[number], spec)
    match = re.fullmatch(r"mtp\.(\d+)\.(?:layers\.(\d+)\.)?(.+)", name)
    assert match, name
    return _mtp(int(match[1]), match[2], match[3], spec)


def _mtp(depth: int, layer: str | None, rest: str, spec: ModelSpec) -> list[list[Piece]]:
    """Qwen3-Next keeps its one depth under `mtp.`; everyone else follows DeepSeek: one layer more."""
    if spec.family == "qwen3_next":
        if layer is not None:
            return _block(rest, f"mtp.layers.{depth}.", spec.mtp_depth[int(layer)], spec)
        prefix, table = "mtp.", _MTP["qwen3_next"]
    else:
        prefix, table = f"model.layers.{spec.num_layers + depth}.", _MTP["deepseek_v3"]
        if layer is not None:
            return _block(rest, prefix, spec.mtp_depth[int(layer)], spec)
    part, _, end = rest.partition(".")
    return [[Piece(f"{prefix}{table.get(part, part)}.{end}")]]


def copies(spec: ModelSpec, mtp: int) -> dict[str, str]:
    """Hugging Face keys that repeat an engine tensor: DeepSeek's MTP layers carry embedding and head once more."""
    if spec.family == "qwen3_next":
        return {}
    head = "embed.weight" if spec.tied else "head.weight"
    found: dict[str, str] = {}
    for depth in range(mtp):
        prefix = f"model.layers.{spec.num_layers + depth}."
        found |= {f"{prefix}embed_tokens.weight": "embed.weight", f"{prefix}shared_head.head.weight": head}
    return found


def _block(rest: str, prefix: str, layer: Layer, spec: ModelSpec) -> list[list[Piece]]:
    part, _, inner = rest.partition(".")
    if part == "mixer_norm":
        return [[Piece(f"{prefix}input_layernorm.{inner}")]]
    if part == "ffn_norm":
        return [[Piece(f"{prefix}post_attention_layernorm.{inner}")]]
    if part == "mixer":
        return [[_mixer(inner, prefix, layer, spec)]]
    if layer.ffn == "dense":
        return [[Piece(f"{prefix}mlp.{_renamed(inner, _MLP)}")]]
    return _moe(inner, prefix, spec)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    first, _, rest = name.partition(".")
    return f"{table[first]}.{rest}" if rest else table[first]


def _mixer(name: str, prefix: str, layer: Layer, spec: ModelSpec) -> Piece:
    if layer.mixer == "delta":
        view = (lambda p_WT: p_WT[:, None]) if name == "conv" else _whole
        return Piece(prefix + _renamed(name, _DELTA), view)
    return Piece(prefix + _renamed(name, _MLA if isinstance(spec.attention, MlaSpec) else _GQA))


def _moe(name: str, prefix: str, spec: ModelSpec) -> list[list[Piece]]:
    part, _, inner = name.partition(".")
    if part == "experts":
        return _experts(inner, prefix, spec)
    if part == "router":
        inner = "e_score_correction_bias" if inner == "balance_bias" else inner
        places = dict.fromkeys([_ROUTER.get(spec.family, "mlp.gate"), "mlp.gate"])
        return [[Piece(f"{prefix}{place}.{inner}")] for place in places]
    if part == "shared":
        return [[Piece(f"{prefix}{_SHARED.get(spec.family, 'mlp.shared_experts')}.{_renamed(inner, _MLP)}")]]
    return [[Piece(f"{prefix}mlp.shared_expert_gate.{inner}")]]


def _experts(name: str, prefix: str, spec: ModelSpec) -> list[list[Piece]]:
    if spec.family == "gpt_oss":
        return _oss_experts(name, f"{prefix}mlp.experts.")
    assert spec.moe is not None
    gate, up, down = ("w1", "w3", "w2") if spec.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    home = f"{prefix}{'block_sparse_moe' if spec.family == 'mixtral' else 'mlp'}.experts."
    stacked = [Piece(f"{prefix}mlp.experts.{name}_proj")]
    if name == "down":
        return [[Piece(f"{home}{e}.{down}.weight", _expert(e)) for e in range(spec.moe.num_experts)], stacked]
    halves = ((gate, 0), (up, 1))
    each = [
        Piece(f"{home}{e}.{half}.weight", _expert(e, number))
        for e in range(spec.moe.num_experts)
        for half, number in halves
    ]
    return [each, stacked]


def _expert(number: int, half: int | None = None) -> Callable[[Tensor], Tensor]:
    """One expert of a stack, or its gate (0) or up (1) half."""
    if half is None:
        return lambda p_EDH: p_EDH[number]
    return lambda p_EXD: p_EXD[number].chunk(2)[half]


def _oss_experts(name: str, home: str) -> list[list[Piece]]:
    """GPT-OSS stores experts input-first, with gate and up rows alternating; in MXFP4 output-first."""
    key = home + name.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
    if name == "down_bias":
        return [[Piece(key)]]
    if name == "gate_up_bias":
        return [[Piece(key, lambda p_EX: p_EX.unflatten(1, (2, -1)).transpose(1, 2), merge=1)]]
    if name == "down":
        return [[Piece(key, lambda p_EDH: p_EDH.transpose(1, 2))], [Piece(key, stored="mxfp4")]]
    return [
        [Piece(key, lambda p_EXD: p_EXD.unflatten(1, (2, -1)).permute(0, 3, 2, 1), merge=2)],
        [Piece(key, lambda p_EXD: p_EXD.unflatten(1, (2, -1)).transpose(1, 2), merge=1, stored="mxfp4")],
    ]


def tensors_of(piece: Piece) -> Sequence[str]:
    """The keys of the file that make up a piece."""
    return (f"{piece.key}_blocks", f"{piece.key}_scales") if piece.stored == "mxfp4" else (piece.key,)
