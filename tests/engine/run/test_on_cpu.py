"""Memory stays with the process, and products by oneDNN are right in every layout and size, and gone after the run."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.run import on_cpu
from threefold.engine.run.on_cpu import MIN_PRODUCT, ROWS, mkl_lacks_avx512, onednn_gemms

# A sum of n products of normal numbers is rounded by about sqrt(n) * 2^-24; a row of 512 stays below 1e-4.
ATOL = 1e-4


@pytest.fixture
def replaced() -> Iterator[None]:
    with onednn_gemms():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multiplied(run: Callable[[], object]) -> set[str]:
    """Names of the operators that a call runs."""
    with torch.profiler.profile() as profile:
        run()
    return {event.key for event in profile.key_averages()}


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("rows", [ROWS - 1, ROWS, 100, 256, 301])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_products_are_those_of_fp64(rows: int, layout: str) -> None:
    """Of rows and weights in any order in memory, with as many rows, or sums over as many rows, as an expert has."""
    for m, k in ((rows, 512), (512, rows)):
        a = normal(m, k) if layout[0] == "N" else normal(k, m).t()
        b = normal(k, 256, seed=1) if layout[1] == "N" else normal(256, k, seed=1).t()
        expected = (a.double() @ b.double()).float()
        torch.testing.assert_close(a @ b, expected, rtol=0, atol=ATOL)
        out = torch.full((m, 300), float("nan"))
        torch.mm(a, b, out=out[:, :256])
        torch.testing.assert_close(out[:, :256], expected, rtol=0, atol=ATOL)
        assert out[:, 256:].isnan().all()


@pytest.mark.usefixtures("replaced")
def test_linear_layers_and_experts_are_multiplied_so() -> None:
    """Their outputs and gradients are those of fp64, and both come by oneDNN."""
    x, weight, experts = normal(300, 256), normal(256, 256, seed=1), normal(4, 256, 256, seed=2)
    ends = torch.tensor([70, 70, 201, 300], dtype=torch.int32)

    def loss(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
        hidden = F.linear(x, weight)
        if x.dtype == torch.float32:
            return F.grouped_mm(hidden, experts, offs=ends).square().mean()
        starts = [0, *ends[:-1]]
        outs = [hidden[a:b] @ expert for a, b, expert in zip(starts, ends, experts, strict=True)]
        return torch.cat(outs).square().mean()

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.clone().requires_grad_() for each in inputs]
        return torch.autograd.grad(loss(*leaves), leaves)

    expected = gradients(x.double(), weight.double(), experts.double())
    for ours, theirs in zip(gradients(x, weight, experts), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert "mkldnn::_linear_pointwise" in multiplied(lambda: F.grouped_mm(x, experts, offs=ends))


def test_small_products_and_other_dtypes_are_torchs_own() -> None:
    """Bit for bit, and for integers too."""
    pairs = [(normal(7, 64), normal(64, 64)), (normal(300, 512).double(), normal(512, 256).double())]
    pairs += [(normal(300, 512).bfloat16(), normal(512, 256).bfloat16()), (normal(0, 512), normal(512, 256))]
    pairs += [(normal(3, 0), normal(0, 5)), (torch.arange(6).view(2, 3), torch.arange(6).view(3, 2))]
    expected = [a @ b for a, b in pairs]
    with onednn_gemms():
        found = [a @ b for a, b in pairs]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_torchs_kernels_are_back_afterwards() -> None:
    a, b = normal(128, 256), normal(256, 128, seed=1)
    assert a.numel() * b.shape[1] >= MIN_PRODUCT
    with onednn_gemms():
        assert "mkldnn::_linear_pointwise" in multiplied(lambda: a @ b)
    assert "mkldnn::_linear_pointwise" not in multiplied(lambda: a @ b)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="MKL has nothing to leave unused")
@pytest.mark.parametrize(("vendor", "lacks"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
def test_only_cpus_on_which_mkl_has_no_avx512_are_treated_so(
    vendor: str | None, lacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel says of the CPU decides; a system that says nothing keeps torch's kernels."""
    facts = tmp_path / "cpuinfo"
    if vendor:
        facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(on_cpu, "CPU_FACTS", facts)
    assert mkl_lacks_avx512() == (lacks and torch.backends.mkl.is_available())


# Large tensors made and freed as a step does, and the pages that the kernel had to give once the heap has grown.
STEPS = """
import resource, sys, torch
from threefold.engine.run.on_cpu import keep_freed_memory
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
    """Four steps with two tensors of 64 MiB: 131,072 pages of 4 KiB, or a few large ones where the kernel has them.

    Of the eight tensors the heap may still grow by one.
    """
    kept, given_back = page_faults("keep"), page_faults("give back")
    assert given_back > 100
    assert kept < given_back / 4
