"""Configurations that were once read otherwise than transformers reads them, or accepted and not run."""

from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS

from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.rules.all import check
from threefold.spec.hf import model_from_config, model_from_dict
from threefold.spec.model import GqaSpec, MlaSpec, ModelSpec, RopeScaling
from threefold.spec.stacks import engine_lacks


def read(model_type: str, *absent: str, **changes: Any) -> ModelSpec:
    config = {name: value for name, value in CONFIGS[model_type].items() if name not in absent}
    return model_from_dict({"model_type": model_type, **config, **changes}, "m", "here")


def refused(model_type: str, *absent: str, **changes: Any) -> str:
    with pytest.raises(FindingsError) as caught:
        read(model_type, *absent, **changes)
    [finding] = caught.value.findings
    assert (finding.rule, finding.severity) == ("model-config", "error")
    return finding.problem


def gqa(model: ModelSpec) -> GqaSpec:
    assert isinstance(model.attention, GqaSpec)
    return model.attention


def test_absent_keys_of_experts() -> None:
    qwen = read("qwen3_moe", "norm_topk_prob").moe
    assert qwen
    assert not qwen.norm_topk
    absent = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts")
    deepseek = read("deepseek_v3", *absent).moe
    assert deepseek
    assert (deepseek.norm_topk, deepseek.scale) == (True, 2.5)
    assert (deepseek.num_groups, deepseek.top_groups, deepseek.num_shared) == (8, 4, 1)


def test_absent_keys_of_norms_and_positions() -> None:
    mixtral, oss = read("mixtral", "rope_theta", "rms_norm_eps"), read("gpt_oss", "rope_theta", "rms_norm_eps")
    assert (gqa(mixtral).rope_theta, mixtral.norm_eps) == (1e6, 1e-5)
    assert (gqa(oss).rope_theta, oss.norm_eps) == (150_000.0, 1e-5)
    scaling = RopeScaling(factor=32.0, original_len=4096, truncate=False)
    assert gqa(read("gpt_oss", "rope_scaling")).rope_scaling == scaling
    assert gqa(read("gpt_oss", "rope_scaling", rope_parameters={})).rope_scaling is None
    assert gqa(read("qwen3_next", "partial_rotary_factor")).rope_fraction == 0.25
    assert gqa(read("qwen3_next", partial_rotary_factor=None)).rope_fraction == 1.0
    assert gqa(read("qwen3", "head_dim", hidden_size=2048)).head_dim == 128


def test_keys_that_the_class_of_a_family_has_not_are_passed_over() -> None:
    assert gqa(read("llama", partial_rotary_factor=0.5)).rope_fraction == 1.0
    assert gqa(read("qwen3", rope_parameters={"partial_rotary_factor": 0.5})).rope_fraction == 1.0
    assert not gqa(read("mixtral", attention_bias=True)).bias
    assert read("qwen3", mlp_bias=True) == read("qwen3")
    assert read("llama", use_sliding_window=True, sliding_window=8) == read("llama")


def test_rope_scaling_stands_for_all_of_rope_parameters() -> None:
    new = {"rope_type": "default", "rope_theta": 7.0}
    attention = gqa(read("llama", rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters=new))
    assert attention.rope_theta == CONFIGS["llama"]["rope_theta"]
    assert attention.rope_scaling
    assert (attention.rope_scaling.kind, attention.rope_scaling.factor) == ("linear", 4.0)
    assert gqa(read("llama", rope_parameters=new)).rope_theta == 7.0
    assert gqa(read("llama", rope_scaling={}, rope_parameters=new)).rope_theta == 7.0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "qwen3_vl_moe"])
@pytest.mark.parametrize(("name", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_dense_layers_between_sparse_ones_are_refused(model_type: str, name: str, value: Any) -> None:
    config = CONFIGS[model_type]
    changes = {"text_config": {**config["text_config"], name: value}} if "text_config" in config else {name: value}
    assert name in refused(model_type, **changes)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "qwen3_moe", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("head_dim", [1, 3, 7, 63])
def test_odd_heads_are_refused(model_type: str, head_dim: int) -> None:
    changes = {"partial_rotary_factor": 1.0} if model_type == "qwen3_next" else {}
    assert "head_dim" in refused(model_type, head_dim=head_dim, **changes)


def test_an_odd_part_of_a_head_is_rounded_up_as_transformers_does() -> None:
    assert gqa(read("qwen3_next", head_dim=7, partial_rotary_factor=0.5)).head_dim == 7
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert "odd" in refused("qwen3_next", head_dim=6, partial_rotary_factor=0.5, rope_scaling=yarn)


@pytest.mark.parametrize("fraction", [1.01, 2, 0, -0.5, 0.001, "half", True])
def test_parts_of_a_head_that_are_none_are_refused(fraction: Any) -> None:
    assert "partial_rotary_factor" in refused("qwen3_next", partial_rotary_factor=fraction)
    assert "partial_rotary_factor" in refused("qwen3_next", rope_parameters={"partial_rotary_factor": fraction})


def test_latent_attention_that_the_engine_has_not_is_said() -> None:
    wide = read("deepseek_v3", v_head_dim=193)
    assert isinstance(wide.attention, MlaSpec)
    assert any("wider than keys" in problem for problem, _ in engine_lacks(wide))
    assert not list(engine_lacks(read("deepseek_v3", v_head_dim=192)))
    assert "rotated dimensions" in refused("deepseek_v3", qk_rope_head_dim=63)
    assert "attention_bias" in refused("deepseek_v3", attention_bias=True)
    assert "num_key_value_heads" in refused("deepseek_v3", num_key_value_heads=8)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("deepseek_v3", {"topk_group": 9}, "9 of 8 groups"),
        ("deepseek_v3", {"n_group": 7}, "7 groups"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 33}, "33 of 32 experts"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("mixtral", {"sliding_window": 0}, "sliding_window"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": "false"}, "attention_bias"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
        ("llama", {"hidden_act": "clamped swiglu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v32", {"index_topk": 0}, "indexer.top_k"),
        ("deepseek_v32", {"index_head_dim": 2}, "index_head_dim"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ("glm_moe_dsa", {"topk_method": "greedy"}, "topk_method"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention"], "num_nextn_predict_layers": 1}, "MTP depths"),
        ("nemotron_h", {"mamba_num_heads": 63}, "63 Mamba heads"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        ("llama", {"rope_parameters": {"rope_type": "ntk_alpha", "alpha": 4.0}}, "rope_type"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("granitemoe", {"attention_bias": True}, "residual_multiplier"),
        ("granitemoe", {"attention_multiplier": 0.0}, "scale of the attention"),
        ("hunyuan_v1_moe", {"moe_topk": [8, 4]}, "moe_topk"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2]}, "num_shared_expert"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "attn_type_list"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("minimax_m2", {"rotary_dim": 129}, "partial_rotary_factor"),
        ("olmoe", {"head_dim": 64}, "hidden_size"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("phimoe", {"router_jitter_noise": 0.0}, "router_jitter_noise"),
        ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias"),
        ("phimoe", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ("phimoe", {"rope_scaling": {"rope_type": "longrope", "short_mscale": 1.0}}, "long_mscale"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_honored_is_refused_by_name(model_type: str, changes: dict[str, Any], said: str) -> None:
    assert said in refused(model_type, **changes)


def test_a_model_with_pictures_has_no_scaling_by_length() -> None:
    text = {**CONFIGS["qwen3_vl_moe"]["text_config"], "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert any("with pictures" in problem for problem, _ in engine_lacks(read("qwen3_vl_moe", text_config=text)))
    assert not list(engine_lacks(read("qwen3_moe", rope_scaling={"rope_type": "dynamic", "factor": 2.0})))


def test_a_fifo_is_no_configuration(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FindingsError, match="cannot read"):
        model_from_config(tmp_path)


def test_a_depth_that_a_plan_adds_to_a_hybrid_without_experts_has_none() -> None:
    """The default of transformers is a depth of attention and experts; `check` of `job.mtp` ended in a traceback."""
    model = read("nemotron_h", layers_block_type=["mamba", "attention"], num_nextn_predict_layers=0)
    assert [layer.ffn for layer in model.mtp_depth] == ["none", "dense"]
    fields = {"model": "m", "cluster.chip": "h100", "cluster.gpus": 2, "job.seq_len": 16, "job.mtp": 1}
    plan = parse(fields, model=model).plan
    assert plan is not None
    assert "stack-runs-family" not in {finding.rule for finding in check(plan)}
