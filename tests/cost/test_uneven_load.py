"""Uneven loads in numbers: against drawn tokens, against tables of order statistics, and by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import CLEAN, build

from threefold.cost import expert_load
from threefold.cost.estimate import estimate, time_band
from threefold.cost.expert_load import EVEN, SkewLevel, expected_largest, load_band, load_of
from threefold.cost.layer_work import layer_case, layer_work
from threefold.cost.memory.by_stack import memory, out_of_memory_chance
from threefold.cost.rates import rates_of
from threefold.cost.time.communication import expert_copy_seconds
from threefold.cost.time.layer import layer_time
from threefold.cost.time.step import step_time
from threefold.cost.traffic.dispatch import dispatch_bytes
from threefold.plan.load import WORKLOADS, drawn_counts
from threefold.plan.plan import Plan
from threefold.search.search import search

MOE = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 32,
    "job.seq_len": 4096,
    "job.global_batch": 64,
    "layout.ep": 16,
}


def loaded(load: str, **fields: object) -> Plan:
    return build({**MOE, "job.load": load, **{name.replace("__", "."): value for name, value in fields.items()}})


@pytest.mark.parametrize(
    ("count", "largest"), [(2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (10, 1.53875)]
)
def test_the_largest_of_normal_numbers(count: int, largest: float) -> None:
    """Expectations of order statistics, as tables have them (Harter 1961)."""
    assert expected_largest(count) == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize("load", WORKLOADS)
def test_skews_are_those_of_drawn_tokens(load: str) -> None:
    """The largest of four ranks over some layers and steps of a small model, from tokens drawn one by one."""
    plan = loaded(load, layout__ep=4, cluster__gpus=4, job__seq_len=512, model__num_layers=8, model__num_dense_layers=0)
    found = load_of(plan)
    largest = []
    for step in range(16):
        for layer in range(8):
            sources = [drawn_counts(load, 128, 512, 8, layer, step, rank) for rank in range(4)]
            ranks = np.sum(sources, axis=0).reshape(4, 32).sum(axis=1)
            largest.append(ranks.max() / ranks.mean())
    # Chance is taken as if copies chose apart; those of one token choose different experts, and deviate a little less.
    assert found.skew == pytest.approx(np.mean(largest), rel=0.02)


def test_skews_by_hand() -> None:
    """Eight of 128 experts are hot: on 16 ranks they are one rank's, which gets half of all rows: 8 times the mean."""
    assert load_of(loaded("hot-rank")).skew == pytest.approx(8, rel=1e-3)
    assert load_of(loaded("idle-experts")).skew == pytest.approx(4 / 3, rel=0.02)
    # A quarter of 8 ranks in the one domain of 8 stays empty, or none of it: 12 ranks have 16/12, the others 0.
    assert max(level.domain for level in load_of(loaded("idle-experts")).levels) == pytest.approx(4 / 3, rel=0.01)
    assert load_of(loaded("zipf", layout__ep=1)) == EVEN


def test_experts_and_exchanges_wait_for_the_largest_rank() -> None:
    plan = loaded("balanced")
    layer = next(kind for kind in plan.model.layers if kind.ffn == "moe")
    even, twice = (layer_time(plan, layer, rates_of(plan), skew) for skew in (1.0, 2.0))
    work = layer_work(layer_case(plan, layer))
    rows = work.rows_per_expert
    assert layer_time(plan, layer, rates_of(plan)) == even
    # GEMMs of twice the rows at the rate of twice the rows; bytes of weights and gradients stay.
    assert even.experts < twice.experts < 2 * even.experts
    assert rows > 0
    assert twice.ep > even.ep
    assert (twice.attention, twice.gemm, twice.tp) == (even.attention, even.gemm, even.tp)


def test_exchanges_over_each_link() -> None:
    """All-to-all sends each copy; DeepEP one copy of a token to a rank, and one to a domain."""
    skew, even = SkewLevel(1.0, 4.0, 1.5), EVEN.levels[0]
    for dispatcher, inside, outside in (
        ("alltoall", 4, 4),
        ("deepep", (1 - (12 / 16) ** 8) / (1 - (15 / 16) ** 8), (1 - (1 / 4) ** 8) / (1 - (1 / 2) ** 8)),
    ):
        plan = loaded("balanced", knobs__dispatcher=dispatcher)
        work = layer_work(layer_case(plan, plan.model.layers[0]))
        before, after = (dispatch_bytes(plan, work, at) for at in (even, skew))
        assert after.domain / before.domain == pytest.approx(inside)
        assert after.network / before.network == pytest.approx(outside)


def test_a_balanced_load_is_priced_as_before() -> None:
    """A skew of 1 is what every estimate before `job.load` assumed."""
    plan = loaded("balanced")
    assert step_time(plan, rates_of(plan)) == step_time(plan, rates_of(plan), 1.0)
    assert memory(plan) == memory(plan, 1.0)
    assert estimate(plan).uneven is None


def test_an_estimate_says_what_forced_balance_would_promise() -> None:
    plan, balanced = loaded("zipf"), estimate(loaded("balanced"))
    found = estimate(plan)
    assert found.uneven is not None
    assert found.uneven.balanced_seconds == pytest.approx(balanced.time.step_seconds)
    assert found.time.step_seconds > 1.2 * balanced.time.step_seconds
    assert found.memory.peak_bytes > balanced.memory.peak_bytes
    assert load_band(plan) > 0
    assert time_band(plan) == pytest.approx(time_band(loaded("balanced")) + load_band(plan))
    assert found.to_json()["uneven_load"]["load"] == "zipf"


def test_capacity_drops_what_is_above_it() -> None:
    """Half of all copies go to 8 of 128 experts: 8 times the mean each, of which a factor of 2 takes a quarter."""
    found = load_of(loaded("hot-rank", job__capacity_factor=2.0))
    assert found.dropped == pytest.approx(0.5 * (1 - 2 / 8), rel=1e-3)


def test_the_chance_of_running_out_of_memory() -> None:
    plan = loaded("uniform", job__seq_len=512)
    load = load_of(plan)
    middle = load.steps[0].skew
    assert load.chance_above(middle, 1) == pytest.approx(0.5)
    assert load.chance_above(middle, 2) == pytest.approx(0.75)
    need = memory(plan, middle).device_bytes  # a chip that holds what the middle of the distribution needs
    chip = replace(plan.chip, memory_bytes=round(need))
    assert out_of_memory_chance(plan.on_chip(chip)) == pytest.approx(0.75, abs=0.05)  # of two groups
    assert out_of_memory_chance(plan.on_chip(replace(chip, memory_bytes=10**15))) == 0
    assert out_of_memory_chance(plan.on_chip(replace(chip, memory_bytes=10**6))) == 1


def test_a_recorded_load_is_priced_by_its_layers(tmp_path: Path) -> None:
    """Two layers, one even and one with all rows on the first of four ranks."""
    (tmp_path / "loads.json").write_text(json.dumps([[1] * 128, [9] * 32 + [0] * 96]))
    found = load_of(loaded(f"file:{tmp_path}", layout__ep=4, cluster__gpus=4))
    assert max(level.rank for level in found.levels) == pytest.approx(4, rel=0.01)
    assert found.skew == pytest.approx(2.5, rel=0.01)


def test_plan_avoids_expert_parallelism_that_a_load_makes_slow() -> None:
    draft = {**MOE, "cluster.gpus": 8, "layout.ep": "auto", "knobs.dispatcher": "alltoall", "layout.pp": 1}
    best = [search({**draft, "job.load": load}, 1).best.layout.ep for load in ("balanced", "hot-rank")]
    assert best[1] <= best[0]


def test_loads_are_looked_up_once() -> None:
    expert_load._load.cache_clear()
    plan = loaded("zipf")
    step_time(plan, rates_of(plan))
    assert expert_load._load.cache_info().misses == 1


def test_the_clean_plan_of_the_rules_has_no_load() -> None:
    assert build(CLEAN).job.load == "balanced"


@pytest.mark.parametrize("ep", [3, 256])
def test_experts_that_do_not_divide_are_left_to_the_rules(ep: int) -> None:
    assert load_of(loaded("zipf", layout__ep=ep, cluster__gpus=768)) is EVEN


def test_copies_level_a_load_and_cost_their_weights() -> None:
    """Half of the rows go to one of 16 ranks: a slot on each of the 15 others takes what is above the mean."""
    plan = loaded("hot-rank", knobs__expert_balance="replicate", knobs__dispatcher="alltoall")
    bare = loaded("hot-rank", knobs__dispatcher="alltoall")
    balanced = loaded("balanced", knobs__dispatcher="alltoall")
    found = load_of(plan)
    assert found.skew == pytest.approx(1, abs=0.03)
    assert found.copied == 15  # the hot rank sends an expert to each of the others
    seconds = [step_time(each, rates_of(each)).step_seconds for each in (balanced, plan, bare)]
    assert seconds == sorted(seconds)
    weights = 15 * 3 * 2048 * 768 * (2 + 4)  # one expert to each, in bf16, and its gradient back in fp32
    link = plan.chip.network_bandwidth
    assert expert_copy_seconds(plan, rates_of(plan)) > weights / link
    assert expert_copy_seconds(bare, rates_of(bare)) == 0


def test_copies_that_are_placed_late_miss_a_load_that_moves() -> None:
    late = load_of(loaded("drift", knobs__expert_balance="replicate", knobs__dispatcher="alltoall"))
    assert (
        late.skew
        > 2 * load_of(loaded("hot-rank", knobs__expert_balance="replicate", knobs__dispatcher="alltoall")).skew
    )


def test_plan_copies_experts_where_a_load_pays_for_it() -> None:
    """EP 16 is given, so that the load cannot be avoided by fewer expert ranks."""
    draft = {name: value for name, value in MOE.items() if name != "layout.ep"} | {"cluster.gpus": 16, "layout.ep": 16}
    chosen = {load: search({**draft, "job.load": load}, 1).best.knobs for load in ("balanced", "hot-experts")}
    assert chosen["balanced"].expert_balance == "none"
    assert (chosen["hot-experts"].expert_balance, chosen["hot-experts"].dispatcher) == ("replicate", "alltoall")
