"""DeepSeek-V4: compressed attention of three kinds, several residual streams, and experts that the first layers look up
by token id.

transformers has no MTP depth of it and passes the weights of one over, so that there is none here.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from threefold.spec.family import BASE, NO_DROPOUT, ROPE, Family, Fields, HfClass, Parts, WeightNames, published, tiny
from threefold.spec.hf_config import scaling_keys
from threefold.spec.hf_fields import number, read_rope
from threefold.spec.hf_parts import layer_pattern, num_layers, standard_parts
from threefold.spec.model import CompressedSpec, GqaSpec, IndexerSpec, ModelSpec, StreamsSpec

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_LETTERS = {_SLIDING: "w", _SPARSE: "t", _HEAVY: "p"}
_TYPE_OF_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}


def _read(c: Fields, family: Family) -> Parts:
    parts = standard_parts(c, family)
    rates, heads, groups = _rates(c), c["num_attention_heads"], c["o_groups"]
    if c["scoring_func"] not in ("sqrtsoftplus", "sigmoid"):
        raise ValueError(f"scoring_func {reprlib.repr(c['scoring_func'])} is not supported")
    if type(heads) is int and type(groups) is int and (groups < 1 or heads % groups):
        raise ValueError(f"num_attention_heads {heads} does not fall into o_groups {groups}")
    main, compress = _rotations(c)
    own = parts["attention"]
    sizes = {"num_heads": heads, "num_kv_heads": 1, "head_dim": c["head_dim"], "window": c["sliding_window"]}
    sizes |= {"sinks": True, "shared_kv": True, "rope_pairs": True}
    sizes |= {name: own[name] for name in ("q_rank", "out_groups", "out_rank")}
    indexer = {**own["indexer"], "rope_pairs": True}
    rotated = int(c["head_dim"] * compress["rope_fraction"])
    if indexer["head_dim"] < rotated:
        raise ValueError(f"index_head_dim {indexer['head_dim']} is less than the {rotated} dims that turn")
    if c["hc_mult"] < 1 or c["hc_sinkhorn_iters"] < 1:
        raise ValueError("hc_mult and hc_sinkhorn_iters are at least 1")
    pattern = layer_pattern(_layer_types(c), _LETTERS, num_layers(c))
    return {
        **parts,
        "pattern": pattern,
        "attention": {**sizes, **compress, "rate": rates[_SPARSE], "overlaps": True, "indexer": indexer},
        "local_attention": {**sizes, **main} if "w" in pattern else None,
        "pooled_attention": {**sizes, **compress, "rate": rates[_HEAVY]} if "p" in pattern else None,
        "activation": {"silu": "limited silu"}.get(parts["activation"], parts["activation"]),
        "moe": {**parts["moe"], "score": c["scoring_func"], "hash_layers": _hash_layers(c)},
        "dense_dim": 0,
    }


def _rates(c: Fields) -> dict[str, Any]:
    given = {_SPARSE: 4, _HEAVY: 128} if c["compress_rates"] is None else c["compress_rates"]
    if not isinstance(given, Mapping):
        raise ValueError(f"compress_rates is {reprlib.repr(given)}, not a table")
    old = {_SPARSE: c["compress_rate_csa"], _HEAVY: c["compress_rate_hca"]}
    rates = {kind: given.get(kind) if value is None else value for kind, value in old.items()}
    for kind, rate in rates.items():
        if type(rate) is not int or rate < 1:
            raise ValueError(f"compress_rates of {kind} is {reprlib.repr(rate)}, not a whole number from 1 on")
    return rates


def _layer_types(c: Fields) -> list[Any]:
    """The types of the layers: stated, by their ratios in published files, or two heavy ones and then in turn."""
    count, ratios = num_layers(c), c["compress_ratios"]
    if c["layer_types"] is not None:
        return list(c["layer_types"][:count])
    if ratios is None:
        return [_HEAVY] * min(count, 2) + [_SPARSE if i % 2 else _HEAVY for i in range(max(count - 2, 0))]
    if not isinstance(ratios, list) or any(ratio not in _TYPE_OF_RATIO for ratio in ratios):
        raise ValueError(f"compress_ratios is {reprlib.repr(ratios)}, not a list of {list(_TYPE_OF_RATIO)}")
    return [_TYPE_OF_RATIO[ratio] for ratio in ratios][:count]


def _hash_layers(c: Fields) -> int:
    count, types = num_layers(c), c["mlp_layer_types"]
    if types is None:
        hashed = 3 if c["num_hash_layers"] is None else c["num_hash_layers"]
        return int(min(count, hashed))
    pattern = layer_pattern(types[:count], {"hash_moe": "h", "moe": "m"}, count)
    if "mh" in pattern:
        raise ValueError("layers that look experts up (hash_moe in mlp_layer_types) after others are not supported")
    return pattern.count("h")


def _rotations(c: Fields) -> tuple[Parts, Parts]:
    """Rotary positions of layers with a window alone, and of those with entries, which alone are stretched."""
    fraction = c["partial_rotary_factor"]
    if fraction is None:
        rotated = c["qk_rope_head_dim"]
        fraction = 64 / 512 if rotated is None else number("qk_rope_head_dim", rotated) / c["head_dim"]
    rope = c["rope_scaling"] or c["rope_parameters"] or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {reprlib.repr(rope)}, not a table")
    if isinstance(rope.get("main"), Mapping) and isinstance(rope.get("compress"), Mapping):
        tables = rope["main"], rope["compress"]
    else:
        part = {"partial_rotary_factor": fraction}
        compress = {**{key: value for key, value in rope.items() if key not in ("main", "compress")}, **part}
        compress["rope_theta"] = c["compress_rope_theta"]
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
        tables = {"rope_theta": c["rope_theta"], **part}, compress
    main, stretched = (_rotation(c, table) for table in tables)
    return main, stretched


def _rotation(c: Fields, table: Mapping[str, Any]) -> Parts:
    if table.get("rope_theta") is None:
        raise ValueError("rope_parameters lacks rope_theta")
    own = {**dict.fromkeys(ROPE), "rope_parameters": table, "max_position_embeddings": c["max_position_embeddings"]}
    return read_rope(own, c["head_dim"], partial=True)


def _write(spec: ModelSpec) -> Parts:
    sparse, heavy, local = spec.attention, spec.pooled_attention, spec.local_attention
    assert isinstance(sparse, CompressedSpec)
    assert spec.moe is not None
    rates = {_SPARSE: sparse.rate, _HEAVY: heavy.rate if isinstance(heavy, CompressedSpec) else 128}
    types = {letter: kind for kind, letter in _LETTERS.items()}
    letters = [spec.pattern[i % len(spec.pattern)] for i in range(spec.num_layers)]
    main = local or replace(sparse, rope_theta=10_000.0, rope_scaling=None)  # of no layer where there is none
    return {
        "hidden_act": "silu" if spec.activation == "limited silu" else spec.activation,
        "intermediate_size": spec.moe.expert_dim,  # transformers' other name for the width of experts
        "layer_types": [types[letter] for letter in letters],
        "compress_rates": rates,
        "compress_rope_theta": sparse.rope_theta,
        "rope_theta": main.rope_theta,
        "partial_rotary_factor": main.rope_fraction,
        "rope_parameters": {"main": _rope_table(main), "compress": _rope_table(sparse)},
        "scoring_func": spec.moe.score,
        "sliding_window": sparse.window,
        "mlp_layer_types": ["hash_moe" if layer.hashed else "moe" for layer in spec.layers],
        "num_nextn_predict_layers": 0,
    }


def _rope_table(attention: GqaSpec) -> Parts:
    scaling = {"rope_type": "default"} if attention.rope_scaling is None else scaling_keys(attention.rope_scaling)
    return {**scaling, "rope_theta": attention.rope_theta, "partial_rotary_factor": attention.rope_fraction}


# What checkpoints call things: DeepSeek's, and those that transformers writes, which differ in a norm and above.
_STORED = (
    (r"\.self_attn\.compressor\.indexer\.(scorer\.)?(weights_proj|q_b_proj)", r".self_attn.indexer.\2"),
    (r"\.self_attn\.compressor\.indexer\.", ".self_attn.indexer.compressor."),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"\.position_bias", ".ape"),
    (r"\.sinks", ".attn_sink"),
    (r"\.q_a_norm", ".q_norm"),
    (r"\.q_a_proj", ".wq_a"),
    (r"\.q_b_proj", ".wq_b"),
    (r"\.kv_proj", ".wkv"),
    (r"(compressor)\.gate_proj", r"\1.wgate"),
    (r"\.o_a_proj", ".wo_a"),
    (r"\.o_b_proj", ".wo_b"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias", ".gate.bias"),
    (r"experts\.(\d+\.)?gate_proj", r"experts.\1w1"),
    (r"experts\.(\d+\.)?up_proj", r"experts.\1w3"),
    (r"experts\.(\d+\.)?down_proj", r"experts.\1w2"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"^lm_head", "head"),
)
_PUBLISHED = (*_STORED, (r"^model\.", ""), (r"^embed_tokens", "embed"), (r"^hc_head\.hc_", "hc_head_"))
_BY_TRANSFORMERS = (*_STORED, (r"\.attn\.kv_norm", ".attn.norm"))


_STREAMS = {"weight": "fn", "bias": "base", "kind_scale": "scale"}
_POOLING = {"kv.weight": "kv_proj.weight", "gate.weight": "gate_proj.weight"}
_POOLING |= {"position_bias": "position_bias", "norm.weight": "kv_norm.weight"}


def _part_names(ours: str, stored: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{ours}{name}": f"{stored}{path}" for name, path in parts.items()}


def _sizes(num_heads: int, head_dim: int, q_rank: int, out_groups: int, out_rank: int, window: int) -> dict[str, Any]:
    low_rank = {"q_rank": q_rank, "out_groups": out_groups, "out_rank": out_rank, "window": window}
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim, "rope_fraction": 0.25}
    return {**heads, **low_rank, "sinks": True, "shared_kv": True, "rope_pairs": True}


_TINY = _sizes(8, 32, 48, 4, 16, 32)
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_ASSUMED = "MTP layer left out, as in transformers"
DEEPSEEK_V4 = Family(
    "deepseek_v4",
    {"deepseek_v4": "DeepseekV4ForCausalLM"},
    HfClass(
        defaults={
            **BASE,
            "moe_intermediate_size": 2048,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "num_experts_per_tok": 6,
            "n_routed_experts": 256,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 1048576,
            "rope_theta": 10000.0,
            "layer_types": None,
            "compress_rates": None,
            "compress_rope_theta": 160000.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "mlp_layer_types": None,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "partial_rotary_factor": None,
        },
        only={**NO_DROPOUT, "attention_bias": False, "mlp_bias": False, "n_shared_experts": 1},
        # One key for all heads, and weights that sum to one, whatever the file says; MTP is not in transformers.
        unread=frozenset({"num_key_value_heads", "norm_topk_prob", "num_nextn_predict_layers", "router_jitter_noise"}),
        aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        extra={
            **{key: None for key in ROPE if key not in ("rope_theta", "partial_rotary_factor")},
            **dict.fromkeys(("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers")),
            "qk_rope_head_dim": None,
        },
        places={
            "o_groups": "attention.out_groups",
            "o_lora_rank": "attention.out_rank",
            "hc_mult": "streams.count",
            "hc_sinkhorn_iters": "streams.sinkhorn_iters",
            "hc_eps": "streams.eps",
            "swiglu_limit": "moe.glu_limit",
            "qk_rope_head_dim": "",
        },
    ),
    facts={"moe.balance_bias": True, "moe.num_shared": 1, "moe.norm_topk": True},
    attention="own",
    read=_read,
    write=_write,
    names=WeightNames(
        own={
            **_part_names("norm.streams.", "hc_head.hc_", _STREAMS),
            **_part_names("mixer_streams.", "attn_hc.", _STREAMS),
            **_part_names("ffn_streams.", "ffn_hc.", _STREAMS),
            **_part_names("mixer.pooling.", "self_attn.compressor.", _POOLING),
            **_part_names("mixer.indexer.pooling.", "self_attn.compressor.indexer.", _POOLING),
            "mixer.indexer.q.weight": "self_attn.compressor.indexer.q_b_proj.weight",
            "mixer.indexer.weight.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
            "mixer.group_down": "self_attn.o_a_proj.weight",
            "ffn.router.expert_of_token": "mlp.gate.tid2eid",
        },
        mixers=dict.fromkeys(("attention", "window", "pooled"), "self_attn."),
        attention={
            "q_down": "q_a_proj",
            "q_norm": "q_a_norm",
            "q_up": "q_b_proj",
            "kv": "kv_proj",
            "kv_norm": "kv_norm",
            "out": "o_b_proj",
            "sinks": "sinks",
        },
        stored_as=(_PUBLISHED, _BY_TRANSFORMERS),
    ),
    models=(
        published(
            "deepseek-v4-flash",
            (43, 4096, 64, 129280),
            {"rope_parameters": _YARN, "compress_ratios": [0, 0, *(4, 128) * 20, 4]},
            source="transformers DeepseekV4Config defaults, for deepseek-ai/DeepSeek-V4-Flash-Base; ratios and YaRN of "
            "inference-optimization/DeepSeek-V4-Flash-bf16-dequantized-5layers config.json, continued in turn",
            counts=(284e9, 13e9),
            approximate=_ASSUMED,
        ),
        published(
            "deepseek-v4-pro",
            (61, 7168, 128, 129280),
            {"rope_parameters": _YARN, "q_lora_rank": 1536, "o_groups": 16, "n_routed_experts": 384},
            {"moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "index_topk": 1024},
            {"compress_ratios": [128, 128, *(4, 128) * 29, 4]},
            source="transformers modeling_deepseek_v4 (heads, groups and widths of Pro) and DeepseekV4Config defaults",
            counts=(None, 49e9),
            approximate="width of experts from the published total of 1.6T; factor of their weights, chosen entries, "
            f"and the order of kinds of attention after the first two from descriptions of the model; {_ASSUMED}",
        ),
        tiny(
            "tiny-deepseek-v4",
            "deepseek_v4",
            num_layers=4,
            pattern="wtpt",
            attention=CompressedSpec(
                **_TINY, rope_theta=160_000.0, rate=4, overlaps=True, indexer=IndexerSpec(9, 16, 8, rope_pairs=True)
            ),
            local_attention=CompressedSpec(**_TINY),
            pooled_attention=CompressedSpec(**_TINY, rope_theta=160_000.0, rate=16),
            streams=StreamsSpec(4),
            moe={
                "num_shared": 1,
                "score": "sqrtsoftplus",
                "balance_bias": True,
                "scale": 1.5,
                "hash_layers": 1,
                "glu_limit": 10.0,
            },
            activation="limited silu",
        ),
    ),
)
