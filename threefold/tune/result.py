"""The result of a tuning as JSON, as a plan file and as a card. `api/tunings.py` writes them; `report/tune.py` makes
text of the JSON."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from threefold.compare.contract import BENCHMARK, label_of, why_benchmark
from threefold.findings import as_overrides
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.safe_files import write_aside
from threefold.tune.labels import ALL_RANKS, label_change
from threefold.tune.loop import Tuned
from threefold.tune.measurement import Measurement

WINNER_FILE, RESULT_FILE, CARD_FILE = "winner.toml", "result.json", "card.toml"
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
        **({"images_per_second": found.images / seconds} if found.images and seconds else {}),
        "tflops_per_gpu": per_gpu / 1e12 if per_gpu else None,
        "mfu": per_gpu / peak if per_gpu and peak else None,
        "mfu_peak": f"{plan.chip.name} {name} dense" if name else None,
        "peak_bytes": found.peak_bytes,
        "losses_finite": found.is_finite if found.losses else None,
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
        "level": level_of(found.contract),
        "verdict": "improved" if winner else NO_CHANGE,
        "label": label_of(found.baseline),
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


def level_of(contract: Mapping[str, Any]) -> str:
    """How the steps of a tuning came about."""
    ranks = contract.get("ranks", ALL_RANKS)
    return "measured" if ranks == ALL_RANKS else f"{ranks}: compute measured, communication and bubble estimated"


def _winner_json(found: Tuned, folder: Path) -> dict[str, Any] | None:
    if found.winner is None or found.confirmed is None:
        return None
    changes: dict[str, Any] = {}
    for one in found.adopted:
        changes |= dict(one.candidate.changes)
    return {
        **plan_numbers(found.winner, found.confirmed.winner),
        "set": changes,
        "label": label_change(found.baseline, found.winner).kind if not why_benchmark(found.winner) else BENCHMARK,
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
        for name in (WINNER_FILE, RESULT_FILE, CARD_FILE):
            (folder / name).unlink(missing_ok=True)
        return None
    write_aside(path, ("\n".join([*_comments(found), "", dump_plan(found.winner)])).encode())
    return path


def write_card(found: Tuned, folder: Path, command: Sequence[str]) -> None:
    """Write the speedup of the winner as a card that `threefold card check` measures again.

    `command` is the command line that tuned the plan; the card has it try all changes of the winner at once.
    """
    if found.winner is None:
        return
    result = tuned_json(found, folder)
    changes = as_overrides(result["winner"]["set"])
    hardware, (low, _) = result["contract"]["hardware"], result["interval"]
    words = [*command, "--try", changes, "--trials", "1", "--json", "--out", "{folder}"]
    card = {
        "claim": f"The plan {found.baseline.hash} with {changes} is {{speedup}} times as fast as without",
        "date": date.today(),
        "machine": ", ".join(hardware["gpus"]) or f"{hardware['chip']}, {hardware['system']}",
        "command": shlex.join(words),
        "needs": {"chip": hardware["chip"]},
        "evidence": str(folder / RESULT_FILE),
        "minutes": max(1.0, round(found.confirmed_seconds / 60, 1)),
        "contract": _without_none(result["contract"]),
        "figures": [
            {
                "name": "speedup",
                "value": round(result["speedup"], 4),
                "at": "/speedup",
                "tolerance": round(1 - low / result["speedup"], 4),
            }
        ],
    }
    write_aside(folder / RESULT_FILE, (json.dumps(result, indent=1) + "\n").encode())
    write_aside(folder / CARD_FILE, tomli_w.dumps(card).encode())


def _without_none(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value if each is not None] if isinstance(value, list) else value


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
