"""The ledger of a tuning, DIR/ledger.sqlite: the contract, every finished trial, and every verdict.

    facts       key, value           the contract, the wall, the candidates of each race, what was adopted
    trials      one row a trial      stage, round, role, plan fields, measurement, when and how long
    verdicts    one row a candidate  of each stage: the change, why it was tried, the predicted and the measured gain

A trial is written in one transaction when it is done, so that a kill at any moment loses no finished trial. Values are
JSON. `open_ledger` is the only way in; a lock keeps a second tuning out of the folder.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.tune.measurement import Measurement

LEDGER = "ledger.sqlite"
BASELINE = "baseline"  # the role of the plan that candidates of a stage are compared with
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL, round INTEGER NOT NULL, role TEXT NOT NULL, session TEXT NOT NULL,
    plan TEXT NOT NULL, fields TEXT NOT NULL, began REAL NOT NULL, seconds REAL NOT NULL, measurement TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    stage TEXT NOT NULL, role TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (stage, role));
"""


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
            self._rows = [_row(values) for values in rows]
        return [row for row in self._rows if stage is None or row.stage == stage]

    def fields_of(self, plan: str) -> dict[str, Any]:
        row = self._database.execute("SELECT fields FROM trials WHERE plan = ?", (plan,)).fetchone()
        return dict(_decoded(row[0])) if row else {}

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
        return [{"stage": stage, "change": role, **dict(_decoded(value))} for stage, role, value in rows]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"a value is no JSON: {error}") from None


def _row(values: tuple[Any, ...]) -> TrialRow:
    number, stage, round_, role, session, plan, began, seconds, text = values
    return TrialRow(number, stage, round_, role, session, plan, began, seconds, _measurement(text))


def _measurement(text: str) -> Measurement:
    try:
        return Measurement.from_json(_decoded(text))
    except (TypeError, AttributeError) as error:
        raise DamagedError(f"a measurement cannot be read: {error}") from None


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
            database = sqlite3.connect(path, timeout=30)
            closing.callback(database.close)
            if create:
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from error
        try:
            yield Ledger(database)
        except (sqlite3.Error, DamagedError) as error:
            raise _unusable(path, error) from error


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
