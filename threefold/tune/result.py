"""The result of a tuning as JSON and as a plan file. `cli/tune.py` writes both; `report/tune.py` makes text of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.findings import as_overrides
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.safe_files import write_aside
from threefold.tune.loop import Tuned
from threefold.tune.measurement import Measurement

WINNER_FILE = "winner.toml"
NO_CHANGE = "no change is certain"


def plan_numbers(plan: Plan, found: Measurement) -> dict[str, Any]:
    """Speed and evidence of a measured plan. MFU is null on a CPU, whose peak is nominal."""
    seconds = found.seconds if found.steps else None
    per_gpu = found.flops / seconds / plan.layout.gpus if found.flops and seconds else None
    name, peak = (None, None) if plan.chip.architecture == "cpu" else plan.chip.dense_peak(plan.knobs.precision)
    return {
        "plan": plan.hash,
        "fields": {path: list(v) if isinstance(v, tuple) else v for path, v in plan.written},
        "level": "measured",
        "step_seconds": seconds,
        "num_steps": len(found.steps),
        "tokens_per_second": found.useful_tokens / seconds if found.useful_tokens and seconds else None,
        "tflops_per_gpu": per_gpu / 1e12 if per_gpu else None,
        "mfu": per_gpu / peak if per_gpu and peak else None,
        "mfu_peak": f"{plan.cluster.chip} {name} dense" if name else None,
        "peak_bytes": found.peak_bytes,
        "losses_finite": found.is_finite,
        "last_loss": found.losses[-1] if found.losses else None,
        "skipped_steps": found.skipped,
        "effects": list(found.effects),
        "without_effect": [
            f"knobs.{one['knob']}: {one['evidence']}"
            for one in found.effects
            if one.get("took_effect") is False and one.get("is_chosen")
        ],
    }


def tuned_json(found: Tuned, folder: Path) -> dict[str, Any]:
    """What `--json` prints."""
    confirmed, winner = found.confirmed, found.winner
    base = confirmed.baseline if confirmed and confirmed.baseline.steps else found.proof
    return {
        "level": "measured",
        "verdict": "improved" if winner else NO_CHANGE,
        "label": "benchmark-only" if found.baseline.is_benchmark_only else "training-equivalent",
        "baseline": plan_numbers(found.baseline, base),
        "winner": _winner_json(found, folder),
        "speedup": confirmed.speedup if winner and confirmed else 1.0,
        "interval": list(confirmed.interval) if winner and confirmed and confirmed.interval else None,
        "confirmation": _confirmation_json(found),
        "wall": {"name": found.wall, "source": found.wall_source, "evidence": list(found.wall_evidence)},
        "ended": found.ended,
        "verdicts": list(found.verdicts),
        "trials": [row.to_json() for row in found.trials],
        "contract": found.contract,
        "folder": str(folder),
    }


def _winner_json(found: Tuned, folder: Path) -> dict[str, Any] | None:
    if found.winner is None or found.confirmed is None:
        return None
    changes: dict[str, Any] = {}
    for one in found.adopted:
        changes |= dict(one.candidate.changes)
    return {
        **plan_numbers(found.winner, found.confirmed.winner),
        "set": changes,
        "label": "benchmark-only" if found.winner.is_benchmark_only else "training-equivalent",
        "steps": [{**one.candidate.to_json(), **one.verdict.to_json()} for one in found.adopted],
        "file": str(folder / WINNER_FILE),
    }


def _confirmation_json(found: Tuned) -> dict[str, Any] | None:
    confirmed = found.confirmed
    if confirmed is None:
        return None
    return {
        "speedup": confirmed.speedup,
        "interval": list(confirmed.interval) if confirmed.interval else None,
        "rounds": confirmed.rounds,
        "window": found.contract["timing"]["confirmed_steps"],
        "losses": confirmed.losses.to_json() if confirmed.losses else None,
        "refused": confirmed.reason or None,
    }


def write_winner(found: Tuned, folder: Path) -> Path | None:
    """Write the winner as a plan file that says what was changed and why; None where there is none.

    A tuning that goes on with more time may refuse an earlier winner: its file is deleted then.
    """
    path = folder / WINNER_FILE
    if found.winner is None:
        path.unlink(missing_ok=True)
        return None
    write_aside(path, ("\n".join([*_comments(found), "", dump_plan(found.winner)])).encode())
    return path


def _comments(found: Tuned) -> Iterator[str]:
    confirmed = found.confirmed
    assert confirmed is not None
    assert confirmed.interval is not None
    low, high = confirmed.interval
    first, last = found.contract["timing"]["confirmed_steps"]
    yield f"# Tuned by `threefold tune` from plan {found.baseline.hash}: {confirmed.speedup:.3f} times as fast"
    yield f"# (99 % interval {low:.3f} to {high:.3f}), confirmed over steps {first} to {last}."
    yield f"# Wall of the baseline: {found.wall} ({found.wall_source}). Changes, each against the best plan before it:"
    for one in found.adopted:
        predicted = one.candidate.predicted_gain
        guess = "not predicted" if predicted is None else f"predicted {predicted:+.1%}"
        yield f"#   {as_overrides(one.candidate.changes)}"
        yield f"#     {one.candidate.why}; measured {one.verdict.gain or 0.0:+.1%}, {guess}"
