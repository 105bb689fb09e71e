"""Several real NCCL ranks on one GPU against one rank there: layouts, groups, resharding, ranks that die or hang.

Skipped without a GPU; THREEFOLD_TEST_SHARED_ON=cpu runs the same on gloo. `benchmarks/nccl_ranks.py` runs them all and
prints a table. Ranks are time-sliced on their GPU, so that nothing is said about times.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_gpu import LIMIT_SECONDS, Outcome, SharedGpuRanks, chip_here, train_and_reshard
from shared_gpu_cases import CASES, PRECISIONS
from shared_gpu_faults import compare_with_undisturbed, disturb_run

pytestmark = [
    pytest.mark.skipif(chip_here() is None, reason="no CUDA device"),
    pytest.mark.timeout(3 * LIMIT_SECONDS),  # a session has its own limit, whose failure says more
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared-gpu")


@pytest.fixture(scope="module", autouse=True)
def disturbed(folder: Path) -> Iterator[Future[list[Outcome]]]:
    """The run whose ranks are killed: most of its time is spent on starts, so that it goes on beside the layouts."""
    chip = chip_here()
    assert chip is not None
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(disturb_run, folder / "disturbed", chip, LIMIT_SECONDS)


@pytest.fixture(scope="module")
def sessions(folder: Path) -> Iterator[dict[int, SharedGpuRanks]]:
    """Ranks that stay alive from one test to the next, by their number."""
    chip = chip_here()
    assert chip is not None
    with SharedGpuRanks(folder / "four", 4, chip) as four, SharedGpuRanks(folder / "two", 2, chip) as two:
        yield {4: four, 2: two}


def check(outcome: Outcome) -> None:
    assert outcome.is_good, f"{outcome}\n{outcome.log}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in CASES for name in CASES[ranks]])
def test_nccl_ranks_compute_what_one_rank_computes(
    ranks: int, name: str, precision: str, sessions: dict[int, SharedGpuRanks]
) -> None:
    check(sessions[ranks].compare_layout(name, precision))


def test_nccl_groups_of_the_recipes_start(sessions: dict[int, SharedGpuRanks]) -> None:
    outcomes = sessions[4].start_groups()
    assert outcomes
    for outcome in outcomes:
        check(outcome)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_of_four_nccl_ranks_goes_on_with_fewer(
    precision: str, sessions: dict[int, SharedGpuRanks], folder: Path
) -> None:
    for outcome in train_and_reshard(sessions[4], sessions[2], folder / "resharded", precision):
        check(outcome)


def test_nccl_ranks_that_die_or_hang_are_named_and_started_again(
    disturbed: Future[list[Outcome]], sessions: dict[int, SharedGpuRanks], folder: Path
) -> None:
    for outcome in disturbed.result():
        check(outcome)
    check(compare_with_undisturbed(sessions[2], folder / "undisturbed", folder / "disturbed"))
