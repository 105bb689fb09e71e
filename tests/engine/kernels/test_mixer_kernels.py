"""Tests of the kernels of token mixers against formulas in fp64: MLA heads, short convolution, gated norm.

Without a GPU they run in Triton's interpreter, on tiny sizes in fp32 (see `test_interpreter.py`).

Shapes: B batch, S sequence, K key heads, H value heads, d head dim, X columns of a key head, W channels, T taps.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from threefold.engine.attention.mla import MlaAttention
from threefold.engine.kernels.availability import without_fused_kernels
from threefold.engine.kernels.mixers.conv_heads import ConvHeads, conv_heads
from threefold.engine.kernels.mixers.delta_chunk_grads import chunk_grads
from threefold.engine.kernels.mixers.gated_norm import gated_rms_norm
from threefold.engine.kernels.mixers.mla_heads import join_key_heads, rotate_query_tails
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.layers.positions import Positions
from threefold.spec.model import MlaSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = importlib.util.find_spec("triton") is not None and torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
# Root-mean-square rounding of bf16 is 1 / 600, and values are rounded up to four times on their way; fp32 sums of some
# thousand numbers stay within 1e-5.
FAR = 8e-3 if HAS_GPU else 1e-5
# Chained GEMMs of bf16 numbers, and differences of their results.
FAR_IN_CHAINS = 3e-2 if HAS_GPU else 2e-5
pytestmark = [
    pytest.mark.usefixtures("one_thread", "poisoned"),
    pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="needs a GPU or test_interpreter.py"),
]


def leaf(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64).to(DTYPE).to(DEVICE).requires_grad_()


def far(found: Any, expected: Any) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def compare(ours: Callable[..., Any], exact: Callable[..., Any], given: list[Any]) -> None:
    """Compare results and their gradients with those of `exact` on fp64 copies of the inputs."""
    found, doubles = ours(*given), [x.detach().double().requires_grad_() for x in given]
    expected = exact(*doubles)
    slopes = [torch.randn_like(x) for x in found]
    made = torch.autograd.grad(found, given, slopes)
    right = torch.autograd.grad(expected, doubles, [slope.double() for slope in slopes])
    for one, best in zip([*found, *made], [*expected, *right], strict=True):
        assert one.shape == best.shape
        assert far(one, best) < FAR


@pytest.mark.parametrize("interleaved", [False, True])
def test_interpreted_query_tails_are_rotated(interleaved: bool) -> None:
    batch, length, heads, unrotated, freqs = 2, 5, 10, 12, 4
    angle = torch.randn(batch, length, freqs, device=DEVICE)
    table = angle.cos(), angle.sin()

    def exact(x: Any) -> list[Any]:
        cos, sin = (each.double()[:, :, None] for each in table)
        tail = x[..., unrotated:]
        one, two = (tail[..., 0::2], tail[..., 1::2]) if interleaved else tail.chunk(2, dim=-1)
        return [torch.cat([x[..., :unrotated], one * cos - two * sin, two * cos + one * sin], dim=-1)]

    def in_place(x: Any) -> list[Any]:
        made = x.flatten(2) * 1  # stands for what a projection made
        out = rotate_query_tails(made, heads, table, interleaved)
        assert out.data_ptr() == made.data_ptr()
        return [out]

    given = [leaf(batch, length, heads, unrotated + 2 * freqs)]
    compare(in_place, exact, given)
    before = given[0].detach().clone()
    compare(lambda x: [rotate_query_tails(x.flatten(2), heads, table, interleaved)], exact, given)
    assert torch.equal(given[0], before)  # a view is not overwritten


def test_interpreted_keys_are_joined_with_the_rotated_key_of_all_heads() -> None:
    batch, length, heads, unrotated, rotated, values = 2, 3, 10, 12, 8, 6

    def exact(kv: Any, shared: Any) -> list[Any]:
        k, v = kv.split([unrotated, values], dim=-1)
        return [torch.cat([k, shared[:, :, None].expand(-1, -1, heads, -1)], dim=-1), v]

    given = [leaf(batch, length, heads, unrotated + values), leaf(batch, length, rotated)]
    compare(lambda kv, shared: list(join_key_heads(kv, shared, unrotated)), exact, given)


def documents_of(batch: int, length: int) -> Any:
    """Documents that begin one, two and more tokens behind each other, elsewhere in each row."""
    numbers = torch.zeros(batch, length, dtype=torch.int32)
    for row in range(batch):
        for start in (3 + row, 4 + row, 6 + row, 13):
            numbers[row, start:] += 1
    return numbers.to(DEVICE)


def convolved(x_BSW: Any, weight_WT: Any, document_BS: Any) -> Any:
    total = torch.zeros_like(x_BSW)
    for back in range(weight_WT.shape[1]):
        moved = F.pad(x_BSW, (0, 0, back, 0))[:, : x_BSW.shape[1]]
        if document_BS is not None:
            before = F.pad(document_BS, (back, 0), value=-1)[:, : x_BSW.shape[1]]
            moved = moved * (before == document_BS)[..., None]
        total = total + moved * weight_WT[:, -1 - back]
    return F.silu(total)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("k_dim", "v_dim", "eps"), [(16, 16, 1e-6), (12, 20, None)])
def test_interpreted_convolution_makes_heads(packed: bool, k_dim: int, v_dim: int, eps: float | None) -> None:
    batch, length, keys, each, taps = 2, 19, 3, 2, 4
    columns, channels = 2 * k_dim + each * v_dim, keys * (2 * k_dim + each * v_dim)
    document_BS = documents_of(batch, length) if packed else None
    sizes = ConvHeads(k_dim, v_dim, each, eps)

    def ours(x: Any, weight: Any) -> list[Any]:
        view = x.view(batch, length, keys, columns + 5)[..., :columns]  # gates lie between the key heads
        return list(conv_heads(view, weight, document_BS, sizes))

    def exact(x: Any, weight: Any) -> list[Any]:
        view = x.view(batch, length, keys, columns + 5)[..., :columns]
        parts = [part.flatten(2) for part in view.split([k_dim, k_dim, each * v_dim], dim=-1)]
        mixed = convolved(torch.cat(parts, dim=-1), weight, document_BS)
        q, k, v = mixed.split([keys * k_dim, keys * k_dim, keys * each * v_dim], dim=-1)
        q, k = (part.unflatten(-1, (keys, k_dim)) for part in (q, k))
        if eps is not None:
            q, k = (part * (part.square().sum(dim=-1, keepdim=True) + eps).rsqrt() for part in (q, k))
        return [q, k, v.unflatten(-1, (keys * each, v_dim))]

    compare(ours, exact, [leaf(batch, length, keys * (columns + 5)), leaf(channels, taps)])


def test_interpreted_norm_is_gated_by_columns_between_others() -> None:
    batch, length, keys, each, dim, eps = 2, 7, 3, 2, 12, 1e-5

    def gate_of(columns: Any) -> Any:
        return columns.view(batch, length, keys, 5 + each * dim)[..., 5:]

    def exact(x: Any, columns: Any, weight: Any) -> list[Any]:
        normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight
        return [normed * F.silu(gate_of(columns).reshape(x.shape))]

    given = [leaf(batch, length, keys * each, dim), leaf(batch, length, keys * (5 + each * dim)), leaf(dim)]
    compare(lambda x, columns, weight: [gated_rms_norm(x, gate_of(columns), weight, eps)], exact, given)


def test_interpreted_latent_attention_equals_plain_torch() -> None:
    spec = MlaSpec(num_heads=4, q_rank=32, kv_rank=16, nope_dim=32, rope_dim=16, v_dim=16, rope_pairs=True)
    torch.manual_seed(0)
    mla = MlaAttention(spec, 24, partial(RMSNorm, eps=1e-6)).to(DEVICE, DTYPE)
    x = leaf(2, 20, 24)
    positions = Positions.from_tokens(torch.zeros(2, 20, dtype=torch.long, device=DEVICE))

    def run() -> list[Any]:
        out = mla(x, positions)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *mla.parameters()])]

    found = run()
    with without_fused_kernels():
        expected = run()
    for one, best in zip(found, expected, strict=True):
        assert far(one, best) < FAR_IN_CHAINS


def chunk_of(given: list[Any], scale: float) -> list[Any]:
    """What a chunk of the delta rule computes, token by token against token: outputs, state behind it, and values that
    are corrected by what the state knows."""
    q, k, v, w, state, decay = given  # (S, k), (S, k), (S, v), (S, k), (k, v), (S)
    between = (decay[:, None] - decay[None, :]).tril().exp().tril()
    out = scale * (decay.exp()[:, None] * (q @ state) + ((q @ k.T) * between) @ v)
    after = decay[-1].exp() * state + (k * (decay[-1] - decay).exp()[:, None]).T @ v
    return [out, after, -w @ state]


@pytest.mark.parametrize("packed", [False, True])
def test_interpreted_grads_of_chunks(packed: bool) -> None:
    torch.manual_seed(0)
    batch, length, keys, heads, k_dim, v_dim, scale = 1 if packed else 2, 150, 1, 2, 128, 128, 0.09
    documents = [(0, 70), (70, 75), (75, 150)] if packed else [(row * length, (row + 1) * length) for row in range(2)]
    chunks = [
        (n, at, range(a + at, min(a + at + 64, b))) for n, (a, b) in enumerate(documents) for at in range(0, b - a, 64)
    ]

    def made(*shape: int, dtype: Any = DTYPE) -> Any:
        return torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)

    q, k = (made(batch, length, keys, k_dim) for _ in range(2))
    v, out_grad, v_grad = (made(batch, length, heads, v_dim) for _ in range(3))
    state, state_grad = (made(batch, len(chunks) // batch, heads, k_dim, v_dim) for _ in range(2))
    decay = made(batch, length, heads, dtype=torch.float32)
    for _, _, span in chunks:  # sums of negative numbers from the start of each chunk
        decay.view(-1, heads)[span.start : span.stop] = -torch.rand(len(span), heads, device=DEVICE).cumsum(dim=0)
    edges = torch.tensor([0, *(b for _, b in documents)], device=DEVICE) if packed else None
    names = torch.tensor([(n, at // 64) for n, at, _ in chunks], device=DEVICE) if packed else None
    found = chunk_grads(q, k, v, out_grad, state, state_grad, decay / math.log(2), v_grad, scale, edges, names)

    expected = [torch.zeros(batch * length, heads, width, dtype=torch.float64, device=DEVICE) for width in (k_dim,) * 3]
    expected.append(torch.zeros(batch * length, heads, dtype=torch.float64, device=DEVICE))
    for number, (_, _, span) in enumerate(chunks):
        for head in range(heads):
            rows = slice(span.start, span.stop)
            per_token = [x.flatten(0, 1)[rows, 0] for x in (q, k)] + [v.flatten(0, 1)[rows, head]]
            before, after_grad = (x.flatten(0, 1)[number, head] for x in (state, state_grad))
            given = [*per_token, torch.zeros_like(per_token[0]), before, decay.flatten(0, 1)[rows, head]]
            given = [x.double().requires_grad_() for x in given]
            slopes = [out_grad.flatten(0, 1)[rows, head], after_grad, v_grad.flatten(0, 1)[rows, head]]
            wanted = [given[0], given[1], given[3], given[5]]
            grads = torch.autograd.grad(chunk_of(given, scale), wanted, [x.double() for x in slopes])
            for whole, part in zip(expected, grads, strict=True):
                whole[rows, head] = part
    expected[:2] = [whole.sum(dim=1, keepdim=True) for whole in expected[:2]]  # both value heads share their key head
    for one, best in zip(found, expected, strict=True):
        assert far(one.flatten(0, 1), best) < FAR_IN_CHAINS
