"""The calls of all ranks are played against each other: what differs, or waits in a circle, is found and named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from rehearsal_plans import tiny
from repository import ROOT
from torch import Tensor

from threefold.api.rehearsals import as_the_engine_runs
from threefold.dryrun import optimizer_step
from threefold.dryrun.collective_match import find_mismatch, match_findings
from threefold.dryrun.rehearse_plan import ALL, Rehearsal, rehearse
from threefold.dryrun.simulated.expert_load import ExpertLoads
from threefold.dryrun.tracking.call_recorder import CallSequence, Message, RecordedCall
from threefold.engine import step
from threefold.engine.data_parallel import fsdp
from threefold.engine.dist import collectives
from threefold.engine.dist.collectives import PendingCollective
from threefold.engine.dist.mesh import Group
from threefold.engine.schedule.p2p import P2PChannel
from threefold.layout.degrees import Layout
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.plan.scale import MAX_REHEARSED_RANKS, is_small, scale_ranks

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def call(group: str = "a", operation: str = "all_reduce", size: int | None = 8, **more: Any) -> RecordedCall:
    ranks = {"a": (0, 1), "b": (0, 1), "world": (0, 1, 2)}[group]
    return RecordedCall(group, ranks, operation, size, "float32", "forward, layers.0", **more)


def waited(*calls: RecordedCall) -> CallSequence:
    """Each call is waited for before the next one starts."""
    return CallSequence(calls, tuple(event for number in range(len(calls)) for event in (number, ~number)))


def started(*calls: RecordedCall) -> CallSequence:
    """All calls are started before any of them is waited for."""
    return CallSequence(calls, (*range(len(calls)), *(~number for number in range(len(calls)))))


def message(is_send: bool, peer: int, size: int = 8) -> Message:
    return Message(is_send, peer, size, "float32")


def send(peer: int, size: int = 8) -> RecordedCall:
    return call("a", "send", size, messages=(message(True, peer, size),))


def recv(peer: int, size: int = 8) -> RecordedCall:
    return call("a", "recv", size, messages=(message(False, peer, size),))


def test_equal_calls_match_in_any_timing() -> None:
    calls = call(), call("b"), call(size=16)
    assert find_mismatch({0: waited(*calls), 1: started(*calls)}) is None


@pytest.mark.parametrize(
    ("other", "number", "said"),
    [
        ((call(), call(size=16)), 2, "all_reduce of 16 bytes"),  # skips the second
        ((call(), call(size=16), call("a", "all_gather", 8)), 2, "all_reduce of 16 bytes"),  # in another order
        ((call(), call("a", "all_gather", 24), call(size=16)), 2, "all_gather of 24 bytes"),  # other bytes
        ((call(), replace(call("a", "all_gather", 8), dtype="int64"), call(size=16)), 2, "8 bytes (int64)"),
        ((call(), call("a", "all_gather", 8)), 3, "rank 1 has ended its step"),  # skips the last
    ],
)
def test_first_call_that_differs_is_named(other: tuple[RecordedCall, ...], number: int, said: str) -> None:
    right = call(), call("a", "all_gather", 8), call(size=16)
    (finding,) = match_findings(Layout(tp=2, gpus=2), {0: waited(*right), 1: waited(*other)})
    assert (finding.severity, finding.rule) == ("error", "collectives-match")
    assert finding.at == f"call {number} of group world (ranks 0, 1)"
    assert said in finding.problem
    assert "rank 0 calls " in finding.problem
    assert "forward, layers.0" in finding.problem


def test_groups_in_another_order_are_a_deadlock_only_where_ranks_wait() -> None:
    one, other = (call("a"), call("b", "all_gather")), (call("b", "all_gather"), call("a"))
    assert find_mismatch({0: started(*one), 1: started(*other)}) is None
    found = find_mismatch({0: waited(*one), 1: waited(*other)})
    assert found is not None
    assert found.is_deadlock
    assert [(state.rank, state.call and state.call.operation) for state in found.states] == [
        (0, "all_reduce"),
        (1, "all_gather"),
    ]


def test_a_third_rank_that_waits_elsewhere_is_followed() -> None:
    world = call("world")
    found = find_mismatch({0: waited(call(), world), 1: waited(world, call()), 2: waited(world)})
    assert found is not None
    assert {state.rank for state in found.states} == {0, 1}


def test_parts_of_an_all_to_all_agree_by_pair() -> None:
    def exchange(sent: tuple[int, int], received: tuple[int, int]) -> CallSequence:
        return waited(call("a", "all_to_all", None, sent=sent, received=received))

    uneven = exchange((4, 12), (4, 20))
    assert find_mismatch({0: uneven, 1: exchange((20, 0), (12, 0))}) is None
    assert find_mismatch({0: uneven, 1: exchange((16, 4), (12, 4))}) is not None  # as many bytes in all
    assert find_mismatch({0: uneven, 1: exchange((20, 0), (8, 0))}) is not None


def test_messages_pair_up_in_order() -> None:
    assert find_mismatch({0: waited(send(1), recv(1, 16)), 1: waited(recv(0), send(0, 16))}) is None
    assert find_mismatch({0: waited(send(1, 8)), 1: waited(recv(0, 16))}) is not None
    assert find_mismatch({0: waited(send(1), send(1)), 1: waited(recv(0))}) is not None
    both_send = {0: started(send(1), recv(1)), 1: started(send(0), recv(0))}
    assert find_mismatch(both_send) is not None  # they queue behind each other on the pair's communicator


def test_messages_of_a_batch_progress_together() -> None:
    def ring(rank: int) -> RecordedCall:
        both = message(True, (rank + 1) % 3), message(False, (rank - 1) % 3)
        return call("world", "send_recv", 8, messages=both)

    assert find_mismatch({rank: waited(ring(rank), ring(rank)) for rank in range(3)}) is None
    found = find_mismatch({rank: waited(*[ring(rank)] * (2 - (rank == 1))) for rank in range(3)})
    assert found is not None
    assert found.states[-1].call is None


def all_ranks(plan: Plan) -> Rehearsal:
    return rehearse(plan, ALL, jobs=1)


def folded(**changes: Any) -> Plan:
    return tiny("tiny-deepseek-v3", 8, layout__pp=2, layout__tp=2, layout__ep=2, job__global_batch=8, **changes)


def test_ranks_of_every_axis_match() -> None:
    found = all_ranks(folded(layout__vpp=2, layout__cp=2, job__mtp=1))
    assert found.mismatches == ()
    assert found.num_calls > 1000
    assert found.to_json()["compared_calls"] == found.num_calls
    assert {rank.num_microbatches for rank in found.ranks} == {6}


def on_rank_1(broken: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (broken if dist.get_rank() == 1 else right)(*args, **kwargs)


def skipped(x: Tensor, group: Group, op: str = "sum") -> PendingCollective:
    return PendingCollective.completed()


def longer(x: Tensor, group: Group, op: str = "sum") -> PendingCollective:
    return collectives.all_reduce(x.new_empty(2 * x.numel()), group, op)


def twice(x: Tensor, group: Group, op: str = "sum") -> PendingCollective:
    collectives.all_reduce(x, group, op).wait()
    return collectives.all_reduce(x, group, op)


@pytest.mark.parametrize("broken", [skipped, longer, twice])
def test_one_rank_of_the_engine_that_differs_is_found(
    broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "all_reduce", on_rank_1(broken, collectives.all_reduce))
    (finding,) = all_ranks(tiny("tiny-qwen3-moe", 2, layout__ep=2, job__seq_len=16)).findings
    assert finding.rule == "collectives-match"
    assert "group world (ranks 0, 1)" in finding.at
    assert "threefold/engine/step.py:" in finding.problem
    assert "rank 1 " in finding.problem


def test_a_message_that_nobody_receives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send_once = P2PChannel.send

    def send_twice(self: P2PChannel, x: Tensor) -> None:
        send_once(self, x)
        send_once(self, x)

    monkeypatch.setattr(P2PChannel, "send", send_twice)
    found = all_ranks(tiny("tiny-qwen3-moe", 2, layout__pp=2, job__seq_len=16, job__global_batch=4))
    (finding,) = found.findings
    assert "group world (ranks 0, 1)" in finding.at
    assert "send of " in finding.problem


def test_two_groups_in_another_order_on_one_rank_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    add = optimizer_step.add_over_ranks

    def add_with_more(parts: Any, sums: Any, squares: Tensor) -> Any:
        groups = [parts.mesh.group("tp"), parts.mesh.world]
        for group in reversed(groups) if dist.get_rank() == 1 else groups:
            collectives.all_reduce(squares.new_empty(3), group).wait()
        return add(parts, sums, squares)

    monkeypatch.setattr(optimizer_step, "add_over_ranks", add_with_more)
    plan = tiny("tiny-qwen3-moe", 4, layout__tp=2, job__seq_len=16)
    (finding,) = all_ranks(plan).findings
    assert "in group tp (ranks 0, 1)" in finding.problem
    assert "in group world (ranks 0, 1, 2, 3)" in finding.problem
    assert finding.problem.endswith("each waits for the next, the last for the first")


HANGS = {
    "two depths": ("fsdp", 4, {"job__mtp": 2, "layout__stages": "Et|tm|m|L"}),
    "three depths": ("fsdp", 4, {"job__mtp": 3}),
    "replicas": ("hsdp", 8, {"job__mtp": 2, "layout__stages": "Et|tm|m|L", "layout__replicate": 2}),
}


@pytest.mark.parametrize("name", ["two depths", *(pytest.param(n, marks=pytest.mark.slow) for n in list(HANGS)[1:])])
def test_ranks_that_shard_an_embedding_differently_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MTP one pipeline rank may use the embedding in two chunks and another in one. All must shard it alike."""
    sharding, gpus, more = HANGS[name]
    changes = {"layout__pp": 2, "layout__vpp": 2, "model__num_layers": 2, "job__seq_len": 32, "job__global_batch": 8}
    plan = tiny("tiny-deepseek-v3", gpus, knobs__data_parallel=sharding, **changes, **more)
    assert all_ranks(plan).findings == []
    collect = fsdp.collect_entries

    def as_this_rank_sees_it(*args: Any, **more: Any) -> Any:
        entries = collect(*args, **more)
        for entry in entries:
            entry.placement = replace(entry.placement, in_several_chunks=len(entry.chunks) > 1)
        return entries

    monkeypatch.setattr(fsdp, "collect_entries", as_this_rank_sees_it)
    (finding,) = all_ranks(plan).findings
    assert finding.rule == "collectives-match"
    assert "threefold/engine/data_parallel/" in finding.problem


def test_balanced_and_skewed_routing_match() -> None:
    """37 tokens of which no number of ranks takes equal parts."""
    plan = tiny("tiny-qwen3-moe", 4, layout__ep=4, job__seq_len=37)
    assert all_ranks(plan).findings == []
    shares = tuple(float(1 + expert % 3) for expert in range(plan.model.num_experts))
    assert rehearse(plan, ALL, ExpertLoads(shares), jobs=1).findings == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_keep_their_axes_on_few_ranks(path: Any) -> None:
    parsed = read_plan(str(path))
    assert parsed.plan is not None
    small, said = scale_ranks(parsed.plan)
    assert small.layout.gpus <= MAX_REHEARSED_RANKS
    for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp"):
        assert (small.layout.degree(axis) > 1) == (parsed.plan.layout.degree(axis) > 1), axis
    assert small.num_microbatches >= min(parsed.plan.num_microbatches, 2)
    assert (small.model.dim, small.knobs.precision) == (parsed.plan.model.dim, parsed.plan.knobs.precision)
    assert said or is_small(parsed.plan)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow, id=path.stem) for path in RECIPES],
)
def test_all_ranks_of_recipes_match(path: Any) -> None:
    parsed = read_plan(str(path))
    assert parsed.plan is not None
    plan, _ = as_the_engine_runs(parsed.plan)
    assert all_ranks(plan).mismatches == ()
