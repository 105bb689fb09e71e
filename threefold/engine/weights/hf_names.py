"""Maps each tensor of the engine to the Hugging Face tensors that hold its values.

An engine tensor can consist of several Hugging Face tensors, such as one for each expert. An `HfTensor` names one of
them and the view of the engine tensor with the same values, so that one table serves reading and writing, and bits are
only moved. For example, the engine's `layers.3.ffn.experts.down` is written as
`model.layers.3.mlp.experts.0.down_proj.weight` and so on, one for each expert. `read_hf` and `write_hf` call
`hf_layouts`.

Shapes: E experts, D model dim, H expert dim, X = 2H (gate and up), W convolution channels.
"""

import re
from collections.abc import Callable, Mapping

from torch import Tensor

from threefold.engine.weights.families.family_names import names_of
from threefold.engine.weights.families.nemotron_names import nemotron_layouts
from threefold.engine.weights.hf_tensor import HfTensor, Layout, TensorsOfExperts, View, whole
from threefold.engine.weights.hf_vision_names import is_vision_name, vision_tensor
from threefold.spec.model import DeltaSpec, Layer, MlaSpec, ModelSpec

_GQA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
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
_INDEXER = {"q": "wq_b", "k": "wk", "k_norm": "k_norm", "weight": "weights_proj"}
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
_TOP = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight", "norm.bias": "norm.bias"}
_MTP = {
    "deepseek_v3": {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"},
    "qwen3_next": {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "join": "fc"},
}


def hf_layouts(name: str, spec: ModelSpec) -> list[Layout]:
    """The layouts in which a checkpoint may hold the engine tensor `name`, each a list of tensors.

    The first layout is the one that is written. Others are the stacked experts of newer transformers, and MXFP4.
    """
    if name.startswith("head."):
        return [[HfTensor(f"lm_{name}")]]
    if spec.family == "nemotron_h":
        return nemotron_layouts(name, spec)
    if spec.vision is not None and is_vision_name(name):
        return [[vision_tensor(name, spec.vision)]]
    prefixes = ["model."] if spec.vision is None else ["model.language_model."]
    if names_of(spec.family).published_with_pictures:
        prefixes.append("model.language_model.")
    if name in _TOP:
        return [[HfTensor(model + _TOP[name])] for model in prefixes]
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


def _mtp_layouts(depth: int, layer: str | None, rest: str, spec: ModelSpec) -> list[Layout]:
    """MTP depths: Qwen3-Next has one under `mtp.`; other families follow DeepSeek and add layers after the last."""
    if names_of(spec.family).one_mtp_depth:
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
    if names_of(spec.family).one_mtp_depth or spec.family == "nemotron_h":
        return {}
    head = "embed.weight" if spec.tied else "head.weight"
    found: dict[str, str] = {}
    for depth in range(mtp):
        prefix = f"model.layers.{spec.num_layers + depth}."
        found |= {f"{prefix}embed_tokens.weight": "embed.weight", f"{prefix}shared_head.head.weight": head}
    return found


def _layer_layouts(rest: str, prefix: str, layer: Layer, spec: ModelSpec) -> list[Layout]:
    part, _, inner = rest.partition(".")
    if own := dict(names_of(spec.family).own).get(rest):
        return [[HfTensor(f"{prefix}{own}")]]
    if part == "mixer_norm":
        return [[HfTensor(f"{prefix}input_layernorm.{inner}")]]
    if part == "ffn_norm":
        return [[HfTensor(f"{prefix}post_attention_layernorm.{inner}")]]
    if part == "mixer":
        return [_mixer_tensors(inner, prefix, layer, spec)]
    if layer.ffn == "dense":
        return [[HfTensor(f"{prefix}mlp.{_translate(inner, _MLP)}")]]
    return _moe_layouts(inner, prefix, spec)


def _translate(name: str, table: Mapping[str, str]) -> str:
    first, _, rest = name.partition(".")
    return f"{table[first]}.{rest}" if rest else table[first]


def _mixer_tensors(name: str, prefix: str, layer: Layer, spec: ModelSpec) -> Layout:
    if name.startswith("indexer."):
        return [HfTensor(f"{prefix}self_attn.indexer.{_translate(name.removeprefix('indexer.'), _INDEXER)}")]
    if layer.mixer != "delta":
        names = names_of(spec.family)
        grouped = {**_GQA, "q_norm": names.q_norm, "k_norm": names.k_norm}
        return [HfTensor(prefix + _translate(name, _MLA if isinstance(spec.attention, MlaSpec) else grouped))]
    if spec.family == "qwen3_5_moe" and name in ("qkvz.weight", "ba.weight"):
        assert spec.delta is not None
        return _separate_projections(name, f"{prefix}linear_attn.", spec.delta)
    view = (lambda p_WT: p_WT[:, None]) if name == "conv" else whole
    return [HfTensor(prefix + _translate(name, _DELTA), view)]


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
        view = (lambda p_E: p_E[None]) if names.balance_bias_has_groups else whole
        return [[HfTensor(f"{prefix}{path}", view)] for path in names.balance_bias]
    if part == "router":
        return [[HfTensor(f"{prefix}{path}.{inner}")] for path in names.router]
    if part == "shared":
        return [[HfTensor(f"{prefix}{names.shared}.{_translate(inner, _MLP)}")]]
    return [[HfTensor(f"{prefix}mlp.shared_expert_gate.{inner}")]]


def _expert_layouts(name: str, prefix: str, spec: ModelSpec) -> list[Layout]:
    if spec.family == "gpt_oss":
        return _gpt_oss_expert_layouts(name, f"{prefix}mlp.experts.")
    assert spec.moe is not None
    names = names_of(spec.family)
    gate, up, down = names.expert_parts
    experts_prefix = f"{prefix}{names.experts}."
    which = 0 if name == "gate_up" else 1
    stacked = [HfTensor(prefix + names.stacked_experts[which])]
    if names.stacked_on_disk is not None:
        return [[HfTensor(prefix + names.stacked_on_disk[which])], stacked]
    if spec.family == "qwen3_vl_moe":  # published with the input dim first, and written by transformers 5 as here
        return [stacked, [HfTensor(f"{prefix}mlp.experts.{name}_proj", lambda p: p.transpose(1, 2))]]
    count = spec.moe.num_experts
    if name == "down":
        of_expert = TensorsOfExperts(count, lambda e: HfTensor(f"{experts_prefix}{e}.{down}.weight", _expert_view(e)))
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
