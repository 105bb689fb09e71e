"""Runs a verb with `--json` in a process of its own, with limits of time, memory and output, for one call of a tool."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS, BYTES, CHARACTERS = 120.0, 4 * 2**30, 200_000


def run_verb(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The exit code (0 clean, 1 errors in the plan or a file, 2 a wrong call) with the verb's JSON, or what it said."""
    command = [sys.executable, "-m", "threefold", words[0], "--json", *words[1:]]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            preexec_fn=_limit,
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "message": f"no answer after {SECONDS:g} s: ask for less, such as fewer candidates"}
    said = done.stderr.strip()[-2000:]
    if not done.stdout.strip():
        return {"exit_code": done.returncode, "message": said or "no answer"}
    if len(done.stdout) > CHARACTERS:
        return {"exit_code": done.returncode, "message": f"an answer of {len(done.stdout):,} characters: ask for less"}
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"exit_code": done.returncode, "message": done.stdout[:2000]}
    return {"exit_code": done.returncode, "answer": answer} | ({"message": said} if said else {})


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
