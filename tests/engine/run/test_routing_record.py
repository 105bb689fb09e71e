"""The record of a run's loads: bounded, by step, layer and source, and what `threefold load` says of it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_plan, tiny_shard

from threefold.api.loads import load_of_run
from threefold.cli.main import main
from threefold.cost.estimate import estimate
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Mesh
from threefold.engine.run.routing_record import MOST_NUMBERS, MOST_STEPS, RoutingRecord, most_steps
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout
from threefold.plan.load import read_load
from threefold.plan.parse import change
from threefold.profile.expert_loads import summarize_load

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_records_every_token_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"job.data": tiny_shard(tmp_path / "counting.tok"), "model.num_layers": 2}
    plan = tiny_plan({**fields, "job.steps": 3})
    train(plan, tmp_path / "run", lambda text: None)
    train(tiny_plan({**fields, "job.steps": 5}), tmp_path / "run", lambda text: None)
    record = read_load(tmp_path / "run")
    assert record.steps == (1, 2, 3, 4, 5)  # of both starts
    assert plan.model.moe is not None
    copies = plan.tokens_per_step * plan.model.moe.top_k
    assert [[sum(row) for row in rows] for rows in record.counts] == [[copies] * 2] * 5
    last = json.loads((tmp_path / "run" / "loads.json").read_text())
    assert [list(row) for row in record.counts[-1]] == last
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found, _ = load_of_run(tmp_path / "run")
    by_hand = [max(max(row) / (sum(row) / len(row)) for row in rows) for rows in record.counts]
    assert [line["router/load_max"] for line in lines] == pytest.approx(by_hand)
    assert max(layer.busiest_expert for layer in found.layers) <= max(by_hand)
    page = tmp_path / "load.html"
    assert main(["load", str(tmp_path / "run"), "--ep", "2", "--out", str(page)]) == 0
    assert "largest of 2 ranks" in capsys.readouterr().out
    assert "Load of every expert in all recorded steps" in page.read_text()
    assert main(["load", str(tmp_path / "run"), "--ep", "3"]) == 2


def two_sources(rank: int, folder: Path) -> None:
    record = RoutingRecord(Mesh(Layout(gpus=2), rank, torch.device("cpu")))
    own_LE = torch.tensor([[3, 1]]) if rank == 0 else torch.tensor([[0, 4]])
    for step in (1, 2):
        record.add(step, torch.tensor([[3, 5]]), own_LE)
    record.gather_sources(record.mesh.world)
    if rank == 0:
        record.write(folder)


def test_source_ranks_are_recorded_apart(tmp_path: Path) -> None:
    run_ranks(2, two_sources, tmp_path)
    record = read_load(tmp_path)
    assert record.counts == (((3.0, 5.0),),) * 2
    assert record.sources == (((6.0, 2.0),), ((0.0, 8.0),))
    # 3/8 of the copies of each source go elsewhere than those of both together.
    assert summarize_load(tmp_path).layers[0].ragged == pytest.approx(3 / 8)


def test_a_record_stays_small(tmp_path: Path) -> None:
    assert most_steps(61, 256) * 61 * 256 <= MOST_NUMBERS
    record = RoutingRecord(Mesh(Layout(), 0, torch.device("cpu")))
    for step in range(1, 1001):
        record.add(step, torch.tensor([[step, 1]]), None)
    record.gather_sources(TRIVIAL_GROUP)
    record.write(tmp_path)
    steps = read_load(tmp_path).steps
    assert MOST_STEPS / 2 < len(steps) <= MOST_STEPS
    assert {after - before for before, after in itertools.pairwise(steps)} == {record.stride}


def test_router_health_by_hand(tmp_path: Path) -> None:
    """Two steps of four experts on two ranks: 6 of 8 rows, then 8 of 8, on the first rank."""
    (tmp_path / "x.json").write_text('{"steps": [10, 20], "counts": [[[4, 2, 2, 0]], [[8, 0, 0, 0]]]}')
    [layer] = summarize_load(tmp_path / "x.json", ep=2).layers
    assert layer.busiest_expert == pytest.approx(4 * (4 / 8 + 8 / 8) / 2)
    assert layer.largest_rank == pytest.approx(2 * (6 / 8 + 8 / 8) / 2)
    assert (layer.idle_experts, layer.drift) == (1, pytest.approx(4 / 8))
    shares = torch.tensor([12 / 16, 2 / 16, 2 / 16])
    assert layer.entropy == pytest.approx(float(-(shares * shares.log()).sum() / torch.tensor(4.0).log()))


def test_lost_time_is_that_of_the_estimate(tmp_path: Path) -> None:
    (tmp_path / "routing.json").write_text(json.dumps({"counts": [[[9] * 32 + [1] * 96] * 4]}))
    fields = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 8, "layout.ep": 8, "job.seq_len": 4096}
    plan = tiny_plan({**fields, "model.num_layers": 4, "model.num_experts": 128, "job.global_batch": 8})
    found = summarize_load(tmp_path, plan)
    seconds = [
        estimate(change(plan, {"job.load": load})).time.step_seconds for load in ("balanced", f"file:{tmp_path}")
    ]
    assert found.lost_fraction == pytest.approx(1 - seconds[0] / seconds[1])
    assert found.lost_fraction > 0.01
