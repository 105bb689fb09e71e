"""The engine's models against Hugging Face's, same weights; and against plain loops where those are no oracle.

Shapes: B batch, S sequence, V vocabulary, D model dim.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_reference import reference

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch.nn.functional as F
import transformers
from hf_parity import EAGER, GRADIENTS, LOGITS, compare_gradients, ours, peer, relative
from tiny_models import FAMILIES, config_of, spec_of

from threefold.engine.attention import backend
from threefold.engine.layers.positions import Positions
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.moe.experts import ACTIVATIONS
from threefold.engine.moe.router import Router
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.spec.models import MODELS
from threefold.spec.stacks import ENGINE_ACTIVATIONS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_hugging_face(family: str, odd: bool, tmp_path: Path) -> None:
    model = peer(family, odd)
    engine = ours(model, tmp_path)
    tokens = torch.randint(0, engine.spec.vocab, (2, 13))
    labels = torch.randint(0, engine.spec.vocab, (2, 13))
    labels[0, :4] = -100

    logits = model(tokens, use_cache=False).logits
    found = engine(tokens).logits
    assert (found - logits).abs().max() <= LOGITS * logits.abs().max()

    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    out = engine(tokens, labels)
    assert out.logits is None
    assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), rel=LOGITS)
    out.loss.backward()
    compare_gradients(engine, model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_equals_hugging_face(family: str, side: str, tmp_path: Path) -> None:
    """Padding is a document of its own; positions count on, as Hugging Face's do."""
    model = peer(family)
    engine = ours(model, tmp_path)
    tokens = torch.randint(0, engine.spec.vocab, (2, 13))
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 5) if side == "left" else slice(8, 13)] = 0
    labels = torch.randint(0, engine.spec.vocab, (2, 13)).masked_fill(mask == 0, -100)

    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    positions = torch.arange(13).expand(2, 13)
    found = engine(tokens, documents_BS=mask, positions_BS=positions).logits
    assert (found - logits)[mask == 1].abs().max() <= LOGITS * logits[mask == 1].abs().max()

    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    engine(tokens, labels, documents_BS=mask, positions_BS=positions).loss.backward()
    compare_gradients(engine, model)


@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_write(family: str, odd: bool, tmp_path: Path) -> None:
    """With the configuration made from the spec alone."""
    engine = build_model(spec_of(family, odd), seed=1)
    write_hf(engine, engine.spec, tmp_path, max_shard_bytes=20_000)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, **EAGER, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, engine.spec.vocab, (2, 9))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        assert (engine(tokens).logits - logits).abs().max() <= LOGITS * logits.abs().max()


def test_yarn_of_published_models_equals_hugging_face() -> None:
    """The frequencies and factors of the real DeepSeek-V3 and GPT-OSS, to the last bit but rounding."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from threefold.engine.layers.rope import frequencies, table_scale
    from threefold.spec.hf import hf_config_of

    for name, dim in (("deepseek-v3", 64), ("gpt-oss-20b", 64)):
        spec = MODELS[name]
        config = transformers.AutoConfig.for_model(**hf_config_of(spec))
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)
        attention = spec.attention
        found = frequencies(dim, attention.rope_theta, attention.rope_scaling)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert table_scale(attention.rope_scaling) == pytest.approx(factor, rel=1e-12)


ROPES = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scalings_equal_hugging_face(kind: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from threefold.engine.layers.rope import frequencies, table_scale

    rope = {**ROPES[kind], "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    changes = {"rope_parameters": rope, "max_position_embeddings": 131072, "head_dim": 128}
    attention = spec_of("llama", **changes).attention
    config = transformers.AutoConfig.for_model(**{**config_of("llama"), **changes})
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    found = frequencies(128, attention.rope_theta, attention.rope_scaling)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert table_scale(attention.rope_scaling) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("head_dim", [2, 4])
def test_heads_of_two_dims_equal_plain_attention(head_dim: int, window: int | None) -> None:
    """The rotation of such heads leaves strides that the CPU kernel does not read right."""
    engine = build_model(spec_of("mixtral", head_dim=head_dim, sliding_window=window), seed=1)
    tokens = torch.randint(0, engine.spec.vocab, (2, 13))
    gradients = []
    for attention_fn in (backend.attend, plain_attention):
        for layer in engine.layers.values():
            layer.mixer.attention_fn = attention_fn
        engine.zero_grad()
        engine(tokens, tokens).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in engine.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert relative(found, expected) < GRADIENTS


def plain_attention(q: Any, k: Any, v: Any, *, bounds: Any = None, **options: Any) -> Any:
    return reference(q, k, v, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_one_at_a_time(family: str) -> None:
    """fp64, so that only the order of sums differs."""
    engine = build_model(spec_of(family), dtype=torch.float64, seed=3)
    lengths = [[5, 1, 7], [13]]
    documents = torch.tensor([[number for number, n in enumerate(row) for _ in range(n)] for row in lengths])
    tokens, labels = (torch.randint(0, engine.spec.vocab, (2, 13)) for _ in range(2))

    out = engine(tokens, labels, documents)
    out.loss.backward()
    trained = {name: parameter for name, parameter in engine.named_parameters() if parameter.requires_grad}
    packed = {name: parameter.grad.clone() for name, parameter in trained.items()}
    logits = engine(tokens, documents_BS=documents).logits
    engine.zero_grad()
    for row, ids in enumerate(documents):
        for number in ids.unique():
            where = ids == number
            alone = tokens[row, where][None]
            torch.testing.assert_close(engine(alone).logits[0], logits[row, where], rtol=1e-9, atol=1e-12)
            part = engine(alone, labels[row, where][None])
            (part.loss * where.sum() / 26).backward()
    for name, parameter in trained.items():
        assert relative(packed[name], parameter.grad) < 1e-9 or parameter.grad.norm() < 1e-15, name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_mtp_equals_a_loop_over_documents(family: str) -> None:
    """Depth d joins the hidden state of i with the embedding of i + d and predicts what follows i + d."""
    engine = build_model(spec_of(family), mtp=2, dtype=torch.float64, seed=5, options=Options(mtp_loss=0.5))
    documents = torch.tensor([[0] * 6 + [1] * 7])
    tokens = torch.randint(0, engine.spec.vocab, (1, 13))
    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
    labels[0, 5] = -100

    sums, counts = [0.0, 0.0], [0, 0]
    seen = []
    engine.norm.register_forward_hook(lambda _module, _inputs, hidden: seen.append(hidden))
    out = engine(tokens, labels, documents)
    for part in (slice(0, 6), slice(6, 13)):
        text, hidden = tokens[:, part], seen[0][:, part]
        for depth, module in enumerate(engine.mtp.values(), start=1):
            length = text.shape[1] - depth
            positions = Positions.from_tokens(text[:, :length])
            hidden, _ = module(hidden[:, :length], engine.embed(text[:, depth:]), positions)
            for i in range(length - 1):
                logits = F.linear(hidden[0, i], engine.head_weight)
                sums[depth - 1] = sums[depth - 1] + F.cross_entropy(logits, text[0, i + depth + 1])
                counts[depth - 1] += 1
    expected = sum(total / count for total, count in zip(sums, counts, strict=True)) / 2
    assert float(out.aux["mtp"]) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert float(out.loss.detach()) == pytest.approx(float(out.aux["ce"]) + 0.5 * float(expected.detach()), rel=1e-10)
    assert len(out.aux["load_LE"]) == len(list(engine.routers()))


def test_equal_scores_go_to_the_lower_expert() -> None:
    spec = spec_of("deepseek_v3").moe
    router = Router(spec, 4)
    scores = torch.randint(0, 3, (200, spec.num_experts)).float()
    found = router.choose_experts(scores, scores)
    for row, chosen in zip(scores.tolist(), found.tolist(), strict=True):
        size = spec.num_experts // spec.num_groups
        groups = [row[g * size : (g + 1) * size] for g in range(spec.num_groups)]
        worth = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(spec.num_groups), key=lambda g: (-worth[g], g))[: spec.top_groups]
        allowed = [e for e in range(spec.num_experts) if e // size in best]
        assert chosen == sorted(allowed, key=lambda e: (-row[e], e))[: spec.top_k]


@pytest.mark.parametrize("family", FAMILIES)
def test_overfits_one_batch(family: str) -> None:
    options = Options(aux_loss=1e-3, z_loss=1e-4)
    mtp = 1 if family in ("deepseek_v3", "qwen3_next") else 0
    engine = build_model(spec_of(family), mtp=mtp, options=options)
    tokens, labels = (torch.randint(0, engine.spec.vocab, (2, 12)) for _ in range(2))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(50):
        out = engine(tokens, labels)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(out.aux["ce"]) < 0.1  # from log(67) = 4.2


def test_initial_weights_do_not_depend_on_the_number_of_layers() -> None:
    small, large = build_model(spec_of("mixtral")), build_model(spec_of("mixtral", num_hidden_layers=3))
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, dict(large.named_parameters())[name])
    other = build_model(spec_of("mixtral"), seed=1)
    assert not torch.equal(small.embed.weight, other.embed.weight)


def test_a_model_without_code_is_a_finding() -> None:
    with pytest.raises(FindingsError, match="engine-family"):
        build_model(MODELS["nemotron-3-super"], device="meta")


def test_an_unknown_rotary_scaling_is_a_finding() -> None:
    rope = {"rope_type": "xpos", "rope_theta": 10000.0, "factor": 8.0}
    with pytest.raises(FindingsError, match="no rotary scaling 'xpos'"):
        build_model(spec_of("llama", rope_parameters=rope), device="meta")


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_on_fake_tensors(family: str) -> None:
    """What a rehearsal needs: no value of a tensor is asked for on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = {"hidden_size": 64, "intermediate_size": 32}
    sizes |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in config_of(family) else {}
    with FakeTensorMode():
        options = Options(expert_backend="grouped", aux_loss=0.1)
        engine = build_model(spec_of(family, **sizes), dtype=torch.bfloat16, options=options)
        tokens = torch.zeros(2, 13, dtype=torch.long)
        engine(tokens, tokens).loss.backward()
        assert all(parameter.grad is not None for parameter in engine.parameters() if parameter.requires_grad)


def test_the_table_of_what_the_engine_has_is_the_engine_s_own() -> None:
    """`rules` and `search` judge by it without torch."""
    # Its limit is a setting of the experts (`Experts.glu_limit`), with the activation of silu.
    assert set(ENGINE_ACTIVATIONS) - {"limited silu"} == set(ACTIVATIONS)
