"""The overlapped schedule computes what one rank computes, and every exchange overlaps with compute."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan
from typing import Any
from weakref import ref

import pytest
import torch
from oracle_layouts import FOUR, FSDP, HSDP, MTP1, ODD, PACKED, TIED, Case, case
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD, OVERLAP_F_B

from threefold.cli.main import main
from threefold.engine.build import build, options_of
from threefold.engine.dist.collectives import CallListener, CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.schedule.autograd_cuts import NodeValue
from threefold.engine.schedule.autograd_nodes import DeferredValue, GraphNodes, observe_nodes
from threefold.engine.schedule.interleave import interleave_steps, run_overlap_pairs
from threefold.engine.schedule.pipeline_order import pipeline_actions
from threefold.engine.step import train_step
from threefold.engine.verify.exchange_times import intersection, total_length, union
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import compare_with_one_rank, synthetic_batch
from threefold.engine.verify.overlap_ab import Trial, VariantSummary, loss_difference
from threefold.rules.all import check, errors

# fp64 sums in another order; the gradient's norm is a sum over all parameters.
EXACT = 1e-12
OVERLAP, DELAYED = {"ep_overlap": True}, {"ep_overlap": True, "delay_wgrad": True}
SIX = {"global_batch": 6}
EIGHT = {"global_batch": 8}
SOME = {"recompute": ["layernorm", "moe_act", "shared_experts", "core_attn"]}

CASES = [
    case("ep, tied", "qwen3_moe", 2, often=True, ep=2, knobs=DELAYED, spec=TIED, job=SIX),
    case("shared experts, one depth", "deepseek_v3", 2, often=True, ep=2, knobs=DELAYED, spec=MTP1, job=PACKED),
    case("all axes", "deepseek_v3", 4, often=True, tp=2, cp=2, ep=2, etp=2, knobs=DELAYED, spec=MTP1, job=PACKED),
    case("delta rule", "qwen3_next", 2, often=True, ep=2, knobs=OVERLAP, job={**SIX, "mtp": 1}),
    case("fsdp", "deepseek_v3", 4, often=True, ep=2, knobs={**OVERLAP, **FSDP}, spec=MTP1, job=EIGHT),
    case("interleaved", "qwen3_moe", 4, often=True, pp=2, vpp=2, ep=2, knobs=DELAYED, spec={**FOUR, **TIED}, job=EIGHT),
    case("dualpipev", "deepseek_v3", 4, often=True, pp=2, vpp=2, ep=2, schedule="dualpipev", knobs=DELAYED,
         spec={**FOUR, **MTP1}, job=EIGHT),
    case("recompute", "deepseek_v3", 2, often=True, ep=2, knobs={**DELAYED, **SOME}, spec=MTP1),
    case("hsdp, tied", "qwen3_moe", 4, ep=2, replicate=2, knobs={**OVERLAP, **HSDP}, spec=TIED, job=EIGHT),
    case("fsdp, recompute", "deepseek_v3", 4, ep=4, knobs={**OVERLAP, **FSDP, **SOME}, spec=MTP1, job=EIGHT),
    case("tp", "qwen3_next", 4, tp=2, ep=2, knobs=DELAYED, job=EIGHT),
    case("cp a2a", "qwen3_moe", 4, cp=2, ep=4, knobs={**DELAYED, "cp_comm": "a2a"}, job=PACKED),
    case("odd sizes", "qwen3_next", 2, ep=2, knobs=DELAYED, spec=ODD),
    case("biases", "gpt_oss", 3, ep=3, knobs=DELAYED, job=SIX),
    case("capacity", "qwen3_moe", 4, ep=2, knobs=DELAYED, job={**EIGHT, "capacity_factor": 1.0}),
    case("muon", "deepseek_v3", 4, ep=2, knobs=DELAYED, job={**EIGHT, "optimizer": "muon"}),
    case("interleaved, fsdp", "qwen3_moe", 8, pp=2, vpp=2, ep=2, knobs={**OVERLAP, **FSDP}, spec=FOUR,
         job={"global_batch": 16}),
    case("interleaved, three chunks", "deepseek_v3", 4, pp=2, vpp=3, ep=2, knobs=OVERLAP,
         spec={"num_hidden_layers": 6, **MTP1}, job=EIGHT),
    case("dualpipev, delta rule", "qwen3_next", 8, pp=2, vpp=2, tp=2, ep=4, schedule="dualpipev", knobs=DELAYED,
         spec={"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}, job=EIGHT),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def marked(one: Case) -> Any:
    return pytest.param(one, id=one.name, marks=() if one.often else pytest.mark.slow)


@pytest.mark.parametrize("one", [marked(one) for one in CASES])
def test_overlap_is_one_rank(one: Case) -> None:
    assert errors(check(one.plan, "threefold")) == []
    found = compare_with_one_rank(one.plan, steps=1)
    assert found.problems == ()
    assert found.near_ties == 0
    assert max(found.loss, found.gradient) <= EXACT, found


def test_streams_are_interleaved() -> None:
    said: list[str] = []

    def stream(name: str, stops: list[Any]) -> Iterator[Any]:
        for n, stop in enumerate(stops):
            said.append(f"{name}{n}")
            yield stop
        said.append(f"{name} ends")

    interleave_steps(stream("b", ["rows"] * 2), stream("f", ["rows", "counts", "rows"]), lambda: said.append("filled"))  # type: ignore[arg-type]
    assert said == ["b0", "f0", "b1", "f1", "filled", "f2", "b ends", "f ends"]


class Noted:
    """A pass with two exchanges in each direction, which notes what it runs."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.number, self.said = number, said

    def forward(self, x: Any) -> Iterator[str]:
        for part in "ade":
            self.said.append(f"F{self.number}{part}")
            if part != "e":
                yield "rows"

    def backward(self, grad: Any) -> Iterator[str]:
        for part in "eda":
            self.said.append(f"B{self.number}{part}")
            if part != "a":
                yield "rows"

    def fill_gap(self) -> None: ...


def test_pairs_follow_each_other_without_a_gap() -> None:
    """Whenever one pass has started an exchange the other computes; only the first and the last part run alone."""
    said: list[str] = []
    run_overlap_pairs(lambda number: Noted(number, said), 3)  # type: ignore[arg-type,return-value]
    first, last = ["F0a", "F0d", "F0e"], ["B2e", "B2d", "B2a"]
    steady = ["B0e", "F1a", "B0d", "F1d", "B0a", "F1e", "B1e", "F2a", "B1d", "F2d", "B1a", "F2e"]
    assert said == first + steady + last


class Log(list[tuple[Any, ...]]):
    """Nodes and exchanges in the order they run: ("node", part, name, layer), ("start", n), ("wait", n)."""

    @contextmanager
    def node(self, part: str, name: str, layer: str) -> Iterator[None]:
        self.append(("node", part, name, layer))
        yield

    def see(self, call: CollectiveCall) -> CallListener | None:
        if call.group.name != "ep" or self[-1][1:3] == ("forward", "attention"):  # counts
            return None
        number, log = sum(entry[0] == "start" for entry in self), self
        self.append(("start", number))

        class Noting(CallListener):
            def on_wait(self) -> None:
                log.append(("wait", number))

        return Noting()


def log_of(rank: int, plan: Any) -> Log:
    mesh, log = Mesh(plan.layout, rank), Log()
    parts = build(plan, mesh, torch.float64, replace(options_of(plan), expert_backend="loop"), with_data=False)
    batches = [synthetic_batch(plan, 0, number, mesh.coordinate("dp")) for number in range(plan.num_microbatches)]
    with observe_collectives(log.see), observe_nodes(log.node):
        train_step(parts, batches, 1e-3, plan.job)
    return Log(log)


def computed_during(log: Log) -> dict[int, set[str]]:
    """For each exchange, the parts of nodes that computed between its start and the node that waits for it."""
    found: dict[int, set[str]] = {}
    for at, entry in enumerate(log):
        if entry[0] == "start":
            end = log.index(("wait", entry[1]))
            *between, _ = [f"{e[1]} {e[2]}" for e in log[at:end] if e[0] == "node"]
            found[entry[1]] = set(between)
    return found


BIG = {"forward attention", "forward experts", "backward attention", "backward experts"}


@pytest.mark.parametrize("delayed", [False, True])
def test_every_steady_exchange_has_compute_beside_it(delayed: bool) -> None:
    knobs = DELAYED if delayed else OVERLAP
    plan = case("", "deepseek_v3", 2, ep=2, knobs=knobs, spec={**FOUR, **MTP1}, job=EIGHT).plan
    (log, other) = run_ranks(2, log_of, plan)
    assert log == other, "ranks started their collectives in different orders"
    found = computed_during(log)
    layers, microbatches = 4, 4  # three of four layers and the MTP depth have experts
    a_pass = 3 * layers  # of rows: rows and weights there, rows back; so again in the backward
    assert len(found) == 2 * a_pass * microbatches
    # All but the first forward and the last backward: each has attention or experts of another microbatch beside it.
    bare = {number for number, parts in found.items() if not parts & BIG}
    last = range(len(found) - a_pass, len(found))
    assert bare == {*range(a_pass), *last}
    # Shared experts run beside the dispatch even where nothing else does, and their backward beside its gradients.
    assert all("forward shared" in found[number] for number in range(0, a_pass, 3))
    if delayed:
        waiting = {number for number, parts in found.items() if any(part.startswith("weights") for part in parts)}
        # In the last backward too; behind the loss there are none yet.
        assert waiting >= set(last[1:])


def simulate(actions: dict[int, list[Any]], num_chunks: int) -> int:
    """The number of rounds if each action of each rank runs as soon as its inputs exist; fails on a deadlock."""
    done: set[tuple[str, int, int]] = set()
    at, rounds = dict.fromkeys(actions, 0), 0
    while any(at[rank] < len(actions[rank]) for rank in actions):
        ready = [
            rank for rank in actions if at[rank] < len(actions[rank]) and can(actions[rank][at[rank]], done, num_chunks)
        ]
        assert ready, "no rank can go on"
        for rank in ready:
            for one in parts_of(actions[rank][at[rank]]):
                key = "F" if one.computation_type == FORWARD else "B", one.stage_index, one.microbatch_index
                assert key not in done
                done.add(key)
            at[rank] += 1
        rounds += 1
    return rounds


def parts_of(action: Any) -> list[Any]:
    return list(action.sub_actions) if action.computation_type == OVERLAP_F_B else [action]


def can(action: Any, done: set[tuple[str, int, int]], num_chunks: int) -> bool:
    for one in parts_of(action):
        chunk, number = one.stage_index, one.microbatch_index
        if one.computation_type == FORWARD:
            needs = [("F", chunk - 1, number)] if chunk else []
        else:
            needs = [("F", chunk, number), *([("B", chunk + 1, number)] if chunk + 1 < num_chunks else [])]
        if not set(needs) <= done:
            return False
    return True


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_overlapped_interleaved_order_ends(pp: int, vpp: int, rounds: int) -> None:
    count = pp * rounds
    actions = {
        rank: [a for a in row if a]
        for rank, row in pipeline_actions("interleaved", pp, vpp, count, overlap_f_b=True).items()
    }
    simulate(actions, pp * vpp)
    for row in actions.values():
        each = [part for action in row for part in parts_of(action)]
        assert sum(part.computation_type == FORWARD for part in each) == count * vpp
        assert sum(part.computation_type == FULL_BACKWARD for part in each) == count * vpp
    pairs = sum(action.computation_type == OVERLAP_F_B for action in actions[pp - 1])
    # On the last rank all but the chunks before its last, and one microbatch, are in pairs.
    assert pairs == vpp * count - (vpp - 1) * pp - 1


def test_cuts_hold_no_memory() -> None:
    """A cut holds no more memory than an uncut graph: a tensor that no backward needs is freed."""
    weight = torch.ones(4, requires_grad=True)
    nodes = GraphNodes(False, torch.nn.Module())
    (middle,) = nodes.run("one", "", lambda: weight * 3)
    alive = ref(middle.tensor)
    (end,) = nodes.run("two", "", lambda x: x + 1, middle)
    del middle
    assert alive() is None
    assert end.cut_edge is not None
    end.cut_edge.add(torch.full((4,), 2.0))
    while nodes:
        nodes.run_backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 4


def test_deferred_values_belong_to_the_node_that_consumes_them() -> None:
    """Both run in one call of autograd, and the inputs are freed when the node starts, even if the caller holds it."""
    x = torch.tensor([2.0], requires_grad=True)
    nodes = GraphNodes(False, torch.nn.Module())
    (one,) = nodes.run("one", "a", lambda: x * x)
    late, alive = DeferredValue("sum", "a", lambda y: y + 1, (one,)), ref(one.tensor)
    del one
    (end,) = nodes.run("two", "b", lambda y: y * y, late)
    assert alive() is None
    end.cut_edge.add(torch.ones(1))  # type: ignore[union-attr]
    ran = [nodes.run_backward(), nodes.run_backward()]
    assert [(node.name, node.ends_exchange_of) for node in ran] == [("two", "a"), ("one", None)]
    assert x.grad.tolist() == [4 * 2 * (2 * 2 + 1.0)]  # type: ignore[union-attr]  # d (x^2 + 1)^2 = 4 x (x^2 + 1)
    assert not nodes


def test_gradients_of_several_uses_add_up_at_the_cut() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    nodes = GraphNodes(False, torch.nn.Module())
    (one,) = nodes.run("", "", lambda: x * x)
    (two,) = nodes.run("", "", lambda y: y * 3, one)
    (end,) = nodes.run("", "", lambda y, z: y + z, one, two)
    assert isinstance(end, NodeValue)
    end.cut_edge.add(torch.ones(1))  # type: ignore[union-attr]
    while nodes:
        nodes.run_backward()
    assert x.grad.tolist() == [4 * 2 * 2.0]  # type: ignore[union-attr]  # d(4 x^2) = 8 x


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert total_length([(0, 2), (1, 3), (1, 2)]) == 3
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert intersection([], [(0, 1)]) == []


def ab(tmp_path: Any, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    from tiny_models import config_of

    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe")))
    (tmp_path / "plan.toml").write_text(
        f'model = "hf:{tmp_path}/config.json"\ntarget = "threefold"\ncluster = {{ chip = "cpu", gpus = 2 }}\n'
        '[job]\nseq_len = 16\nglobal_batch = 4\ndata = "synthetic"\n[layout]\nep = 2\n[knobs]\nprecision = "fp32"\n'
    )
    code = main(["overlap-ab", str(tmp_path / "plan.toml"), "--warmup", "0", "--steps", "2", *more])
    return code, capsys.readouterr().out


def test_ab_tells_the_variants_apart(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ab(tmp_path, capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["same"]
    assert [row["variant"] for row in found["rows"]] == ["no overlap", "overlap", "overlap, delayed weights"]
    for row in found["rows"]:
        assert 0 < row["exchange_seconds"] <= row["step_seconds"]
        assert 0 <= row["hidden"] <= 1
    phases = {each["phase"] for each in found["rows"][1]["exposed"]}
    assert phases == {"counts", "dispatch", "combine", "combine gradient", "dispatch gradient"}


def test_ab_refuses_the_switch_that_sets_both(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ab(tmp_path, capsys, "comm_overlap.moe_a2a_overlap=true")
    assert code == 1
    assert "error[overlap-switch-couples]" in text


def test_ab_refuses_what_overlap_cannot_run(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ab(tmp_path, capsys, "layout.ep=1")
    assert code == 1
    assert "error[ep-overlap-needs-ep]" in text


def test_ab_refuses_what_the_engine_cannot_run(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ab(tmp_path, capsys, "job.capacity_factor=1.0", "job.capacity_scope=rank")
    assert code == 1
    assert "error[engine-has-capacity]" in text


@pytest.mark.parametrize("losses", [[1.0, nan], [nan, 1.0], [1.0, inf]])
def test_a_loss_that_is_no_number_is_not_the_same(losses: list[float]) -> None:
    fine, lost = Trial("no overlap", [1.0, 1.0], []), Trial("overlap", losses, [])
    assert loss_difference([[fine, fine], [fine, lost]]) == inf
    assert loss_difference([[lost, fine]]) == inf
    assert loss_difference([[fine, Trial("overlap", [1.0, 1.5], [])]]) == 0.5


def test_json_of_a_loss_that_is_no_number(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threefold.engine.verify.overlap_ab.loss_difference", lambda ranks: inf)
    monkeypatch.setattr(
        "threefold.engine.verify.overlap_ab.summarize", lambda ranks: [VariantSummary("one", 1, 0, 1, 0, {})] * 2
    )
    monkeypatch.setattr("threefold.engine.verify.forked_ranks.run_ranks", lambda *args, **more: [])
    code, text = ab(tmp_path, capsys, "--json")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (code, found["same"], found["loss_difference"]) == (1, False, None)


def test_ab_prints_a_speed_up(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 1 is faster, as the published tables of overlap have it; the first variant is the baseline."""
    rows = [VariantSummary(name, seconds, 0, 1, 0, {}) for name, seconds in (("no overlap", 2.0), ("overlap", 1.6))]
    monkeypatch.setattr("threefold.engine.verify.overlap_ab.loss_difference", lambda ranks: 0.0)
    monkeypatch.setattr("threefold.engine.verify.overlap_ab.summarize", lambda ranks: rows)
    monkeypatch.setattr("threefold.engine.verify.forked_ranks.run_ranks", lambda *args, **more: [])
    found = json.loads(ab(tmp_path, capsys, "--json")[1])
    assert [row["speed_up"] for row in found["rows"]] == [1.0, 1.25]
    header, first, second, legend, *_ = ab(tmp_path, capsys)[1].splitlines()
    assert "speed-up" in header
    assert "1.000x" in first
    assert "1.250x" in second
    assert "above 1 is faster" in legend


@pytest.mark.parametrize("verb", ["overlap-ab", "verify"])
@pytest.mark.parametrize("limit", ["nan", "-5", "0", "inf", "soon"])
def test_a_limit_is_a_time(verb: str, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "plan.toml", "--limit", limit])
    assert ended.value.code == 2
    assert "--limit" in capsys.readouterr().err
