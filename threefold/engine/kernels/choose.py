"""Which kernel computes which product: measured once for a shape on a device, kept in a file; a sane choice before.

Of all that are there (`auto`), or of one kind: `torch` its grouped products, `triton` ours beside them, `cute` those of
the optional package quack-kernels beside them. No triton and no CUDA device: plain torch (`reference.py`).
"""

import math
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.launch import Config, CuteConfig
from threefold.engine.measured import add_kept, kept_at, read_kept
from threefold.findings import Finding, FindingsError

STEPS = ("up", "down", "act_grad", "input_grad", "up_grad", "down_grad")
HALVED = ("up", "act_grad", "input_grad", "up_grad")  # the steps that see FC1's output or its gradient
Tiling = Config | CuteConfig | None


@dataclass(frozen=True)
class Choice:
    """For each product the tiles of a kernel, or None: torch's grouped product, the rest in passes beside it."""

    up: Tiling = None
    down: Tiling = None
    act_grad: Tiling = None
    input_grad: Tiling = None
    up_grad: Tiling = None
    down_grad: Tiling = None

    def __post_init__(self) -> None:
        halves = {step: isinstance(getattr(self, step), CuteConfig) for step in HALVED}
        if halves["up"] != halves["act_grad"] or (halves["up"] and not all(halves.values())):
            raise ValueError("FC1's output is interleaved for all of its steps or for none")

    @property
    def interleaved(self) -> bool:
        """Gate and up of one column lie side by side in FC1's output."""
        return isinstance(self.up, CuteConfig)

    @property
    def cute(self) -> bool:
        return any(isinstance(getattr(self, step), CuteConfig) for step in STEPS)


@dataclass(frozen=True)
class Shape:
    num_rows: int
    num_experts: int
    dim: int
    expert_dim: int
    gathered: bool  # rows are read at their tokens
    plain: bool = True  # SwiGLU without biases and clamps

    @property
    def key(self) -> str:
        """Row counts nearest to one power of two share a choice: they change with every microbatch, around a fair share
        that often is a power of two itself."""
        kind = "tokens" if self.gathered else "rows"
        rows = 1 << round(math.log2(max(self.num_rows, 1)))
        bent = "" if self.plain else " bent"
        return f"{kind} {rows} experts {self.num_experts} dim {self.dim} expert_dim {self.expert_dim}{bent}"


def choose(shape: Shape, x: Tensor, kernels: str = "auto") -> Choice | None:
    """None: plain torch."""
    if not takes(x, shape.dim, shape.expert_dim):
        return None
    require(kernels, x.device)
    measured = _measured(x.device).get(f"{shape.key} {kernels}")
    if measured and (not measured.cute or cute_works(x.device)):
        return measured
    return default(shape, kernels)


def takes(x: Tensor, dim: int, expert_dim: int) -> bool:
    """Whether this device has kernels for such rows and experts of these sizes."""
    aligned = all(size * x.element_size() % 16 == 0 for size in (dim, expert_dim))  # the copy engine's
    return works(x.device) and aligned and x.dtype in (torch.bfloat16, torch.float16)


@cache
def works(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def cute_works(device: torch.device) -> bool:
    """Whether the package is there and imports: it is built on others, and a wrong release of one breaks it."""
    if device.type != "cuda" or not quack_version() or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import quack.epilogue.frontend
        import quack.gemm  # type: ignore # noqa: F401
    except Exception:
        return False
    return True


@cache
def quack_version() -> str | None:
    try:
        return version("quack-kernels")
    except PackageNotFoundError:
        return None


def require(kernels: str | None, device: torch.device) -> None:
    """Refuse what was asked for by name and cannot run on this GPU."""
    if kernels != "cute" or device.type != "cuda" or cute_works(device):
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


def default(shape: Shape, kernels: str = "auto") -> Choice:
    """What won on an H200. Under load its power limits any kernel, and the ways differ by a few percent."""
    if kernels == "torch":
        return Choice()
    if kernels == "cute" and shape.plain:
        return Choice(**{step: cute_candidates(step, shape.gathered)[0] for step in STEPS})
    fused = Choice(up=Config(n=128, stages=4), act_grad=Config(stages=4, strip=32) if shape.gathered else None)
    if not shape.gathered or shape.expert_dim > 1024:
        return fused  # torch's products are the better ones where tiles have much to sum
    flat, up_grad = Config(flat=True, group=4), Config(m=256, n=128, stages=5, group=2)
    return replace(fused, down=flat, input_grad=flat, up_grad=up_grad, down_grad=Config(stages=5))


def candidates(step: str) -> list[Config]:
    """Of ours: what came first or second somewhere on an H200."""
    found = {
        "up": [Config(n=128, stages=4), Config(n=128)],
        "down": [Config(flat=True, group=4), Config(flat=True), Config()],
        "act_grad": [Config(stages=4, strip=32), Config(stages=4, strip=32, group=4), Config(stages=4)],
        "input_grad": [Config(flat=True, group=4), Config(flat=True), Config(stages=4)],
        "up_grad": [
            Config(m=256, n=128, stages=5, group=2),
            Config(m=256, n=128, k=32, stages=7, group=2),
            Config(stages=4),
        ],
        "down_grad": [Config(stages=5), Config(stages=5, group=2), Config(stages=4)],
    }
    return found[step]


def cute_candidates(step: str, gathered: bool) -> list[CuteConfig]:
    """Of quack's: what came first or second somewhere on an H200."""
    wide, turns, alone = CuteConfig(), CuteConfig(n=192, pingpong=True), CuteConfig(cluster=1)
    one_by_one = CuteConfig(group=1)
    found = {
        "up": [turns, wide, alone],
        "down": [turns, alone, wide],
        "act_grad": [CuteConfig(n=128, pingpong=True, cluster=1), alone]
        if gathered
        else [turns, CuteConfig(n=128, pingpong=True)],
        "input_grad": [wide, turns],
        "up_grad": [one_by_one, wide, CuteConfig(m=256, n=192)],
        "down_grad": [one_by_one, wide, turns, CuteConfig(m=256, n=192)],
    }
    return found[step]


def cache_file(device: torch.device) -> Path:
    return kept_at("experts", device, {"quack": quack_version()})


def save(device: torch.device, shape: Shape, choice: Choice, kernels: str = "auto") -> None:
    add_kept(cache_file(device), {f"{shape.key} {kernels}": asdict(choice)})
    _measured.cache_clear()


@cache
def _measured(device: torch.device) -> dict[str, Choice]:
    if device.type != "cuda":
        return {}
    try:
        return {key: _choice(facts) for key, facts in read_kept(cache_file(device)).items()}
    except (AttributeError, TypeError, ValueError):
        return {}  # written by another release


def _choice(facts: dict[str, Any]) -> Choice:
    return Choice(**{step: _tiling(config) if config else None for step, config in facts.items()})


def _tiling(facts: dict[str, Any]) -> Config | CuteConfig:
    return CuteConfig(**facts) if "pingpong" in facts else Config(**facts)
