"""A Hugging Face config.json for a model that was not imported: the inverse of `spec/hf.py`.

`scaling_keys` is also what families with rotary tables of their own write. The engine's export and the judges of
Megatron's settings call `hf_config_of` with the family's declaration.
"""

from typing import Any

from threefold.spec.family import Family, Parts
from threefold.spec.model import GqaSpec, MlaSpec, ModelSpec, RopeScaling

# A key is written under the name that published files have, and with the value that the model resolves it to.
_PUBLISHED = {"num_mtp_layers": "num_nextn_predict_layers"}
_RESOLVED = {"moe.shared_dim": "moe.shared_width", "attention.scale": "attention.logit_scale"}


def text_config(spec: ModelSpec, family: Family) -> Parts:
    """The configuration of the text model."""
    attention = spec.attention
    assert attention is not None
    config: Parts = {
        "model_type": spec.family if family.composite_tied is None else f"{spec.family}_text",
        "hidden_size": spec.dim,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.dense_dim,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(attention, GqaSpec):
        config["head_dim"] = attention.head_dim
    rotated = attention if isinstance(attention, MlaSpec) or attention.use_rope else spec.local_attention
    if rotated is not None:
        config |= {"hidden_act": "silu", "rms_norm_eps": spec.norm_eps, **_rope(rotated, family)}
        config |= {"attention_bias": attention.bias} if isinstance(attention, GqaSpec) else {}
    for key, places in family.config.placed().items():
        holder: Any = spec
        *tables, name = _RESOLVED.get(places[0], places[0]).split(".")
        for table in tables:
            holder = getattr(holder, table)
        if holder is not None and not (key == "sliding_window" and getattr(holder, name) is None):
            config[_PUBLISHED.get(key, key)] = getattr(holder, name)
    return config | (family.write(spec) if family.write is not None else {})


def _rope(spec: GqaSpec | MlaSpec, family: Family) -> Parts:
    """RoPE settings, twice: transformers 4 reads `rope_theta`, transformers 5 reads `rope_parameters`."""
    is_partial = bool(family.rope.get("partial")) and isinstance(spec, GqaSpec)
    part = {"partial_rotary_factor": spec.rope_fraction} if is_partial and isinstance(spec, GqaSpec) else {}
    scaling = {"rope_type": "default"} if spec.rope_scaling is None else scaling_keys(spec.rope_scaling)
    if isinstance(spec, GqaSpec) and spec.rope_sections:
        scaling |= {"mrope_section": list(spec.rope_sections), "mrope_interleaved": True}
    config: Parts = {
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **part},
        **part,
    }
    if spec.rope_scaling is not None:
        # The stated length is that of the context of training where a table has no other key for it.
        stretch = 1.0 if spec.rope_scaling.kind in ("linear", "dynamic", "ntk_alpha") else spec.rope_scaling.factor
        config["max_position_embeddings"] = int(stretch * spec.rope_scaling.original_len)
    return config


def scaling_keys(spec: RopeScaling) -> Parts:
    """A rotary scaling as `rope_parameters` has it."""
    config: Parts = {"rope_type": spec.kind, "factor": spec.factor}
    if spec.mscale_all_dim is not None:
        config["mscale_all_dim"] = spec.mscale_all_dim
    if spec.kind == "ntk_alpha":
        return {**config, "rope_type": "dynamic", "factor": 1.0, "alpha": spec.factor}
    if spec.kind in ("linear", "dynamic"):
        return config
    config["original_max_position_embeddings"] = spec.original_len
    if spec.kind == "longrope":
        config |= {"short_factor": list(spec.short_factor), "long_factor": list(spec.long_factor)}
        return config if spec.attention_factor is None else {**config, "attention_factor": spec.attention_factor}
    if spec.kind == "llama3":
        return {**config, "low_freq_factor": spec.low_freq_factor, "high_freq_factor": spec.high_freq_factor}
    optional = {"attention_factor": spec.attention_factor, "mscale": spec.mscale}
    return {
        **config,
        "beta_fast": spec.beta_fast,
        "beta_slow": spec.beta_slow,
        "truncate": spec.truncate,
        **{name: value for name, value in optional.items() if value is not None},
    }
