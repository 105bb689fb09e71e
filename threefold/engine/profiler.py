"""Profiles a window of steps of a run: a trace with named ranges, and a snapshot of GPU memory (`train --profile`).

`RUN/profile/rank-N.json.gz` is a trace of torch's profiler, which `threefold profile` and Perfetto read;
`memory-N.pickle` is what torch's memory viewer reads. Ranges are named `threefold.attention`, `threefold.router`,
`threefold.dispatch`, `threefold.experts`, `threefold.combine`, `threefold.loss` and `threefold.optimizer`, and for
models that see `threefold.encoder` and `threefold.projector`, within a `threefold.step`. They are methods of the run's
own modules, wrapped for the length of the window, so that a run without a profile pays nothing. Around the window stand
cudaProfilerStart and cudaProfilerStop, for Nsight Systems with `--capture-range=cudaProfilerApi`; there the ranges are
NVTX ranges.
"""

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from threefold.engine.build import Parts
from threefold.engine.context import Method, wrapped_method
from threefold.engine.models.block import Block
from threefold.engine.moe.layer import MoeLayer
from threefold.findings import Finding, FindingsError

PROFILE = "profile"  # the folder in the run's
FIRST_STEP, NUM_STEPS = 4, 3  # counted from the first step of this start: kernels are compiled and buffers made by then
MOST_ALLOCATIONS = 200_000  # of a memory snapshot


def profiled_window(step: int, last_step: int) -> tuple[int, int]:
    """The first step to profile of a start at `step`, and how many; of a short run the last step, which is the warmest.

    Raises a finding where no step is left.
    """
    if step >= last_step:
        enough = step + FIRST_STEP + NUM_STEPS - 1
        finding = Finding(
            rule="profile-has-steps",
            at="--profile",
            problem=f"no step is left to profile: the run is at step {step}, and this start ends at step {last_step}",
            advice=f"raise job.steps (and --stop-at) to {enough}, or profile a new run (--run)",
        )
        raise FindingsError([finding])
    first = min(step + FIRST_STEP, last_step)
    return first, min(NUM_STEPS, last_step - first + 1)


class StepProfiler:
    """Profiles some steps of one rank."""

    def __init__(
        self, folder: Path, parts: Parts, rank: int, first: int, count: int = NUM_STEPS, by_nsys: bool = False
    ) -> None:
        """`first` is the first step of the window; steps are counted from 1. `by_nsys`: ranges alone, no trace."""
        self.folder, self.parts, self.rank, self.by_nsys = folder / PROFILE, parts, rank, by_nsys
        self.first, self.last = first, first + count - 1
        self._open: ExitStack | None = None

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around step `number` of the run."""
        return self._profiled(number) if self.first <= number <= self.last else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        if self._open is None:
            self._open = ExitStack()
            self._open.enter_context(self._window())
        # torch's own name for a numbered step, by which readers match the steps of several ranks
        with annotated("step"), record_function(f"ProfilerStep#{number}"):
            yield

    def finish(self, number: int) -> None:
        """After step `number`: write the trace once the last step of the window is done."""
        if number == self.last:
            self.close()

    def close(self) -> None:
        """End the window, also one that was not finished: a run may end inside it."""
        window, self._open = self._open, None
        if window is not None:
            window.close()

    @contextmanager
    def _window(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with annotations_of(self.parts), ExitStack() as around:
            if self.parts.device.type == "cuda":
                around.enter_context(self._on_gpu())
            if self.by_nsys:
                yield
                return
            activities = [ProfilerActivity.CPU]
            if self.parts.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            kept_apart = _ExperimentalConfig(enable_cuda_sync_events=True)  # which stream waits for which event
            with profile(
                activities=activities, record_shapes=True, profile_memory=True, experimental_config=kept_apart
            ) as kept:
                yield
                if self.parts.device.type == "cuda":
                    torch.cuda.synchronize(self.parts.device)
            write_trace(kept, self.folder / f"rank-{self.rank}.json.gz")

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        """The window as Nsight sees it, and the memory in it."""
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.synchronize(self.parts.device)
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def write_trace(kept: profile, path: Path) -> None:
    """Write a finished trace whole or not at all: a reader may look for it at any time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        kept.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target)
        packed.replace(path)


@contextmanager
def annotated(name: str) -> Iterator[None]:
    """A range in the traces of torch's profiler and of Nsight."""
    nvtx = torch.cuda.nvtx.range(f"threefold.{name}") if torch.cuda.is_initialized() else nullcontext()
    with record_function(f"threefold.{name}"), nvtx:
        yield


@contextmanager
def annotations_of(parts: Parts) -> Iterator[None]:
    """Name ranges of everything that a step computes, for the length of a `with` block."""
    with ExitStack() as wrapped:
        for target, method, name in _ranges(parts):
            wrapped.enter_context(wrapped_method(target, method, partial(_named, name)))
        yield


_DISPATCH = ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess")
_COMBINE = ("combine_preprocess", "token_combine", "combine_postprocess")


def _ranges(parts: Parts) -> Iterator[tuple[Any, str, str]]:
    """Objects, their methods, and the names of the ranges."""
    for chunk in parts.chunks.values():
        yield chunk, "compute_loss", "loss"
        if chunk.vision is not None and chunk.projector is not None:
            yield chunk.vision, "forward", "encoder"
            yield chunk.projector, "forward", "projector"
        for module in chunk.modules():
            if isinstance(module, Block) and module.mixer is not None:
                yield module.mixer, "forward", "attention"
            elif isinstance(module, MoeLayer):
                yield module.router, "forward", "router"
                yield from ((module.dispatcher, method, "dispatch") for method in _DISPATCH)
                yield from ((module.dispatcher, method, "combine") for method in _COMBINE)
                yield from ((module, name, "experts") for name in ("run_experts", "run_fused_experts"))
                if module.shared is not None:
                    yield module, "compute_shared", "experts"
    yield parts.optimizer, "step", "optimizer"


def _named(name: str, inner: Method) -> Method:
    def annotate(*args: Any, **kwargs: Any) -> Any:
        with annotated(name):
            return inner(*args, **kwargs)

    return annotate
