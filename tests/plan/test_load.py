"""The load of the experts: shares by the formulas of docs/reference/load.md, draws, recorded files, and the field."""

import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from plans import CLEAN, build

from threefold.findings import FindingsError
from threefold.plan.load import BALANCED, WORKLOADS, drawn_choices, drawn_counts, expert_shares, read_load
from threefold.plan.parse import change, parse

SIZES = [(8, 2), (60, 4), (128, 8), (256, 8), (2, 1), (16, 16)]


@pytest.mark.parametrize("load", WORKLOADS)
@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
def test_shares_add_up_and_no_token_chooses_twice(load: str, num_experts: int, top_k: int) -> None:
    for layer, step, rank in ((0, 0, 0), (5, 7, 3), (61, 1000, 1023)):
        shares = expert_shares(load, num_experts, layer, step, rank, top_k)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        assert max(shares) <= 1 / top_k + 1e-9


def test_shares_follow_the_formulas() -> None:
    """By hand for 16 experts, of which one is hot: 9 is nearest to 9.89 without a common divisor."""
    places = [q * 9 % 16 for q in range(16)]
    harmonic = sum(1 / (q + 1) for q in range(16))
    assert [expert_shares("zipf", 16)[e] * harmonic * (q + 1) for q, e in enumerate(places)] == pytest.approx([1] * 16)
    assert expert_shares("hot-experts", 16, layer=1)[9] == pytest.approx(0.5)
    assert expert_shares("hot-rank", 16, layer=3)[27 % 16] == pytest.approx(0.5)
    assert expert_shares("ragged-sources", 16, rank=5)[5] == pytest.approx(0.5)
    assert expert_shares("drift", 16, step=18)[2] == pytest.approx(0.5)
    assert expert_shares("idle-experts", 16, layer=1) == pytest.approx([1 / 12] * 8 + [0] * 4 + [1 / 12] * 4)
    assert expert_shares("burst", 16, step=6) == [1 / 16] * 16
    assert expert_shares("burst", 16, step=15)[0] == pytest.approx(0.5)
    assert expert_shares("zipf", 16, top_k=4)[0] == pytest.approx(0.25)  # 1/3.38 without the bound


def test_ragged_sources_are_level_together() -> None:
    shares = [expert_shares("ragged-sources", 64, rank=rank) for rank in range(16)]
    assert np.mean(shares, axis=0) == pytest.approx(np.full(64, 1 / 64))


@pytest.mark.parametrize("load", WORKLOADS)
def test_draws_follow_the_shares(load: str) -> None:
    """Each expert within five standard deviations of a binomial count, with different experts for every token."""
    num_tokens, top_k = 4096, 4
    choices = drawn_choices(load, 32, num_tokens, top_k, layer=2, step=7, rank=1, seed=3)
    assert all(len(set(row)) == top_k for row in choices.tolist())
    counts = drawn_counts(load, 32, num_tokens, top_k, layer=2, step=7, rank=1, seed=3)
    assert counts == np.bincount(choices.ravel(), minlength=32).tolist()
    for share, count in zip(expert_shares(load, 32, 2, 7, 1, top_k), counts, strict=True):
        chance = min(1.0, top_k * share)
        assert abs(count - num_tokens * chance) <= 5 * sqrt(num_tokens * chance * (1 - chance)) + 1e-6


def test_balanced_takes_experts_in_turn() -> None:
    assert drawn_counts(BALANCED, 8, 64, 2, rank=3) == [16] * 8
    assert drawn_choices(BALANCED, 4, 2, 2).tolist() == [[0, 1], [2, 3]]


def test_recorded_loads_by_step_layer_and_source(tmp_path: Path) -> None:
    record = {
        "steps": [4, 8],
        "counts": [[[1, 3]], [[4, 0]]],
        "sources": [[[3, 1]], [[1, 3]]],
    }
    (tmp_path / "routing.json").write_text(json.dumps(record))
    load = f"file:{tmp_path}"
    assert read_load(tmp_path).steps == (4, 8)
    # The first source sends 3/2 of the mean to expert 0 and 1/2 to expert 1: 1.5 to 1.5 of the first step.
    assert expert_shares(load, 2, step=0, rank=0) == pytest.approx([0.5, 0.5])
    assert expert_shares(load, 2, step=0, rank=1) == pytest.approx([0.5 / 5, 4.5 / 5])
    assert expert_shares(load, 2, step=3, rank=0) == [1, 0]
    (tmp_path / "loads.json").write_text("[1, 3]")
    assert expert_shares(f"file:{tmp_path / 'loads.json'}", 2) == [0.25, 0.75]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[[1], [1, 2]]", "[-1, 2]", "[0, 0]", '{"counts": [[1]]}', "[NaN]"])
def test_what_is_no_load_is_a_finding(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FindingsError, match=r"job\.load"):
        expert_shares(f"file:{path}", 2)


def test_the_field_takes_names_and_files(tmp_path: Path) -> None:
    plan = build({**CLEAN, "job.load": "ZIPF"})
    assert plan.job.load == "zipf"
    assert plan.hash != build(CLEAN).hash
    parsed = parse({"model": "qwen3-30b-a3b", "job.load": "hotrank"})
    assert parsed.plan is None
    assert parsed.findings[0].fix_data == {"job.load": "hot-rank"}
    plan = change(plan, {"job.load": f"file:{tmp_path}"})
    assert plan.job.load == f"file:{tmp_path}"
