"""Context parallelism against one rank: outputs, gradients, bytes sent, and how even the work is.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import plans
import pytest
import torch
from attention_reference import reference
from tiny_models import spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from threefold.engine.attention.attend_tiles import (
    BLOCKS,
    CPU,
    FLASH,
    TileKernel,
    TileMask,
    attend_tiles,
    attend_tiles_backward,
    empty_output,
    tile_mask,
)
from threefold.engine.attention.backend import attend
from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.mask_tiles import AttentionMask, Tile, host_documents
from threefold.engine.attention.query_blocks import backward_blocks, forward_blocks
from threefold.engine.dist.collectives import CollectiveCall, all_reduce, observe_collectives
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group, Mesh
from threefold.engine.layers.positions import Positions
from threefold.engine.models.build import build_model
from threefold.engine.shard.context_parallel import ContextParallelAttention, shard_context
from threefold.engine.shard.recurrent_context import ContextParallelDelta
from threefold.engine.shard.sequence_layout import apply_zigzag, rank_spans, shard_sequence, undo_zigzag, zigzag_pieces
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LENGTH = 64  # pieces of 16, 8 and 4 tokens at cp 2, 4 and 8
# In the first row one document crosses many pieces, one is a single token, one starts where a piece does.
LENGTHS = ([3, 1, 37, 7, 16], [64], [32, 5, 27])
CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "narrow values": {"values": 4},
    "short window": {"window": 3},
    "window of two": {"window": 2},
    "long window": {"window": 21},
    "sinks": {"sinks": True},
    "documents": {"packed": True},
    "documents, window": {"packed": True, "window": 11},
    "all": {"packed": True, "window": 19, "sinks": True, "values": 4},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def packed(lengths: Any = LENGTHS) -> Any:
    return torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in lengths])


def context_group(rank: int, cp: int) -> tuple[Group, Group, Group]:
    """All ranks, pairs of neighbors, and the ring of pairs."""
    mesh = Mesh(Layout(cp=cp, gpus=cp), rank)
    inner = mesh.of_ranks("inner", [rank // 2 * 2, rank // 2 * 2 + 1])
    return mesh.group("cp"), inner, mesh.of_ranks("outer", range(rank % 2, cp, 2))


def relative(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def tensors(case: dict[str, Any], heads: tuple[int, int], dtype: Any) -> tuple[list[Any], Any, dict[str, Any]]:
    """q, k, v and the sinks of a case, the gradient of the output, and the mask arguments."""
    generator = torch.Generator().manual_seed(0)
    rows, values = len(LENGTHS), case.get("values", 8)
    shapes = [(rows, heads[0], LENGTH, 8), (rows, heads[1], LENGTH, 8), (rows, heads[1], LENGTH, values)]
    shapes += [(heads[0],)] * ("sinks" in case)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    slope = torch.randn(rows, heads[0], LENGTH, values, generator=generator, dtype=torch.float64).to(dtype)
    return (
        inputs,
        slope,
        {"scale": 0.4, "window": case.get("window")} | ({"documents_BS": packed()} if "packed" in case else {}),
    )


def one_rank(inputs: list[Any], slope: Any, asked: dict[str, Any]) -> list[Any]:
    """Output and gradients in fp64 with every score in memory."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = reference(*leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **asked)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.double())]


def errors_of(rank: int, cp: int, heads: tuple[int, int], dtype: Any) -> dict[str, float]:
    group, inner, outer = context_group(rank, cp)
    worst = {}
    for name, case in CASES.items():
        inputs, slope, asked = tensors(case, heads, dtype)
        expected = one_rank(inputs, slope, asked)
        for kind in KINDS:
            leaves = [shard_sequence(x, group, 2) if x.dim() > 1 else x for x in inputs]
            leaves = [x.clone().requires_grad_() for x in leaves]
            out = ContextParallelAttention(kind, group, inner, outer)(
                *leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **asked
            )
            grads = list(torch.autograd.grad(out, leaves, shard_sequence(slope, group, 2)))
            if len(leaves) > 3:  # the sinks' gradients are parts of a sum
                all_reduce(grads[3], group).wait()
            wanted = [shard_sequence(x, group, 2) if x.dim() > 1 else x for x in expected]
            pairs = zip([out.detach(), *grads], wanted, strict=True)
            worst[f"{kind}, {name}"] = max(relative(a, b) for a, b in pairs)
    return worst


def check(cp: int, heads: tuple[int, int], dtype: Any, tolerance: float) -> None:
    for rank, worst in enumerate(run_ranks(cp, errors_of, cp, heads, dtype)):
        assert len(worst) == len(KINDS) * len(CASES)
        assert not {name: error for name, error in worst.items() if not error <= tolerance}, rank


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_equals_one_rank(cp: int) -> None:
    check(cp, (8, 4), torch.float64, 1e-10)  # fp64 leaves about 1e-14 of rounding


@pytest.mark.slow
def test_attention_equals_one_rank_on_8() -> None:
    check(8, (16, 8), torch.float64, 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_low_precision_stays_close_to_fp64(dtype: Any, tolerance: float) -> None:
    """Rounding of 24 and of 8 bits: inputs are alike, outputs and each step of the traveling gradients round."""
    check(2, (8, 4), dtype, tolerance)


def test_zigzag_pieces_and_orders_are_inverse() -> None:
    assert [zigzag_pieces(3, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert rank_spans(24, 3, 1) == [range(4, 8), range(16, 20)]
    x = torch.arange(24).view(1, 24)
    groups = [Group("cp", (0, 1, 2), rank, None) for rank in range(3)]
    shares = [shard_sequence(x, group, 1) for group in groups]
    assert shares[1].tolist() == [[4, 5, 6, 7, 16, 17, 18, 19]]
    assert torch.equal(undo_zigzag(torch.cat(shares, 1), 3, 1), x)
    assert torch.equal(apply_zigzag(x, 3, 1), torch.cat(shares, 1))
    assert shard_sequence(x, TRIVIAL_GROUP, 1) is x
    assert rank_spans(7, 1, 0) == [range(7)]


def tiles_as_mask(mask: AttentionMask, here: list[range], there: list[range], rows: int) -> Any:
    """The tiles as a mask of (query, key) pairs; fails where two tiles hold the same pair."""
    q, k = torch.zeros(rows, 1, sum(map(len, here)), 1), torch.zeros(rows, 1, sum(map(len, there)), 1)
    counts = torch.zeros(rows, q.shape[2], k.shape[2], dtype=torch.int)
    for tile in mask.tiles_between(here, there):
        part_q, part_k = q[tile.rows, :, tile.q], k[tile.rows, :, tile.k]
        hidden = tile_mask(tile, part_q, part_k)
        mask = None if hidden is None else ~hidden
        assert mask is None or mask.any(dim=-1).all(), "a query that reads nothing"
        assert mask is None or not mask.all() or mask.shape[-2:] == (1, 1), "a mask that hides nothing"
        counts[tile.rows, tile.q, tile.k] += 1 if mask is None else mask.view(-1, *mask.shape[-2:]).int()
    assert counts.max() <= 1
    return counts.bool()


@pytest.mark.parametrize(("window", "documents", "cp"), [*product([None, 1, 3, 8, 21, 63], [False, True], [1, 2, 4])])
def test_tiles_are_what_a_token_may_read(window: int | None, documents: bool, cp: int) -> None:
    """A key is visible if it is not later, not further back than the window, and of the same document."""
    ids = packed() if documents else torch.zeros(3, LENGTH, dtype=torch.long)
    mask = AttentionMask(window, host_documents(ids) if documents else None)
    for rank, other in product(range(cp), range(cp)):
        here, there = rank_spans(LENGTH, cp, rank), rank_spans(LENGTH, cp, other)
        places = torch.tensor([p for span in here for p in span]), torch.tensor([p for span in there for p in span])
        distance = places[0][:, None] - places[1][None, :]
        expected = (
            (distance >= 0) & (distance < (window or LENGTH)) & (ids[:, places[0], None] == ids[:, None, places[1]])
        )
        assert torch.equal(tiles_as_mask(mask, here, there, 3), expected)


def test_documents_are_reread_when_their_buffer_is_overwritten() -> None:
    ids = packed()
    first = host_documents(ids)
    assert host_documents(ids) is first
    ids[1, 10:] = 1
    assert host_documents(ids).row_starts[1] == [0, 10]


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls of the attention kernel and the (query, key) pairs they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.pairs = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            queries, keys, causal = args[0].shape[2], args[1].shape[2], len(args) > 4 and args[4]
            self.calls += 1
            self.pairs += queries * (queries + 1) // 2 if causal else queries * keys
        return func(*args, **(kwargs or {}))


def work_of(rank: int, cp: int) -> dict[str, tuple[int, int]]:
    group, _, _ = context_group(rank, cp)
    q, k, v = (torch.randn(1, 2, LENGTH // cp, 8) for _ in range(3))
    work = {}
    for name, kind, window in (("ring", "p2p", None), ("gathered", "all_gather", None), ("window", "p2p", LENGTH // 8)):
        with Kernels() as kernels:
            ContextParallelAttention(kind, group)(q, k, v, scale=1.0, window=window)
        work[name] = kernels.calls, kernels.pairs
    return work


def test_causal_work_is_even_and_complete_and_no_block_too_many() -> None:
    cp, piece = 4, LENGTH // 8
    with Kernels():  # what a mode imports on first use is imported once, before the ranks fork
        torch.zeros(1)
    work = run_ranks(cp, work_of, cp)
    for name in ("ring", "gathered"):
        assert sum(of_rank[name][1] for of_rank in work) == LENGTH * (LENGTH + 1) // 2
        assert {of_rank[name][1] for of_rank in work} == {2 * piece * (piece + 1) // 2 + 7 * piece * piece}
    # A rank computes 3 of the 4 * cp blocks with its own keys and 2 with the keys of each other rank.
    assert {of_rank["ring"][0] for of_rank in work} == {2 * cp + 1}
    # A window of one piece: each piece reads itself and, but for piece 0, the one before.
    assert [of_rank["window"][0] for of_rank in work] == [3, 4, 4, 4]


def bytes_of(rank: int, cp: int, kind: str) -> tuple[Counter[str], Counter[str]]:
    group, inner, outer = context_group(rank, cp)
    q, k, v = (torch.randn(2, heads, LENGTH // cp, dim, requires_grad=True) for heads, dim in ((8, 8), (4, 8), (4, 4)))
    sent: list[Counter[str]] = [Counter(), Counter()]

    def watch(into: Counter[str]) -> Any:
        def see(call: CollectiveCall) -> None:
            into[f"{call.operation} {call.group.name}"] += call.num_bytes

        return see

    with observe_collectives(watch(sent[0])):
        out = ContextParallelAttention(kind, group, inner, outer)(q, k, v, scale=1.0)
    with observe_collectives(watch(sent[1])):
        out.sum().backward()
    return sent[0], sent[1]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_hand_count(kind: str) -> None:
    """fp32, 2 x 16 tokens a rank: keys with values 4 x (8 + 4) columns, all that enters 8 x 8 more, output 8 x 4."""
    tokens, keys, out = 2 * 16 * 4, 48, 32
    into = 64 + keys
    forward, backward = {
        "p2p": ({"send cp": 3 * tokens * keys}, {"send cp": 6 * tokens * keys}),
        "all_gather": (
            {"all_gather cp": 3 * tokens * keys},
            {"all_gather cp": 3 * tokens * keys, "reduce_scatter cp": 3 * tokens * keys},
        ),
        "a2a": ({"all_to_all cp": tokens * (into + out) * 3 // 4},) * 2,
        "a2a+p2p": (
            {"all_to_all inner": tokens * (into + out) // 2, "send outer": tokens * keys},
            {"all_to_all inner": tokens * (into + out) // 2, "send outer": 2 * tokens * keys},
        ),
    }[kind]
    for found in run_ranks(4, bytes_of, 4, kind):
        assert found == (Counter(forward), Counter(backward))


def delta_layer(num_k_heads: int) -> GatedDelta:
    torch.manual_seed(0)
    layer = GatedDelta(DeltaSpec(num_k_heads, 2 * num_k_heads, 6, 5), 12, 1e-6).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def delta_case(length: int, documents: bool) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, slope = (torch.randn(2, length, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = (torch.rand(2, length, generator=generator) < 0.1).cumsum(dim=1) if documents else None
    return x, slope, ids


def run_delta(layer: GatedDelta, x: Any, slope: Any, ids: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    out = layer(x, Positions(torch.zeros(2, x.shape[1]), ids))
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], slope)]


def delta_errors(rank: int, cp: int) -> dict[str, float]:
    group, _, _ = context_group(rank, cp)
    worst = {}
    # 2 * cp tokens: pieces shorter than the convolution; 528: pieces of more than one chunk that do not fill it.
    for heads, length, documents, kinds in [
        (4, 2 * cp, False, ("a2a", "p2p")),
        (4, 16, True, ("a2a", "p2p")),
        (4, 72, False, ("a2a", "p2p")),
        (3, 72, True, ("a2a",)),
        (4, 528, True, ("p2p",)),
    ]:
        layer, case = delta_layer(heads), delta_case(length, documents)
        expected = run_delta(layer, *case)
        for kind in kinds:
            layer.mix_over_ranks = ContextParallelDelta(kind, group)
            found = run_delta(layer, shard_sequence(case[0], group, 1), shard_sequence(case[1], group, 1), case[2])
            for grad in found[2:]:
                all_reduce(grad, group).wait()
            wanted = [shard_sequence(x, group, 1) for x in expected[:2]] + expected[2:]
            worst[f"{heads} {length} {documents} {kind}"] = max(map(relative, found, wanted))
        layer.mix_over_ranks = None
    return worst


@pytest.mark.parametrize("cp", [2, 4])
def test_delta_layer_equals_one_rank(cp: int) -> None:
    for worst in run_ranks(cp, delta_errors, cp):
        # fp64; the states' products are taken in another order, and the gradients of the decay are small sums of large.
        assert not {name: error for name, error in worst.items() if not error <= 1e-10}


def delta_bytes(rank: int, cp: int, kind: str) -> Counter[str]:
    group, _, _ = context_group(rank, cp)
    layer, (x, _, ids) = delta_layer(4), delta_case(32, False)
    layer.mix_over_ranks = ContextParallelDelta(kind, group)
    sent: Counter[str] = Counter()
    with observe_collectives(lambda call: sent.update({call.operation: call.num_bytes})), torch.no_grad():
        layer(shard_sequence(x, group, 1), Positions(torch.zeros(2, 16), ids))
    return sent


def test_delta_bytes_are_the_hand_count() -> None:
    """2 x 16 tokens of 8 bytes; 4 key heads of 6, 8 value heads of 5; half of it goes to the other rank."""
    into, out = 2 * 24 + 40 + 2 * 8, 40
    assert run_ranks(2, delta_bytes, 2, "a2a") == [Counter({"all_to_all": 32 * 8 * (into + out) // 2})] * 2
    # For both pieces: 3 tokens of 2 rows with 88 channels, and a 6 x (5 + 6) matrix for each of 8 heads and 2 rows.
    passed = 8 * 2 * (2 * 3 * 88 + 2 * 8 * 6 * 11)
    assert run_ranks(2, delta_bytes, 2, "p2p") == [Counter({"all_gather": passed})] * 2


def test_shards_of_the_delta_heads_sum_to_the_layer() -> None:
    """Tensor parallelism: the projections of each rank hold some key heads, and its output is a partial sum."""
    layer, (x, _, ids) = delta_layer(4), delta_case(24, True)
    positions, parts = Positions(torch.zeros(2, 24), ids), []
    for rank in range(2):
        part, heads = delta_layer(4), layer.head_weights(rank, 2)
        part.conv, part.dt_bias, part.a_log = map(torch.nn.Parameter, (heads.conv_WT, heads.dt_bias_H, heads.a_log_H))
        for name, dim in (("qkvz", 0), ("ba", 0), ("out", 1)):
            linear = getattr(part, name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim)[rank])
        part.input_linears = lambda x, linears: [linear(x / 2) for linear in linears]
        parts.append(part(2 * x, positions))
    torch.testing.assert_close(sum(parts), layer(x, positions))


def model_errors(rank: int, plan: Plan) -> dict[str, float]:
    mesh = Mesh(plan.layout, rank)
    group, ids = mesh.group("cp"), packed(([5, 16, 11], [32]))
    tokens = torch.arange(64).view(2, 32) * 7 % 67
    slope = torch.randn(2, 32, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst = {}
    for family in ("gpt_oss", "deepseek_v3", "qwen3_next"):
        model = build_model(spec_of(family), dtype=torch.float64)
        weights = list(model.parameters())
        expected = model(tokens, documents_BS=ids).logits
        wholes = torch.autograd.grad(expected, weights, slope, materialize_grads=True)
        shard_context(model, mesh, plan)
        found = model(tokens, documents_BS=ids).logits
        parts = torch.autograd.grad(found, weights, shard_sequence(slope, group, 1), materialize_grads=True)
        worst[family] = relative(found, shard_sequence(expected, group, 1))
        for whole, part in zip(wholes, parts, strict=True):
            total = part.clone(memory_format=torch.contiguous_format)
            all_reduce(total, group).wait()
            worst[family] = max(worst[family], relative(total, whole))
    return worst


@pytest.mark.parametrize("kinds", ["p2p", "a2a+p2p", ["a2a", "all_gather"]], ids=str)
def test_sharded_models_equal_one_rank(kinds: Any) -> None:
    """Rotary positions, windows, sinks, latents and the delta rule, put in place by `shard_context`."""
    cp = 4 if isinstance(kinds, str) else 2  # there are 2 key/value heads to trade
    fields = {"cluster.chip": "h100", "cluster.gpus": cp, "cluster.domain": 2, "layout.cp": cp}
    plan = plans.build({"model": "tiny-qwen3-moe", "job.seq_len": 32, "knobs.cp_comm": kinds, **fields})
    for errors in run_ranks(cp, model_errors, plan):
        assert all(error < 1e-9 for error in errors.values()), errors  # fp64, through two layers and their norms


@cache
def long_case() -> tuple[list[Any], list[Any]]:
    """q, k, v and the output's gradient at 32K tokens; output and gradients of one rank, too long for `reference`."""
    generator = torch.Generator().manual_seed(0)
    *inputs, slope = [torch.randn(1, 4, 32768, 8, generator=generator) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, scale=0.4)
    return [*inputs, slope], [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def long_errors(rank: int, cp: int, kind: str) -> list[float]:
    group, inner, outer = context_group(rank, cp)
    whole, expected = long_case()
    *leaves, slope = (shard_sequence(x, group, 2) for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    out = ContextParallelAttention(kind, group, inner, outer)(*leaves, scale=0.4)
    found = [out.detach(), *torch.autograd.grad(out, leaves, slope)]
    errors = [relative(mine, shard_sequence(theirs, group, 2)) for mine, theirs in zip(found, expected, strict=True)]
    # The last query of each span once more, against one softmax over all keys it sees, in fp64.
    for n, span in enumerate(rank_spans(whole[0].shape[2], cp, rank)):
        keys, values = (x[:, :, : span.stop].double() for x in whole[1:3])
        weight = (whole[0][:, :, span.stop - 1 : span.stop].double() @ keys.mT * 0.4).softmax(dim=-1)
        errors.append(relative(out[:, :, (n + 1) * len(span) - 1].detach(), (weight @ values)[:, :, 0]))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_32k_tokens_in_fp32(kind: str) -> None:
    long_case()  # once, before the ranks fork
    for errors in run_ranks(4, long_errors, 4, kind):
        # Sums of up to 32K terms in fp32; relative to the largest entry, but late outputs are means near 0.
        assert max(errors) < 1e-4, errors


def simulate(cp: int, inputs: list[Any], slope: Any, mask: AttentionMask, kernel: Any) -> list[Any]:
    """Ring attention of all ranks in one process, without groups: forward and backward tile by tile."""
    share = [
        [shard_sequence(x, Group("cp", tuple(range(cp)), rank, None), 2) for x in (*inputs, slope)]
        for rank in range(cp)
    ]
    outs, grads = [], [[torch.zeros_like(x, dtype=torch.float32) for x in share[rank][:3]] for rank in range(cp)]
    for rank, (q, _, _, slope_here) in enumerate(share):
        out, lse = empty_output(q, inputs[2].shape[-1])
        tiles = [mask.tiles_between(rank_spans(LENGTH, cp, rank), rank_spans(LENGTH, cp, other)) for other in range(cp)]
        for other in range(cp):
            attend_tiles(out, lse, q, *share[other][1:3], 0.4, tiles[other], kernel)
        out = out.to(q.dtype)
        for other in range(cp):
            into = (grads[rank][0], *grads[other][1:])
            attend_tiles_backward(into, slope_here, q, *share[other][1:3], out, lse, 0.4, tiles[other], kernel)
        outs.append(out)
    parts = [outs, *([grads[rank][n] for rank in range(cp)] for n in range(3))]
    return [undo_zigzag(torch.cat(part, 2), cp, 2) for part in parts]


def simulated_errors(case: dict[str, Any], device: str, dtype: Any, kernel: Any) -> float:
    inputs, slope, asked = tensors({**case, "sinks": True}, (8, 4), torch.float32)
    inputs, slope = [x.to(dtype).float() for x in inputs[:3]], slope.to(dtype).float()
    expected = one_rank(inputs, slope, asked)
    ids = packed().to(device) if "packed" in case else None
    mask = AttentionMask(case.get("window"), None if ids is None else host_documents(ids))
    found = simulate(4, [x.to(device, dtype) for x in inputs], slope.to(device, dtype), mask, kernel)
    return max(relative(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def forward_in_small_blocks(q: Any, k: Any, v: Any, scale: float, tile: Tile) -> Any:
    return forward_blocks(q, k, v, scale, TileMask(tile, q, k.shape[2]), max_bytes=SMALL_BYTES)


def backward_in_small_blocks(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, tile: Tile) -> Any:
    mask = TileMask(tile, q, k.shape[2])
    return backward_blocks(grad, q, k, v, out, lse, scale, mask, max_bytes=SMALL_BYTES)


SMALL_BYTES = 2000  # scores of a block: one to five of the queries of a tile
SMALL_BLOCKS = TileKernel(forward_in_small_blocks, backward_in_small_blocks)


@pytest.mark.parametrize("name", CASES)
def test_query_blocks_and_the_cpu_kernel_agree_without_a_group(name: str) -> None:
    for kernel in (CPU, BLOCKS, SMALL_BLOCKS):
        assert simulated_errors(CASES[name], "cpu", torch.float32, kernel) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "kernel", "tolerance"),
    # bf16 keeps 8 bits; probabilities and outputs of each block round, and their sums add up.
    [(torch.bfloat16, FLASH, 4e-2), (torch.float16, FLASH, 1e-2), (torch.float32, BLOCKS, 1e-4)],
    ids=["bf16", "fp16", "fp32"],
)
def test_cuda_blocks_equal_fp64(name: str, dtype: Any, kernel: Any, tolerance: float) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        assert simulated_errors(CASES[name], "cuda", dtype, kernel) < tolerance
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
