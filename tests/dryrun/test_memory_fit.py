"""The largest term of a rank that does not fit is of what is larger: the model's states or the rest."""

from dataclasses import replace

import pytest
from rehearsal_plans import tiny

from threefold.dryrun.memory_fit import largest_term
from threefold.dryrun.rehearse_rank import RankRehearsal, rehearse_rank
from threefold.units import GIB


@pytest.fixture(scope="module")
def rank() -> RankRehearsal:
    return rehearse_rank(tiny("tiny-qwen3-moe", 1, job__seq_len=16))


def test_activations_larger_than_states_that_fill_half_a_chip_are_named(rank: RankRehearsal) -> None:
    terms = {"weights": 6, "gradients": 13, "optimizer": 21, "attention": 30, "experts": 60, "norms": 12}
    assert largest_term(replace(rank, terms={name: size * GIB for name, size in terms.items()})) == "experts"


def test_states_larger_than_activations_are_named(rank: RankRehearsal) -> None:
    terms = {"weights": 2, "gradients": 4, "optimizer": 21, "attention": 22, "norms": 3}
    assert largest_term(replace(rank, terms={name: size * GIB for name, size in terms.items()})) == "optimizer"
