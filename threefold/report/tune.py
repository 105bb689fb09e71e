"""The result of a tuning, and the ledger of one, as text."""

from collections.abc import Sequence
from typing import Any

from threefold.report.terminal import table
from threefold.units import format_bytes


def tuned_text(found: dict[str, Any]) -> str:
    """What `threefold tune` prints, from its JSON."""
    baseline, winner, confirmation = found["baseline"], found["winner"], found["confirmation"]
    wall = found["wall"]
    lines = [f"wall: {wall['name']} ({wall['source']})", *(f"  {line}" for line in wall["evidence"])]
    for text in baseline["without_effect"]:
        lines.append(f"the baseline asks for a setting without effect: {text}")
    lines += ["", verdicts_text(found["verdicts"]), "", _numbers(baseline, winner), ""]
    if winner is None:
        lines.append(f"{found['verdict']}: keep the plan as it is; {found['label']}")
        if confirmation:
            lines.append(f"the best candidate was not kept: {confirmation['refused']}")
    else:
        low, high = found["interval"]
        first, last = confirmation["window"]
        lines.append(
            f"{found['speedup']:.3f} times as fast (99 % interval {low:.3f} to {high:.3f}), confirmed over steps "
            f"{first} to {last} in {confirmation['rounds']} rounds; {winner['label']}"
        )
        lines.append(_losses(confirmation["losses"]))
        if found["level"] != "measured":
            lines.append(f"{found['level']}: validate it on the cluster, with losses")
        lines.append(f"written to {winner['file']}")
    lines.append(f"{len(found['trials'])} trials in {found['folder']}; {found['ended']}")
    return "\n".join(line for line in lines if line is not None)


def verdicts_text(verdicts: Sequence[dict[str, Any]]) -> str:
    """The table of changes that were tried or refused, with the reasons."""
    if not verdicts:
        return "no change was tried"
    rows = [
        [
            one["stage"],
            one["change"] or "-",
            _percent(one.get("predicted_gain")),
            _percent(one.get("gain")),
            _interval(one.get("interval")),
            one["verdict"],
            one.get("reason") or one.get("why") or "",
        ]
        for one in verdicts
    ]
    return table(["stage", "change", "predicted", "measured", "interval", "verdict", "reason"], rows)


def ledger_text(contract: dict[str, Any] | None, verdicts: Sequence[dict[str, Any]], trials: Sequence[Any]) -> str:
    """What `threefold tune --show DIR` prints."""
    rows = [
        [
            str(one["trial"]),
            one["stage"],
            str(one["round"]) if one["round"] >= 0 else "-",
            one["role"],
            one["plan"],
            "-" if one["step_seconds"] is None else f"{1e3 * one['step_seconds']:.2f}",
            "-" if one["peak_bytes"] is None else format_bytes(one["peak_bytes"]),
            one["error"] or "ok",
        ]
        for one in trials
    ]
    head = [_contract_line(contract)] if contract else []
    columns = ["trial", "stage", "round", "role", "plan", "ms a step", "peak", "result"]
    return "\n".join([*head, "", table(columns, rows) if rows else "no trials", "", verdicts_text(verdicts)])


def _contract_line(contract: dict[str, Any]) -> str:
    hardware = contract.get("hardware")
    chip = hardware.get("chip") if isinstance(hardware, dict) else None
    return f"plan {contract.get('plan')}, {chip}, seed {contract.get('seed')}"


def _numbers(baseline: dict[str, Any], winner: dict[str, Any] | None) -> str:
    rows = []
    for name, one in (("baseline", baseline), ("winner", winner)):
        if one is not None and one["step_seconds"]:
            rows.append(
                [
                    name,
                    one["plan"],
                    f"{1e3 * one['step_seconds']:.2f}",
                    "-" if one["tflops_per_gpu"] is None else f"{one['tflops_per_gpu']:.4g}",
                    "-" if one["mfu"] is None else f"{one['mfu']:.1%}",
                    "-" if one["peak_bytes"] is None else format_bytes(one["peak_bytes"]),
                    {True: "yes", False: "no", None: "-"}[one["losses_finite"]],
                    str(one["skipped_steps"]),
                ]
            )
    columns = ["", "plan", "ms a step", "TFLOP/s a GPU", "MFU", "peak", "finite losses", "skipped steps"]
    return table(columns, rows)


def _losses(losses: dict[str, Any] | None) -> str:
    if losses is None:
        return "losses were not compared: a rank without its peers has none"
    said = "agree" if losses["agrees"] else "differ"
    return (
        f"losses {said}: {losses['early_difference']:+.2%} over the first {losses['early_steps']} steps (tolerance "
        f"{losses['early_tolerance']:.1%}), {losses['difference']:+.2%} over {losses['num_steps']} "
        f"({losses['tolerance']:.0%})"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _interval(value: Sequence[float] | None) -> str:
    return "-" if not value else f"{value[0]:+.1%} to {value[1]:+.1%}"
