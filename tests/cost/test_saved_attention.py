"""What saving the outputs of attention inside recomputed layers costs and spares, by hand."""

from dataclasses import replace
from typing import Any

import pytest
from plans import build

from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.plan.plan import Plan
from threefold.search.search import search
from threefold.units import GIB

FULL: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "model.num_layers": 4,
    "target": "threefold",
    "cluster.chip": "h200",
    "job.seq_len": 2**20,
    "job.global_batch": 1,
    "knobs.expert_fusion": True,
    "knobs.recompute": ["full"],
}


def saving(plan: Plan) -> Plan:
    return replace(plan, knobs=replace(plan.knobs, recompute_save=("core_attn",)))


@pytest.mark.parametrize(("gpus", "degrees"), [(1, {}), (4, {"layout.cp": 4}), (4, {"layout.tp": 4})])
def test_saved_outputs_take_their_bytes(gpus: int, degrees: dict[str, int]) -> None:
    """Four layers of 32 heads of 128: bf16 outputs and fp32 log-sum-exps of 2^20 tokens, sharded over ranks."""
    plan = build({**FULL, "cluster.gpus": gpus, **degrees})
    terms = [memory(each).worst.terms["attention"] for each in (plan, saving(plan))]
    assert terms[1] - terms[0] == pytest.approx(4 * 32 * (128 * 2 + 4) * 2**20 / gpus)


def test_attention_is_not_paid_for_twice() -> None:
    """The forward is one of 3.5 parts of attention's time; everything else is recomputed all the same."""
    plan = build(FULL)
    plain, saved = (step_time(each, rates_of(plan)).terms for each in (plan, saving(plan)))
    assert plain["recompute"] - saved["recompute"] == pytest.approx(plain["attention"] / 3.5)
    assert {name: size for name, size in saved.items() if name != "recompute"} == pytest.approx(
        {name: size for name, size in plain.items() if name != "recompute"}
    )


def test_outputs_on_the_host_leave_the_device() -> None:
    """All but those of the last layer, which its backward needs, and of the one before, which are on their way."""
    plan = saving(build({**FULL, "job.seq_len": 2**19}))
    hosted = replace(plan, knobs=replace(plan.knobs, activation_offload=("core_attn",)))
    layer = 32 * (128 * 2 + 4) * 2**19
    assert memory(plan).peak_bytes - memory(hosted).peak_bytes == pytest.approx(2 * layer, rel=0.02)


def test_the_search_saves_what_pays() -> None:
    found = search({**FULL, "knobs.recompute": "auto", "job.global_batch": 1}, top=1)
    best = found.candidates[0].plan
    assert best.knobs.recompute == ("full",)
    assert best.knobs.recompute_save == ("core_attn",)
    assert memory(best).peak_bytes < 140 * GIB
