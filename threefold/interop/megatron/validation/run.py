"""Runs `validate.py` of an exported folder in the interpreter that has Megatron, for `threefold export --verify`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from threefold.interop.megatron.validation.judge.verdict import NOT_JUDGED

_GRACE_SECONDS = 30  # validate.py ends by its own limit; this one is for an interpreter that does not


def run_validation(
    stack: str, folder: Path, python: str | None, megatron: Path | None, seconds: float
) -> dict[str, Any]:
    """The verdict as `validate.py --json` prints it; without an answer "not judged", with the reason as a remark."""
    words = [python or sys.executable, str(folder / "validate.py"), "--json", "--seconds", str(seconds)]
    if megatron is not None:
        words += ["--megatron", str(megatron.resolve())]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + _GRACE_SECONDS)
    except OSError as error:
        return _not_judged(stack, f"{words[0]} cannot be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        return _not_judged(stack, f"{words[0]} did not answer within {seconds:g} seconds")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return _not_judged(stack, f"{words[0]}: {lines[-1]}")
    return answer


def _not_judged(stack: str, reason: str) -> dict[str, Any]:
    return {"stack": stack, "verdict": NOT_JUDGED, "ranks": [], "differs": {}, "stood_in": [], "remark": reason}
