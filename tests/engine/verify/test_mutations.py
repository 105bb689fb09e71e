"""The oracle notices mistakes: one collective, scale, group, mask or sharding is broken at a time, and each is caught.

A mutation changes the engine inside the forked ranks only; the one rank they are compared with stays intact.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mutations_dp_pp  # noqa: F401
import mutations_dynamic_cp  # noqa: F401
import mutations_experts  # noqa: F401
import mutations_mixtures  # noqa: F401
import mutations_pending
import mutations_tp_cp  # noqa: F401
import pytest
import torch
from mixture_layouts import MIXTURE_CASES
from mutation_registry import MUTATIONS, Mutation
from oracle_layouts import CASES

from threefold.engine.build import options_of
from threefold.engine.model_options import Options
from threefold.engine.verify.compare import RankResults, compare_results
from threefold.engine.verify.forked_ranks import RankError, run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank
from threefold.plan.plan import Plan

TOLERANCE = 1e-10  # as FP64 in test_oracle.py, which the intact engine keeps
STEPS = 2  # the second shows what the first left behind


@cache
def intact_run(name: str) -> tuple[Plan, Options, RankResults]:
    torch.set_num_threads(1)
    [case] = [case for case in (*CASES, *MIXTURE_CASES) if case.name == name]
    plan = case.plan
    options = replace(options_of(plan), expert_backend="loop")
    return plan, options, run_one_rank(plan, STEPS, torch.float64, options)


def run_broken_rank(rank: int, mutate: Callable[[], None], plan: Plan, options: Options) -> RankResults:
    mutate()
    return run_rank(rank, plan, STEPS, torch.float64, options)


def marked(mutation: Mutation) -> Any:
    return pytest.param(mutation, id=mutation.name, marks=() if mutation.often else pytest.mark.slow)


@pytest.mark.parametrize("mutation", [marked(mutation) for mutation in MUTATIONS])
def test_mutation_is_caught(mutation: Mutation) -> None:
    plan, options, one_rank = intact_run(mutation.case)
    try:
        ranks = run_ranks(plan.layout.gpus, run_broken_rank, mutation.mutate, plan, options)
    except RankError as error:
        if mutation.error and re.search(mutation.error, str(error)):
            return
        raise  # the mutation itself failed, so the oracle has caught nothing
    assert compare_results(plan, one_rank, ranks).largest > TOLERANCE


def test_nothing_broken_is_not_caught() -> None:
    plan, options, one_rank = intact_run("dp")
    ranks = run_ranks(plan.layout.gpus, run_broken_rank, lambda: None, plan, options)
    assert compare_results(plan, one_rank, ranks).largest <= TOLERANCE


LATE = {"dp": False, "offload, loss alone, dp": False, "embedding alone": True, "dp tp ep edp": True, "fsdp tp": True}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in LATE.items()])
def test_weights_may_arrive_as_late_as_they_are_read(name: str) -> None:
    """Every read waits for its gather: mutations that read without waiting are seen because gathers are late."""
    plan, options, one_rank = intact_run(name)
    ranks = run_ranks(plan.layout.gpus, run_broken_rank, mutations_pending.deliver_gathers_late, plan, options)
    assert compare_results(plan, one_rank, ranks).largest <= TOLERANCE


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 25
    assert {mutation.case for mutation in MUTATIONS} <= {case.name for case in (*CASES, *MIXTURE_CASES)}
