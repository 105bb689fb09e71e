"""Optimizer states on the host, whose updates run beside the next forward: the same bits as states on the device."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda_graphs import StandIn
from oracle_layouts import CASES, case

from threefold.engine import build as build_module
from threefold.engine.build import Parts, build, options_of
from threefold.engine.data_parallel import zero1
from threefold.engine.data_parallel.protocol import DataParallelSettings, data_parallel_settings
from threefold.engine.data_parallel.single_rank import SingleRank
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.mesh import Mesh
from threefold.engine.graphs.graphed_part import ChunkGraphs
from threefold.engine.graphs.scopes import ModelGraphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim import pending_updates
from threefold.engine.optim.cpu_offload import PinnedMemory
from threefold.engine.optim.pending_updates import PendingUpdates, is_pending, mark_pending
from threefold.engine.schedule import microbatch_runners
from threefold.engine.step import evaluate_batches, to_device, train_step
from threefold.engine.verify.compare import compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank, synthetic_batch
from threefold.plan.plan import Knobs, Plan

CPU = torch.device("cpu")
GRAPHS = [("attn", "moe_router", "moe_preprocess"), ("attn", "moe", "mlp")]
# Gradients are summed in fp32 where there are several microbatches of bf16: then they lie in the buffers of ZeRO-1.
KINDS = {
    "one microbatch": (case("", "llama", 1, job={"global_batch": 1}).plan, SingleRank),
    "experts": (case("", "qwen3_moe", 1, job={"global_batch": 1}).plan, SingleRank),
    "sums in fp32": (case("", "qwen3_moe", 1).plan, Zero1),
    "tied embedding": (case("", "llama", 1, spec={"tie_word_embeddings": True}).plan, Zero1),
    "multi-token prediction": (case("", "deepseek_v3", 1, job={"mtp": 1}).plan, Zero1),
    "part of the states": (case("", "qwen3_moe", 1, knobs={"optimizer_offload": 0.5}).plan, Zero1),
    "bf16 moments": (case("", "qwen3_moe", 1, knobs={"optimizer_dtype": "bf16"}).plan, Zero1),
    "quantized once a step": (case("", "deepseek_v3", 1, knobs={"precision": "fp8-blockwise"}).plan, Zero1),
    "adapters": (case("", "qwen3_moe", 1, job={"lora_rank": 2, "global_batch": 1}).plan, SingleRank),
}


def parts_of(plan: Plan, offload: float, device: torch.device = CPU) -> Parts:
    precision = "bf16" if plan.knobs.precision == "fp32" else plan.knobs.precision
    plan = replace(plan, knobs=replace(plan.knobs, optimizer_offload=offload, precision=precision))
    return build(plan, Mesh(plan.layout, device=device), torch.bfloat16, with_data=False)


def run(
    plan: Plan, offload: float, device: torch.device = CPU, change: Callable[[Parts], None] | None = None, **events: int
) -> dict[str, Any]:
    """Losses, weights and states after four steps. `events` are the steps after which something reads weights or
    states, or whose gradients are not finite (`nan`). `change` breaks the parts first."""
    parts = parts_of(plan, offload, device)
    if change is not None:
        change(parts)
    found: dict[str, Any] = {}
    for step in range(4):
        batches = [to_device(synthetic_batch(plan, step, m, 0), device) for m in range(plan.num_microbatches)]
        squares = parts.data.grad_sum_of_squares
        if step == events.get("nan"):
            parts.data.grad_sum_of_squares = lambda of=squares: of() * torch.nan  # type: ignore[method-assign]
        result = train_step(parts, batches, 1e-2, plan.job)
        parts.data.grad_sum_of_squares = squares  # type: ignore[method-assign]
        assert result.applied == (step != events.get("nan"))
        found[f"loss {step}"] = torch.tensor(result.loss)
        if step == events.get("evaluate"):
            found["evaluated"] = torch.tensor(evaluate_batches(parts, batches, 1))
        if step == events.get("save"):
            parts.data.finish_param_sync()
            parts.optimizer.load_state_dict({n: x.clone() for n, x in parts.optimizer.state_dict().items()})
    parts.data.finish_param_sync()
    found |= {name: memory.detach().clone() for name, _, memory, _ in parts.data.local_tensors()}
    return found | parts.optimizer.state_dict()


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name].cpu(), wanted[name].cpu())]


@pytest.mark.parametrize("kind", KINDS)
def test_deferred_updates_are_those_of_a_plain_step(kind: str) -> None:
    plan, data_parallel = KINDS[kind]
    parts = parts_of(plan, 1.0)
    assert isinstance(parts.data, data_parallel)
    assert parts.optimizer.updates.is_deferred
    assert differing(run(plan, plan.knobs.optimizer_offload or 1.0), run(plan, 0.0)) == []


def trained(plan: Plan) -> list[str]:
    parts = parts_of(plan, 0.0)
    return [name for name, p in parts.model.named_parameters() if p.requires_grad]


def stand_in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphStats]:
    """Let a stand-in record and replay the graphs of a plan on a CPU; the statistics of each model that has graphs."""
    stats: list[GraphStats] = []

    def graphed(model: Decoder, graph_stats: GraphStats | None = None, reduces_grads: bool = False) -> ModelGraphs:
        stats.append(graph_stats or GraphStats())
        return ModelGraphs(model, ChunkGraphs(StandIn, stats[-1]), reduces_grads)

    monkeypatch.setattr(microbatch_runners, "make_model_graphs", graphed)
    return stats


def one_bucket_each(knobs: Knobs, device: torch.device) -> DataParallelSettings:
    return replace(data_parallel_settings(knobs, device), bucket_elements=1)


@contextmanager
def suppress_error(pattern: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not re.search(pattern, str(error)):
            raise


READERS = {
    "multi-token prediction": True,
    "tied embedding": False,
    "quantized once a step": True,
    "sums in fp32": True,
    "one microbatch": True,
    "adapters": True,
    "graphs": True,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * slow) for kind, slow in READERS.items()]
)
def test_a_parameter_that_does_not_wait_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever parameter is left unmarked, something reads it while its update is pending.

    Each has a bucket of its own, because whoever reads one parameter waits for its bucket.
    """
    plan, _ = KINDS["sums in fp32" if kind == "graphs" else kind]
    monkeypatch.setattr(build_module, "data_parallel_settings", one_bucket_each)
    if kind == "graphs":
        plan = replace(plan, knobs=replace(plan.knobs, graphs=GRAPHS[0]))
        stand_in_graphs(monkeypatch)
    wanted, unseen = run(plan, 0.0), []

    def leave_unmarked(name: str, parts: Parts) -> None:
        left = parts.model.get_parameter(name)
        for module in (pending_updates, zero1):
            monkeypatch.setattr(
                module, "mark_pending", lambda xs, wait: mark_pending([x for x in xs if x is not left], wait)
            )

    for name in trained(plan):
        # Autograd may see it first: a weight changes between its use and its backward.
        with suppress_error("modified by an inplace operation|has been modified inplace"):
            if not differing(run(plan, 1.0, change=partial(leave_unmarked, name)), wanted):
                unseen.append(name)
    assert unseen == []


@pytest.mark.parametrize("event", ["nan", "evaluate", "save"])
@pytest.mark.parametrize("kind", ["one microbatch", "sums in fp32"])
def test_whatever_happens_between_steps_sees_updated_weights(kind: str, event: str) -> None:
    plan, _ = KINDS[kind]
    at = {event: 1}
    assert differing(run(plan, 1.0, **at), run(plan, 0.0, **at)) == []


def test_a_forward_finds_the_updates_of_later_layers_pending() -> None:
    """While the first layer runs, the last one still has its old weights."""
    plan, _ = KINDS["one microbatch"]
    parts = parts_of(plan, 1.0)
    batches = [synthetic_batch(plan, 0, m, 0) for m in range(plan.num_microbatches)]
    train_step(parts, batches, 1e-2, plan.job)
    head = parts.model.head
    assert head is not None
    last, seen = parts.model.layers["1"].ffn_norm, []
    assert isinstance(last, RMSNorm)
    first_layer = parts.model.layers["0"]
    hook = first_layer.register_forward_hook(
        lambda *_: seen.append((is_pending(first_layer.ffn_norm.weight), is_pending(last.weight)))
    )
    evaluate_batches(parts, batches[:1], 1)
    hook.remove()
    assert seen == [(False, True)]
    assert not is_pending(last.weight)
    assert not is_pending(head.weight)


def test_gathers_that_do_not_overlap_wait_for_all_updates() -> None:
    plan = case("", "qwen3_moe", 1, knobs={"param_gather_overlap": False}).plan
    assert not parts_of(plan, 1.0).optimizer.updates.is_deferred


def test_updates_run_in_order_and_only_when_they_are_waited_for() -> None:
    done = []

    def updates() -> Any:
        for name in "abd":
            done.append(name)
            yield torch.zeros(1)
        done.append("end")

    pending = PendingUpdates("abcd", CPU)
    written = {name: [torch.zeros(1), torch.zeros(1)] for name in "ab"}
    pending.defer(written)
    pending.start([0, 1, 3], updates())
    assert done == []
    assert all(is_pending(x) for tensors in written.values() for x in tensors)
    written["a"][1].sum()
    assert done == ["a"]
    assert [is_pending(x) for tensors in written.values() for x in tensors] == [False, False, True, True]
    pending.wait_through(2)
    assert done == ["a", "b"]
    assert not pending.is_pending(2)
    assert pending.is_pending(3)
    with pending.after(3):
        assert done == ["a", "b", "d", "end"]
    pending.wait()
    assert done[-1] == "end"
    pending.is_deferred = False
    pending.start([0, 1, 3], updates())
    assert done[4:] == ["a", "b", "d", "end"]


def test_tensors_share_pinned_blocks_of_powers_of_two() -> None:
    """With tensors of two layers of Qwen3-30B-A3B. Rounding each up to a power of two would take 45 % more memory."""
    sizes = [1187, 1536, 768, 64, 1536, 768, 64, 1187] * 3
    total = 1024 * sum(sizes)
    memory = PinnedMemory(total, pin=False)
    tensors = [memory.empty((size, 256), torch.float32) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert all(size & (size - 1) == 0 for size in blocks.values())
    assert sum(blocks.values()) < 1.15 * total
    assert memory.empty((0, 3), torch.int16).shape == (0, 3)


RANKS = {name: slow for slow, names in {
    False: ("ep overlap", "dp tp ep edp"),
    True: ("dp pp vpp ep", "dualpipev, tied, ep", "ep overlap, mtp", "ep overlap, chunks", "hsdp with experts"),
}.items() for name in names}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in RANKS.items()])
def test_ranks_whose_states_are_on_the_host_are_one_rank(name: str) -> None:
    plan = next(one for one in CASES if one.name == name).plan
    options = replace(options_of(plan), expert_backend="loop")
    alone = run_one_rank(plan, 3, torch.float64, options)
    hosted = replace(plan, knobs=replace(plan.knobs, optimizer_offload=1.0))
    ranks = run_ranks(plan.layout.gpus, run_rank, hosted, 3, torch.float64, options)
    assert compare_results(plan, alone, ranks).problems == ()


def pending_after_a_step(rank: int, plan: Plan) -> tuple[set[str], set[str]]:
    """The parameters that are pending behind a step, and those that no other rank holds."""
    parts = build(plan, Mesh(plan.layout, rank), torch.float32, with_data=False)
    batches = [synthetic_batch(plan, 0, m, rank) for m in range(plan.num_microbatches)]
    train_step(parts, batches, 1e-2, plan.job)
    updates = parts.optimizer.updates
    pending = {name for name, position in updates.positions.items() if updates.is_pending(position)}
    assert isinstance(parts.data, Zero1)
    return pending, set(parts.data.unbucketed)


def test_experts_of_one_rank_are_updated_behind_what_is_gathered() -> None:
    """Gloo waits for updates before it gathers: then those of the experts are still to come."""
    plan = case("", "qwen3_moe", 2, ep=2, knobs={"optimizer_offload": 1.0}).plan
    for pending, unbucketed in run_ranks(2, pending_after_a_step, plan):
        assert pending == unbucketed
        assert all(".experts." in name for name in pending)
        assert pending


@pytest.mark.parametrize("scopes", GRAPHS, ids="+".join)
@pytest.mark.parametrize("kind", ["one microbatch", "experts", "sums in fp32"])
def test_graphs_wait_for_updates_and_leave_gradients_alone(
    kind: str, scopes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay runs no Python that reads a parameter, and writes to memory that other graphs of its pool have used."""
    plan, _ = KINDS[kind]
    plan = replace(plan, knobs=replace(plan.knobs, graphs=scopes))
    wanted = run(plan, 0.0)
    stats = stand_in_graphs(monkeypatch)
    assert differing(run(plan, 1.0), wanted) == []
    assert stats[-1].replays["attn"] > 0
