"""Whether a run, of the threefold engine or of another system, can be accepted: the last step of the workflow.

`threefold validate` calls `validate_run` or `validate_logs`. A short window of steps may reject a candidate; accepting
one takes 50 unprofiled steps and more, finite losses, peak memory, a checkpoint that was resumed, and proof that what
the plan asks for ran. Each check passes, fails, or cannot be answered from what is there. A configuration is no proof.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from threefold.compare.contract import Contract, differences, undeclared, unstated
from threefold.diagnose.logs.job_logs import JobLogs
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed
from threefold.profile.readers.run_record import RunRecord
from threefold.safe_files import read_json_object
from threefold.units import format_bytes, format_many, format_number

SCREENED_STEPS = 6  # that may reject a candidate
ACCEPTED_STEPS = 50  # that it takes to accept one
EFFECTS = "effects.json"
NO_KNOB_OF_PROOF = ("bf16", "fp32", "fp16")

Answer = Literal["pass", "fail", "unknown"]
Verdict = Literal["accepted", "screened", "rejected", "not enough evidence", "benchmark-only"]
Window = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Check:
    """One question of a validation, with its answer and evidence."""

    name: str
    answer: Answer
    evidence: str
    to_accept: bool = True  # whether accepting needs it; what only accepting needs does not keep a screening back

    def to_json(self) -> dict[str, Any]:
        return {"check": self.name, "answer": self.answer, "evidence": self.evidence}


@dataclass(frozen=True)
class Validation:
    """The checks of a run, and what follows from them."""

    contract: Contract
    checks: tuple[Check, ...]
    num_steps: int  # of the window

    @property
    def verdict(self) -> Verdict:
        if any(check.answer == "fail" for check in self.checks):
            return "rejected"
        if self.contract.why_benchmark:
            return "benchmark-only"
        if all(check.answer == "pass" for check in self.checks):
            return "accepted"
        needed = [check for check in self.checks if not check.to_accept]
        is_screened = self.num_steps >= SCREENED_STEPS and all(check.answer == "pass" for check in needed)
        return "screened" if is_screened else "not enough evidence"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "label": self.contract.label,
            "why_benchmark": list(self.contract.why_benchmark),
            "contract": self.contract.hash,
            "num_steps": self.num_steps,
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass(frozen=True)
class Seen:
    """What is known of the steps of a run, wherever they were read."""

    steps: np.ndarray[Any, np.dtype[np.float64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    losses: np.ndarray[Any, np.dtype[np.float64]]
    is_steady: np.ndarray[Any, np.dtype[np.bool_]]
    num_bad: int  # steps whose loss or gradient norm was not finite
    num_skipped: int
    profiled: tuple[tuple[int, int], ...] = ()


def validate_run(
    run: RunRecord, contract: Contract, window: Window, frozen: Contract | None, declared: Sequence[str]
) -> Validation:
    """Validate a run of the threefold engine from its folder."""
    columns, timing = run.columns, run.contract.get("timing")
    starts = [each for each in timing if isinstance(each, dict)] if isinstance(timing, list) else []
    profiled = tuple(
        (int(pair[0]), int(pair[1]))
        for each in starts
        if isinstance(pair := each.get("profiled_steps"), list) and len(pair) == 2 and all(map(_is_count, pair))
    )
    norm = np.isfinite(columns["grad_norm"])
    bad = ~np.isfinite(columns["loss"]) | (~norm & norm.any())
    skipped = int(run.last("skipped_steps") or 0)
    seen = Seen(
        columns["step"], columns["seconds"], columns["loss"], run.is_steady(window), int(bad.sum()), skipped, profiled
    )
    checks = [*_of_steps(seen, window, run.last("tflops_per_gpu") or run.last("tflops"))]
    peak = columns["memory_bytes"][np.isfinite(columns["memory_bytes"])]
    checks.append(_memory(float(peak.max()) if len(peak) else None, run.plan, "the rank that uses most"))
    checks.append(_resumed(run.folder, starts))
    checks += _proof_of_effects(run.folder, run.plan)
    return Validation(contract, (*checks, *_of_contract(contract, frozen, declared)), int(seen.is_steady.sum()))


def validate_logs(
    logs: JobLogs, contract: Contract, window: Window, frozen: Contract | None, declared: Sequence[str],
    kernels: Mapping[str, bool] | None = None,
) -> Validation:  # fmt: skip
    """Validate a job from its logs. `kernels`: what its traces show, by the name of a setting."""
    table = {name: np.asarray(column, dtype=np.float64) for name, column in logs.steps.columns.items()}
    steps = table["step"]
    warmup = min(SCREENED_STEPS, len(steps) // 2)
    inside = np.arange(len(steps)) >= warmup if window is None else (steps >= window[0]) & (steps <= window[1])
    bad, skipped = logs.steps.num_nan, logs.steps.num_skipped
    seen = Seen(steps, table["seconds"], table["loss"], inside & (table["seconds"] > 0), bad, skipped)
    checks = [_alive(logs), *_of_steps(seen, window, logs.health.tflops)]
    peaks = [
        size for values in logs.printed.memory_bytes.values() for name, size in values.items()
        if "max" in name or "peak" in name
    ]  # fmt: skip
    ranks = f"{format_many(len(logs.printed.memory_bytes), 'rank')} that reported it"
    checks.append(_memory(max(peaks) if peaks else None, logs.configuration.plan, ranks))
    both = {"saved", "loaded"} <= logs.checkpoints
    evidence = f"the log says {' and '.join(sorted(logs.checkpoints)) or 'nothing'} of checkpoints"
    checks.append(Check("checkpoint saved and resumed", "pass" if both else "unknown", evidence))
    checks += _proof_of_kernels(logs, kernels or {})
    return Validation(contract, (*checks, *_of_contract(contract, frozen, declared)), int(seen.is_steady.sum()))


def _of_steps(seen: Seen, window: Window, tflops: float | None) -> Iterator[Check]:
    count = int(seen.is_steady.sum())
    inside = seen.steps[seen.is_steady]
    where = f"steps {inside[0]:.0f} to {inside[-1]:.0f}" if count else "none"
    kind = "declared" if window else "not declared: --window FIRST:LAST"
    screen: Answer = "pass" if count >= SCREENED_STEPS else "unknown"
    yield Check("steps to reject by", screen, f"{count} of {SCREENED_STEPS} timed steps ({where})", to_accept=False)
    enough: Answer = "pass" if count >= ACCEPTED_STEPS and window else "unknown"
    yield Check("steps to accept by", enough, f"{count} of {ACCEPTED_STEPS}; the window is {kind} ({where})")
    overlap = [f"{a} to {b}" for a, b in seen.profiled if count and a <= inside[-1] and b >= inside[0]]
    evidence = f"steps {', '.join(overlap)} were profiled" if overlap else "no step of the window was profiled"
    yield Check("unprofiled", "fail" if overlap else "pass", evidence, to_accept=False)
    losses = seen.losses[np.isfinite(seen.losses)]
    if not len(seen.losses) or (not len(losses) and not seen.num_bad):
        yield Check("finite losses", "unknown", "no loss was reported", to_accept=False)
    else:
        said = f"{format_many(seen.num_bad, 'step')} not finite"
        said += f"; {format_number(losses[0])} to {format_number(losses[-1])}" if len(losses) else ""
        yield Check("finite losses", "fail" if seen.num_bad else "pass", said, to_accept=False)
    skipped = f"{format_many(seen.num_skipped, 'step')} skipped"
    yield Check("no skipped steps", "fail" if seen.num_skipped else "pass", skipped, to_accept=False)
    if count:
        seconds = seen.seconds[seen.is_steady]
        middle, low, high = (float(np.percentile(seconds, at)) for at in (50, 10, 90))
        said = f"{middle:.4g} s a step, median ({low:.4g} to {high:.4g})"
        said += f"; {tflops:.4g} TFLOP/s a GPU" if tflops else ""
        yield Check("step time", "pass", said, to_accept=False)
    else:
        yield Check("step time", "unknown", "no timed step", to_accept=False)


def _memory(peak: float | None, plan: Plan | None, ranks: str) -> Check:
    name = "peak memory"
    if peak is None:
        return Check(name, "unknown", "no rank reported its peak after the optimizer's states were made")
    capacity = plan.chip.memory_bytes if plan and plan.chip.architecture != "cpu" else None
    said = f"{format_bytes(peak)}, {ranks}"
    if capacity is None:
        return Check(name, "pass", said)
    return Check(name, "pass" if peak <= capacity else "fail", f"{said}; the chip has {format_bytes(capacity)}")


def _resumed(folder: Path, starts: Sequence[Mapping[str, Any]]) -> Check:
    name = "checkpoint saved and resumed"
    firsts = [each["first_step"] for each in starts if _is_count(each.get("first_step"))]
    resumed = [first for first in firsts if first > 1]
    if resumed:
        return Check(name, "pass", f"resumed at step {', '.join(map(str, resumed))}")
    saved = any((folder / "checkpoints").glob("step-*"))
    said = "saved, never resumed: stop the run and give the same command again" if saved else "none was saved"
    return Check(name, "unknown", said)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _proof_of_effects(folder: Path, plan: Plan) -> Iterator[Check]:
    """What the run observed of its settings in one of its steps."""
    try:
        effects = read_json_object(folder / EFFECTS, within=folder).get("effects")
    except (OSError, ValueError):
        effects = None
    rows = [each for each in effects if isinstance(each, dict)] if isinstance(effects, list) else []
    if not rows:
        yield Check("settings ran", "unknown", "the run observed no step: effects.json is absent")
        return
    chosen = [each for each in rows if each.get("is_chosen", True)]
    dead = [f"{each.get('knob')}: {each.get('evidence')}" for each in chosen if each.get("took_effect") is False]
    unclear = [str(each.get("knob")) for each in chosen if each.get("took_effect") is None]
    if dead:
        yield Check("settings ran", "fail", listed([text[:160] for text in dead]), to_accept=False)
    elif unclear:
        yield Check("settings ran", "unknown", f"nothing shows {', '.join(unclear)[:200]}")
    else:
        yield Check("settings ran", "pass", f"{format_many(len(chosen), 'setting')} seen in a step of the run")


def _proof_of_kernels(logs: JobLogs, kernels: Mapping[str, bool]) -> Iterator[Check]:
    """What logs and traces of a foreign job show of its settings."""
    if logs.notices:
        said = listed([f"{slug}: {text}" for slug, text in logs.notices.items()])
        yield Check("settings ran", "fail", said, to_accept=False)
        return
    plan = logs.configuration.plan
    if plan is None:
        yield Check("settings ran", "unknown", "no configuration was printed")
        return
    asked = list(_settings_to_prove(plan))
    absent = [name for name in asked if kernels.get(name) is False]
    unclear = [name for name in asked if name not in kernels]
    if absent:
        yield Check("settings ran", "fail", f"no kernel of the traces shows {', '.join(absent)}", to_accept=False)
    elif unclear:
        yield Check("settings ran", "unknown", f"a configuration is no proof of {', '.join(unclear)}: give a trace too")
    else:
        yield Check("settings ran", "pass", f"in the traces: {', '.join(asked) or 'nothing to show'}")


def _settings_to_prove(plan: Plan) -> Iterator[str]:
    """Settings that may fall back in silence, and that kernels of a trace show."""
    if plan.knobs.precision not in NO_KNOB_OF_PROOF:
        yield "knobs.precision"
    if plan.knobs.dispatcher in ("deepep", "hybridep"):
        yield "knobs.dispatcher"
    if plan.knobs.graphs:
        yield "knobs.graphs"


# What of a profile shows a setting: a kernel's name, in lower case.
_KERNELS: dict[str, Callable[[str], bool]] = {
    "knobs.precision": lambda name: any(word in name for word in ("fp8", "e4m3", "e5m2", "mxf8", "nvf4", "_qmma")),
    "knobs.dispatcher": lambda name: "deep_ep" in name or "hybrid_ep" in name or "hybridep" in name,
    "knobs.graphs": lambda name: "graphlaunch" in name or "graph_launch" in name,
}


def settings_in_kernels(names: Sequence[str]) -> dict[str, bool]:
    """Which settings the names of kernels and runtime calls of a trace show."""
    lowered = [name.lower() for name in names]
    return {setting: any(map(is_shown, lowered)) for setting, is_shown in _KERNELS.items()}


def _alive(logs: JobLogs) -> Check:
    verdict = logs.verdict
    if verdict.status == "died":
        return Check("came to its end", "fail", f"died of {verdict.slug or 'something unknown'}", to_accept=False)
    if verdict.status == "finished":
        return Check("came to its end", "pass", "the log says so", to_accept=False)
    steps = logs.steps
    done = steps.total is not None and steps.last >= steps.total
    return Check("came to its end", "pass" if done else "unknown", f"last step {steps.last} of {steps.total}")


def _of_contract(contract: Contract, frozen: Contract | None, declared: Sequence[str]) -> Iterator[Check]:
    if not any(path == "job.data" or path.startswith("data.") for path in contract.facts):
        yield Check("data is known", "unknown", "the logs do not say on what data they trained: give --plan")
    if frozen is None:
        return
    more = undeclared(differences(frozen, contract), declared)
    name = f"contract {frozen.hash}"
    if more:
        said = listed([f"{each.field} ({each.kind})" for each in more])
        yield Check(name, "fail", f"{format_many(len(more), 'undeclared difference')}: {said}", to_accept=False)
        return
    lacking = unstated(frozen, contract)
    said = f"kept; {format_many(len(lacking), 'fact')} of it not stated here" if lacking else "kept"
    yield Check(name, "pass" if not math.isclose(len(lacking), len(frozen.facts)) else "unknown", said)
