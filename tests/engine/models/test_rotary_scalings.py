"""Every rotary scaling of transformers in every family, on texts within the context of training and beyond it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parity import LOGITS, ours, peer
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES, config_of, spec_of

from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import frequencies
from threefold.spec.hf import hf_config_of, model_from_dict

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 8  # of training; texts have 5 and 13 tokens
KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
# Nemotron-H has no rotary positions, and Phi-MoE only its own LongRoPE.
WITH_ROPE = [family for family in (*FAMILIES, *MIXTURES) if family not in ("nemotron_h", "phimoe", "gemma4_text")]


def scaling(family: str, kind: str) -> dict[str, Any]:
    """The table of a scaling, with what the family's own configuration says about its rotation."""
    spec = spec_of(family)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = CONTEXT
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rotated = [each.rope_dim for each in (spec.attention, spec.local_attention) if each is not None]
        count = max(rotated) // 2  # K-EXAONE rotates in its layers with a window alone
        rope |= {"short_factor": [1.0 + 0.3 * n for n in range(count)], "long_factor": [2.0 + n for n in range(count)]}
    kept = {**config_of(family), **(config_of(family).get("rope_parameters") or {})}
    return rope | {name: kept[name] for name in ("partial_rotary_factor", "mrope_section") if name in kept}


def cases() -> list[Any]:
    """Every family with every scaling; the default suite has all with one family, and each family with one of two."""
    # The engine has those of DeepSeek-V4 that do not depend on the length of the text.
    refused = {("deepseek_v4", kind) for kind in ("dynamic", "longrope")}
    pairs = [(family, kind) for family in WITH_ROPE for kind in KINDS if (family, kind) not in refused]
    often = {(family, ("dynamic", "longrope")[number % 2]) for number, family in enumerate(WITH_ROPE)}
    return [
        pair if pair in often or pair[0] == "qwen3" else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs
    ]


@pytest.mark.parametrize(("family", "kind"), cases())
def test_scalings_equal_hugging_face(family: str, kind: str, tmp_path: Path) -> None:
    length = CONTEXT if kind == "dynamic" else 4 * CONTEXT
    table = {"rope_parameters": scaling(family, kind), "rope_scaling": None, "max_position_embeddings": length}
    model = peer(family, **table)
    engine = ours(model, tmp_path)
    assert engine.spec.attention.rope_scaling.kind == kind
    for size in (5, 13):
        tokens = torch.randint(0, engine.spec.vocab, (2, size))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
            assert (engine(tokens).logits - logits).abs().max() <= LOGITS * logits.abs().max(), size


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_that_is_written_has_the_same_scaling(kind: str) -> None:
    for family in WITH_ROPE:
        table = {"rope_parameters": scaling(family, kind), "rope_scaling": None, "max_position_embeddings": 4 * CONTEXT}
        spec = spec_of(family, **table)
        assert model_from_dict(hf_config_of(spec), name=spec.name, source=spec.source) == spec


def test_the_longest_document_decides() -> None:
    """Packed short documents have the frequencies of short texts, wherever they lie in the row and on which rank."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    attention = spec_of("qwen3", rope_scaling=rope, max_position_embeddings=8).attention
    given = attention.rope_dim, attention.rope_theta, attention.rope_scaling
    tokens, documents = torch.zeros(1, 16, dtype=torch.long), torch.tensor([[0] * 8 + [1] * 8])
    short = Positions.from_tokens(tokens, documents)
    assert torch.equal(short.rope(*given)[0], Positions.from_tokens(tokens[:, :8]).rope(*given)[0].repeat(1, 2, 1))
    whole = Positions.from_tokens(tokens)
    shard = Positions(whole.positions_BS[:, :4], whole_BS=whole.positions_BS)
    assert torch.equal(shard.rope(*given)[0], whole.rope(*given)[0][:, :4])
    assert not torch.equal(shard.rope(*given)[0], short.rope(*given)[0][:, :4])


@pytest.mark.parametrize("name", ["kimi-k2", "llama3.1-405b", "hunyuan-a13b"])
def test_scalings_of_published_models_equal_hugging_face(name: str) -> None:
    import transformers

    from threefold.spec.models import MODELS

    spec = MODELS[name]
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "vocab_size": 8, "num_experts": 1, "n_routed_experts": 8}
    sizes |= {"intermediate_size": 8, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "moe_topk": 1}
    config = transformers.AutoConfig.for_model(**{**hf_config_of(spec), **sizes})
    [embedding] = [
        module
        for module in transformers.AutoModelForCausalLM.from_config(config).modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    ]
    attention = spec.attention
    assert attention is not None
    found = frequencies(attention.rope_dim, attention.rope_theta, attention.rope_scaling)
    torch.testing.assert_close(found, embedding.inv_freq, rtol=1e-6, atol=0)
