"""Fit the rates of the megatron-bridge stack to published runs around priors, and leave groups out to judge the fit.

    python tools/fit_rates.py [--judge] [--no-cv] [--json FILE] [--write]
    python tools/fit_rates.py --table benchmarks/results/fit-published.json
    python tools/fit_rates.py --engine [--write]

Each rate is fitted as a logarithm around a prior: what a data sheet, a microbenchmark or our own engine on an H200 says
of it (`PRIORS`), with the spread that such a figure has. Rows of one model on one system share what the model of a step
lacks, so their errors have a common part (`GROUP_SPREAD`) beside that of each row: eight releases of one setting count
little more than one. Each feature release has one drift. `--judge` fits to the rows that `data/split.json` names for
it, and judges by the others. `--engine` fits our own engine to its measured steps, `data/threefold_runs.json`, around
the rates that it has. Only the newest steps are of the engine as it is: they change the rates of what has changed since
the older ones (`CHANGED`), to which the others were fitted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import judge, speed  # noqa: E402
from floor import RUNS, SPLIT, replicates, throughput, usable_rows  # noqa: E402

from threefold.cost.anchor import differing_fields, likeness  # noqa: E402
from threefold.cost.fit_rates import MeasuredStep, errors, fit_rates, held_out_errors  # noqa: E402
from threefold.cost.rates import Rates, rates_from, rates_to  # noqa: E402
from threefold.cost.time.step import step_time  # noqa: E402
from threefold.interop.published import cannot_express, load_rows, plan_from_row  # noqa: E402
from threefold.plan.parse import parse  # noqa: E402
from threefold.plan.plan import Plan  # noqa: E402
from threefold.spec.flops import flops_per_token  # noqa: E402

OUT = ROOT / "threefold" / "cost" / "calibration.json"
REFERENCE = "26.04"  # the release whose drift is 1
Row = Mapping[str, Any]

# By rate: the prior, the spread of its logarithm, and where the prior comes from.
PRIORS: dict[str, tuple[float, float, str]] = {
    "gemm": (0.70, 0.08, "0.71 with our engine on an H200"),
    "gemm_fp8": (
        0.62,
        0.10,
        "0.58 with our engine on an H200, in blocks; scales of 32 are applied by Blackwell itself",
    ),
    "grouped": (0.90, 0.10, "0.95 with our engine on an H200"),
    "attention": (0.55, 0.15, "0.56 with our engine on an H200"),
    "attention_blackwell": (0.55, 0.15, "as on Hopper"),
    "sink_passes": (6.0, 0.40, "a guess: no microbenchmark"),
    "passes": (1.5, 0.25, "0.96 with our fused kernels on an H200; Transformer Engine fuses less"),
    "quant_passes": (3.0, 0.30, "2.3 with our engine on an H200, which quantizes in one direction less"),
    "scan": (4.0, 0.40, "1.5 were counted for one fused kernel; Mamba's chunks are five kernels"),
    "fusion": (0.3, 0.40, "0.08 with our engine, which fuses more"),
    "hybridep": (0.70, 0.20, "of NVLink's data sheet"),
    "collective": (0.55, 0.25, "of NVLink's data sheet, for tens of megabytes over two ranks"),
    "hidden": (0.75, 0.15, "0.95 with our engine, of one exchange"),
    "host_mixer_seconds": (1.1e-3, 0.35, "1.7 ms with our engine, which is eager"),
    "host_moe_seconds": (1.5e-3, 0.35, "2.3 ms with our engine, with all local experts"),
    "host_expert_seconds": (60e-6, 0.50, "six GEMMs, launched one by one, of 6 to 10 us"),
    "host_fp8": (1.6, 0.30, "1.4 with our engine"),
    "host_graphed": (0.30, 0.40, "0.18 with our engine, which captures more of a layer"),
    "host_adam": (36e9, 0.30, "a tenth of the memory bandwidth of a host with two sockets, per GPU"),
    "sync_seconds": (0.5e-3, 0.40, "four copies to the host that are waited for"),
    "power": (0.40, 0.30, "clocks: power grows with the square to the cube of the frequency"),
    "adapter": (75e9, 0.30, "between one port of 400 Gb/s and two"),
}
# Rates that the rows say nothing about beside these: moving them does not change an error by 0.1 %.
ASSUMED = {
    "gemm_rows": 250.0,
    "alltoall": 0.65,
    "attention_latent": 0.8,  # 0.85 with our engine on an H200
    "network": 0.9,
    "ring": 0.8,
    "dp_hidden": 0.5,
    "routing_passes": 2.0,
    "host_grace": 1.1,
    "ramp": 0.15,
    "step_seconds": 0.06,
}
DRIFT_SPREAD, GROUP_SPREAD, PAIRS_SPREAD, ROW_SPREAD = 0.05, 0.08, 0.06, 0.03
FAULT = 0.25  # a row that is so much slower than another one with equal settings tells of a fault and is not fitted
LIKENESS = ("all settings", "all but two settings", "model, chip and precision", "model and chip", "model", "chip")
SHARE = 0.8  # of left-out rows that a band holds
MOST_ITERATIONS, LARGEST_MOVE, SMALLEST_MOVE, WIDTH = 8, 0.5, 0.01, 1e-3
KEYS: dict[str, Callable[[Row], str]] = {
    "model on a system": lambda row: f"{row['model']} on {row['system']}",
    "chip": lambda row: str(row["system"]),
    "model": lambda row: str(row["model"]),
    "feature release": lambda row: str(feature_release(row)),
    "precision": lambda row: str(row.get("precision")),
}
ENGINE_RUNS = ROOT / "data" / "threefold_runs.json"
# What was made faster between the first steps of our engine and the newest: grouped GEMMs, MLA's heads, quantization,
# launches that no longer wait, and the delta rule by flash-linear-attention.
CHANGED = (
    "grouped_rows",
    "latent_passes",
    "quant_passes",
    "expert_quant",
    "fusion",
    "fla_chunk_seconds",
    "host_mixer_seconds",
    "host_moe_seconds",
    "step_seconds",
)
ADAMW_RATE = 4.16 / 4.8  # of an H200's bandwidth, by the kernel alone: benchmarks/results/optimizer-h200.json


def feature_release(row: Row) -> str | None:
    """26.04 of 26.04.01, and None where a row is of no release."""
    release = plan_from_row(row).plan.stack.release or ""
    return release[:5] if release[:1].isdigit() else None


class Fit:
    """Rows as plans, and rates as a vector: logarithms of each rate over its prior, then of the drifts."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.plans = [plan_from_row(row).plan for row in rows]
        self.measured = np.log([row["tflops_per_gpu"] for row in rows])
        work = [flops_per_token(p.model, p.job.seq_len, p.mtp, p.layout.tp, p.stack.release) for p in self.plans]
        tokens = [p.tokens_per_step / p.layout.gpus / 1e12 for p in self.plans]
        self.work = np.array(work) * np.array(tokens)
        self.releases = [feature_release(row) for row in rows]
        self.drifts = sorted({release for release in self.releases if release} - {REFERENCE})
        self.spread = np.array([spread for _, spread, _ in PRIORS.values()] + [DRIFT_SPREAD] * len(self.drifts))
        self.groups = self.keys("model on a system")
        self.is_sound = np.array([row["id"] not in faults(rows) for row in rows])
        self.pairs = controlled_pairs(load_rows(RUNS))

    def keys(self, name: str) -> np.ndarray:
        return np.array([KEYS[name](row) for row in self.rows])

    def rates(self, x: np.ndarray) -> Rates:
        values = {name: float(PRIORS[name][0] * np.exp(v)) for name, v in zip(PRIORS, x, strict=False)}
        drift = {r: float(np.exp(v)) for r, v in zip(self.drifts, x[len(PRIORS) :], strict=True)}
        return replace(Rates(), **ASSUMED, **values, drift=drift)

    def predict(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Logarithms of TFLOP/s."""
        rates = self.rates(x)
        return np.array([np.log(self.work[i] / step_time(self.plans[i], rates).step_seconds) for i in index])

    def predict_pairs(self, x: np.ndarray, pairs: Sequence["Pair"]) -> np.ndarray:
        """Logarithms of the throughput of each second plan over that of its first."""
        rates = self.rates(x)
        seconds = [[step_time(plan, rates).step_seconds for plan in (pair.base, pair.other)] for pair in pairs]
        return np.array([np.log(base / other) for base, other in seconds])

    def solve(
        self,
        index: np.ndarray,
        start: np.ndarray | None = None,
        iterations: int = MOST_ITERATIONS,
        without: tuple[str, str] = ("chip", ""),
        slopes: np.ndarray | None = None,
    ) -> np.ndarray:
        """The vector with the highest posterior, by the method of Gauss and Newton. Pairs that have the key `without`
        are left out. `slopes` of all rows and pairs, `all_slopes`, are taken as they are near the start."""
        index = index[self.is_sound[index]]
        numbers = [i for i, pair in enumerate(self.pairs) if KEYS[without[0]](pair.row) != without[1]]
        pairs = [self.pairs[i] for i in numbers]
        precision = np.linalg.inv(self._covariance(index, pairs))
        measured = np.concatenate([self.measured[index], [pair.measured for pair in pairs]])

        def predict(x: np.ndarray) -> np.ndarray:
            return np.concatenate([self.predict(x, index), self.predict_pairs(x, pairs)])

        x = np.zeros(len(self.spread)) if start is None else start
        for _ in range(iterations):
            here = predict(x)
            if slopes is None:
                jacobian = np.stack([predict(x + step) - here for step in WIDTH * np.eye(len(x))], 1) / WIDTH
            else:
                jacobian = slopes[np.concatenate([index, len(self.rows) + np.array(numbers, int)])]
            normal = jacobian.T @ precision @ jacobian + np.diag(self.spread**-2)
            target = jacobian.T @ precision @ (measured - here + jacobian @ x)
            move = np.clip(np.linalg.solve(normal, target) - x, -LARGEST_MOVE, LARGEST_MOVE)
            x = x + move
            if np.abs(move).max() < SMALLEST_MOVE:
                break
        return x

    def _covariance(self, index: np.ndarray, pairs: Sequence["Pair"]) -> np.ndarray:
        rows, count = len(index), len(index) + len(pairs)
        same = self.groups[index][:, None] == self.groups[index]
        names = np.array([pair.row["ab_group"] for pair in pairs])
        found = np.zeros((count, count))
        found[:rows, :rows] = GROUP_SPREAD**2 * same + ROW_SPREAD**2 * np.eye(rows)
        found[rows:, rows:] = PAIRS_SPREAD**2 * (names[:, None] == names) + ROW_SPREAD**2 * np.eye(len(pairs))
        return found

    def all_slopes(self, x: np.ndarray) -> np.ndarray:
        """Derivatives of the prediction of every row, then of every pair."""
        index = np.arange(len(self.rows))

        def predict(x: np.ndarray) -> np.ndarray:
            return np.concatenate([self.predict(x, index), self.predict_pairs(x, self.pairs)])

        here = predict(x)
        return np.stack([predict(x + step) - here for step in WIDTH * np.eye(len(x))], 1) / WIDTH

    def errors(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.exp(self.predict(x, index) - self.measured[index]) - 1

    def left_out(self, name: str, start: np.ndarray) -> np.ndarray:
        """The error of each row with rates that were fitted without all rows of its key."""
        keys, found, slopes = self.keys(name), np.zeros(len(self.rows)), self.all_slopes(start)
        for key in sorted(set(keys)):
            out = np.flatnonzero(keys == key)
            found[out] = self.errors(
                self.solve(np.flatnonzero(keys != key), start, MOST_ITERATIONS, (name, key), slopes), out
            )
        return found


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of one A/B group that differ in one field."""

    row: Row  # the first
    base: Plan
    other: Plan
    measured: float  # logarithm of the throughput of the second over that of the first


def controlled_pairs(rows: list[dict[str, Any]]) -> list[Pair]:
    """Rows of an A/B group beside the first of it, where one field differs: these show what a knob does, even where the
    level of a run cannot be used."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("ab_group") and not cannot_express(row) and speed(row):
            groups.setdefault(row["ab_group"], []).append(row)
    found = []
    for first, *rest in groups.values():
        base = plan_from_row(first).plan
        for row in rest:
            other = plan_from_row(row).plan
            if base and other and len(differing_fields(base, other)) == 1:
                found.append(Pair(first, base, other, float(np.log(speed(row) / speed(first)))))
    return found


def faults(rows: list[dict[str, Any]]) -> set[str]:
    """Rows that are much slower than another one with equal settings: the fault of a release."""
    found = set()
    for members in replicates(rows):
        best = max(throughput(row) for row in members)
        found |= {row["id"] for row in members if throughput(row) < (1 - FAULT) * best}
    return found


def held_by_others(error: np.ndarray, groups: np.ndarray, share: float = SHARE) -> float:
    """The share of rows within a band that was read off the errors of all other groups."""
    size = np.abs(error)
    return float(np.mean([size[i] <= np.quantile(size[groups != groups[i]], share) for i in range(len(size))]))


def figures(error: np.ndarray) -> dict[str, float]:
    size = np.abs(error)
    return {
        "rows": len(size),
        "mean": round(float(size.mean()), 4),
        "median": round(float(np.median(size)), 4),
        "p80": round(float(np.quantile(size, SHARE)), 4),
        "p90": round(float(np.quantile(size, 0.9)), 4),
        "bias": round(float(error.mean()), 4),
    }


def summary(error: np.ndarray) -> str:
    return "  ".join(
        f"{name} {value:.1%}" if name != "rows" else f"{value} rows" for name, value in figures(error).items()
    )


def error_table(found: Mapping[str, Any]) -> str:
    """What `--json` wrote, as Markdown for docs/log/estimate.md."""
    percent = "{:.1%}".format
    lines = [
        "| left out of the fit | rows | mean error | median | 80 % of rows within | bias |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in {"nothing": found["in sample"], **found["left out"]}.items():
        shown = [percent(one[key]) for key in ("mean", "median", "p80")]
        title = name if name == "nothing" else f"a {name}"
        lines.append(f"| {title} | {one['rows']} | {' | '.join(shown)} | {one['bias']:+.1%} |")
    lines += ["", "| model on a system, left out | rows | mean error | bias |", "|---|---|---|---|"]
    for name, one in found["groups"].items():
        lines.append(f"| {name} | {one['rows']} | {percent(one['mean'])} | {one['bias']:+.1%} |")
    lines += [
        "",
        "| a measured run and the plan share | pairs | carried over | 80 % of pairs within |",
        "|---|---|---|---|",
    ]
    for name, one in found["anchors"].items():
        lines.append(f"| {name} | {one['pairs']} | {one['weight']:.0%} | {percent(one['band'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", action="store_true", help="fit to the rows for it, and judge by the others")
    parser.add_argument("--no-cv", action="store_true", help="leave nothing out")
    parser.add_argument("--json", type=Path, help="write the errors")
    parser.add_argument("--write", action="store_true", help=f"write {OUT.relative_to(ROOT)}")
    parser.add_argument("--table", type=Path, help="print what --json wrote, as docs/log/estimate.md has it")
    parser.add_argument("--engine", action="store_true", help="fit our own engine to its measured steps")
    args = parser.parse_args()
    if args.table:
        print(error_table(json.loads(args.table.read_text())))
        return
    if args.engine:
        fit_engine(args.write)
        return
    fit = Fit(usable_rows())
    everything = np.arange(len(fit.rows))
    fitted = everything
    if args.judge:
        names = set(json.loads(SPLIT.read_text())["fit"])
        fitted = np.array([i for i, row in enumerate(fit.rows) if row["id"] in names])
    x = fit.solve(fitted)
    for pair, ratio in zip(fit.pairs, fit.predict_pairs(x, fit.pairs), strict=True):
        print(f"  {pair.row['ab_group']:36} {np.expm1(pair.measured):+.1%} measured, {np.expm1(ratio):+.1%} predicted")
    error = fit.errors(x, fitted)
    found: dict[str, Any] = {"date": str(date.today()), "coefficients": len(x), "in sample": figures(error)}
    print(f"{len(fitted)} rows, {len(PRIORS)} rates and {len(fit.drifts)} drifts\nin sample  {summary(error)}")
    for name, value in zip(PRIORS, x, strict=False):
        prior, spread, _ = PRIORS[name]
        print(f"  {name:20} {prior:10.4g} -> {prior * np.exp(value):10.4g}  {value / spread:+.1f} spreads")
    if args.judge:
        judged = np.setdiff1d(everything, fitted)
        error = fit.errors(x, judged)
        found["judged"] = figures(error) | {"by_row": _by_row(fit, judged, error)}
        print(f"judged     {summary(error)}")
    elif not args.no_cv:
        found |= cross_validate(fit, x)
    found["memory"] = judge(load_rows(RUNS))["memory"]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.write and not args.judge:
        write(fit, fit.rates(x), found)


def cross_validate(fit: Fit, x: np.ndarray) -> dict[str, Any]:
    """Errors with each model on a system, chip, model, release and precision left out of the fit."""
    found: dict[str, Any] = {"left out": {}}
    for name in KEYS:
        error = fit.left_out(name, x)
        found["left out"][name] = figures(error)
        print(f"without a {name:18} {summary(error)}", flush=True)
        if name == "model on a system":
            groups = fit.groups
            found["held"] = round(held_by_others(error, groups), 3)
            by_group = {group: figures(error[groups == group]) for group in sorted(set(groups))}
            found["groups"] = by_group
            found["by_row"] = _by_row(fit, np.arange(len(error)), error)
            for group, one in by_group.items():
                print(f"    {group:28} {one['rows']} rows, mean {one['mean']:.1%}, bias {one['bias']:+.1%}")
            found["anchors"] = carried_over(fit, error)
            print(f"    a band from the other groups holds {found['held']:.0%} of the rows")
    return found


def carried_over(fit: Fit, error: np.ndarray) -> dict[str, dict[str, float]]:
    """What a measured run says of another plan, by what the two share: the part of its error that both have, and the
    error that is left, as `cost/anchor.py` reads them. From rows that their own fit had not seen."""
    log = np.log1p(error)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for i, plan in enumerate(fit.plans):
        for j, other in enumerate(fit.plans):
            if i != j and fit.is_sound[i] and fit.is_sound[j]:
                pairs.setdefault(likeness(plan, other), []).append((log[i], log[j]))
    found = {}
    for name in LIKENESS:
        one, other = np.array(pairs[name]).T
        weight = float(np.clip((one * other).sum() / (other**2).sum(), 0, 1))
        left = np.abs(np.expm1(one - weight * other))
        found[name] = {
            "pairs": len(one),
            "weight": round(weight, 2),
            "band": round(float(np.quantile(left, SHARE)), 3),
            "mean": round(float(left.mean()), 3),
        }
        print(f"    like a run with the same {name:26} {found[name]}")
    return found


def _by_row(fit: Fit, index: np.ndarray, error: np.ndarray) -> dict[str, float]:
    return {fit.rows[i]["id"]: round(float(e), 4) for i, e in zip(index, error, strict=True)}


def write(fit: Fit, rates: Rates, found: dict[str, Any]) -> None:
    counts: dict[str, int] = {}
    for plan in fit.plans:
        for key in (f"{plan.cluster.chip}:{plan.knobs.precision}", plan.knobs.dispatcher):
            counts[key] = counts.get(key, 0) + 1
    out = found["left out"]
    known = json.loads(OUT.read_text())
    known["megatron-bridge"] |= {
        "provenance": (
            f"{len(fit.rows)} published Megatron Bridge runs, fitted {date.today()}: mean error "
            f"{found['in sample']['mean']:.1%} in sample, {out['model on a system']['mean']:.1%} in leave-one-group-out"
        ),
        "rows": len(fit.rows),
        "band": round(out["model on a system"]["p80"], 3),
        "wide_band": round(2 * max(one["p80"] for one in out.values()), 3),
        "seen": sorted(key for key, count in counts.items() if count >= 5),
        "rates": rates_to(rates),
    }
    known["anchors"] = found["anchors"]
    OUT.write_text(json.dumps(known, indent=2) + "\n")
    print(f"wrote {OUT.relative_to(ROOT)}")


def fit_engine(write: bool) -> None:
    """Our own engine, by the steps that it was measured at on one GPU."""
    rows = json.loads(ENGINE_RUNS.read_text())
    newest = max(row["date"] for row in rows)
    plans = [parse(row["fields"]).plan for row in rows]
    pairs = zip(rows, plans, strict=True)
    steps = [MeasuredStep(plan, row["seconds"]) for row, plan in pairs if row["date"] == newest]
    known = json.loads(OUT.read_text())
    assumed = replace(rates_from(known["threefold"]["rates"]), optimizer=ADAMW_RATE)
    rates = fit_rates(steps, assumed, CHANGED)
    inside, held_out = np.array(errors(steps, rates)), np.array(held_out_errors(steps, assumed, CHANGED, rates))
    print(f"{len(steps)} steps of {newest}\nin sample   {summary(inside)}\nleft out    {summary(held_out)}")
    for name in CHANGED:
        print(f"  {name:20} {getattr(assumed, name):10.4g} -> {getattr(rates, name):10.4g}")
    if not write:
        return
    known["threefold"] = {
        "provenance": (
            f"{len(steps)} steps of this engine on one H200, {newest}: mean error {np.abs(inside).mean():.1%} in "
            f"sample, {np.abs(held_out).mean():.1%} for a step left out; what they do not show by "
            f"{len(rows) - len(steps)} older steps, exchanges between ranks as in published Megatron Bridge runs"
        ),
        "rows": len(rows),
        # The newest steps are few and alike, so that their errors say too little: the band never becomes narrower.
        "band": max(known["threefold"]["band"], round(float(np.quantile(np.abs(held_out), 0.9)), 3)),
        "wide_band": 0.75,  # twice the one and a half times of megatron-bridge's that were assumed before measurements
        "memory_band": 0.06,  # the most that random plans were off in benchmarks/rehearsal.py
        "seen": sorted({f"{plan.cluster.chip}:{plan.knobs.precision}" for plan in plans}),
        "longest": max(plan.job.seq_len for plan in plans),
        "most_gpus": max(plan.layout.gpus for plan in plans),
        "rates": rates_to(rates),
    }
    OUT.write_text(json.dumps(known, indent=2) + "\n")
    print(f"wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
