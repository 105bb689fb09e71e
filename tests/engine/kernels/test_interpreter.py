"""Runs the tests of the Triton kernels in Triton's interpreter, for machines without a GPU.

They run in a process of their own, because triton reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1]
HANG_SECONDS = 3000  # the tests take minutes, and longer beside other work
WHOLE = "test_elementwise_kernels.py"  # all tests of this file run there; of others those that are named so
FILES = sorted(path for path in ENGINE.rglob("test_*.py") if "\ndef test_interpreted" in path.read_text())
FILES += ENGINE.rglob(WHOLE)


@pytest.mark.timeout(3100)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs there already")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(marks: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, FILES)]
    words += ["-m", marks, "-k", f"interpreted or {Path(WHOLE).stem}"]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=env, timeout=HANG_SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
