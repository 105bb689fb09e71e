"""Bytes that recompute and offload keep from being saved, against the tensors that live behind a forward."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors
from observed_steps import observe
from tiny_runs import DEEPSEEK
from torch import Tensor

from threefold.engine.autograd.recompute import recompute
from threefold.engine.effects.activation_bytes import ActivationObserver, ActivationUse
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.spec.models import MODELS

TOKENS = (2, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QWEN, LATENT, DELTA = "tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-qwen3-next"
CASES: list[tuple[str, dict[str, Any]]] = [
    (QWEN, {"recompute": ("layernorm",)}),
    (QWEN, {"recompute": ("core_attn",)}),
    (QWEN, {"recompute": ("moe_act",)}),
    (QWEN, {"recompute": ("moe",)}),
    (QWEN, {"recompute": ("moe",), "ffn_chunk": 50}),
    (QWEN, {"recompute": ("full",)}),
    (QWEN, {"recompute": ("full",), "ffn_chunk": 50}),
    (QWEN, {"recompute": ("full",), "recompute_method": "block", "recompute_layers": 1}),
    (QWEN, {"recompute": ("full",), "recompute_save": ("core_attn",)}),
    (QWEN, {"recompute": ("full",), "recompute_save": ("core_attn",), "activation_offload": ("core_attn",)}),
    (QWEN, {"recompute": ("layernorm", "moe_act"), "expert_fusion": True}),
    (LATENT, {"recompute": ("mla_up_proj",)}),
    (LATENT, {"recompute": ("shared_experts", "mlp")}),
    (LATENT, {"recompute": ("layernorm", "mla_up_proj", "moe", "mlp")}),
    (LATENT, {"activation_offload": ("core_attn", "attn_proj")}),
    (QWEN, {"activation_offload": ("expert_fc1", "moe_act", "mlp_norm", "qkv_linear")}),
    (QWEN, {"activation_offload_layers": 1}),
    (QWEN, {"recompute": ("layernorm", "moe_act"), "activation_offload": ("attn_norm", "moe_act", "expert_fc1")}),
    (QWEN, {"recompute": ("full",), "activation_offload_layers": 1}),
    (DELTA, {"recompute": ("gdn_norm_out",)}),
]


def model_of(name: str, **options: Any) -> Decoder:
    return build_model(MODELS[name], 0, torch.float32, torch.device("cpu"), Options(**options), 0)


def tokens_of(model: Decoder) -> Tensor:
    return torch.randint(model.spec.vocab, TOKENS, generator=torch.Generator().manual_seed(0))


def live_bytes(model: Decoder) -> int:
    """Bytes that a forward leaves alive. Host copies of an offload are bytes, and do not count."""
    tokens_BS = tokens_of(model)
    with LiveTensors(without=(torch.uint8,)) as live:
        out = model(tokens_BS, tokens_BS.roll(-1, 1))
    num_bytes = live.num_bytes
    del out
    return num_bytes


def observed(model: Decoder) -> dict[str, ActivationUse]:
    tokens_BS = tokens_of(model)
    observer = ActivationObserver([model], torch.device("cpu"))
    with observer.step():
        loss = model(tokens_BS, tokens_BS.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
    recomputed, offloaded = observer.results(1)
    return recomputed | {f"offload {name}": use for name, use in offloaded.items()}


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_bytes_are_those_that_no_longer_live(name: str, options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key in ("ffn_chunk", "expert_fusion")}
    measured = live_bytes(model_of(name, **plain)) - live_bytes(model_of(name, **options))
    uses = observed(model_of(name, **options))
    assert measured > 0
    # Indices of the router that are saved live on in its statistics: some bytes a token, where rows have a thousand.
    assert sum(use.kept_bytes for use in uses.values()) == pytest.approx(measured, rel=0.01)
    asked = {*options.get("recompute", ()), *(f"offload {one}" for one in options.get("activation_offload", ()))}
    asked |= {"offload layers"} if "activation_offload_layers" in options else set()
    assert uses.keys() <= asked


def test_each_name_has_the_bytes_that_it_frees_alone() -> None:
    names = ("layernorm", "core_attn", "moe_act")
    together = observed(model_of(QWEN, recompute=names))
    nothing = live_bytes(model_of(QWEN))
    for name in names:
        alone = nothing - live_bytes(model_of(QWEN, recompute=(name,)))
        assert together[name].kept_bytes == pytest.approx(alone, rel=0.01)


def test_an_observed_step_computes_what_others_do() -> None:
    options = {"recompute": ("layernorm", "moe_act"), "activation_offload": ("core_attn",)}
    plain, watched = model_of(QWEN, **options), model_of(QWEN, **options)
    tokens_BS = tokens_of(plain)
    loss = plain(tokens_BS, tokens_BS.roll(-1, 1)).loss
    assert loss is not None
    loss.backward()
    observed(watched)
    for expected, found in zip(plain.parameters(), watched.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)


def test_bytes_are_of_one_microbatch_however_many_a_step_has() -> None:
    def kept(sequences: int) -> float:
        report = observe({**DEEPSEEK, "job.global_batch": sequences, "knobs.recompute": ["mlp", "layernorm"]})
        return sum(use.kept_bytes for use in report.ranks[0].recompute.values())

    assert kept(4) == kept(8) == kept(2)


def test_seconds_are_those_of_second_runs() -> None:
    nap = 0.05
    runs = []

    def slow(x: Tensor) -> Tensor:
        time.sleep(nap)
        runs.append(x)
        return x.exp()

    def outer(x: Tensor) -> Tensor:
        return recompute(slow, x, name="inner").sin()

    observer = ActivationObserver([], torch.device("cpu"))
    x = torch.ones(4, requires_grad=True)
    with observer.step():
        y = recompute(slow, x, name="slow") + recompute(outer, x, name="outer")
        forward_runs = len(runs)
        y.sum().backward()
    uses, _ = observer.results(1)
    assert forward_runs == 2
    assert uses.keys() == {"slow", "outer"}  # a region inside another one is part of it
    assert uses["slow"].times == 1
    # Sleeps are never shorter than asked for. Twice more inside the outer one: for its own tensors, and for the inner
    # region's, which saves none of its own.
    assert uses["slow"].seconds >= nap
    assert uses["outer"].seconds >= (len(runs) - forward_runs - 1) * nap
