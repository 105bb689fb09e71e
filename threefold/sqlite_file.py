"""SQLite files that may come from a stranger: opened for reading, only their plain tables, values of bounded size.

A database can hold programs: views, triggers, generated columns and virtual tables compute something when they are
read. None of them is used. The ledger of a tuning and exports of Nsight Systems are read through it.
"""

import sqlite3
from pathlib import Path

MAX_VALUE_BYTES = 2**26
_MAX_TABLES = 10_000


def connect_to_read(path: Path, is_still: bool = False) -> sqlite3.Connection:
    """Open a database for reading. `is_still` says that nobody writes it, so that no lock and no log is looked for."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * is_still}", uri=True, timeout=30)
    distrust(database)
    return database


def distrust(database: sqlite3.Connection) -> None:
    """Bound its values, and let its schema call no function with side effects."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    database.execute("PRAGMA trusted_schema = OFF")


def plain_tables(database: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns of each table that stores its rows: no view, no virtual table, no column that is computed."""
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
    names = [name for (name,) in listed.fetchmany(_MAX_TABLES) if isinstance(name, str)]
    return {name: _stored_columns(database, name) for name in names}


def _stored_columns(database: sqlite3.Connection, table: str) -> list[str]:
    """The columns in their order; table_info leaves out those that are computed."""
    quoted = table.replace('"', '""')
    return [row[1] for row in database.execute(f'PRAGMA table_info("{quoted}")')]
