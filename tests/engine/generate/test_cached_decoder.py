"""Decoding with caches against the full forward over the same tokens, in fp64, for every family.

Shapes: V vocabulary.
"""

import random
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from threefold.engine.generate import cached_mixers
from threefold.engine.generate.generate import CachedDecoder, Sampling, TokenChooser, generate, probabilities
from threefold.engine.lora import LoraSettings
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.plan.plan import LORA_TARGETS

SAME = 1e-10  # relative, fp64: sums in another order differ by about 1e-14

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(family: str, odd: bool = False, options: Options | None = None) -> Decoder:
    """A model in fp64 in which no parameter is zero or one that could hide a wrong use of it."""
    model = build_model(spec_of(family, odd), dtype=torch.float64, options=options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            tensor.add_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.dtype) * 0.1)
    return model


def full_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The logits behind the last token, from a forward over all of them."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    assert logits is not None
    return logits[0, -1]


def texts_of(vocab: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def assert_same(found_V: torch.Tensor, expected_V: torch.Tensor) -> None:
    assert float((found_V - expected_V).norm() / expected_V.norm()) < SAME


@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_are_those_of_the_full_forward(family: str, odd: bool) -> None:
    """Prompts shorter and longer than the windows (4 and 5) and than the convolution, in one batch."""
    model = model_of(family, odd)
    texts = texts_of(model.spec.vocab, (1, 3, 13, 7))
    cached = CachedDecoder(model)
    for logits_V, text in zip(cached.prefill(texts), texts, strict=True):
        assert_same(logits_V, full_logits(model, text))
    draw = random.Random(2)
    for _ in range(9):
        new = [draw.randrange(model.spec.vocab) for _ in texts]
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
        for logits_V, text in zip(cached.step(new), texts, strict=True):
            assert_same(logits_V, full_logits(model, text))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_adapters_are_in_cached_logits(family: str) -> None:
    """MLA's up projection is absorbed into queries and outputs, with the adapter that lies beside it."""
    model = model_of(family, options=Options(lora=LoraSettings(2, 3.0, LORA_TARGETS)))
    assert any(name.endswith("lora_b") for name, _ in model.named_parameters())
    texts = texts_of(model.spec.vocab, (6, 3))
    cached = CachedDecoder(model)
    cached.prefill(texts)
    for logits_V, text in zip(cached.step([5, 8]), ([*texts[0], 5], [*texts[1], 8]), strict=True):
        assert_same(logits_V, full_logits(model, text))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_next"])
def test_caches_grow_past_their_first_slots(family: str) -> None:
    """150 tokens: full caches grow twice, the ring of a window goes round many times, the state stays."""
    model = model_of(family)
    texts = texts_of(model.spec.vocab, (2, 5))
    cached = CachedDecoder(model)
    cached.prefill(texts)
    steps = texts_of(model.spec.vocab, (150, 150), seed=3)
    for new in zip(*steps, strict=True):
        logits_BV = cached.step(new)
    for logits_V, text, more in zip(logits_BV, texts, steps, strict=True):
        assert_same(logits_V, full_logits(model, text + more))
    sizes = [mixer.cache for mixer in cached.mixers if isinstance(mixer, cached_mixers.CachedGqa)]
    windows = [cache for cache in sizes if cache.window is not None]
    assert all(cache.tensors[0].shape[2] == cache.window for cache in windows)
    assert len(windows) == (1 if family == "gpt_oss" else 0)


class CountedOperators(TorchDispatchMode):
    """Counts the operators that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_costs_the_same_operators_however_long_the_text_is(family: str) -> None:
    """So that time grows with the number of tokens; `benchmarks/sample_speed.py` measures it."""
    model = model_of(family)
    counts = []
    for length in (10, 40):
        cached = CachedDecoder(model)
        cached.prefill(texts_of(model.spec.vocab, (length,)))
        cached.step([1])  # a first one may grow the cache
        with CountedOperators() as counted:
            cached.step([2])
        counts.append(counted.num_operators)
    # Experts that no token chose cost nothing, and two tokens may choose others.
    assert counts[0] > 50
    assert abs(counts[1] - counts[0]) <= 0.1 * counts[0]


def test_a_row_does_not_depend_on_the_batch() -> None:
    model = model_of("qwen3_moe")
    texts = texts_of(model.spec.vocab, (4, 9))
    sampling = Sampling(temperature=1.0, seed=5)
    both = list(generate(model, texts, 12, sampling))
    alone = list(generate(model, texts[:1], 12, sampling))
    assert [step[0] for step in both] == [step[0] for step in alone]


def test_greedy_generation_is_the_argmax_of_the_full_forward_and_stops_at_the_end() -> None:
    model = model_of("llama")
    (text,) = texts_of(model.spec.vocab, (5,))
    expected = list(text)
    for _ in range(8):
        expected.append(int(full_logits(model, expected).argmax()))
    assert [step[0] for step in generate(model, [text], 8)] == expected[5:]
    end = expected[7]
    stopped = [step[0] for step in generate(model, [text], 8, ends={end})]
    assert stopped == expected[5 : expected.index(end, 5) + 1]
    other = texts_of(model.spec.vocab, (5,), seed=9)[0]
    rows = list(generate(model, [text, other], 8, ends={end}))
    assert [step[0] for step in rows][len(stopped) :] == [None] * (len(rows) - len(stopped))
    assert not list(generate(model, [text], 0))


def test_top_k_and_top_p_leave_out_the_tail() -> None:
    logits_BV = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.1, 0.2, 0.6]]).log()
    # By hand: the two likeliest of each row, divided by their sum.
    top_k = probabilities(logits_BV, Sampling(1.0, top_k=2))
    assert torch.allclose(top_k, torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 0.25, 0.75]]))
    # 0.5 + 0.25 reach 0.7 in the first row, 0.6 + 0.2 in the second.
    top_p = probabilities(logits_BV, Sampling(1.0, top_p=0.7))
    assert torch.allclose(top_p, top_k)
    assert torch.allclose(probabilities(logits_BV, Sampling(1.0, top_p=0.0)).max(dim=-1).values, torch.ones(2))
    # A temperature of one half squares the probabilities.
    squared = torch.tensor([[0.25, 0.0625, 0.015625, 0.015625]])
    assert torch.allclose(probabilities(logits_BV[:1], Sampling(0.5)), squared / squared.sum())
    assert TokenChooser(Sampling(), 2).choose(logits_BV) == [0, 3]
