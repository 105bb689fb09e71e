"""The record of what was measured: every result with its commit and machine, what got slower, and curves.

python benchmarks/history.py add FILE [FILE ...]     write result files into the record, under the commit checked out
python benchmarks/history.py fill                    the same for every version of every result file in git's history
python benchmarks/history.py [--limit 0.05] [--plot FILE.png] [--names step-h200 ...]
                                                     say what got slower or faster since the result before

The record is one file of JSON lines a benchmark, `benchmarks/results/history/NAME.jsonl`. A line holds the times of one
result file, in milliseconds and by the path of keys to each of them, for example

    {"benchmark": "moe_layer-h200", "commit": "0d6a740...", "date": "2026-11-15",
     "machine": "NVIDIA H200, torch 2.11.0", "ms": {"rows/qwen3-16k/threefold/ms": 6.76, ...}}

`fill` writes the commit that a result file came with: the code that was measured is that commit or the one before it.
`add` writes the commit that is checked out, with a "+" where there are changes on top of it.
Only results of one machine are compared. A GPU at its power limit is as fast as the last second has left it, and
results of two days differ by some 3 % without a cause; the ratios inside one result file say more than a time alone.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
RECORD = RESULTS / "history"
UNITS = {"ms": 1.0, "us": 1e-3, "seconds": 1e3}  # the last word of a key -> milliseconds
SKIPPED = ("earlier_run", "spread_ms", "wall_ms", "machine")  # keys that hold no measurement of their own
MAX_LABEL = 40  # characters; longer texts do not name a row
MAX_CURVES = 12


@dataclass(frozen=True)
class Entry:
    """The times of one result file."""

    benchmark: str
    commit: str
    date: str
    machine: str
    ms: dict[str, float]  # by path of keys


@dataclass(frozen=True)
class Change:
    """A time in two results of one machine that follow each other."""

    path: str
    before: Entry
    after: Entry

    @property
    def ratio(self) -> float:
        return self.after.ms[self.path] / self.before.ms[self.path]


def times_in(result: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """(path, milliseconds) of every time in a result file. Rows of a list are named by their texts and integers. Under
    a key that is a unit, there may be one time for each side, by name."""
    if isinstance(result, list):
        for row in result:
            if isinstance(row, dict):
                yield from times_in(row, (*path, _row_label(row)))
    if not isinstance(result, dict):
        return
    for key, value in result.items():
        if key in SKIPPED:
            continue
        unit = UNITS.get(key.rsplit("_", 1)[-1])
        if unit is not None:
            times = {(key, side): time for side, time in value.items()} if isinstance(value, dict) else {(key,): value}
            for names, time in times.items():
                if isinstance(time, int | float) and time == time and time > 0:  # not nan
                    yield "/".join((*path, *names)), time * unit
        elif isinstance(value, dict | list):
            yield from times_in(value, (*path, key))


def _row_label(row: dict[str, Any]) -> str:
    said = [str(value) for value in row.values() if isinstance(value, str | int) and len(str(value)) <= MAX_LABEL]
    return " ".join(said)


def machine_of(result: dict[str, Any]) -> str:
    """A machine in words. Times of two different ones are not compared."""
    facts = result.get("machine")
    if isinstance(facts, str):
        return facts
    if not isinstance(facts, dict):
        return "not said"
    chip = facts.get("gpu") or facts.get("cpu") or facts.get("device", "not said")
    return f"{chip}, torch {facts['torch'].split('+')[0]}" if "torch" in facts else str(chip)


def entry_of(name: str, text: str, commit: str, date: str) -> Entry | None:
    """None where the file holds no times. A date in the name of a file is that of the measurement."""
    result = json.loads(text)
    ms = dict(times_in(result))
    if not ms or not isinstance(result, dict):
        return None
    dated = re.fullmatch(r"(.+)-(\d{4}-\d\d-\d\d)", name)
    benchmark, date = dated.groups() if dated else (name, str(result.get("date", date)))
    return Entry(benchmark, commit, date, machine_of(result), ms)


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def entries_of_git() -> Iterator[Entry]:
    """Every version of every result file, oldest first. A version that changed no time is left out."""
    last: dict[str, dict[str, float]] = {}
    where = RESULTS.relative_to(ROOT)
    for line in git("log", "--reverse", "--format=%H %cs", "--", str(where)).splitlines():
        commit, date = line.split()
        for path in git("diff-tree", "--no-commit-id", "--name-only", "--diff-filter=d", "-r", commit).splitlines():
            if Path(path).parent != where or not path.endswith(".json"):
                continue
            entry = entry_of(Path(path).stem, git("show", f"{commit}:{path}"), commit, date)
            if entry is not None and last.get(path) != entry.ms:
                last[path] = entry.ms
                yield entry


def read(names: list[str] | None = None) -> dict[str, list[Entry]]:
    """Entries by benchmark, oldest first."""
    files = sorted(RECORD.glob("*.jsonl"))
    found = {
        file.stem: [Entry(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
        if names is None or file.stem in names
    }
    return {name: sorted(entries, key=lambda entry: entry.date) for name, entries in found.items()}


def add(entries: list[Entry]) -> int:
    """Append those that the record does not hold yet. -> their number."""
    RECORD.mkdir(parents=True, exist_ok=True)
    known = read()
    added = 0
    for entry in entries:
        if any(old.ms == entry.ms and old.date == entry.date for old in known.get(entry.benchmark, [])):
            continue
        known.setdefault(entry.benchmark, []).append(entry)
        with (RECORD / f"{entry.benchmark}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        added += 1
    return added


def changes(entries: list[Entry]) -> Iterator[Change]:
    """Every time of the last result, against the latest one before it that has it, on the same machine."""
    if not entries:
        return
    *earlier, after = entries
    for path in after.ms:
        for before in reversed(earlier):
            if before.machine == after.machine and path in before.ms:
                yield Change(path, before, after)
                break


def say(found: dict[str, list[Entry]], limit: float) -> int:
    """Print what changed by more than `limit`, slower first. -> the number of times that got longer."""
    slower = 0
    for name, entries in found.items():
        moved = [change for change in changes(entries) if not 1 / (1 + limit) <= change.ratio <= 1 + limit]
        slower += sum(change.ratio > 1 for change in moved)
        compared = sum(1 for _ in changes(entries))
        print(f"{name}: {len(entries)} results, {compared} times to compare, {len(moved)} changed by > {limit:.0%}")
        for change in sorted(moved, key=lambda change: -change.ratio):
            before, after = change.before, change.after
            word = "slower" if change.ratio > 1 else "faster"
            times = f"{before.ms[change.path]:.4g} -> {after.ms[change.path]:.4g} ms"
            print(f"  {word} {change.ratio:5.2f}x  {change.path}: {times} ({before.commit[:7]} -> {after.commit[:7]})")
    return slower


def plot(found: dict[str, list[Entry]], path: Path) -> None:
    """A picture with one curve a time, over its first value, for benchmarks that have more than one result."""
    from matplotlib.figure import Figure

    drawn = {name: entries for name, entries in found.items() if any(True for _ in changes(entries))}
    if not drawn:
        print("no benchmark has two results to compare: nothing to draw")
        return
    figure = Figure(figsize=(9.0, 3.2 * len(drawn)), dpi=130, layout="constrained")
    rows = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, (name, entries) in zip(rows, drawn.items(), strict=True):
        by_path = {path: [entry for entry in entries if path in entry.ms] for path in entries[-1].ms}
        curves = {path: points for path, points in by_path.items() if len(points) > 1}
        for path_in_file in sorted(curves, key=lambda one: -entries[-1].ms[one])[:MAX_CURVES]:
            points = curves[path_in_file]
            first = points[0].ms[path_in_file]
            places = [entries.index(point) for point in points]
            axes.plot(places, [point.ms[path_in_file] / first for point in points], "o-", label=path_in_file)
        axes.set_title(f"{name}: time over its first value (less is faster)", fontsize=10)
        axes.set_xticks(range(len(entries)), [f"{entry.commit[:7]}\n{entry.date}" for entry in entries], fontsize=7)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=("say", "add", "fill"), default="say")
    parser.add_argument("files", nargs="*", type=Path, help="result files, for `add`")
    parser.add_argument("--names", nargs="+", help="these benchmarks only")
    parser.add_argument("--limit", type=float, default=0.05, help="changes up to this are not said")
    parser.add_argument("--plot", type=Path, help="write a picture of the curves")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where something got slower")
    args = parser.parse_args()
    if args.verb == "fill":
        print(f"{add(list(entries_of_git()))} results added")
    if args.verb == "add":
        commit = git("describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*").strip()
        date = datetime.now(UTC).date().isoformat()
        made = [entry_of(file.stem, file.read_text(encoding="utf-8"), commit, date) for file in args.files]
        print(f"{add([entry for entry in made if entry is not None])} results added")
    found = read(args.names)
    slower = say(found, args.limit) if args.verb == "say" else 0
    if args.plot:
        plot(found, args.plot)
    return 1 if args.fail and slower else 0


if __name__ == "__main__":
    sys.exit(main())
