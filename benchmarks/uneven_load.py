"""Simulated steps under the workloads of docs/reference/load.md: as they come, with copies of experts, and balanced.

    python -m benchmarks.uneven_load --out docs/images/uneven-load.svg

prints a table for each number of ranks, and draws it. Nothing is measured: rates are those of the estimate.
"""

import argparse
import json
from pathlib import Path

from threefold.cost.expert_load import load_of
from threefold.cost.time.simulation import simulate_step
from threefold.plan.load import BALANCED, WORKLOADS
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

RANKS = (64, 256, 1024)
STEPS = 32
# 32 experts a rank in groups of 8 ranks would hide most of a skew; EP 64 with 4 experts a rank is what DeepSeek-V3 had.
FIELDS = {
    "model": "deepseek-v3",
    "target": "threefold",
    "cluster.chip": "h100",
    "job.seq_len": 4096,
    "job.mtp": 0,
    "layout.ep": 64,
    "knobs.precision": "bf16",
    "knobs.dispatcher": "alltoall",
}


def plan_of(ranks: int, load: str, copies: int) -> Plan:
    pp = {64: 1, 256: 4, 1024: 8}[ranks]
    balance = {"knobs.expert_balance": "replicate", "knobs.expert_copies": copies} if copies else {}
    fields = {
        **FIELDS,
        "cluster.gpus": ranks,
        "layout.pp": pp,
        "job.global_batch": 8 * ranks,
        "job.load": load,
        **balance,
    }
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def rows_of(ranks: int) -> list[dict[str, float | str]]:
    even = simulate_step(plan_of(ranks, BALANCED, 0), 0.0, draws=1).median_seconds
    rows: list[dict[str, float | str]] = []
    for load in WORKLOADS:
        found = {copies: simulate_step(plan_of(ranks, load, copies), 0.0, draws=STEPS) for copies in (0, 1, 2)}
        mean = {copies: sum(one.seconds) / STEPS / even for copies, one in found.items()}
        skews = {copies: load_of(plan_of(ranks, load, copies)).skew for copies in found}
        rows.append({"load": load, **{f"skew {n}": skews[n] for n in skews}, **{f"steps {n}": mean[n] for n in mean}})
    return rows


def draw(tables: dict[int, list[dict[str, float | str]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(tables)), layout="constrained")
    for axes, (ranks, rows) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables.items(), strict=True):
        for n, (key, name) in enumerate(
            (("steps 0", "as it comes"), ("steps 1", "1 copy a rank"), ("steps 2", "2 copies"))
        ):
            places = [i + 0.27 * (n - 1) for i in range(len(rows))]
            axes.bar(places, [float(row[key]) for row in rows], 0.25, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(rows)), [str(row["load"]) for row in rows])
        axes.set_ylabel("step over the balanced one")
        axes.set_title(f"{ranks} ranks, simulated", loc="left")
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="draw the tables")
    parser.add_argument("--json", type=Path, help="write them")
    args = parser.parse_args()
    tables = {ranks: rows_of(ranks) for ranks in RANKS}
    for ranks, rows in tables.items():
        print(f"{ranks} ranks")
        for row in rows:
            print("  ".join(f"{value:15}" if isinstance(value, str) else f"{value:6.2f}" for value in row.values()))
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1))
    if args.out:
        draw(tables, args.out)


if __name__ == "__main__":
    main()
