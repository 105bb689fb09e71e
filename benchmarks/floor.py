"""The split of the published rows into those that rates are fitted to and those that judge the fit, and the floor.

    python benchmarks/floor.py --split     # write data/split.json
    python benchmarks/floor.py             # print the floor as a table for docs/log/estimate.md

The floor is what no model of a plan's settings can explain: rows with the same settings that differ all the same,
because releases differ and runs are repeated. `tools/fit_rates.py` reads the split.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from threefold.interop.published import is_usable, load_rows, plan_from_row

ROOT = Path(__file__).parent.parent
RUNS, SPLIT = ROOT / "data" / "published_runs.json", ROOT / "data" / "split.json"
Row = Mapping[str, Any]
RULE = (
    "A group is all rows with one model, system and precision. It is judged where the first eight hexadecimal digits "
    "of the SHA-256 of 'model:system:precision' are a multiple of four; else rates are fitted to it."
)


def group_name(row: Row) -> str:
    return f"{row['model']}:{row['system']}:{row.get('precision')}"


def is_judged(row: Row) -> bool:
    return int(hashlib.sha256(group_name(row).encode()).hexdigest()[:8], 16) % 4 == 0


def usable_rows(path: Path = RUNS) -> list[dict[str, Any]]:
    return [row for row in load_rows(path) if is_usable(row)]


def split(rows: Iterable[Row]) -> dict[str, Any]:
    rows = list(rows)
    return {
        "rule": RULE,
        "fit": sorted(row["id"] for row in rows if not is_judged(row)),
        "judged": sorted(row["id"] for row in rows if is_judged(row)),
    }


def settings(row: Row) -> tuple[str | None, dict[str, Any]]:
    """The release of a row, and all other settings of its plan."""
    written = dict(plan_from_row(row).plan.written)
    return written.pop("stack.release", None), written


def throughput(row: Row) -> float:
    """Tokens a second and GPU from the finer column: TFLOP/s of GPT-OSS changed their numerator in 26.06."""
    return float(row["tokens_per_s_per_gpu_from_tflops"])


def replicates(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows whose settings are equal but for the release."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(settings(row)[1], sort_keys=True, default=str), []).append(row)
    return [members for members in found.values() if len(members) > 1]


def one_difference(rows: Iterable[Row]) -> list[tuple[Row, Row, str]]:
    """Pairs of one release that differ in one setting."""
    found = []
    for one, other in combinations(list(rows), 2):
        if (one["model"], one["system"]) != (other["model"], other["system"]):
            continue
        (release, before), (same, after) = settings(one), settings(other)
        fields = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        if release == same and len(fields) == 1:
            found.append((one, other, fields[0]))
    return found


def floor(rows: list[dict[str, Any]]) -> str:
    """The floor as Markdown."""
    sets = replicates(rows)
    off = np.concatenate([_from_median(members) for members in sets])
    patch = [abs(throughput(b) / throughput(a) - 1) for one in sets for a, b in _neighbors(one)]
    worst = sorted(((abs(e), row["id"]) for one in sets for e, row in zip(_from_median(one), one, strict=True)))[-2:]
    rest = np.array(sorted(np.abs(off))[:-2])
    pairs = one_difference(rows)
    lines = [
        "| what differs | rows | mean | median | 90th percentile | largest |",
        "|---|---|---|---|---|---|",
        _line(f"the release alone, from the median of {len(sets)} sets of equal settings", np.abs(off)),
        _line("the same without the two largest", rest),
        _line("a patch release and the release that it patches", np.array(patch)),
        "",
        "The two largest:",
        "",
        *(f"- `{name}`, {size:.0%}" for size, name in reversed(worst)),
        "",
        f"Pairs of one release with one setting changed: {len(pairs)}",
        "",
        *(
            f"- `{b['id']}`, `{field}` against\n  `{a['id']}`: {throughput(b) / throughput(a) - 1:+.1%}"
            for a, b, field in pairs
        ),
    ]
    return "\n".join(lines)


def _from_median(members: list[Row]) -> np.ndarray:
    speed = np.array([throughput(row) for row in members])
    return speed / np.median(speed) - 1


def _neighbors(members: list[Row]) -> list[tuple[Row, Row]]:
    """A release and its patch, such as 26.04 and 26.04.01."""
    named = {settings(row)[0]: row for row in members}
    return [(named[name], named[f"{name}.01"]) for name in named if f"{name}.01" in named]


def _line(what: str, off: np.ndarray) -> str:
    sizes = (off.mean(), np.median(off), np.quantile(off, 0.9), off.max())
    return f"| {what} | {len(off)} | " + " | ".join(f"{size:.1%}" for size in sizes) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", action="store_true", help=f"write {SPLIT.relative_to(ROOT)}")
    args = parser.parse_args()
    rows = usable_rows()
    if args.split:
        SPLIT.write_text(json.dumps(split(rows), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {SPLIT.relative_to(ROOT)}")
    else:
        print(floor(rows))


if __name__ == "__main__":
    main()
