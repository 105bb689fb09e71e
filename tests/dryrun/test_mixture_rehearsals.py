"""Estimate and rehearsal of published models of the families in `spec/families`, cut to a few layers, on H100s."""

from typing import Any

import pytest
from plans import build
from rehearsal_plans import GPU

from threefold.cost.memory.by_stack import memory
from threefold.dryrun.rehearse_rank import rehearse_rank

PLANS: dict[str, dict[str, Any]] = {
    "glm-4.5": {"layout.tp": 4, "layout.ep": 16, "layout.pp": 2, "model.num_layers": 4, "job.mtp": 0},
    "glm-4.5-air": {"layout.ep": 16},
    "qwen2-57b-a14b": {"layout.tp": 4},
    "olmoe-1b-7b": {"layout.tp": 4, "job.seq_len": 16384, "knobs.precision": "fp32"},
    "minimax-m2": {"layout.tp": 16, "layout.ep": 16, "job.micro_batch": 4},
    "ernie-4.5-21b-a3b": {"layout.tp": 4, "model.num_layers": 3},
    "dots.llm1": {"layout.ep": 16},
    "hunyuan-a13b": {"layout.tp": 2, "job.seq_len": 16384},
    "granite-3.1-3b-a800m": {"layout.tp": 2, "model.num_layers": 8, "job.seq_len": 16384},
    "phi-3.5-moe": {"layout.tp": 2, "model.num_layers": 3},
    "solar-open-100b": {"layout.tp": 4, "layout.ep": 16},
    "hy3-preview": {"layout.tp": 4, "layout.ep": 16, "model.num_layers": 3},
    "glm-4.7-flash": {"layout.ep": 8, "model.num_layers": 3},
    "deepseek-v4-flash": {"layout.ep": 16, "layout.pp": 2, "model.num_layers": 6, "job.mtp": 0},
    "gemma-4-26b-a4b": {"layout.ep": 16, "layout.pp": 2, "model.num_layers": 12},
}
OFTEN = ("olmoe-1b-7b", "minimax-m2", "granite-3.1-3b-a800m", "phi-3.5-moe", "gemma-4-26b-a4b")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_estimate_is_near_the_rehearsal(name: str) -> None:
    """Seen: 0.4 % at most."""
    plan = build({**GPU, "model": name, "model.num_layers": 2, **PLANS[name]})
    for stage in {0, plan.layout.pp - 1}:
        seen = rehearse_rank(plan, stage * plan.layout.stride("pp"))
        assert memory(plan).stages[stage].peak_bytes == pytest.approx(seen.peak_bytes, rel=0.01)
