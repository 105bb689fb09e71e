"""Memory that tensors gave back stays with the process, so that the kernel need not clear it again."""

import subprocess
import sys

import pytest

# Large tensors made and freed as a step does, and the pages that the kernel had to give once the heap has grown.
STEPS = """
import resource, sys, torch
from threefold.engine.train_setup import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    x = torch.ones(4, 2**22)
    return (x * 2).sum()
for _ in range(10):
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""


def page_faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is of glibc")
def test_freed_memory_is_kept() -> None:
    """Four steps with two tensors of 64 MiB: 131,072 pages of 4 KiB, or a few large ones where the kernel has them."""
    kept, given_back = page_faults("keep"), page_faults("give back")
    assert given_back > 100
    assert kept < given_back / 10
