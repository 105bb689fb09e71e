"""Loads of experts: shares, skew, and the loads that a run recorded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import build
from rehearsal_plans import GPU

from threefold.api.rehearsals import shares_from
from threefold.dryrun.rehearse_plan import rehearse
from threefold.dryrun.simulated.expert_load import DrawnLoads, ExpertLoads, split_total


def test_loads_split_by_share() -> None:
    assert split_total(10, [1, 1, 1]) == [3, 4, 3]
    loads = ExpertLoads((3.0, 1.0, 1.0, 1.0), ep_rank=0)
    assert loads.size_source()(2, 60, True) == [40, 20]
    # Two ranks send 60 rows each; two thirds of all come here.
    assert loads.size_source()(2, 60, False) == [40, 40]
    assert loads.skew(2) == pytest.approx(4 / 3)


def test_loads_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    """Two layers of four experts, of which two ranks hold two each: 10 of 16 tokens come to the first rank."""
    (tmp_path / "loads.json").write_text("[[4, 2, 1, 1], [3, 1, 2, 2]]")
    assert shares_from(str(tmp_path), 4) == ((7.0, 3.0, 3.0, 3.0), "")
    assert "has no 8 loads" in shares_from(str(tmp_path), 8)[1]
    assert "No such file" in shares_from(str(tmp_path / "nothing"), 4)[1]


DRAWN = {**GPU, "cluster.chip": "h200", "cluster.gpus": 8, "layout.ep": 4, "job.routing": "learned"}


def test_drawn_loads_agree_between_ranks() -> None:
    """Each rank receives what the others send it, and the rows of its experts add up to that."""
    plan = build({**DRAWN, "job.load": "zipf", "job.global_batch": 16})
    assert plan.model.moe is not None
    drawn, copies = DrawnLoads.of(plan), plan.job.seq_len * plan.model.moe.top_k
    for layer in (0, 3):
        sources = [replace(drawn, ep_rank=rank).size_source(lambda at=layer: at) for rank in range(4)]
        sent, received = ([source(4, copies, exact) for source in sources] for exact in (True, False))
        assert [list(column) for column in zip(*sent, strict=True)] == received
        assert sum(map(sum, sent)) == 4 * copies
    largest, mean = drawn.ranks(4)
    skews = [replace(drawn, ep_rank=rank).skew_of_rank() for rank in range(4)]
    assert skews[largest] == max(skews) == drawn.skew(4) > 1.05
    assert abs(skews[mean] - 1) == min(abs(skew - 1) for skew in skews)


@pytest.mark.parametrize(
    ("load", "knobs"),
    [
        ("zipf", {}),
        ("burst", {"knobs.ep_overlap": True}),
        ("hot-experts", {"knobs.recompute": ["moe"]}),
        ("idle-experts", {"knobs.dispatcher": "deepep"}),
    ],
)
def test_the_largest_and_a_mean_rank_are_rehearsed(load: str, knobs: dict[str, Any]) -> None:
    """The bound of docs/log/rehearsal.md, at the rows that each of both ranks gets."""
    plan = build({**DRAWN, "job.load": load, "job.global_batch": 16, "model.num_layers": 2, **knobs})
    found = rehearse(plan, loads=DrawnLoads.of(plan), jobs=1)
    assert len(found.ranks) == 2
    assert max(rank.skew or 0 for rank in found.ranks) > 1.1
    for rank in found.ranks:
        assert found.stage_estimate(rank).peak_bytes == pytest.approx(rank.peak_bytes, rel=0.06)
