"""The Triton kernels on a machine without a GPU: their tests again, in triton's interpreter.

In processes of their own: triton reads the variable as it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# A file's tests that are interpreted by name; all of a file whose tests run there as they do on a GPU.
CHOSEN = {path.name: "interpreted" for path in HERE.glob("test_*.py") if "\ndef test_interpreted" in path.read_text()}
CHOSEN |= {"test_kernels_around.py": ""}


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs there already")
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_kernels_in_the_interpreter(name: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / name)]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*words, "-k", CHOSEN[name]], env=env, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
