"""The timeline of a pipeline: the engine's order of passes, and the idle time that the papers give."""

import pytest
from plans import make

from threefold.cost.estimate import estimate
from threefold.cost.time.pipeline_timeline import Pass, pipeline_timeline, stage_passes, timed_passes

CASES = [
    ("1f1b", 4, 1, 7),
    ("1f1b", 4, 1, 2),
    ("interleaved", 2, 3, 4),
    ("interleaved", 4, 2, 8),
    ("interleaved", 4, 2, 6),
    ("zero-bubble", 4, 1, 6),
    ("zero-bubble", 2, 2, 4),
    ("dualpipev", 2, 2, 4),
    ("dualpipev", 4, 2, 12),
]


def engine_passes(schedule: str, pp: int, vpp: int, count: int, paired: bool) -> list[list[tuple[Pass, ...]]]:
    """The order of the engine in the words of the timeline."""
    order = pytest.importorskip("threefold.engine.schedule.pipeline_order")
    kinds = {
        order.FORWARD: "forward",
        order.FULL_BACKWARD: "backward",
        order.BACKWARD_INPUT: "dgrad",
        order.BACKWARD_WEIGHT: "wgrad",
    }
    found = []
    for actions in order.pipeline_actions(schedule, pp, vpp, count, overlap_f_b=paired).values():
        rank = []
        for action in filter(None, actions):
            parts = action.sub_actions or (action,)
            rank.append(tuple(Pass(kinds[p.computation_type], p.stage_index, p.microbatch_index) for p in parts))
        found.append(rank)
    return found


@pytest.mark.parametrize(("schedule", "pp", "vpp", "count"), CASES)
def test_passes_come_in_the_engines_order(schedule: str, pp: int, vpp: int, count: int) -> None:
    split, paired = schedule in ("zero-bubble", "dualpipev"), schedule == "dualpipev"
    ours = [stage_passes(schedule, pp, vpp, stage, count, split, paired) for stage in range(pp)]
    assert ours == engine_passes(schedule, pp, vpp, count, paired)


def test_pairs_of_ep_overlap_are_the_engines() -> None:
    ours = [stage_passes("interleaved", 4, 2, stage, 8, split=False, paired=True) for stage in range(4)]
    assert ours == engine_passes("interleaved", 4, 2, 8, paired=True)


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_idle_time_is_that_of_the_megatron_paper(vpp: int) -> None:
    """(p - 1) / v of a microbatch's forward and backward, beside m of them (arXiv 2104.04473, section 2.2)."""
    pp, count, forward, backward = 4, 8, 1.0, 2.0
    seconds = {("forward", c): forward / vpp for c in range(pp * vpp)}
    seconds |= {("backward", c): backward / vpp for c in range(pp * vpp)}
    schedule = "interleaved" if vpp > 1 else "1f1b"
    order = [stage_passes(schedule, pp, vpp, stage, count, split=False) for stage in range(pp)]
    end = max(one.end for rank in timed_passes(order, seconds) for one in rank)
    assert end == pytest.approx((forward + backward) * (count + (pp - 1) / vpp))


def test_a_plan_is_drawn_with_the_seconds_of_its_estimate() -> None:
    plan = make()
    found = estimate(plan)
    timeline = pipeline_timeline(plan, found.time)
    assert timeline is not None
    assert len(timeline.ranks) == 8
    assert timeline.num_microbatches == 16
    slowest = timeline.ranks[found.time.stage]
    busy = sum(one.end - one.start for one in slowest) / timeline.num_microbatches * plan.num_microbatches
    outside = sum(found.time.terms[name] for name in ("bubble", "dp", "optimizer", "offload", "other"))
    assert busy == pytest.approx(found.time.step_seconds - outside, rel=1e-6)
    assert pipeline_timeline(make(layout_pp=1, layout_vpp=1), found.time) is None
