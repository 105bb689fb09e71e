"""The ledger of a tuning, DIR/ledger.sqlite: the contract, every finished trial, and every verdict.

    facts       key, value           the contract, the wall, the candidates of each race, what was adopted
    trials      one row a trial      stage, round, role, plan fields, measurement, when and how long
    verdicts    one row a candidate  of each stage: the change, why it was tried, the predicted and the measured gain

A trial is written in one transaction when it is done, so that a kill at any moment loses no finished trial. Values are
JSON. `open_ledger` is the only way in; a lock keeps a second tuning out of the folder.

A ledger may come from a stranger: it has the tables below and nothing that computes (views, triggers, indexes of
expressions), the types of all values are checked, and its size, its rows and the steps to read them are bounded.
"""

import fcntl
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.safe_files import parse_json
from threefold.sqlite_file import connect_to_read, distrust, plain_tables
from threefold.tune.measurement import Measurement

LEDGER = "ledger.sqlite"
MAX_BYTES = 2**26
MAX_ROWS = 100_000
MAX_STEPS = 100_000_000  # of SQLite's machine, to read a ledger of a finished tuning; a row takes some 20
_STEPS_BETWEEN_LOOKS = 10_000
BASELINE = "baseline"  # the role of the plan that candidates of a stage are compared with
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL, round INTEGER NOT NULL, role TEXT NOT NULL, session TEXT NOT NULL,
    plan TEXT NOT NULL, fields TEXT NOT NULL, began REAL NOT NULL, seconds REAL NOT NULL, measurement TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    stage TEXT NOT NULL, role TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (stage, role));
"""
_TABLES = {
    "facts": ["key", "value"],
    "trials": ["id", "stage", "round", "role", "session", "plan", "fields", "began", "seconds", "measurement"],
    "verdicts": ["stage", "role", "value"],
}


class DamagedError(ValueError):
    """A value in the database is not what this module writes."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One finished trial."""

    number: int
    stage: str
    round: int
    role: str  # BASELINE, or the candidate's change as overrides
    session: str  # trials of one session follow each other without a gap
    plan: str  # the hash
    began: float
    seconds: float  # that the trial took, with everything around its steps
    measurement: Measurement

    @property
    def middle(self) -> float:
        return self.began + self.seconds / 2

    def to_json(self) -> dict[str, Any]:
        found = self.measurement
        return {
            "trial": self.number,
            "stage": self.stage,
            "round": self.round,
            "role": self.role,
            "plan": self.plan,
            "step_seconds": found.seconds if found.steps else None,
            "num_steps": len(found.steps),
            "peak_bytes": found.peak_bytes,
            "skipped": found.skipped,
            "failure": found.failure,
            "error": found.error,
            "seconds": self.seconds,
        }


class Ledger:
    """Reads and writes the database. All writes are committed when they return."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._rows: list[TrialRow] | None = None  # every trial, once they were read

    def fact(self, key: str) -> Any:
        """The value of a fact; None where there is none."""
        row = self._database.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return _decoded(row[0]) if row else None

    @property
    def contract(self) -> dict[str, Any] | None:
        """What all trials share; None before the first."""
        found = self.fact("contract")
        return None if found is None else _object(found)

    def set_fact(self, key: str, value: Any) -> None:
        with self._database:
            self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))

    def add_trial(
        self, key: tuple[str, int, str], session: str, plan: tuple[str, Mapping[str, Any]], when: tuple[float, float],
        measurement: Measurement,
    ) -> None:  # fmt: skip
        """`key`: stage, round and role; `plan`: hash and fields; `when`: beginning and length."""
        values = (*key, session, plan[0], json.dumps(dict(plan[1])), *when, json.dumps(measurement.to_json()))
        before = self.trials()
        with self._database:
            done = self._database.execute(
                "INSERT INTO trials (stage, round, role, session, plan, fields, began, seconds, measurement)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        assert done.lastrowid is not None
        stage, number, role = key
        row = TrialRow(done.lastrowid, stage, number, role, session, plan[0], when[0], when[1], measurement)
        self._rows = [*before, row]

    def trials(self, stage: str | None = None) -> list[TrialRow]:
        """Finished trials in their order, of one stage or of all."""
        if self._rows is None:
            columns = "id, stage, round, role, session, plan, began, seconds, measurement"
            rows = self._database.execute(f"SELECT {columns} FROM trials ORDER BY id")
            self._rows = [_row(values) for values in _bounded(rows)]
        return [row for row in self._rows if stage is None or row.stage == stage]

    def fields_of(self, plan: str) -> dict[str, Any]:
        row = self._database.execute("SELECT fields FROM trials WHERE plan = ?", (plan,)).fetchone()
        return _object(_decoded(row[0])) if row else {}

    @property
    def spent_seconds(self) -> float:
        """What all trials took together."""
        return sum(row.seconds for row in self.trials())

    def set_verdict(self, stage: str, role: str, value: Mapping[str, Any]) -> None:
        with self._database:
            self._database.execute(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (stage, role, json.dumps(dict(value)))
            )

    def verdicts(self) -> list[dict[str, Any]]:
        rows = self._database.execute("SELECT stage, role, value FROM verdicts ORDER BY rowid")
        return [_verdict(*values) for values in _bounded(rows)]


def _bounded(rows: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    found = rows.fetchmany(MAX_ROWS + 1)
    if len(found) > MAX_ROWS:
        raise DamagedError(f"it has more than {MAX_ROWS} rows")
    return found


def _decoded(text: Any) -> Any:
    try:
        return parse_json(text)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a value is no JSON: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DamagedError("a value is no JSON object")
    return value


def _row(values: tuple[Any, ...]) -> TrialRow:
    number, stage, round_, role, session, plan, began, seconds, text = values
    texts, times = (stage, role, session, plan), (began, seconds)
    are_times = all(isinstance(one, float) and math.isfinite(one) for one in times)
    if not (isinstance(round_, int) and all(isinstance(one, str) for one in texts) and are_times):
        raise DamagedError(f"trial {number} has a value of a wrong type")
    try:
        measurement = Measurement.from_json(_object(_decoded(text)))
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the measurement of trial {number} cannot be read: {error}") from None
    return TrialRow(number, stage, round_, role, session, plan, began, seconds, measurement)


def _verdict(stage: Any, role: Any, text: Any) -> dict[str, Any]:
    found = {"stage": stage, "change": role, **_object(_decoded(text))}
    texts = [found["stage"], found["change"], found.get("verdict"), found.get("reason") or "", found.get("why") or ""]
    interval = found.get("interval")
    numbers = [found.get("gain"), found.get("predicted_gain"), *(interval if isinstance(interval, list) else ())]
    is_pair = interval is None or (isinstance(interval, list) and len(interval) == 2 and None not in interval)
    if not (is_pair and all(isinstance(one, str) for one in texts) and all(map(_is_gain, numbers))):
        raise DamagedError("a verdict has a value of a wrong type")
    return found


def _is_gain(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12)


@contextmanager
def open_ledger(folder: Path, create: bool = True) -> Iterator[Ledger]:
    """The ledger of a folder. Raises a finding where it cannot be used, is damaged, or is in use."""
    path = folder / LEDGER
    if not create and not path.is_file():
        advice = "give the --out folder of a tuning"
        raise FindingsError(
            [Finding(rule="ledger-readable", at=str(folder), problem=f"there is no {LEDGER} in it", advice=advice)]
        )
    with ExitStack() as closing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if create:
                closing.enter_context(_locked(folder))
            database = sqlite3.connect(path, timeout=30) if create else connect_to_read(path)
            closing.callback(database.close)
            _check_plain(path, database)
            if create:
                distrust(database)
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_SCHEMA)
            else:
                _limit_steps(database)
        except (OSError, sqlite3.Error, DamagedError) as error:
            raise _unusable(path, error) from error
        try:
            yield Ledger(database)
        except (sqlite3.Error, DamagedError) as error:
            raise _unusable(path, error) from error


def _check_plain(path: Path, database: sqlite3.Connection) -> None:
    """Raise unless the database is empty, or has the tables of a ledger and nothing else."""
    if path.stat().st_size > MAX_BYTES:
        raise DamagedError(f"it has more than {MAX_BYTES} bytes")
    [(num_entries,)] = database.execute("SELECT count(*) FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex_%'")
    tables = plain_tables(database)
    if num_entries != len(tables) or any(_TABLES.get(name) != columns for name, columns in tables.items()):
        raise DamagedError("its tables are not those of a ledger")


def _limit_steps(database: sqlite3.Connection) -> None:
    """End what takes too long; SQLite then says that it was interrupted."""
    looks = iter(range(MAX_STEPS // _STEPS_BETWEEN_LOOKS))
    database.set_progress_handler(lambda: next(looks, None) is None, _STEPS_BETWEEN_LOOKS)


def _unusable(path: Path, error: Exception) -> FindingsError:
    advice = "choose another --out folder, or restore the file"
    return FindingsError(
        [Finding(rule="ledger-readable", at=str(path), problem=f"cannot be used: {error}", advice=advice)]
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another tuning is at work in this folder") from None
        yield
