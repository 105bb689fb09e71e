"""Mamba-2: the scan in chunks against its definition, token by token, and the optional kernels of `mamba-ssm`.

Shapes: B batch, S sequence, H heads, G groups, n state dim, p head dim.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from threefold.engine.attention.state_space import mamba
from threefold.engine.attention.state_space.chunk_scan import ScanInputs, chunk_scan, decay_state, scan_by_token
from threefold.engine.attention.state_space.fused_scan import MODULE, PACKAGE, fused_scan
from threefold.engine.layers.positions import Positions
from threefold.spec.model import MambaSpec

B, S, H, G, N, P = 2, 37, 6, 3, 5, 4
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 3 + [2] * 17 + [3] * 7, [4] * 37])


def drawn_inputs(seed: int = 0) -> ScanInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    step, rate = draw(B, S, H).abs() * 0.3, -draw(H).abs()
    made = ScanInputs(draw(B, S, H, P), step, rate, draw(B, S, G, N), draw(B, S, G, N), draw(H))
    return ScanInputs(*(getattr(made, field.name).requires_grad_() for field in fields(made)))


def gradients(out: Tensor, inputs: ScanInputs) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), [getattr(inputs, field.name) for field in fields(inputs)])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
def test_chunks_equal_the_definition(chunk: int, documents: Tensor | None) -> None:
    inputs = drawn_inputs()
    expected, found = scan_by_token(inputs, documents), chunk_scan(inputs, documents, chunk=chunk).output()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
def test_spans_pass_their_state_on(documents: Tensor | None) -> None:
    """Two spans with the state between them are one sequence; a document that begins resets it."""
    inputs, cut = drawn_inputs(1), 16
    expected = scan_by_token(inputs, documents)
    parts = [_span(inputs, slice(0, cut)), _span(inputs, slice(cut, S))]
    numbers = [(None, None), (None, None)]
    if documents is not None:
        numbers = [(documents[:, :cut], None), (documents[:, cut:], documents[:, cut - 1])]
    first, second = (chunk_scan(part, *number, chunk=8) for part, number in zip(parts, numbers, strict=True))
    state, factor = first.transition()
    assert factor.shape == (B, G, H // G)
    found = torch.cat([first.output(), second.output(state)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    # The factor is what is left of a state that was there before the span.
    before = torch.ones_like(state)
    both = decay_state(before, factor) + state
    late = chunk_scan(parts[0], *numbers[0], chunk=8)
    torch.testing.assert_close(late._states(before)[-1], both, rtol=1e-11, atol=1e-11)


def _span(inputs: ScanInputs, span: slice) -> ScanInputs:
    by_token = ("x_BSHp", "step_BSH", "write_BSGn", "read_BSGn")
    return replace(inputs, **{name: getattr(inputs, name)[:, span] for name in by_token})


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    """A stand-in of `mamba-ssm` with the signature of its scan, computed by the definition."""
    names = [".".join(MODULE.split(".")[:end]) for end in range(1, len(MODULE.split(".")) + 1)]
    modules = {name: types.ModuleType(name) for name in names}
    modules[PACKAGE].__spec__ = types.SimpleNamespace(origin="somewhere")  # type: ignore[assignment]
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(modules)
    fused_scan.cache_clear()
    yield modules[MODULE]
    for name, module in kept.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
    fused_scan.cache_clear()


def test_kernels_are_called_as_they_are_defined(package: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def mamba_chunk_scan_combined(  # type: ignore[no-untyped-def]
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        dt_softplus=False,
    ):
        assert z is None
        assert dt_bias is None
        assert not dt_softplus  # the engine applies both itself
        seen.append(seq_idx)
        return scan_by_token(ScanInputs(x, dt, A, B, C, D), seq_idx)

    package.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    scan = fused_scan()
    assert scan is not None
    layer = mamba.Mamba(MambaSpec(num_heads=4, head_dim=4, state_dim=6, num_groups=2), 12, 1e-5).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    x_BSD = torch.randn(B, S, 12, dtype=torch.float64, generator=generator)
    positions = Positions.from_tokens(torch.zeros(B, S, dtype=torch.long), DOCUMENTS)
    expected = layer(x_BSD, positions)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    found = layer(x_BSD, positions)
    monkeypatch.undo()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert [one.dtype for one in seen] == [torch.int32]


@pytest.mark.parametrize("function", [None, lambda x, dt, A: x], ids=["absent", "other arguments"])
def test_an_unknown_package_counts_as_absent(package: types.ModuleType, function: Any) -> None:
    if function is not None:
        package.mamba_chunk_scan_combined = function  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="Mamba layers run in torch"):
        assert fused_scan() is None
