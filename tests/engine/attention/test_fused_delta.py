"""Tests of the adapter of flash-linear-attention: spans, documents and states.

Without the package a stand-in computes what its kernel promises, document by document with our own chunks; where it is
installed on a GPU, its kernels run and are compared with our rule in fp64.

Shapes: B batch, S sequence, K key heads, H value heads, k key dim, v value dim.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from threefold.engine.attention import fused_delta
from threefold.engine.attention.delta_chunks import chunk_delta_rule, l2_normalize
from threefold.engine.attention.fused_delta import FusedDelta
from threefold.engine.attention.gated_delta import GatedDelta, delta_rule_by_token, document_numbers
from threefold.engine.kernels.mixers.fla_on_hopper import is_gated_delta_rule, keep_config
from threefold.engine.layers.positions import Positions, document_bounds
from threefold.findings import FindingsError
from threefold.spec.model import DeltaSpec

HAS_KERNELS = torch.cuda.is_available() and fused_delta.load_kernels() is not None
on_gpu = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU and flash-linear-attention")
pytestmark = pytest.mark.usefixtures("one_thread")


def stand_in(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **rest: Any) -> tuple[Any, Any]:
    """The arguments and results of `chunk_gated_delta_rule`, as far as the adapter uses them."""
    each = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(each, dim=2) for x in (q, k))
    decay, step = -rest["A_log"].exp() * F.softplus(g + rest["dt_bias"]), beta.sigmoid()
    edges, states = rest["cu_seqlens"], rest["initial_state"]
    spans = [(n, slice(None)) for n in range(len(q))]
    if edges is not None:
        spans = [(0, slice(a, b)) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    outs, after = [], []
    for number, (row, span) in enumerate(spans):
        part = chunk_delta_rule(*(x[row : row + 1, span] for x in (q, k, v, decay, step)))
        state = None if states is None else states[number : number + 1].to(q.dtype)
        outs.append(part.output(state))
        if state is not None:
            added, factor = part.transition().split([v.shape[-1], k.shape[-1]], dim=-1)
            after.append(factor @ state + added)
    out = torch.cat(outs, dim=1 if edges is not None else 0)
    return out, torch.cat(after) if rest["output_final_state"] else None


def inputs_of(dtype: Any, device: str, length: int = 40, k: int = 16, v: int = 12) -> list[Any]:
    """q, k, v, logits of decay and step, log of the decay rate, bias: 2 key heads, 4 value heads."""
    torch.manual_seed(0)
    q, key = (torch.randn(2, length, 2, k) for _ in range(2))
    made = [q, key, torch.randn(2, length, 4, v), torch.randn(2, length, 4), torch.randn(2, length, 4)]
    return [x.to(device, dtype).requires_grad_() for x in [*made, torch.randn(4), torch.randn(4)]]


def kernel_inputs(given: list[Any]) -> list[Any]:
    """What the adapter takes: q and k of length 1. Gradients are compared before that: our rule divides by itself."""
    return [l2_normalize(given[0]), l2_normalize(given[1]), *given[2:]]


def exact_inputs(given: list[Any]) -> tuple[Any, ...]:
    """What our rule takes: heads repeated, decay and step."""
    q, k, v, a, b, a_log, bias = given
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    return q, k, v, -a_log.exp() * F.softplus(a + bias), b.sigmoid()


def far(found: Any, expected: Any) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def documents_of(length: int, device: str) -> Any:
    numbers = torch.zeros(2, length, dtype=torch.long)
    for row, starts in enumerate(((5, 6, 30), (length - 1,))):
        for start in starts:
            numbers[row, start:] += 1
    return numbers.to(device)


def compare(found: list[Any], expected: list[Any], given: list[Any], doubles: list[Any], limit: float) -> None:
    """Compare results and their gradients."""
    slopes = [torch.randn_like(x) for x in found]
    made = torch.autograd.grad(found, given, slopes, allow_unused=True)
    right = torch.autograd.grad(expected, doubles, [slope.double() for slope in slopes], allow_unused=True)
    for one, best in zip([*found, *made], [*expected, *right], strict=True):
        if best is not None:
            assert far(one, best) < limit


def check_spans(rule: FusedDelta, given: list[Any], packed: bool, limit: float) -> None:
    """Two halves, the second behind the state of the first, against one run of our rule in fp64."""
    doubles = [x.detach().double().requires_grad_() for x in given]
    length, device = given[0].shape[1], str(given[0].device)
    document_BS = document_numbers(documents_of(length, device)) if packed else None
    half = length // 2
    parts, whole_inputs = [], kernel_inputs(given)
    for at in (slice(0, half), slice(half, length)):
        heads = [x[:, at] for x in whole_inputs[:5]]
        numbers = None if document_BS is None else document_BS[:, at]
        before = document_BS[:, half - 1] if document_BS is not None and at.start else None
        parts.append(rule.span(*heads, *given[5:], numbers, before))
    values = given[2].shape[-1]
    state = parts[0].transition()[..., :values]
    added, factor = parts[1].transition().split([values, given[0].shape[-1]], dim=-1)
    found = [parts[0].output(), parts[1].output(state), factor @ state + added]

    whole = chunk_delta_rule(*exact_inputs(doubles), document_BS)
    expected = [*whole.output().split([half, length - half], dim=1), whole.transition()[..., :values]]
    compare(found, expected, given, doubles, limit)


def check_whole(rule: FusedDelta, given: list[Any], packed: bool, limit: float) -> None:
    doubles = [x.detach().double().requires_grad_() for x in given]
    documents = documents_of(given[0].shape[1], str(given[0].device)) if packed else None
    edges = None if documents is None else document_bounds(documents).cu_seqlens
    found = rule.mix(*kernel_inputs(given), edges)
    compare([found], [delta_rule_by_token(*exact_inputs(doubles), documents)], given, doubles, limit)


@pytest.mark.parametrize("packed", [False, True])
def test_adapter_passes_documents_and_states(packed: bool) -> None:
    rule = FusedDelta(stand_in)
    # The stand-in divides q and k by their length once more, which adds 1e-6 to its square.
    check_whole(rule, inputs_of(torch.float64, "cpu"), packed, 1e-5)
    check_spans(rule, inputs_of(torch.float64, "cpu"), packed, 1e-5)


def test_untried_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_delta, "version", lambda name: "0.5.1")
    with pytest.warns(UserWarning, match="release 0.5.1 was not tried"):
        assert fused_delta.load_kernels.__wrapped__() is None
    fused_delta.require_delta_kernels(None, torch.device("cuda"))
    fused_delta.require_delta_kernels("fla", torch.device("cpu"))
    with pytest.raises(FindingsError) as raised:
        fused_delta.require_delta_kernels("fla", torch.device("cuda"))
    (finding,) = raised.value.findings
    assert (finding.rule, finding.at) == ("kernels-are-installed", "knobs.delta_kernels")


def test_one_configuration_of_a_kernel_is_kept() -> None:
    triton = pytest.importorskip("triton")
    configs = [triton.Config({"BV": size}, num_warps=warps) for size in (32, 64) for warps in (2, 4)]

    def tuned(pointer: Any) -> None:
        """Never launched."""

    kernel = triton.autotune(configs=configs, key=[])(triton.jit(tuned))
    keep_config(kernel, {"BV": 64, "num_warps": 2})
    assert [config.all_kwargs() for config in kernel.configs] == [configs[2].all_kwargs()]
    with pytest.raises(RuntimeError, match="0 configurations of tuned"):
        keep_config(kernel, {"BV": 32})


def test_only_the_gated_delta_rule_runs_on_our_kernel() -> None:
    gated = {"g": 1, "dv": 1, "g_gamma": None, "q": torch.empty(1, 128), "v": torch.empty(1, 128)}
    assert is_gated_delta_rule(gated)
    for other in ({"g": None}, {"g_gamma": 1}, {"dv": None}, {"state_v_first": True}, {"v": torch.empty(256)}):
        assert not is_gated_delta_rule(gated | other)


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [40, 200])
def test_kernels_equal_our_rule(packed: bool, length: int) -> None:
    rule = fused_delta.load_kernels()
    assert rule is not None
    given = inputs_of(torch.bfloat16, "cuda", length, k=128, v=128)
    check_whole(rule, given, packed, 2e-2)  # bf16 matmuls one behind another, with A_log and bias rounded to bf16


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_layer_equals_the_layer_without_the_package(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = GatedDelta(DeltaSpec(num_k_heads=2, num_v_heads=4, k_dim=128, v_dim=128), 64, 1e-6).cuda()
    torch.nn.init.normal_(layer.conv, 0.0, 0.5)
    x = torch.randn(2, 150, 64, device="cuda")
    documents = documents_of(150, "cuda") if packed else None

    def run(dtype: Any) -> list[Any]:
        module, given = layer.to(dtype), x.to(dtype).requires_grad_()
        out = module(given, Positions.from_tokens(torch.zeros(2, 150, device="cuda"), documents))
        grads = torch.autograd.grad(out.float().square().sum(), [given, *module.parameters()])
        return [out.double(), *(grad.double() for grad in grads)]

    expected = run(torch.float32)  # fp32 runs in plain torch
    for one, best in zip(run(torch.bfloat16), expected, strict=True):
        assert far(one, best) < 4e-2  # weights, too, are rounded to bf16
