"""The ledger of a tuning: contracts, resumption after kills, and damaged files."""

import multiprocessing
import random
import sqlite3
import time
from pathlib import Path

import pytest

from tests.support.fake_measurer import FakeMeasurer
from tests.support.tuned_plans import plan_to_tune, tuned
from threefold.findings import FindingsError
from threefold.machine.inventory import Machine
from threefold.plan.plan import Plan
from threefold.tune.contract import check_same_contract, contract_of
from threefold.tune.ledger import LEDGER, open_ledger
from threefold.tune.loop import CONFIRM, SCREEN

HERE = Machine("3.11.0", "Linux", versions={"torch": "2.13.0"})
FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 120
NUM_KILLS = 20


def factor(plan: Plan) -> float:
    return 1.0 - 0.1 * (plan.job.micro_batch // 4)


def _tune_slowly(folder: Path, seed: int) -> None:
    tuned(FakeMeasurer(factor, seed, on_measured=lambda count: time.sleep(0.004)), folder)


def _rows(folder: Path) -> list[tuple[object, ...]]:
    if not (folder / LEDGER).exists():
        return []
    with open_ledger(folder) as ledger:
        return [(row.number, row.stage, row.round, row.role, row.measurement) for row in ledger.trials()]


def test_killed_at_random_moments_it_loses_no_finished_trial(tmp_path: Path) -> None:
    draw = random.Random(0)
    before: list[tuple[object, ...]] = []
    for kill in range(NUM_KILLS):
        process = FORK.Process(target=_tune_slowly, args=(tmp_path, kill))
        process.start()
        process.join(draw.uniform(0.0, 0.06))
        process.kill()
        process.join(LIMIT_SECONDS)
        after = _rows(tmp_path)
        assert after[: len(before)] == before
        before = after
    machine = FakeMeasurer(factor, 99)
    found = tuned(machine, tmp_path)
    assert _rows(tmp_path)[: len(before)] == before
    assert found.winner is not None
    assert found.winner.job.micro_batch == 8
    keys = [(row.stage, row.round, row.role) for row in found.trials if row.round >= 0]
    assert len(keys) == len(set(keys)), "a finished trial was measured again"
    again = FakeMeasurer(factor, 100)
    assert tuned(again, tmp_path).winner == found.winner
    assert again.plans == [], "a finished tuning measures nothing"


def test_every_prefix_of_a_tuning_goes_on_to_the_same_winner(tmp_path: Path) -> None:
    """A stop before each trial in turn: the loop takes the same way again, and no session compares with another's."""

    class StopError(Exception):
        pass

    for stop in range(1, 30, 4):
        folder = tmp_path / str(stop)

        def end(count: int, stop: int = stop) -> None:
            if count == stop:
                raise StopError

        with pytest.raises(StopError):
            tuned(FakeMeasurer(factor, stop, noise=0.003, on_measured=end), folder)
        found = tuned(FakeMeasurer(factor, 1000 + stop, noise=0.003, step_seconds=0.2), folder)
        assert found.winner is not None
        assert found.winner.job.micro_batch == 8


def test_the_same_contract_is_required() -> None:
    plan = plan_to_tune()
    contract = contract_of(plan, HERE, SCREEN, CONFIRM, 0)
    check_same_contract(contract, contract, "folder")
    other = contract_of(plan_to_tune(**{"job.seq_len": 64}), HERE, SCREEN, CONFIRM, 0)
    with pytest.raises(FindingsError) as raised:
        check_same_contract(contract, other, "folder")
    (finding,) = raised.value.findings
    assert finding.rule == "same-tuning"
    assert "job.seq_len was 32, now 64" in finding.problem
    newer = contract_of(plan, Machine("3.11.0", "Linux", versions={"torch": "2.14.0"}), SCREEN, CONFIRM, 0)
    with pytest.raises(FindingsError, match=r"torch was '2\.13\.0', now '2\.14\.0'"):
        check_same_contract(contract, newer, "folder")


def test_a_second_tuning_of_a_folder_is_refused(tmp_path: Path) -> None:
    with open_ledger(tmp_path), pytest.raises(FindingsError, match="another tuning"), open_ledger(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"no database at all", b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_damaged_ledger_is_a_finding(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_bytes(content)
    with pytest.raises(FindingsError) as raised, open_ledger(tmp_path, create=False) as ledger:
        ledger.trials()
    assert [finding.rule for finding in raised.value.findings] == ["ledger-readable"]


def test_strange_values_in_a_ledger_are_a_finding(tmp_path: Path) -> None:
    tuned(FakeMeasurer(), tmp_path, most_trials=1)
    for text in ("[", "[]", '{"no": "measurement"}'):
        database = sqlite3.connect(tmp_path / LEDGER)
        with database:
            database.execute("UPDATE trials SET measurement = ? WHERE id = 2", (text,))
        database.close()
        with pytest.raises(FindingsError, match="cannot be used"), open_ledger(tmp_path, create=False) as ledger:
            ledger.trials()


def test_more_time_goes_on_where_time_was_over(tmp_path: Path) -> None:
    first = FakeMeasurer(factor, 1, noise=0.02)
    short = tuned(first, tmp_path, budget=80)
    assert "80 s" in short.ended
    second = FakeMeasurer(factor, 2, noise=0.02)
    found = tuned(second, tmp_path, budget=2000)
    assert found.trials[: len(short.trials)] == short.trials
    assert len(found.trials) == len(first.plans) + len(second.plans)
    assert found.winner is not None
    assert found.winner.job.micro_batch == 8
