"""Runs the tests of the Triton kernels in Triton's interpreter, for machines without a GPU.

Each file runs in a process of its own, because triton reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1]
HANG_SECONDS = 3000  # an interpreted file takes minutes, and longer beside other work
# File name -> the part of test names to run: "interpreted", or all tests of a file that needs no such names.
FILES = {path.name: path for path in ENGINE.rglob("test_*.py")}
CHOSEN = {name: "interpreted" for name, path in FILES.items() if "\ndef test_interpreted" in path.read_text()}
CHOSEN |= {"test_elementwise_kernels.py": ""}


@pytest.mark.timeout(3100)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs there already")
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_kernels_in_the_interpreter(name: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FILES[name])]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*words, "-k", CHOSEN[name]], env=env, timeout=HANG_SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
