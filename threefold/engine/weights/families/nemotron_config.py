"""The config.json of a Nemotron-H model: the inverse of its reader in `spec/`. `make_hf_config.py` calls it."""

from typing import Any

from threefold.spec.model import GqaSpec, Layer, ModelSpec, MoeSpec

_BLOCKS = {  # transformers from 5.13 on has other names for the first two, and takes these for them
    Layer("mamba", "none"): "mamba",
    Layer("attention", "none"): "attention",
    Layer("none", "moe"): "moe",
    Layer("none", "dense"): "mlp",
}


def nemotron_config(spec: ModelSpec) -> dict[str, Any]:
    """The configuration from which the same spec is read."""
    attention, mamba, moe = spec.attention, spec.mamba, spec.moe
    assert isinstance(attention, GqaSpec)
    assert mamba is not None
    return {
        "model_type": "nemotron_h",
        "hidden_size": spec.dim,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.num_layers,
        "layers_block_type": [_BLOCKS[layer] for layer in spec.layers],
        "intermediate_size": spec.dense_dim,
        "mlp_hidden_act": spec.activation,
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state_dim,
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv,
        "time_step_min": mamba.time_step_min,
        "num_nextn_predict_layers": spec.mtp_layers,
        "mtp_layers_block_type": [_BLOCKS[layer] for layer in spec.mtp_depth],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **({} if moe is None else _moe(moe)),
    }


def _moe(moe: MoeSpec) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "n_shared_experts": moe.num_shared,
        "moe_shared_expert_intermediate_size": moe.shared_width,
        "moe_latent_size": moe.latent_dim,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.norm_topk,
        "routed_scaling_factor": moe.scale,
    }
