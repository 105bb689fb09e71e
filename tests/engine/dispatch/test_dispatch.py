"""Experts on several ranks against the same layer on one rank: outputs, losses and every gradient, in fp64.

Shapes: B batch, S sequence, T tokens, D model dim, K experts of a token, E experts.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import fake_deepep as flex_standin
import plans
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from threefold.engine.dispatch.alltoall import AllToAllDispatcher
from threefold.engine.dispatch.async_exchange import AsyncExchange, finish_exchange, start_exchange
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.rows import permute_rows
from threefold.engine.dispatch.select import make_dispatcher
from threefold.engine.dispatch.split_sizes import RowCounts
from threefold.engine.dist.collectives import observe_collectives
from threefold.engine.dist.host_sizes import sizes_from
from threefold.engine.dist.mesh import Group, Mesh, trivial_group
from threefold.engine.dist.shard_placement import Placement, replicated
from threefold.engine.model_options import Options
from threefold.engine.models.init_weights import materialize
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.shard.expert_parallel import shard_experts
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import FindingsError
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan
from threefold.spec.model import MoeSpec

DIM = 8
SPEC = MoeSpec(num_experts=8, top_k=2, expert_dim=6, num_shared=1, shared_gate=True, bias=True)
# fp64, whose rounding is 2e-16; sums of some hundred terms of order one in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
# The flex packages carry router weights in fp32, whose rounding is 6e-8.
FP32_WEIGHTS = {"rtol": 1e-5, "atol": 1e-5}


def plan_of(layout: Layout, dispatcher: str = "alltoall", seq_len: int = 16) -> Plan:
    degrees = {f"layout.{axis}": layout.degree(axis) for axis in ("tp", "cp", "ep", "etp")}
    cluster = {"cluster.chip": "h200", "cluster.gpus": layout.gpus}
    job = {"job.seq_len": seq_len, "job.global_batch": 8}
    return plans.build({"model": "deepseek-v3", "knobs.dispatcher": dispatcher, **degrees, **cluster, **job})


def whole_layer(options: Options, favor: int | None = None) -> MoeLayer:
    """Integer router weights: with integer tokens its scores are exact, and equal tokens tie on any rank."""
    torch.manual_seed(5)
    layer = MoeLayer(SPEC, DIM, "silu", options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randint(-2, 3, (8, DIM)))
        layer.router.bias.copy_(torch.arange(8) / 4)
        if favor is not None:
            layer.router.bias[favor : favor + 2] += 100
    return layer


def shard_layer(layer: MoeLayer, mesh: Mesh, plan: Plan) -> tuple[MoeLayer, dict[str, Placement]]:
    with torch.device("meta"):
        piece = MoeLayer(SPEC, DIM, "silu", layer.options).double()
    places = {name: replicated(p.shape, ()) for name, p in piece.named_parameters()} | shard_experts(piece, mesh, plan)
    materialize(piece, "cpu")
    with torch.no_grad():
        for name, parameter in piece.named_parameters():
            parameter.copy_(places[name].extract_shard(layer.get_parameter(name)))
    return piece, places


def run_layer(run: Any, layer: MoeLayer, x_BSD: Any, coefficients: Any) -> dict[str, Any]:
    """A loss that sees each token's output differently, and every balancing loss."""
    x_BSD = x_BSD.clone().requires_grad_()
    y_BSD, stats = run(x_BSD)
    loss = (y_BSD * coefficients).sum() + sum(stats.losses.values())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    losses = {name: value.item() for name, value in stats.losses.items()}
    sums = {"load": stats.load_E, "dropped": stats.num_dropped, "entropy": stats.entropy}
    return {"y": y_BSD.detach(), "x": x_BSD.grad, "losses": losses, "sums": sums, "grads": grads}


def tokens_of(counts: list[int]) -> tuple[list[Any], list[Any]]:
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(1, count, DIM, generator=generator, dtype=torch.float64) for count in counts]
    return x, [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in x]


def work(rank: int, layout: Layout, plan: Plan, cases: list[Any], standin: Any = None) -> list[Any]:
    if standin is not None:
        sys.modules["deep_ep"] = standin()
    mesh, results = Mesh(layout, rank), []
    for options, favor, x, coefficients in cases:
        layer, places = shard_layer(whole_layer(options, favor), mesh, plan)
        results.append({**run_layer(layer, layer, x[rank], coefficients[rank]), "places": places})
    return results


def same_as_one_rank(found: list[dict[str, Any]], wanted: dict[str, Any], natural: Any, tolerance: Any) -> None:
    """`natural` puts what the ranks hold of (B, S, ...) in the order of one rank."""
    close = partial(torch.testing.assert_close, **tolerance)
    close(natural([each["y"] for each in found]), wanted["y"])
    close(natural([each["x"] for each in found]), wanted["x"])
    for name, grad in wanted["grads"].items():
        total = torch.zeros_like(grad)
        for each in found:
            for box in each["places"][name].regions():
                box.in_full(total).add_(box.in_shard(each["grads"][name]))
        close(total, grad, msg=lambda said, name=name: f"{name}: {said}")
    for name, value in wanted["sums"].items():
        close(torch.stack([each["sums"][name] for each in found]).sum(dim=0), value)


def side_by_side(parts: list[Any]) -> Any:
    return torch.cat(parts, dim=1)


LAYOUTS = {
    "ep2": Layout(ep=2, gpus=2),
    "ep4": Layout(ep=4, gpus=4),
    "etp2": Layout(etp=2, gpus=2),
    "ep2 x etp2": Layout(ep=2, etp=2, gpus=4),
    "ep2 x edp2": Layout(ep=2, gpus=4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_on_ranks_equal_one_rank(name: str) -> None:
    """Equal token counts; unequal ones with no token on one rank; all tokens to the experts of one rank."""
    layout, options = LAYOUTS[name], Options(shared_overlap=name == "ep4", expert_backend="loop")
    amounts = [[5] * layout.gpus, [7, 0, 3, 1][: layout.gpus], [0, 4, 2, 5][: layout.gpus]]
    cases = [(options, favor, *tokens_of(counts)) for favor, counts in zip((None, None, 6), amounts, strict=True)]
    found = run_ranks(layout.gpus, work, layout, plan_of(layout), cases)
    for number, (_, favor, x, coefficients) in enumerate(cases):
        layer = whole_layer(Options(), favor)
        wanted = run_layer(layer, layer, side_by_side(x), side_by_side(coefficients))
        del wanted["sums"]["entropy"]  # each rank has a microbatch of its own, and a mean over it
        same_as_one_rank([each[number] for each in found], wanted, side_by_side, EXACT)


def equal_tokens(num_sequences: int, length: int) -> tuple[Any, Any]:
    """Tokens of only five kinds, so that weights tie."""
    generator = torch.Generator().manual_seed(11)
    kinds = torch.randint(-2, 3, (5, DIM), generator=generator).double()
    pick = torch.randint(0, 5, (num_sequences, length), generator=generator)
    return kinds[pick], torch.randn(num_sequences, length, DIM, generator=generator, dtype=torch.float64)


def positions(layout: Layout, length: int) -> list[list[int]]:
    """Zigzag over cp, then equal parts for tp; by hand."""
    size = length // (2 * layout.cp)
    held = []
    for rank in range(layout.cp):
        pieces = [rank, 2 * layout.cp - 1 - rank] if layout.cp > 1 else [0, 1]
        places = [piece * size + i for piece in pieces for i in range(size)]
        step = len(places) // layout.tp
        held += [places[i * step : (i + 1) * step] for i in range(layout.tp)]
    return held


SPREAD = {
    "cp2 x tp2, ep2 x etp2": (Layout(cp=2, tp=2, ep=2, etp=2, gpus=4), "alltoall"),
    "tp2, no ep": (Layout(tp=2, gpus=2), "local"),
    "cp2, ep2": (Layout(cp=2, ep=2, gpus=2), "alltoall"),
}


@pytest.mark.parametrize("name", SPREAD)
def test_a_microbatch_spread_over_ranks_equals_one_rank(name: str) -> None:
    """Which copies are dropped, every balancing loss, and what the routers say of themselves."""
    layout, dispatcher = SPREAD[name]
    x_BSD, coefficients = equal_tokens(2, 16)
    held = positions(layout, 16)
    x, parts = [x_BSD[:, places] for places in held], [coefficients[:, places] for places in held]
    dropless = Options(1.0, 0.5, 0.1, expert_backend="loop")
    cases = [(options, None, x, parts) for options in (dropless, replace(dropless, capacity_factor=0.6))]
    found = run_ranks(layout.gpus, work, layout, plan_of(layout, dispatcher), cases)

    def natural(shares: list[Any]) -> Any:
        out = torch.empty_like(x_BSD)
        for places, share in zip(held, shares, strict=True):
            out[:, places] = share
        return out

    for number, (options, *_) in enumerate(cases):
        layer = whole_layer(options)
        wanted = run_layer(layer, layer, x_BSD, coefficients)
        assert bool(wanted["sums"]["dropped"] > 0) == (options.capacity_factor is not None)
        same_as_one_rank([each[number] for each in found], wanted, natural, EXACT)
        for loss, value in wanted["losses"].items():
            assert sum(each[number]["losses"][loss] for each in found) == pytest.approx(value, rel=1e-12)


STANDINS = {
    "V1": ("deepep", lambda: flex_standin.package(flex_standin.Buffer)),
    "V2": ("deepep", lambda: flex_standin.package(flex_standin.Buffer, flex_standin.ElasticBuffer)),
    "hybrid": ("hybridep", lambda: flex_standin.package(flex_standin.HybridEPBuffer)),
}
WITH_ETP = pytest.param(Layout(ep=2, etp=2, tp=2, gpus=4), marks=pytest.mark.slow, id="ep2 x etp2")


@pytest.mark.parametrize("kind", STANDINS)
@pytest.mark.parametrize("layout", [pytest.param(Layout(ep=2, tp=2, gpus=2), id="ep2"), WITH_ETP])
def test_flex_adapters_equal_one_rank_through_a_stand_in(kind: str, layout: Layout) -> None:
    """The real packages were never run here: this holds the adapters to the documented signatures, no more."""
    dispatcher, standin = STANDINS[kind]
    cases = [(capacity, favor) for capacity in (None, 0.6) for favor in (None, 6)]
    compare_microbatches(layout, dispatcher, cases, FP32_WEIGHTS, standin)


def test_a_capacity_is_of_each_rank_s_own_microbatch() -> None:
    compare_microbatches(Layout(ep=2, gpus=2), "alltoall", [(0.6, None), (0.6, 6)], EXACT)


def compare_microbatches(
    layout: Layout, dispatcher: str, cases: list[tuple[float | None, int | None]], tolerance: Any, standin: Any = None
) -> None:
    x, coefficients = tokens_of([8] * layout.gpus)
    options = {c: Options(capacity_factor=c, expert_backend="loop") for c, _ in cases}
    given = [(options[capacity], favor, x, coefficients) for capacity, favor in cases]
    found = run_ranks(layout.gpus, work, layout, plan_of(layout, dispatcher), given, standin)
    for number, (capacity, favor) in enumerate(cases):
        layer = whole_layer(options[capacity], favor)
        pairs = zip(microbatches(x, layout), microbatches(coefficients, layout), strict=True)
        runs = [run_layer(layer, layer, x_BSD, part) for x_BSD, part in pairs]
        sums = {name: sum(run["sums"][name] for run in runs) for name in ("load", "dropped")}
        assert bool(sums["dropped"] > 0) == (capacity is not None)
        both = {key: side_by_side([run[key] for run in runs]) for key in ("x", "y")}
        wanted = {**both, "grads": runs[-1]["grads"], "sums": sums}  # gradients add up from run to run
        same_as_one_rank([each[number] for each in found], wanted, side_by_side, tolerance)


def microbatches(parts: list[Any], layout: Layout) -> list[Any]:
    """The microbatches, each joined from the ranks that share it."""
    shared = layout.tp * layout.cp
    return [side_by_side(parts[first : first + shared]) for first in range(0, len(parts), shared)]


def apart(rank: int, layout: Layout) -> list[Any]:
    """The same layer whole, recomputed, and phase by phase with the graph cut at each border."""
    sys.modules["deep_ep"] = flex_standin.package(flex_standin.ElasticBuffer)
    mesh, runs = Mesh(layout, rank), []
    for dispatcher, counts in (("alltoall", [4, 7]), ("deepep", [5, 5])):
        layer, _ = shard_layer(whole_layer(Options(expert_backend="loop")), mesh, plan_of(layout, dispatcher))
        x, coefficients = tokens_of(counts)
        each = []
        for run in (layer, partial(checkpoint, layer, use_reentrant=False)):
            layer.zero_grad()
            found = run_layer(run, layer, x[rank], coefficients[rank])
            each.append([found["y"], found["x"], *(grad.clone() for grad in found["grads"].values())])
        layer.zero_grad()
        each.append([*cut_apart(layer, x[rank], coefficients[rank]), *(p.grad for p in layer.parameters())])
        runs.append(each)
    return runs


def cut_apart(layer: MoeLayer, x_BSD: Any, coefficients: Any) -> tuple[Any, Any]:
    """Each phase a graph of its own, run backward one after another; the output and the gradient of the input."""
    borders: list[tuple[Any, Any]] = []

    def border(*tensors: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        borders.append((tensors, leaves))
        return leaves if len(leaves) > 1 else leaves[0]

    dispatcher = layer.dispatcher
    x_TD = x_BSD.flatten(0, 1).clone().requires_grad_()
    routing, state = layer.route(x_TD, len(x_BSD))
    weight_TK = border(routing.weight_TK)
    x_PD, weight_P = border(*dispatcher.token_dispatch(x_TD, weight_TK, state))
    x_RD, weight_R, count_e, order = dispatcher.dispatch_postprocess(x_PD, weight_P, state)
    x_RD, weight_R = border(x_RD, weight_R)
    same_R = torch.arange(len(x_RD))
    moves = (same_R, same_R) if order is None else (order.token_R, order.row_TK[:, 0])
    sorted_rows = permute_rows(x_RD, *moves), permute_rows(weight_R, *moves)
    y_RD = border(permute_rows(layer.experts(*sorted_rows, count_e), *reversed(moves)))
    y_PD = border(dispatcher.combine_preprocess(y_RD, state))
    y_SD = border(dispatcher.token_combine(y_PD, state))
    y_TD = dispatcher.combine_postprocess(y_SD, state) + layer.compute_shared(x_TD)
    y_TD.backward(coefficients.flatten(0, 1))
    for tensors, leaves in reversed(borders):
        torch.autograd.backward(tensors, [leaf.grad for leaf in leaves])
    return y_TD.detach().view_as(x_BSD), x_TD.grad.view_as(x_BSD)


def test_phases_run_apart_and_recomputed() -> None:
    for runs in run_ranks(2, apart, Layout(ep=2, gpus=2)):
        for at_once, recomputed, phases in runs:
            assert all(torch.equal(one, other) for one, other in zip(at_once, recomputed, strict=True))
            # The gradients of a token meet in another order.
            for one, other in zip(at_once, phases, strict=True):
                torch.testing.assert_close(one, other, **EXACT)


def count_bytes(rank: int, ep: int, etp: int) -> dict[tuple[str, str], int]:
    layout = Layout(ep=ep, etp=etp, gpus=2)
    mesh, sent = Mesh(layout, rank), Counter()
    dispatcher = AllToAllDispatcher(4, mesh.group("ep"), mesh.group("etp"))
    # Experts 0 and 1 are on rank 0 of ep, 2 and 3 on rank 1.
    expert_TK = torch.tensor([[0, 1], [0, 3], [2, 1]] if rank == 0 else [[3, 2]])
    x_TD = torch.randn(len(expert_TK), 5, requires_grad=True)
    weight_TK = torch.rand(expert_TK.shape, requires_grad=True)

    def see(call: Any) -> None:
        sent[call.group.name, call.operation] += call.num_bytes

    with observe_collectives(see):
        x_RD, weight_R, *_, state = dispatcher.dispatch(x_TD, expert_TK, weight_TK)
        dispatcher.combine(x_RD * weight_R[:, None], state).sum().backward()
    return dict(sent)


def test_bytes_sent_are_those_counted_by_hand() -> None:
    row, weight, counts = 5 * 4, 4, 4 * 8
    # Rank 0 sends two of its six rows away and rank 1 none of its two; rank 1 has four rows then, rank 0 four.
    # Rows go twice in the forward and twice in the backward, weights once in each; a rank that was sent rows sends
    # them back, and gets their gradients again.
    there = 2 * (row + weight)
    back = 2 * row
    first, second = run_ranks(2, count_bytes, 2, 1)
    assert first == {("ep", "all_to_all"): counts // 2 + there + back}
    assert second == {("ep", "all_to_all"): counts // 2 + there + back}
    # With slices a rank's six or two rows go whole to the other; all rows come back as parts: two or six of its.
    first, second = run_ranks(2, count_bytes, 1, 2)
    for found, own, other in ((first, 6, 2), (second, 2, 6)):
        forward, backward = own * (row + weight) + other * row, own * row + other * (row + weight)
        assert found == {("etp", "all_gather"): counts, ("etp", "all_to_all"): forward + backward}


def test_forced_balance_goes_on_from_rank_to_rank() -> None:
    """Three tokens of two experts each on four ranks: 24 copies for 8 experts."""
    load_E = torch.zeros(8, dtype=torch.long)
    for rank in range(4):
        router = Router(SPEC, DIM, forced_balance=True)
        torch.nn.init.zeros_(router.weight)
        router.expert_group_rank = rank
        expert_TK = router(torch.randn(3, DIM)).expert_TK
        assert len(set(expert_TK.flatten().tolist())) == 6
        load_E += torch.bincount(expert_TK.flatten(), minlength=8)
    assert load_E.tolist() == [3] * 8


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_experts_without_a_row_have_gradients_of_zeros(backend: Any) -> None:
    experts = Experts(2, 8, 4, bias=True, backend=backend)
    x_RD = torch.zeros(0, 8, requires_grad=True)
    experts(x_RD, torch.zeros(0), torch.zeros(2, dtype=torch.long)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in experts.parameters())


@pytest.mark.parametrize("skew", [1, 3])
def test_a_rehearsal_says_the_sizes(skew: int) -> None:
    """Tensors without values: balanced, or a rank that gets three times its share."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        ep = Group("ep", (0, 1, 2, 3), 0, dist.group.WORLD)
        dispatcher = AllToAllDispatcher(8, ep, trivial_group("etp"))

        def source(parts: int, total: int, exact: bool) -> list[int]:
            rows = total if exact else total * skew
            return [rows // parts + (part < rows % parts) for part in range(parts)]

        with FakeTensorMode(), sizes_from(source):
            layer = MoeLayer(SPEC, DIM, "silu", Options(expert_backend="loop"))
            for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
                layer.experts.register_parameter(name, torch.nn.Parameter(getattr(layer.experts, name)[:2].detach()))
            layer.dispatcher = dispatcher
            x_BSD = torch.randn(2, 10, DIM, requires_grad=True)
            routing, state = layer.route(x_BSD.flatten(0, 1), len(x_BSD))
            x_PD, weight_P = dispatcher.token_dispatch(x_BSD.flatten(0, 1), routing.weight_TK, state)
            assert x_PD.shape == (40 * skew, DIM)
            assert weight_P.shape == (40 * skew,)
            y_BSD, _ = layer(x_BSD)
            y_BSD.sum().backward()
            assert x_BSD.grad is not None
            assert x_BSD.grad.shape == x_BSD.shape
    finally:
        dist.destroy_process_group()


EP2 = Group("ep", (0, 1), 0, object())  # type: ignore[arg-type]  # a refusal comes before any use of it


def refusal(name: str, chip: str) -> str:
    with pytest.raises(FindingsError) as error:
        make_dispatcher(name, 8, EP2, chip=chip)
    (finding,) = error.value.findings
    assert finding.rule == "dispatcher-available"
    assert finding.fix == {"knobs.dispatcher": "alltoall"}
    return str(finding)


def test_a_dispatcher_that_is_not_there_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "does not run on" not in refusal("deepep", "gb200")  # upstream's gate has a date: a warning of `check`
    assert "hybridep does not run on cpu" in refusal("hybridep", "cpu")
    assert "needs the package deep_ep" in refusal("deepep", "h200")
    assert "EP 2 x ETP 1" in refusal("local", "h200")


def test_packages_are_told_apart_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        """A class of another package, without `get_dispatch_layout` and with other arguments."""

        def dispatch(self, x: Any) -> None: ...

        def combine(self, x: Any) -> None: ...

    monkeypatch.setitem(sys.modules, "deep_ep", flex_standin.package(Buffer, flex_standin.HybridEPBuffer))
    assert "has no ElasticBuffer or Buffer with the arguments" in refusal("deepep", "h200")
    assert type(make_dispatcher("hybridep", 8, EP2, chip="h200")).__name__ == "HybridEpDispatcher"
    monkeypatch.setitem(sys.modules, "deep_ep", STANDINS["V2"][1]())
    assert type(make_dispatcher("deepep", 8, EP2, chip="h200").buffers).__name__ == "ElasticBuffers"
    monkeypatch.setitem(sys.modules, "deep_ep", STANDINS["V1"][1]())
    assert type(make_dispatcher("deepep", 8, EP2, chip="h200", num_sms=24).buffers).__name__ == "ClassicBuffers"
    assert flex_standin.Buffer.num_sms == 24


@pytest.mark.parametrize("name", ["local", "alltoall", "deepep", "hybridep"])
def test_with_all_experts_here_nothing_travels(name: str) -> None:
    assert make_dispatcher(name, 8) == LocalDispatcher(8)
    assert make_dispatcher(name, 8, trivial_group("ep"), trivial_group("etp"), capacity_factor=1.0) == LocalDispatcher(
        8, 1.0
    )


def on_one_rank(rank: int) -> tuple[str, Any]:
    mesh = Mesh(Layout(), rank, with_single_rank_groups=True)
    layer, _ = shard_layer(whole_layer(Options()), mesh, plan_of(Layout(), "deepep"))
    x, coefficients = tokens_of([6])
    return type(layer.dispatcher).__name__, run_layer(layer, layer, x[0], coefficients[0])["grads"]


def test_real_groups_of_one_rank_run_every_exchange() -> None:
    ((name, found),) = run_ranks(1, on_one_rank)
    assert name == "AllToAllDispatcher"
    layer, (x, coefficients) = whole_layer(Options()), tokens_of([6])
    wanted = run_layer(layer, layer, x[0], coefficients[0])["grads"]
    for parameter, grad in wanted.items():
        torch.testing.assert_close(found[parameter], grad, **EXACT)


def counts_on_second_communicator(rank: int) -> list[bool]:
    mesh = Mesh(Layout(ep=2, gpus=2), rank)
    ep = mesh.group("ep")
    count_group = mesh.second_communicator(ep)
    counts = RowCounts(torch.arange(4) + rank, 6 + 4 * rank, count_group, mesh.group("etp"))
    splits = counts.split_sizes()
    other = 1 - rank
    came = [2 * at + 4 * rank + 1 for at in range(2)]  # two experts here, and who sends adds its number
    return [
        count_group.handle is not ep.handle,
        mesh.second_communicator(ep).handle is count_group.handle,  # one for all layers: a communicator costs memory
        count_group.ranks == ep.ranks,
        mesh.second_communicator(mesh.group("tp")).is_trivial,
        splits.received == came,
        splits.sent[other] == sum(range(2 * other, 2 * other + 2)) + 2 * rank,
    ]


def test_counts_have_a_communicator_of_their_own() -> None:
    for found in run_ranks(2, counts_on_second_communicator):
        assert all(found), found


def test_gradients_that_were_sent_take_no_memory() -> None:
    """Autograd holds on to what the node that starts the exchange of gradients returns, until the rest has run."""
    received = torch.ones(3, 4)
    exchange = AsyncExchange(lambda x: ([x * 2], lambda: None), lambda grad: ([received], lambda: None))
    x = torch.zeros(3, 4, requires_grad=True)
    (started,) = start_exchange(exchange, x)
    (arrived,) = finish_exchange(exchange, started)
    sent: list[torch.Tensor] = []
    started.register_hook(sent.append)
    arrived.backward(torch.full((3, 4), 5.0))
    assert torch.equal(x.grad, received)
    assert sent[0].untyped_storage().nbytes() == sent[0].element_size()
