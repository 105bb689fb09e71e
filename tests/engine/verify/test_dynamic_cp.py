"""Dynamic context parallelism gives one rank's gradients, whatever the lengths; and takes part in every collective."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mutation_registry import wrap_attribute
from oracle_layouts import CASES, DYNAMIC, FSDP, MTP1, Case, case
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.build import options_of
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.schedule.microbatch_runners import Sequential
from threefold.engine.verify import oracle
from threefold.engine.verify.compare import Comparison, RankResults, compare_results
from threefold.engine.verify.forked_ranks import RankError, run_ranks
from threefold.engine.verify.oracle import compare_with_one_rank, run_one_rank, run_rank, synthetic_rows
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan

TOLERANCE = 1e-10  # as FP64 in test_oracle.py
SEQ_LEN, GLOBAL_BATCH = 64, 4
# How the documents of a sample are drawn, by name: their lengths until the sample is full.
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "only short": lambda draw: draw.randint(1, SEQ_LEN // 8),
    "only long": lambda draw: SEQ_LEN,
    "long tail": lambda draw: draw.choice([*[draw.randint(1, 6)] * 12, SEQ_LEN // 2, SEQ_LEN]),
    "any": lambda draw: draw.randint(1, SEQ_LEN),
    "single tokens and full sequences": lambda draw: draw.choice([1, 1, 1, SEQ_LEN]),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def named(name: str) -> Case:
    [found] = [case for case in CASES if case.name == name]
    return found


def samples_with(lengths: str, seed: int) -> Callable[[Plan, int], tuple[Tensor, Tensor, Tensor]]:
    """In place of the oracle's samples: documents of drawn lengths, some labels missing."""

    def sample(plan: Plan, number: int) -> tuple[Tensor, Tensor, Tensor]:
        draw, size = random.Random(f"{seed}/{number}"), plan.job.seq_len
        numbers: list[int] = []
        while len(numbers) < size:
            numbers += [numbers[-1] + 1 if numbers else 0] * LENGTHS[lengths](draw)
        generator = torch.Generator().manual_seed(1000 * seed + number)
        tokens = torch.randint(plan.model.vocab, (size + 1,), generator=generator)
        labels = tokens[1:].masked_fill(torch.rand(size, generator=generator) < 0.2, IGNORE)
        return tokens[:-1], labels, torch.tensor(numbers[:size])

    return sample


def compare(plan: Plan, lengths: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    monkeypatch.setattr(oracle, "_sample", samples_with(lengths, seed))
    return compare_with_one_rank(plan, steps=1)


def batches_of_ranks(plan: Plan, first: int) -> list[list[Batch]]:
    """The microbatches of every rank in the step that begins at a sample."""
    rows = synthetic_rows(plan, Mesh(Layout()))
    ranks = []
    for rank in range(plan.layout.dp * plan.layout.cp):
        rows.grid = replace(rows.grid, rank=rank)
        ranks.append([rows.batch(first, number) for number in range(len(rows.rounds(first)))])
    return ranks


def test_cases_have_all_degrees_and_empty_microbatches() -> None:
    for name in ("dynamic cp, empty microbatches", "dynamic cp over eight ranks"):
        plan = named(name).plan
        steps = [batches_of_ranks(plan, plan.job.global_batch * step) for step in (0, 1)]
        batches = [batch for ranks in steps for rank in ranks for batch in rank]
        assert {batch.cp_degree for batch in batches if not batch.is_empty} == {1, 2, 4}
        assert any(batch.is_empty for batch in batches)


@pytest.mark.parametrize("name", ["dynamic cp, empty microbatches", "dynamic cp tp ep etp", "dynamic cp, two depths"])
def test_layout_is_one_rank(name: str) -> None:
    found = compare_with_one_rank(named(name).plan, steps=2)
    assert (found.problems, found.near_ties) == ((), 0)
    assert found.largest <= TOLERANCE, found


LAYOUTS = [
    case("cp", "qwen3_moe", 4, cp=4),
    case("ep over cp and dp", "qwen3_moe", 4, cp=2, ep=4),
    case("tp", "deepseek_v3", 4, tp=2, cp=2, ep=2, spec=MTP1),
    case("fsdp", "gpt_oss", 4, cp=2, ep=2, knobs=FSDP),
]


def dynamic_plan(base: Case, **job: Any) -> Plan:
    job = {"packing": True, "seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, **job}
    return replace(base, job=job, knobs={**base.knobs, **DYNAMIC}).plan


@pytest.mark.parametrize("lengths", LENGTHS)
def test_any_lengths_are_one_rank(lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(dynamic_plan(LAYOUTS[1]), lengths, 1, monkeypatch)
    assert found.near_ties == 0
    assert max(found.loss, found.norm, found.gradient) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("base", LAYOUTS, ids=lambda base: base.name)
def test_drawn_lengths_are_one_rank(base: Case, lengths: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(dynamic_plan(base), lengths, seed, monkeypatch)
    assert found.near_ties == 0
    assert max(found.loss, found.norm, found.gradient) <= TOLERANCE, found


@pytest.mark.parametrize("base", LAYOUTS[:3], ids=lambda base: base.name)
def test_packing_does_not_change_the_loss(base: Case) -> None:
    """One rank computes the samples as they are, all of them in one microbatch, so that every loss, that of MTP too, is
    the mean over the labels of the step. Balancing losses depend on which tokens share a microbatch, and are off."""
    off = {"aux_loss": 0.0, "seq_aux_loss": 0.0, "z_loss": 0.0, "bias_rate": 0.0}
    plan = dynamic_plan(base, **off)
    options = replace(options_of(plan), expert_backend="loop")
    static = replace(plan, knobs=replace(plan.knobs, cp_dynamic=False), job=replace(plan.job, micro_batch=GLOBAL_BATCH))
    one_rank = run_one_rank(static, 2, torch.float64, options)
    ranks = run_ranks(plan.layout.gpus, run_rank, plan, 2, torch.float64, options)
    found = compare_results(plan, one_rank, ranks)
    assert found.problems == ()
    assert max(found.loss, found.norm, found.gradient, found.weight) <= TOLERANCE, found


def run_without_empty_microbatches(rank: int, plan: Plan, options: Any) -> RankResults:
    def run(old: Callable[..., Any], runner: Any, batches: Sequence[Batch], shares: Any, train: bool = True) -> Any:
        kept = [n for n, batch in enumerate(batches) if not batch.is_empty]
        return old(runner, [batches[n] for n in kept], [shares[n] for n in kept], train)

    wrap_attribute(Sequential, "run", run)
    return run_rank(rank, plan, 1, torch.float64, options)


@pytest.mark.slow
def test_ranks_cannot_do_without_empty_microbatches() -> None:
    """The exchanges of experts then wait for ranks that do not come: the limit ends them."""
    plan = named("dynamic cp, empty microbatches").plan
    num_empty = {sum(batch.is_empty for batch in batches) for batches in batches_of_ranks(plan, 0)}
    assert len(num_empty) > 1
    options = replace(options_of(plan), expert_backend="loop")
    with pytest.raises(RankError):
        run_ranks(4, run_without_empty_microbatches, plan, options, limit=30.0)
