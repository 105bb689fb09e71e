"""The families of `spec/families` against Hugging Face's models, same weights: logits, gradients, checkpoints."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch.nn.functional as F
import transformers
from hf_parity import EAGER, LOGITS, compare_gradients, ours, peer, relative
from tiny_mixtures import MIXTURES
from tiny_models import config_of, spec_of

from threefold.engine.generate.generate import CachedDecoder
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.weights.write_hf import write_hf

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
POOLS_PADDING = ("deepseek_v4",)  # transformers' entries do, ours begin with their document
FAMILIES = pytest.mark.parametrize("family", MIXTURES)


@SHAPES
@FAMILIES
def test_logits_and_gradients_equal_hugging_face(family: str, odd: bool, tmp_path: Path) -> None:
    """The first row starts with padding: a document of its own, and positions that count on."""
    torch.manual_seed(1)  # with seed 0 a gradient of Qwen3.5 nearly cancels and is rounding noise
    model = peer(family, odd)
    engine = ours(model, tmp_path)
    tokens, labels = (torch.randint(0, engine.spec.vocab, (2, 13)) for _ in range(2))
    mask = torch.ones_like(tokens)
    mask[0, : 0 if family in POOLS_PADDING else 4] = 0
    labels = labels.masked_fill(mask == 0, -100)
    given = {"documents_BS": mask, "positions_BS": torch.arange(13).expand(2, 13)}
    given = {} if family in POOLS_PADDING else given

    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    found = engine(tokens, **given).logits
    assert (found - logits)[mask == 1].abs().max() <= LOGITS * logits[mask == 1].abs().max()

    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    engine(tokens, labels, **given).loss.backward()
    compare_gradients(engine, model)


@SHAPES
@FAMILIES
def test_transformers_loads_what_we_write(family: str, odd: bool, tmp_path: Path) -> None:
    """With the configuration made from the spec alone; and what it writes again has the same bits."""
    engine = build_model(spec_of(family, odd), seed=1)
    write_hf(engine, engine.spec, tmp_path / "ours", max_shard_bytes=20_000)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", **EAGER, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, engine.spec.vocab, (2, 9))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        assert (engine(tokens).logits - logits).abs().max() <= LOGITS * logits.abs().max()
    again = ours(model, tmp_path / "theirs")
    for name, tensor in engine.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@FAMILIES
def test_packed_documents_equal_one_at_a_time(family: str) -> None:
    """fp64, so that only the order of sums differs."""
    engine = build_model(spec_of(family), dtype=torch.float64, seed=3)
    documents = torch.tensor([[0] * 5 + [1] + [2] * 7])
    tokens = torch.randint(0, engine.spec.vocab, (1, 13))
    logits = engine(tokens, documents_BS=documents).logits
    for number in range(3):
        where = documents[0] == number
        alone = engine(tokens[:, where]).logits[0]
        assert relative(logits[0, where], alone) < 1e-9


@FAMILIES
def test_runs_on_fake_tensors(family: str) -> None:
    """What a rehearsal needs: no value of a tensor is asked for on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = {name: 32 for name in ("intermediate_size", "moe_intermediate_size") if name in config_of(family)}
    with FakeTensorMode():
        options = Options(expert_backend="grouped", aux_loss=0.1)
        engine = build_model(spec_of(family, hidden_size=64, **sizes), dtype=torch.bfloat16, options=options)
        tokens = torch.zeros(2, 13, dtype=torch.long)
        engine(tokens, tokens).loss.backward()
        assert all(p.grad is not None for p in engine.parameters() if p.requires_grad)


@FAMILIES
def test_cached_logits_are_those_of_the_full_forward(family: str) -> None:
    engine = build_model(spec_of(family), dtype=torch.float64, seed=5)
    texts = torch.randint(0, engine.spec.vocab, (2, 9)).tolist()
    cached = CachedDecoder(engine)
    found = [cached.prefill([text[:6] for text in texts])]
    found += [cached.step([text[at] for text in texts]) for at in (6, 7, 8)]
    with torch.no_grad():
        logits = engine(torch.tensor(texts)).logits[:, 5:]
    assert relative(torch.stack(found, dim=1), logits) < 1e-10  # fp64: sums in another order
