"""The ledger of a tuning: contracts, resumption after kills, and damaged files."""

import json
import multiprocessing
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.command_line import run as command
from tests.support.fake_measurer import FakeMeasurer
from tests.support.tuned_plans import plan_to_tune, tuned
from threefold.findings import FindingsError
from threefold.machine.inventory import Machine
from threefold.plan.plan import Plan
from threefold.tune import ledger as ledger_module
from threefold.tune.labels import check_same_contract, contract_of
from threefold.tune.ledger import _TABLES, LEDGER, open_ledger
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


EMPTY_TABLES = (
    "CREATE TABLE trials (id INTEGER PRIMARY KEY, stage TEXT, round INTEGER, role TEXT, session TEXT, plan TEXT,"
    " fields TEXT, began REAL, seconds REAL, measurement TEXT);"
    "CREATE TABLE verdicts (stage TEXT, role TEXT, value TEXT);"
)
FACTS = "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);"
COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
PROGRAMS = {
    "view": f"CREATE VIEW facts AS {COUNT} SELECT 'k' || x AS key, '1' AS value FROM c;" + EMPTY_TABLES,
    "another view": FACTS + EMPTY_TABLES + f"CREATE VIEW more AS {COUNT} SELECT x FROM c;",
    "trigger": FACTS + EMPTY_TABLES + "CREATE TRIGGER t AFTER INSERT ON facts BEGIN DELETE FROM trials; END;",
    "computed": "CREATE TABLE facts (key TEXT, value TEXT AS (hex(zeroblob(1000000))));" + EMPTY_TABLES,
    "index": FACTS + EMPTY_TABLES + "CREATE INDEX i ON facts (hex(zeroblob(1000000)));",
    "virtual": "CREATE VIRTUAL TABLE facts USING fts5(key, value);" + EMPTY_TABLES,
}


def refused_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """One finding of each verb that opens a ledger, and no page."""
    said = ""
    for words in (["report", str(folder), "--out", str(folder / "page.html")], ["tune", "--show", str(folder)]):
        code, said, err = command(*words, capsys=capsys)
        assert (code, err) == (1, "")
        assert said.count("error[ledger-readable]") == said.count("error[") == 1
    assert not (folder / "page.html").exists()
    return said


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_ledger_that_computes_is_refused(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Views without an end among them: no query over one is begun, also not by a tuning that would resume."""
    with closing(sqlite3.connect(tmp_path / LEDGER)) as database:
        database.executescript(PROGRAMS[program])
    assert "its tables are not those of a ledger" in refused_everywhere(tmp_path, capsys)
    with pytest.raises(FindingsError, match="not those of a ledger"), open_ledger(tmp_path):
        pass


TRIAL = (1, "s", 1, "baseline", "x", "p", "{}", 1.0, 2.0, "{}")
STRANGE_TRIALS = {"seconds": "NaN", "began": 1e400, "stage": None, "round": "many", "role": b"x", "measurement": "7"}
STRANGE_MEASUREMENTS: list[dict[str, object]] = [
    {"steps": ["fast"]}, {"steps": [0]}, {"steps": [-1.0]}, {"steps": [1e400]}, {"steps": 3}, {"losses": [None]},
    {"error": 5}, {"effects": [3]}, {"effects": [{}]}, {"peak_bytes": "much"}, {"flops": -1}, {"wall_evidence": [2]},
]  # fmt: skip
STRANGE_VERDICTS: list[dict[str, object]] = [
    {}, {"verdict": 3}, {"verdict": "better", "gain": "much"}, {"verdict": "better", "interval": [1]},
    {"verdict": "better", "interval": "ab"}, {"verdict": "better", "interval": [None, 1]}, {"verdict": "x", "why": 5},
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "row"),
    [
        *(("trials", dict(zip(_TABLES["trials"], TRIAL, strict=True)) | {k: v}) for k, v in STRANGE_TRIALS.items()),
        *(
            ("trials", dict(zip(_TABLES["trials"], TRIAL, strict=True)) | {"measurement": json.dumps(one)})
            for one in STRANGE_MEASUREMENTS
        ),
        *(("verdicts", {"stage": "s", "role": "r", "value": json.dumps(one)}) for one in STRANGE_VERDICTS),
        *(("facts", {"key": "contract", "value": one}) for one in ("[]", "5", "[" * 99_999, b"{}\xff")),
    ],
    ids=str,
)
def test_a_strange_row_is_a_finding(
    table: str, row: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(tmp_path / LEDGER)) as database, database:
        database.executescript(FACTS + EMPTY_TABLES)
        columns, places = ", ".join(row), ", ".join("?" * len(row))
        database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", list(row.values()))
    refused_everywhere(tmp_path, capsys)


def test_a_tuning_whose_trials_all_failed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(tmp_path / LEDGER)) as database, database:
        database.executescript(FACTS + EMPTY_TABLES)
        failed = json.dumps({"error": "out of memory"})
        database.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*TRIAL[:-1], failed))
    code, _, err = command("report", str(tmp_path), "--out", str(tmp_path / "page.html"), capsys=capsys)
    assert (code, err) == (0, "")
    assert "out of memory" in (tmp_path / "page.html").read_text()
    code, said, _ = command("tune", "--show", str(tmp_path), capsys=capsys)
    assert (code, "out of memory" in said) == (0, True)


def test_what_is_read_of_a_ledger_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(tmp_path / LEDGER)) as database, database:
        database.executescript(FACTS + EMPTY_TABLES)
        failed = json.dumps({"error": "out of memory"})
        rows = [(number, *TRIAL[1:-1], failed) for number in range(5000)]
        database.executemany("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    for name, most, why in (
        ("MAX_BYTES", 1000, "more than 1000 bytes"),
        ("MAX_ROWS", 4999, "more than 4999 rows"),
        ("MAX_STEPS", 20_000, "interrupted"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(ledger_module, name, most)
            assert why in refused_everywhere(tmp_path, capsys)
    assert command("tune", "--show", str(tmp_path), capsys=capsys)[0] == 0
