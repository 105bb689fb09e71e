"""Runs layouts drawn at random one after the other, and keeps what became of each in a file, one JSON object a line.

`benchmarks/layouts.py` calls `run_ledger`. It may be stopped at any time: with the same seed it continues after the
draws that the file has. A draw is tried again where it changed, because its generator did, where it hung, because the
machine may have been busy, and where it failed in another engine; its last record counts.
"""

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drawn_coverage import Coverage, asked_fields, turned_fields
from drawn_layouts import Drawn
from layout_runs import FAULTS, LIMIT_SECONDS, Outcome, run_draw

import threefold.engine.schedule.pipeline  # noqa: F401  # imports torch's compiler: once here, not on every rank

Record = dict[str, Any]
Runner = Callable[[Drawn, float], Outcome]
ENGINE = Path(__file__).parents[2] / "threefold" / "engine"


def run_ledger(
    path: Path, draws: Iterable[Drawn], limit: float = LIMIT_SECONDS, run: Runner = run_draw
) -> Iterator[Record]:
    """Run the draws that the ledger does not have, and yield their records as they are written."""
    engine = engine_digest()
    known = {record["draw"] for record in read_ledger(path) if not _is_tried_again(record, engine)}
    path.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # so that ranks do not copy the memory that they share with this process
    is_torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as ledger:
        ledger.write("\n" if is_torn else "")
        for drawn in draws:
            if digest(drawn) in known:
                continue
            begin = time.monotonic()
            # Other processes slow a draw down: they are no reason to call it a hang.
            busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            record = _run_bounded(drawn, busy * limit, run)
            record |= {"engine": engine, "seconds": round(time.monotonic() - begin, 2)}
            ledger.write(json.dumps(record) + "\n")
            ledger.flush()
            yield record


def read_ledger(path: Path) -> list[Record]:
    """The last record of each draw. A line that a kill cut short is left out, so that its draw runs again."""
    records: dict[str, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["draw"]] = record
    return [*records.values()]


def _is_tried_again(record: Record, engine: str) -> bool:
    return bool(record["kind"] == "HANG" or (record["kind"] in FAULTS and record["engine"] != engine))


def digest(drawn: Drawn) -> str:
    """Names a draw by what it is: another configuration or field under the same seed is another draw."""
    text = json.dumps([drawn.seed, drawn.config, drawn.fields, drawn.as_trained], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_digest() -> str:
    """Names the engine by its sources."""
    files = sorted(ENGINE.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _run_bounded(drawn: Drawn, limit: float, run: Runner) -> Record:
    """Run a draw in a process of its own, which is killed with all its ranks where it does not end.

    The ranks of the layout and the one rank have `limit` seconds each.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run_in_child, args=(sender, drawn, limit, run))
    process.start()
    sender.close()
    facts = {"seed": drawn.seed, "draw": digest(drawn), "theme": drawn.theme, "as_trained": drawn.as_trained}
    facts |= {"model": drawn.fields["model"], "asked": asked_fields(drawn), "turned": [], "rules": []}
    most = 3 * limit
    try:
        result = receiver.recv() if receiver.poll(most) else {"kind": "HANG", "said": f"still runs after {most:.0f} s"}
    except EOFError:
        result = {"kind": "CRASH", "said": "the process ended without a word"}
    if process.is_alive() and process.pid:
        _kill_group(process.pid)
    process.join()
    record = {**facts, **result}
    return record | ({"config": drawn.config, "drawn": drawn.fields} if record["kind"] in FAULTS else {})


def _run_in_child(sender: Connection, drawn: Drawn, limit: float, run: Runner) -> None:
    os.setsid()
    try:
        outcome = run(drawn, limit)
        resolved = outcome.resolved
        turned = [] if resolved.plan is None else turned_fields(resolved.plan)
        rules = [*resolved.repaired, *resolved.refusals]
        sender.send({"kind": outcome.kind, "said": outcome.said, "turned": turned, "rules": rules})
    except Exception:
        sender.send({"kind": "CRASH", "said": traceback.format_exc()})
    sender.close()
    os._exit(0)


def _kill_group(leader: int) -> None:
    os.kill(leader, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it had not yet made a group of its own
        os.killpg(leader, signal.SIGKILL)


def summary(records: Iterable[Record]) -> Iterator[str]:
    """What became of all draws, those of each engine, and which fields were turned together."""
    kinds: Counter[str] = Counter()
    engines: dict[str, Counter[str]] = {}
    themes: Counter[str] = Counter()
    coverage, seconds = Coverage(), 0.0
    for record in records:
        kinds[record["kind"]] += 1
        engines.setdefault(record["engine"], Counter())[record["kind"]] += 1
        seconds += record["seconds"]
        coverage.add(record["asked"], record["turned"], record["rules"])
        if record["turned"]:
            themes[record["theme"] or "no theme"] += 1
    yield f"{kinds.total()} draws in {seconds:.0f} s: {_told(kinds)}"
    yield from (f"engine {name}: {_told(counts)}" for name, counts in engines.items())
    yield f"themes: {_told(themes)}"
    yield from coverage.lines()


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
