"""A calibration as text: what the machine reached, and each measured step beside its predictions."""

from threefold.launch.plan_session import Speed
from threefold.machine.calibrate import Calibrated
from threefold.report.terminal import table
from threefold.units import format_bytes


def calibration_text(found: Calibrated) -> str:
    speeds = [[speed.what, _size(speed), _rate(speed)] for speed in found.speeds]
    steps = []
    errors = iter(zip(found.before, found.after, strict=True))
    for step in found.steps:
        if step.seconds is None:
            steps.append([step.name, step.trouble, "", ""])
            continue
        before, after = next(errors)
        steps.append([step.name, f"{1e3 * step.seconds:.1f} ms", f"{before:+.1%}", f"{after:+.1%}"])
    parts = [
        table(["measured", "size", "reached"], speeds),
        table(["step", "measured", "predicted before", "predicted now"], steps),
        f"A step that was not measured is predicted within {found.fitted.error:.0%} in nine of ten cases, "
        "judged by leaving some of these out of the fit.",
    ]
    return "\n\n".join(parts)


def _size(speed: Speed) -> str:
    if "copy" in speed.what or speed.what.startswith("all-"):
        return format_bytes(speed.size)
    return {"launch": ""}.get(speed.what, f"{speed.size:,} {'tokens' if speed.what == 'attention' else 'rows'}")


def _rate(speed: Speed) -> str:
    if speed.what == "launch":
        return f"{1e6 / speed.rate:.1f} us each"
    if "copy" in speed.what or speed.what.startswith("all-"):
        return f"{speed.rate / 1e9:,.2f} GB/s"
    return f"{speed.rate / 1e12:,.3g} TFLOP/s"
