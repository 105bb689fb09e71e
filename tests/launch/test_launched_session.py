"""Trials whose ranks a launcher starts, as srun does on a cluster, and trials of one rank with rehearsed peers."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_srun
from tests.support.plans import build
from threefold.launch.plan_session import PlanSession

FIELDS: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 1,
    "cluster.chip": "cpu",
    "job.seq_len": 32,
    "job.global_batch": 4,
    "knobs.precision": "fp32",
}
WINDOW = {"warmup": 1, "steps": 2, "seconds": 60.0, "trace": None}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_launcher_starts_the_ranks_and_ends_them(tmp_path: Path) -> None:
    fields = dict(build({**FIELDS, "cluster.gpus": 2, "layout.ep": 2}).written)
    launcher = (sys.executable, str(Path(fake_srun.__file__)), "2")
    with PlanSession(tmp_path, 2, {"MASTER_ADDR": "127.0.0.1"}, launcher=launcher) as session:
        first = session.measure(fields, WINDOW, 150.0)
    assert "error" not in first, first
    assert len(first["steps"]) == 2
    with PlanSession(tmp_path / "alone", 1, {}) as session:
        alone = session.measure(dict(build(FIELDS).written), WINDOW, 150.0)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.timeout(200)
def test_one_rank_of_a_layout_with_rehearsed_peers(tmp_path: Path) -> None:
    many = {"cluster.gpus": 64, "job.global_batch": 32, "layout.pp": 1, "layout.ep": 4, "layout.tp": 2}
    fields = dict(build({**FIELDS, **many}).written)
    module = ("-m", "threefold.dryrun.measured.measure", "5")
    with PlanSession(tmp_path, 1, {}, module) as session:
        found = session.measure(fields, WINDOW, 150.0)
        assert "error" not in found, found
        assert len(found["steps"]) == 2
        assert all(seconds > 0 for seconds in found["steps"])
        assert (found["losses"], found["work"]["useful_tokens"]) == ([], 32 * 32)
        failed = session.measure({**fields, "layout.ep": 8, "model.num_experts": 12}, WINDOW, 150.0)
        assert "error" in failed
