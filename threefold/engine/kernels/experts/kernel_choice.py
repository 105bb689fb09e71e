"""Which kernel runs each step of the experts on this GPU: the fastest that was measured, or a default.

`tune/expert_kernels.py` measures; `fused_experts.py` calls `choose_kernels` in every forward.

The steps, by the name they have in `KernelChoice`, in the tuned cache file and as methods of `GpuSteps`:

    up          FC1, activation, router weight
    down        FC2
    act_grad    backward of FC2 and of the activation
    input_grad  gradient of FC1's input
    up_grad     weight gradient of FC1
    down_grad   weight gradient of FC2

`knobs.expert_kernels` names the kind of kernels to choose from: "torch" has torch's grouped GEMM for every step,
"triton" adds our kernels (those in Gluon too, which run on Hopper), "cute" adds those of the optional package
quack-kernels, and "auto" (the default) has all three. Without Triton or without a GPU of compute capability 9.0 the
experts run in plain torch (`reference_steps.py`).
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.availability import (
    has_cute_kernels,
    has_gluon_kernels,
    has_triton_kernels,
    quack_version,
)
from threefold.engine.kernels.launch_config import CuteConfig, GluonConfig, TritonConfig
from threefold.engine.kernels.tuned_cache import add_entries, cache_path, read_entries
from threefold.findings import Finding, FindingsError

STEPS = ("up", "down", "act_grad", "input_grad", "up_grad", "down_grad")
FC1_OUTPUT_STEPS = ("up", "act_grad", "input_grad", "up_grad")  # steps that read or write FC1's output or its gradient
_GLUON_STEPS = ("down", "input_grad", "up_grad", "down_grad")
_GLUON_ROWS = 64  # rows that a warp group stores at a time: those of a weight gradient must be a multiple
# A row GEMM has tiles of so many columns and sums so many values in a step: those of the weight must be multiples.
_GLUON_COLUMNS, _GLUON_SUMMED = 128, 64
# The smallest weight, in rows and in columns, that runs in Gluon. Smaller ones were not measured. Below the rows of a
# tile a part of it would have none, and Triton 3.6 does not compile such a kernel where it adds to a main gradient.
_MIN_GLUON_SIZE = 256
StepConfig = TritonConfig | GluonConfig | CuteConfig | None


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of each step and its tiles. None is torch's grouped GEMM with row-wise kernels beside it."""

    up: StepConfig = None
    down: StepConfig = None
    act_grad: StepConfig = None
    input_grad: StepConfig = None
    up_grad: StepConfig = None
    down_grad: StepConfig = None

    def __post_init__(self) -> None:
        is_cute = {step: isinstance(getattr(self, step), CuteConfig) for step in FC1_OUTPUT_STEPS}
        if is_cute["up"] != is_cute["act_grad"] or (is_cute["up"] and not all(is_cute.values())):
            raise ValueError("FC1's output is interleaved for all of its steps or for none")
        if any(isinstance(getattr(self, step), GluonConfig) for step in STEPS if step not in _GLUON_STEPS):
            raise ValueError(f"only {', '.join(_GLUON_STEPS)} have a kernel in Gluon")

    @property
    def interleaved(self) -> bool:
        """Whether gate and up of one column lie side by side in FC1's output, as quack's kernels have them."""
        return isinstance(self.up, CuteConfig)

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of kernels that the steps run on, as `knobs.expert_kernels` names them."""
        configs = [getattr(self, step) for step in STEPS]
        return {"torch" if c is None else "cute" if isinstance(c, CuteConfig) else "triton" for c in configs}

    @property
    def uses_cute(self) -> bool:
        return any(isinstance(getattr(self, step), CuteConfig) for step in STEPS)

    @property
    def uses_gluon(self) -> bool:
        return any(isinstance(getattr(self, step), GluonConfig) for step in STEPS)


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of one call of the experts, on which the fastest kernels depend."""

    num_rows: int
    num_experts: int
    dim: int
    expert_dim: int
    gathered: bool  # rows are gathered from tokens inside the kernels (`fused_experts`), not given (`grouped_experts`)
    plain: bool = True  # SwiGLU without biases and without clamps
    stored: bool = False  # each row of the result is stored at the place of its token, which has no other row

    @property
    def key(self) -> str:
        """The key of this shape in the tuned cache. Row counts are rounded to the nearest power of two, because they
        change with every microbatch, around a balanced load that is often a power of two itself."""
        kind = "arrived" if self.stored else "tokens" if self.gathered else "rows"
        rows = 1 << round(math.log2(max(self.num_rows, 1)))
        bent = "" if self.plain else " bent"
        return f"{kind} {rows} experts {self.num_experts} dim {self.dim} expert_dim {self.expert_dim}{bent}"


def choose_kernels(shape: ExpertShape, x: Tensor, kernels: str = "auto") -> KernelChoice | None:
    """The measured choice of these kernels, or the default one. None means that the experts run in plain torch."""
    if not supports_experts(x, shape.dim, shape.expert_dim):
        return None
    return _choose(shape, x.device, kernels)


@lru_cache(maxsize=4096)  # a dispatcher brings other numbers of rows with every microbatch
def _choose(shape: ExpertShape, device: torch.device, kernels: str) -> KernelChoice:
    require_kernels(kernels, device)
    measured = _tuned_choices(device).get(f"{shape.key} {kernels}")
    has_gluon = has_gluon_kernels(device)
    if measured and (has_cute_kernels(device) or not measured.uses_cute) and (has_gluon or not measured.uses_gluon):
        return measured
    return default_choice(shape, kernels, has_gluon)


def supports_experts(x: Tensor, dim: int, expert_dim: int) -> bool:
    """Whether this device has kernels for rows of this dtype and experts of these sizes."""
    aligned = all(size * x.element_size() % 16 == 0 for size in (dim, expert_dim))  # the copy engine (TMA) wants it
    return has_triton_kernels(x.device) and aligned and x.dtype in (torch.bfloat16, torch.float16)


def require_kernels(kernels: str | None, device: torch.device) -> None:
    """Raise a finding if these kernels were asked for by name and cannot run on this GPU."""
    if kernels != "cute" or device.type != "cuda" or has_cute_kernels(device):
        return
    found = quack_version()
    problem = "quack-kernels is not installed" if found is None else f"quack-kernels {found} does not run on this GPU"
    raise FindingsError(
        [
            Finding(
                rule="kernels-are-installed",
                at="knobs.expert_kernels",
                problem=f"the cute kernels of experts are asked for, but {problem}",
                advice="pip install 'threefold[cute]' (Hopper only), or delete knobs.expert_kernels",
            )
        ]
    )


def default_choice(shape: ExpertShape, kernels: str = "auto", has_gluon: bool = False) -> KernelChoice:
    """The fastest kernels on an H200. Under load its power limits every kernel, and the kinds differ by a few
    percent."""
    if kernels == "torch":
        return KernelChoice()
    if kernels == "cute" and shape.plain:
        return KernelChoice(**{step: cute_candidates(step, shape.gathered)[0] for step in STEPS})
    fused = KernelChoice(
        up=TritonConfig(n=128, stages=4, group=2), act_grad=TritonConfig(stages=4, strip=32) if shape.gathered else None
    )
    if not shape.gathered or (shape.expert_dim > 1024 and not shape.stored):
        return fused  # torch's grouped GEMM is faster where tiles sum over many values, but stores no row at its token
    flat, up_grad = TritonConfig(flat=True, stages=4, group=4), TritonConfig(m=256, n=128, stages=5, group=2)
    ours = replace(fused, down=flat, input_grad=flat, up_grad=up_grad, down_grad=TritonConfig(stages=5))
    in_gluon = {step: found[0] for step in STEPS if has_gluon and (found := gluon_candidates(step, shape))}
    return replace(ours, **in_gluon)


def gluon_candidates(step: str, shape: ExpertShape) -> list[GluonConfig]:
    """Configs of our kernel in Gluon for a step of this shape; none where it does not compute it."""
    fc1, fc2 = (2 * shape.expert_dim, shape.dim), (shape.dim, shape.expert_dim)  # rows and columns of the weights
    if step not in _GLUON_STEPS:
        return []
    num_rows, num_columns = fc1 if step in ("input_grad", "up_grad") else fc2
    if min(num_rows, num_columns) < _MIN_GLUON_SIZE:
        return []
    if step in ("up_grad", "down_grad"):
        return [] if num_rows % _GLUON_ROWS else [GluonConfig(group=4), GluonConfig(group=1)]
    summed = num_columns if step == "down" else num_rows
    return [] if shape.dim % _GLUON_COLUMNS or summed % _GLUON_SUMMED else [GluonConfig(group=1), GluonConfig(group=4)]


def triton_candidates(step: str) -> list[TritonConfig]:
    """Configs of our kernels that came first or second for some shape on an H200."""
    found = {
        "up": [TritonConfig(n=128, stages=4, group=2), TritonConfig(n=128, stages=4)],
        "down": [TritonConfig(flat=True, stages=4, group=4), TritonConfig(flat=True, group=4), TritonConfig()],
        "act_grad": [
            TritonConfig(stages=4, strip=32),
            TritonConfig(stages=4, strip=32, group=4),
            TritonConfig(stages=4),
        ],
        "input_grad": [
            TritonConfig(flat=True, stages=4, group=4),
            TritonConfig(flat=True, group=4),
            TritonConfig(stages=4),
        ],
        "up_grad": [
            TritonConfig(m=256, n=128, stages=5, group=2),
            TritonConfig(m=256, n=128, k=32, stages=7, group=2),
            TritonConfig(stages=4),
        ],
        "down_grad": [TritonConfig(stages=5), TritonConfig(stages=5, group=2), TritonConfig(stages=4)],
    }
    return found[step]


def cute_candidates(step: str, gathered: bool) -> list[CuteConfig]:
    """Configs of quack's kernels that came first or second for some shape on an H200."""
    plain, pingpong, no_cluster = CuteConfig(), CuteConfig(n=192, pingpong=True), CuteConfig(cluster=1)
    no_group = CuteConfig(group=1)
    found = {
        "up": [pingpong, plain, no_cluster],
        "down": [pingpong, no_cluster, plain],
        "act_grad": [CuteConfig(n=128, pingpong=True, cluster=1), no_cluster]
        if gathered
        else [pingpong, CuteConfig(n=128, pingpong=True)],
        "input_grad": [plain, pingpong],
        "up_grad": [no_group, plain, CuteConfig(m=256, n=192)],
        "down_grad": [no_group, plain, pingpong, CuteConfig(m=256, n=192)],
    }
    return found[step]


def _cache_path(device: torch.device) -> Path:
    return cache_path("experts", device, {"quack": quack_version()})


def save_choice(device: torch.device, shape: ExpertShape, choice: KernelChoice, kernels: str = "auto") -> None:
    """Write a measured choice to the tuned cache."""
    add_entries(_cache_path(device), {f"{shape.key} {kernels}": asdict(choice)})
    _tuned_choices.cache_clear()
    _choose.cache_clear()


@cache
def _tuned_choices(device: torch.device) -> dict[str, KernelChoice]:
    if device.type != "cuda":
        return {}
    try:
        return {key: _parse_choice(facts) for key, facts in read_entries(_cache_path(device)).items()}
    except (AttributeError, TypeError, ValueError):
        return {}  # the file was written by another release


def _parse_choice(facts: dict[str, Any]) -> KernelChoice:
    return KernelChoice(**{step: _parse_config(config) if config else None for step, config in facts.items()})


def _parse_config(facts: dict[str, Any]) -> TritonConfig | GluonConfig | CuteConfig:
    if "pingpong" in facts:
        return CuteConfig(**facts)
    return TritonConfig(**facts) if "m" in facts else GluonConfig(**facts)
