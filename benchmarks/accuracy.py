"""Predictions against published runs: throughput, peak memory, and the size of one-variable changes.

    python benchmarks/accuracy.py --runs data/published_runs.json [--json]

Takes any file in the schema of data/published_runs.json. A row is used for throughput when it is usable as
data/README.md defines it, for memory when it states an allocator peak and its settings are known.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from threefold.cost.estimate import estimate
from threefold.interop.published import cannot_express, is_usable, load_rows, plan_from_row
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.rules.all import check, errors
from threefold.units import GIB

ROOT = Path(__file__).parent.parent
Row = Mapping[str, Any]
GROUPED_BY = ("model", "task", "system", "gpus", "seq_len", "gbs", "precision", "release")
TOLD_APART = 0.03  # two throughputs that differ by less count as equal


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of one row."""

    row: Row
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def plan_of(row: Row) -> tuple[Plan | None, str]:
    """The plan behind a row, or why there is none."""
    if reason := cannot_express(row):
        return None, reason
    parsed = plan_from_row(row)
    if parsed.plan is None:
        return None, f"not a plan: {parsed.findings[0].problem}"
    found = errors(check(parsed.plan))
    impossible = [finding for finding in found if finding.rule != "states-fit-memory"]
    if impossible:
        return None, f"refused by {impossible[0].rule}: {impossible[0].problem}"
    return parsed.plan, ""


def memory_reason(row: Row, plan: Plan) -> str:
    """Why a stated peak cannot be compared, or nothing."""
    kind = str(row.get("peak_memory_kind") or "")
    if not row.get("peak_memory_gib"):
        return "no peak stated"
    if "device memory" in kind or "estimate" in kind or "kind unspecified" in kind:
        return f"not an allocator peak: {kind}"
    if row.get("status") != "ok":
        return f"status {row.get('status')}: the peak was not reached"
    stated = all(row.get(name) for name in ("gbs", "mbs", "seq_len", "tp", "pp", "ep"))
    if not row.get("knobs_match") and not (stated and row.get("is_moe")):
        return "settings not known"
    if "vision encoder" in plan.model.approximate:
        return "the model's vision encoder is not described"
    return ""


def figures(points: list[Point]) -> dict[str, Any]:
    if not points:
        return {"rows": 0}
    error = np.array([100 * point.error for point in points])
    size = np.abs(error)
    return {
        "rows": len(points),
        "mean_abs_pct": round(float(size.mean()), 2),
        "median_abs_pct": round(float(np.median(size)), 2),
        "p90_abs_pct": round(float(np.quantile(size, 0.9)), 2),
        "bias_pct": round(float(error.mean()), 2),
        "rank_correlation": rank_correlation(points),
    }


def rank_correlation(points: list[Point]) -> float | None:
    if len(points) < 3:
        return None
    ranks = [np.argsort(np.argsort([getattr(p, name) for p in points])) for name in ("predicted", "measured")]
    if ranks[0].std() == 0 or ranks[1].std() == 0:
        return None
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 3)


def speed(row: Row) -> float | None:
    """What a row says about throughput, for changes inside a group: TFLOP/s, or steps per second."""
    if row.get("tflops_per_gpu"):
        return float(row["tflops_per_gpu"])
    return 1 / row["step_time_s"] if row.get("step_time_s") else None


def changes(rows: list[dict[str, Any]], skipped: list[dict[str, str]]) -> list[dict[str, Any]]:
    """For each group the first row is the baseline; each other row gives a measured and a predicted change."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("ab_group"):
            groups.setdefault(row["ab_group"], []).append(row)
    found = []
    for name, members in groups.items():
        pairs = []
        for row in members:
            plan, reason = plan_of(row)
            if plan is None or speed(row) is None:
                skipped.append({"id": row["id"], "reason": f"A/B: {reason or 'no throughput stated'}"})
            else:
                pairs.append((row, plan))
        if len(pairs) < 2:
            continue
        base_row, base_plan = pairs[0]
        base_speed, base_guess = speed(base_row), _throughput(base_row, base_plan)
        for row, plan in pairs[1:]:
            measured, guess = speed(row), _throughput(row, plan)
            assert base_speed is not None
            assert measured is not None
            before, after = dict(base_plan.written), dict(plan.written)
            fields = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
            found.append(
                {
                    "group": name,
                    "variable": row.get("ab_variable"),
                    "from": base_row["id"],
                    "to": row["id"],
                    "fields": fields,
                    "measured_change_pct": round(100 * (measured / base_speed - 1), 2),
                    "predicted_change_pct": round(100 * (guess / base_guess - 1), 2),
                }
            )
    return found


def choices(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How much throughput the plan that is predicted fastest loses against the best measured one of its group, and how
    many pairs of a group that differ by more than 3 % are predicted in the right order.

    A group is all rows that ran one model and task on so many GPUs of one chip, with one length, global batch,
    precision and release.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        plan, _ = plan_of(row)
        if (
            plan is None
            or row.get("status") != "ok"
            or row.get("superseded")
            or speed(row) is None
            or not row.get("gbs")
        ):
            continue
        key = (*(row.get(name) for name in GROUPED_BY), bool(row.get("tflops_per_gpu")))
        groups.setdefault(key, []).append((_throughput(row, plan), float(speed(row) or 0)))
    tried = [members for members in groups.values() if len(members) > 1]
    lost = [1 - _chosen(members) / max(measured for _, measured in members) for members in tried]
    pairs = [
        (one[0] - other[0]) * (one[1] - other[1]) > 0
        for members in tried
        for one, other in combinations(members, 2)
        if abs(one[1] / other[1] - 1) > TOLD_APART and one[0] != other[0]  # plans that are equal have no order
    ]
    if not pairs:
        return {"groups": len(tried), "pairs": 0}
    low, high = wilson(sum(pairs), len(pairs))
    return {
        "groups": len(tried),
        "rows": sum(map(len, tried)),
        "regret_mean_pct": round(100 * float(np.mean(lost)), 2),
        "regret_worst_pct": round(100 * max(lost), 2),
        "pairs": len(pairs),
        "right_pct": round(100 * sum(pairs) / len(pairs), 1),
        "right_95_pct": [round(100 * low, 1), round(100 * high, 1)],
    }


def _chosen(members: list[tuple[float, float]]) -> float:
    """The measured throughput of what is predicted fastest: the mean, where plans are equal."""
    best = max(predicted for predicted, _ in members)
    return float(np.mean([measured for predicted, measured in members if predicted == best]))


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score."""
    z, share = 1.96, right / count
    middle, width = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - width) / (1 + z * z / count), (middle + width) / (1 + z * z / count)


def _throughput(row: Row, plan: Plan) -> float:
    guess = estimate(plan)
    return guess.model_tflops_per_gpu if row.get("tflops_per_gpu") else 1 / guess.time.step_seconds


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    throughput, memory, skipped = [], [], []
    for row in rows:
        wants_time, wants_memory = is_usable(row), bool(row.get("peak_memory_gib"))
        if not wants_time and not wants_memory:
            skipped.append({"id": row["id"], "reason": "neither a usable throughput row nor a stated peak"})
            continue
        plan, reason = plan_of(row)
        if plan is None:
            skipped.append({"id": row["id"], "reason": reason})
            continue
        guess = estimate(plan)
        if wants_time:
            throughput.append(Point(row, guess.model_tflops_per_gpu, float(row["tflops_per_gpu"])))
        if wants_memory:
            why_not = memory_reason(row, plan)
            if why_not:
                skipped.append({"id": row["id"], "reason": f"memory: {why_not}"})
            else:
                memory.append(Point(row, guess.memory.peak_bytes / GIB, float(row["peak_memory_gib"])))
    return {
        "throughput": figures(throughput),
        "memory": figures(memory),
        "ab": changes(rows, skipped),
        "choices": choices(rows),
        "groups": by_group(throughput),
        "per_row": [per_row(p, "tflops_per_gpu") for p in throughput] + [per_row(p, "peak_gib") for p in memory],
        "skipped": skipped,
    }


def by_group(points: list[Point]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.row["model"], point.row["system"]), []).append(point)
    return [{"group": f"{model} on {system}", **figures(found)} for (model, system), found in sorted(groups.items())]


def per_row(point: Point, figure: str) -> dict[str, Any]:
    return {
        "id": point.row["id"],
        "figure": figure,
        "predicted": round(point.predicted, 3),
        "measured": point.measured,
        "error_pct": round(100 * point.error, 2),
    }


def show(result: dict[str, Any]) -> None:
    rows = [
        [r["id"], r["figure"], f"{r['predicted']:.1f}", f"{r['measured']:.1f}", f"{r['error_pct']:+.1f}"]
        for r in result["per_row"]
    ]
    print(table(["row", "figure", "predicted", "measured", "error %"], rows))
    print()
    groups = [
        [g["group"], str(g["rows"]), f"{g['mean_abs_pct']:.1f}", f"{g['bias_pct']:+.1f}"] for g in result["groups"]
    ]
    print(table(["model on system", "rows", "mean abs %", "bias %"], groups))
    print()
    pairs = [
        [
            c["group"],
            c["to"],
            f"{c['measured_change_pct']:+.1f}",
            f"{c['predicted_change_pct']:+.1f}",
            " ".join(c["fields"]),
        ]
        for c in result["ab"]
    ]
    print(table(["A/B group", "row", "measured %", "predicted %", "fields that differ"], pairs))
    print()
    for what in ("throughput", "memory"):
        print(f"{what:11}", "  ".join(f"{name} {value}" for name, value in result[what].items()))
    print("choices    ", "  ".join(f"{name} {value}" for name, value in result["choices"].items()))
    print(f"skipped     {len(result['skipped'])} rows; --json lists each with its reason")


def plot(result: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and memory, predicted against measured, one color a system."""
    import matplotlib.pyplot as plt

    systems = {row["id"]: row["system"] for row in rows}
    colors = {name: f"C{i}" for i, name in enumerate(sorted({s for s in systems.values() if s}))}
    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    for axis, name, label in zip(
        axes, ("tflops_per_gpu", "peak_gib"), ("TFLOP/s per GPU", "peak memory, GiB"), strict=True
    ):
        points = [row for row in result["per_row"] if row["figure"] == name]
        for system in sorted({systems[row["id"]] for row in points}):
            mine = [row for row in points if systems[row["id"]] == system]
            measured, predicted = [r["measured"] for r in mine], [r["predicted"] for r in mine]
            axis.scatter(measured, predicted, s=22, alpha=0.8, color=colors[system], label=system)
        low = 0.8 * min(row["measured"] for row in points)
        high = 1.15 * max(max(row["measured"], row["predicted"]) for row in points)
        axis.plot([low, high], [low, high], color="0.3", linewidth=1)
        axis.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], color="0.9", zorder=0)
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axis.set(xlabel=f"measured {label}", ylabel=f"predicted {label}")
        which = "throughput" if name == "tflops_per_gpu" else "memory"
        axis.set_title(f"{which}: {len(points)} rows, mean error {result[which]['mean_abs_pct']:.1f} %", fontsize=11)
        axis.legend(frameon=False)
    figure.suptitle("Predicted against published runs; gray: 20 % off", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "data" / "published_runs.json")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", type=Path, help="write a picture of predicted against measured")
    args = parser.parse_args()
    try:
        rows = load_rows(args.runs)
    except (OSError, ValueError) as error:
        print(f"accuracy: cannot read {args.runs}: {error}", file=sys.stderr)
        return 1
    result = judge(rows)
    if args.plot:
        plot(result, rows, args.plot)
    if args.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
