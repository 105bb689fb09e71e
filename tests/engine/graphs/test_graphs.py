"""CUDA graphs give the numbers of the eager model, and a part runs eagerly where its graph cannot be used.

On the CPU a stand-in records; where there is a GPU, CUDA graphs do.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda_graphs import Refusing, RefusingBackward, StandIn
from oracle_layouts import case
from repository import ROOT
from tiny_models import FAMILIES, spec_of
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.batch import Batch
from threefold.engine.graphs.graph_slot import GraphSlot, RopeKey
from threefold.engine.graphs.graphed_part import ChunkGraphs, cuda_graphs
from threefold.engine.graphs.scopes import ModelGraphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.layers.positions import Positions
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.compile import compile_parts
from threefold.engine.models.decoder import Decoder
from threefold.engine.schedule import microbatch_runners as runner
from threefold.engine.schedule.microbatch_runners import Sequential
from threefold.engine.train import train
from threefold.engine.verify.oracle import compare_with_one_rank
from threefold.findings import FindingsError

EVERY = ("attn", "moe_router", "moe_preprocess")
SCOPES = [("attn",), ("moe_router",), EVERY, ("attn", "moe", "mlp"), ("full_iteration",)]
FINE = ("layernorm", "core_attn", "moe_act", "shared_experts", "mla_up_proj", "gdn_norm_out")
LENGTH = 16
# Heads and widths that every kernel of a GPU takes.
WIDE = {"hidden_size": 256, "head_dim": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
WIDE |= {"v_head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
OFTEN = ("deepseek_v3", "qwen3_next")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def model_of(family: str, scopes: tuple[str, ...] = (), device: str = "cpu", **options: Any) -> Decoder:
    wide = device == "cuda"
    fields = {name: options.pop(name) for name in ("moe_intermediate_size",) if name in options}
    spec = spec_of(family, **(WIDE if wide else {}), **fields)
    chosen = Options(aux_loss=0.01, z_loss=0.001, graphs=scopes, **options)
    mtp = 1 if family == "deepseek_v3" else 0
    return build_model(spec, mtp, torch.bfloat16 if wide else torch.float32, device, chosen)


def batches(model: Decoder, count: int, seed: int, length: int = LENGTH, packed: bool = False) -> list[Batch]:
    draw, device = torch.Generator().manual_seed(seed), model.norm.weight.device
    made = []
    for _ in range(count):
        tokens = torch.randint(model.spec.vocab, (2, length), generator=draw).to(device)
        documents = (torch.arange(length) >= length // 3).long().expand(2, -1).to(device) if packed else None
        made.append(Batch(tokens, tokens.roll(-1, 1), documents))
    return made


class Run:
    """A model, its graphs, and plain training steps that return losses and gradients."""

    def __init__(self, model: Decoder, graphs: ChunkGraphs | None) -> None:
        self.model, self.model_graphs = model, ModelGraphs(model, graphs)
        self.runner = Sequential(model, self.model_graphs)

    def step(self, given: list[Batch]) -> dict[str, Any]:
        self.model.zero_grad(set_to_none=True)
        sums = self.runner.run(given, [0.5 / (n + 1) for n in range(len(given))])
        found = {**sums, **{name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}}
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:  # the indexer of sparse attention does not train
                    p -= 0.05 * p.grad
        return found


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def pair(family: str, scopes: tuple[str, ...], recorder: type = StandIn, **options: Any) -> tuple[Run, Run]:
    plain = Run(model_of(family, **options), None)
    return plain, Run(model_of(family, scopes, **options), ChunkGraphs(recorder))


def family_and_scopes() -> Iterator[Any]:
    """Each family with each set of scopes; the widest sets of two families run by default."""
    for family in FAMILIES:
        for scopes in SCOPES:
            often = family in OFTEN and scopes in SCOPES[2:]
            name = f"{family}-{'+'.join(scopes)}"
            yield pytest.param(family, scopes, id=name, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("family", "scopes"), list(family_and_scopes()))
def test_same_numbers(family: str, scopes: tuple[str, ...]) -> None:
    """Several steps change the weights, with gradients of two microbatches added."""
    plain, graphed = pair(family, scopes, recompute=FINE)
    for seed in range(3):
        same(graphed.step(batches(graphed.model, 2, seed)), plain.step(batches(plain.model, 2, seed)))
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert not graph_stats.fallbacks
    moe = graphed.model.num_routers > 0
    assert (graph_stats.replays.total() > 0) == (moe or scopes != ("moe_router",))


@pytest.mark.parametrize(
    "options", [{"expert_fusion": True}, {"capacity_factor": 0.7}, {"forced_balance": True}], ids=str
)
@pytest.mark.parametrize("scopes", SCOPES[2:], ids="+".join)
def test_same_numbers_by_path_of_experts(scopes: tuple[str, ...], options: dict[str, Any]) -> None:
    plain, graphed = pair("deepseek_v3", scopes, **options)
    for seed in range(3):
        same(graphed.step(batches(graphed.model, 2, seed)), plain.step(batches(plain.model, 2, seed)))


def test_full_recompute_inside_of_a_whole_microbatch() -> None:
    plain, graphed = pair("deepseek_v3", ("full_iteration",), recompute=("full",))
    for seed in range(3):
        same(graphed.step(batches(graphed.model, 2, seed)), plain.step(batches(plain.model, 2, seed)))


def test_counts_are_those_of_the_graphed_parts() -> None:
    _, graphed = pair("qwen3_moe", ("attn", "moe_router"))
    for seed in range(3):
        graphed.step(batches(graphed.model, 2, seed))
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    # Two layers of two pieces; six microbatches, of which two warm up.
    assert (graph_stats.recorded, graph_stats.num_replays, graph_stats.fallbacks.total()) == (4, 16, 0)
    # What a stand-in says it holds, and inputs: x and the tables; gradients of what left each of four pieces.
    assert graph_stats.metrics()["graphs/memory_bytes"] > StandIn.num_bytes


def test_another_length_runs_eagerly_and_is_counted() -> None:
    for scopes, scope in (
        (("attn",), "attn"),
        (("moe_router",), "moe_router"),
        (("full_iteration",), "full_iteration"),
    ):
        plain, graphed = pair("qwen3_moe", scopes)
        for seed, length in enumerate([LENGTH, LENGTH, 8, LENGTH]):
            given = [batches(run.model, 1, seed, length) for run in (graphed, plain)]
            same(graphed.step(given[0]), plain.step(given[1]))
        graph_stats = graphed.model_graphs.graph_stats
        assert graph_stats is not None
        assert dict(graph_stats.fallbacks.keys()) == {scope: "another shape"}
        assert "another shape" in graph_stats.summary()


@pytest.mark.parametrize("scopes", [("attn",), ("full_iteration",)], ids="+".join)
def test_packed_documents_run_eagerly(scopes: tuple[str, ...]) -> None:
    plain, graphed = pair("qwen3_moe", scopes)
    for seed in range(4):
        packed = seed == 3
        given = [batches(run.model, 2, seed, packed=packed) for run in (graphed, plain)]
        same(graphed.step(given[0]), plain.step(given[1]))
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert {reason for _, reason in graph_stats.fallbacks} == {"packed documents"}


def test_an_eager_microbatch_between_two_replayed_ones() -> None:
    """The gradients of an eager microbatch are added to those of a graph, and those of a graph to them."""
    plain, graphed = pair("qwen3_moe", ("full_iteration",))
    for seed in range(3):
        given = [batches(run.model, 3, seed) for run in (graphed, plain)]
        if seed == 2:
            for one, run in zip(given, (graphed, plain), strict=True):
                one[1] = batches(run.model, 1, 9, 8)[0]
        same(graphed.step(given[0]), plain.step(given[1]))
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert graph_stats.fallbacks.total() == 1


def test_evaluation_runs_eagerly() -> None:
    plain, graphed = pair("qwen3_moe", EVERY)
    for seed in range(2):
        same(graphed.step(batches(graphed.model, 2, seed)), plain.step(batches(plain.model, 2, seed)))
    before = graphed.model_graphs.graph_stats.replays.copy() if graphed.model_graphs.graph_stats else None
    sums = [run.runner.run(batches(run.model, 2, 7), [0.5, 0.5], train=False) for run in (graphed, plain)]
    same(*sums)
    assert graphed.model_graphs.graph_stats is not None
    assert graphed.model_graphs.graph_stats.replays == before
    same(graphed.step(batches(graphed.model, 2, 8)), plain.step(batches(plain.model, 2, 8)))


def test_a_device_that_cannot_record_trains_all_the_same() -> None:
    for scopes in (("attn",), ("full_iteration",)):
        plain, graphed = pair("qwen3_moe", scopes, Refusing)
        for seed in range(3):
            same(graphed.step(batches(graphed.model, 2, seed)), plain.step(batches(plain.model, 2, seed)))
        graph_stats = graphed.model_graphs.graph_stats
        assert graph_stats is not None
        assert graph_stats.fallbacks[scopes[0], "could not be recorded"] == 1
        assert "not permitted when stream is capturing" in graph_stats.summary()


def test_a_backward_that_cannot_be_recorded_is_said() -> None:
    _, graphed = pair("qwen3_moe", ("attn",), RefusingBackward)
    graphed.step(batches(graphed.model, 2, 0))
    with pytest.raises(FindingsError, match="not permitted when stream is capturing") as caught:
        graphed.step(batches(graphed.model, 1, 1))
    assert caught.value.findings[0].rule == "graph-records-backward"


def grads_of_three_in_flight(run: Run, seed: int) -> dict[str, Any]:
    """Gradients of microbatches that run as in a pipeline: forwards first, then the backwards, in the same order."""
    run.model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches(run.model, 3, seed):
        with run.model_graphs.microbatch():
            losses.append(run.model(batch.tokens_BS, batch.labels_BS).loss)
    for loss in losses:
        loss.backward()
    return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


def test_microbatches_in_flight_have_slots_of_their_own() -> None:
    plain, graphed = pair("qwen3_moe", EVERY)
    graphs = graphed.model_graphs.graphs
    assert graphs is not None
    for seed in range(3):
        same(grads_of_three_in_flight(graphed, seed), grads_of_three_in_flight(plain, seed))
    assert len(graphs.slots) == 3
    assert graphed.model_graphs.graph_stats is not None
    assert not graphed.model_graphs.graph_stats.fallbacks


def test_what_needs_no_gradient_gives_its_slot_back() -> None:
    """Frozen layers before the first trained weight have no backward, and in a pipeline several microbatches wait."""
    plain, graphed = pair("qwen3_moe", ("attn",))
    for run in (plain, graphed):
        run.model.requires_grad_(False)
        run.model.norm.requires_grad_(True)
    graphs = graphed.model_graphs.graphs
    assert graphs is not None
    for seed in range(3):
        same(grads_of_three_in_flight(graphed, seed), grads_of_three_in_flight(plain, seed))
    assert len(graphs.slots) == 1


def test_positions_of_pictures_are_those_of_the_microbatch() -> None:
    """Tables that a graph computes by itself turn by the axes of each microbatch, of text alone too."""
    key: RopeKey = (8, 10_000.0, None, (2, 1, 1))
    slot, position_BS = GraphSlot(StandIn(), StandIn()), torch.arange(6).expand(1, -1)
    for axes_3BS in (torch.randint(6, (3, 1, 6)), None, torch.randint(6, (3, 1, 6))):
        given = Positions(position_BS, axes_3BS=axes_3BS)
        static = slot.static_positions(given, ())
        assert static is not None
        static._tables.clear()  # as inside a graph, which computes them anew
        assert all(torch.equal(*both) for both in zip(static.rope(*key), given.rope(*key), strict=True))
        slot._filled_from = None  # as at the next microbatch
    of_text = GraphSlot(StandIn(), StandIn())
    assert of_text.static_positions(Positions(position_BS), ()) is not None
    assert of_text.static_positions(Positions(position_BS, axes_3BS=torch.zeros(3, 1, 6)), ()) is None


def test_memory_of_the_eager_part_is_not_the_graphs() -> None:
    """The next microbatch overwrites the outputs of a graph, so the statistics of a step must be copies."""
    _, graphed = pair("qwen3_moe", ("full_iteration",))
    given = batches(graphed.model, 2, 0)
    for _ in range(2):
        graphed.step(given)
    load = graphed.runner.run(given, [0.5, 0.5])["load_LE"]
    assert int(load.sum()) == 2 * 2 * 2 * LENGTH * 3  # microbatches, layers, tokens, experts of each


def graphed_on_ranks(model: Decoder, graph_stats: GraphStats | None = None, reduces_grads: bool = False) -> ModelGraphs:
    """Graphs in runs of several ranks only: the one-rank reference runs eagerly."""
    return ModelGraphs(model, ChunkGraphs(StandIn, graph_stats) if dist.get_world_size() > 1 else None, reduces_grads)


@pytest.mark.parametrize(
    "layout",
    [
        case("dp ep", "qwen3_moe", 2, ep=2),
        case("pp", "deepseek_v3", 2, pp=2),
        pytest.param(
            case("pp vpp dp", "qwen3_moe", 4, pp=2, vpp=2, spec={"num_hidden_layers": 4}), marks=pytest.mark.slow
        ),
    ],
    ids=lambda one: one.name,
)
def test_ranks_with_graphs_are_one_rank_without(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs together with gradient reduction, parameter gathering and several microbatches in flight."""
    monkeypatch.setattr(runner, "make_model_graphs", graphed_on_ranks)
    plan = replace(layout.plan, knobs=replace(layout.plan.knobs, graphs=EVERY))
    found = compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # fp64, as in the oracle


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("family", "recompute"),
    [("llama", ("mlp",)), *(pytest.param("deepseek_v3", one, marks=pytest.mark.slow) for one in ((), FINE))],
    ids=["llama", "plain", "fine"],
)
def test_compiled_parts_give_the_same_numbers(family: str, recompute: tuple[str, ...]) -> None:
    plain = Run(model_of(family, recompute=recompute), None)
    torch._dynamo.reset()
    compiled = model_of(family, recompute=recompute, compile=True)
    compile_parts(compiled, "aot_eager")
    compiled.options = replace(compiled.options, compile=False)  # the runner would compile by itself
    run = Run(compiled, None)
    found, wanted = (one.step(batches(one.model, 1, 0)) for one in (run, plain))
    for name, value in wanted.items():
        # Decomposed and added in another order: a few roundings of fp32.
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max())), name


def test_a_run_tells_of_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner,
        "make_model_graphs",
        lambda model, graph_stats=None, reduces_grads=False: ModelGraphs(
            model, ChunkGraphs(StandIn, graph_stats), reduces_grads
        ),
    )
    said: list[str] = []
    plan = tiny_plan({"job.data": tiny_shard(tmp_path / "tokens"), "job.steps": 3, "knobs.graphs": ["attn"]})
    train(plan, tmp_path / "run", said.append)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    # One layer, two microbatches a step: the first two warm up, of the other four each replays.
    assert (last["graphs/replays"], last["graphs/fallbacks"]) == (4, 0)
    assert last["graphs/memory_bytes"] > 0
    assert any("graphs: 1 recorded" in text and "4 replays (attn 4), 0 fallbacks" in text for text in said)


def test_scopes_are_off_on_the_cpu() -> None:
    runner = Sequential(model_of("qwen3_moe", EVERY))
    assert runner.graph_stats is None


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
@pytest.mark.parametrize("options", [{}, {"recompute": FINE}, {"expert_fusion": True}], ids=lambda one: ",".join(one))
@pytest.mark.parametrize("scopes", [EVERY, ("attn", "moe", "mlp"), ("full_iteration",)], ids="+".join)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_same_bits_on_a_gpu(family: str, scopes: tuple[str, ...], options: dict[str, Any]) -> None:
    device = torch.device("cuda")
    plain, once_more = (Run(model_of(family, (), "cuda", **options), None) for _ in range(2))
    graphed = Run(model_of(family, scopes, "cuda", **options), cuda_graphs(device))
    for seed in range(3):
        given = batches(plain.model, 2, seed, 256)
        wanted, again, found = (run.step(given) for run in (plain, once_more, graphed))
        for name, value in wanted.items():
            if torch.equal(value, again[name]):
                assert torch.equal(found[name], value), (seed, name)
            else:  # some kernels add in no fixed order; bf16 keeps 8 bits, and steps carry it on
                scale = float(value.abs().max())
                assert float((found[name] - value).abs().max()) <= 5e-2 * scale + 1e-6, (seed, name)
    graph_stats = graphed.model_graphs.graph_stats
    assert graph_stats is not None
    assert not graph_stats.fallbacks, graph_stats.summary()
    assert graph_stats.replays or (scopes == ("moe_router",) and not graphed.model.num_routers)
    graphed.model_graphs.reset()
    assert graph_stats.num_bytes or not graph_stats.replays


def test_the_benchmark_holds_every_variant_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant starts from the same weights. On a CPU all run eagerly, so their losses are equal."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import graphs
    from step import TINY, plan_of

    bench = graphs.Bench(plan_of(TINY, 1, 1, 16), torch.device("cpu"), 1)
    one, other = (bench.measure(variant, 1, 1) for variant in (graphs.Variant(), graphs.Variant(("attn",))))
    assert one["losses"] == other["losses"]
    assert "error" not in one | other
    bench.losses[1] *= 1 + 2 * graphs.FAR
    assert "in step 1" in bench.measure(graphs.Variant(), 1, 1)["error"]
    assert graphs.held([1.0], [float("nan")])
