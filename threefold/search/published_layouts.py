"""Layouts that somebody ran, and how far a layout is from those that were published nearest to a request.

`spec/published_layouts.json` has them; `tools/published_layouts.py` writes it. `search/rank.py` prefers, among
candidates that estimates cannot tell apart, what is near to one.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import log2
from typing import Any

from threefold.plan.plan import Plan
from threefold.spec.chips import CHIPS
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS
from threefold.spec.params import count_params
from threefold.units import format_tokens

NEAR = 4.0  # doublings of GPUs and length within which a published layout guides a request


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """A layout with the request it was an answer to."""

    name: str  # of the recipe or of the run in data/published_runs.json
    model: str
    chip: str
    gpus: int
    seq_len: int
    task: str
    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    data_parallel: str
    recompute: tuple[str, ...]
    optimizer_offload: float

    def __str__(self) -> str:
        axes = [f"{axis.upper()} {getattr(self, axis)}" for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")]
        used = " ".join(axis for axis in axes if not axis.endswith(" 1")) or "data parallel only"
        return f"{self.model} with {used} on {self.gpus} x {self.chip} at {format_tokens(self.seq_len)}"

    def request_distance(self, plan: Plan) -> float:
        """Doublings of GPUs and of length between the two requests, and one for another chip."""
        same = self.chip == plan.chip.name
        return abs(log2(plan.layout.gpus / self.gpus)) + abs(log2(plan.job.seq_len / self.seq_len)) + (not same)

    def distance(self, plan: Plan) -> float:
        """Doublings of the model's degrees between a plan and this layout; CP follows the length."""
        layout = plan.layout
        cp = max(1.0, self.cp * plan.job.seq_len / self.seq_len) if self.cp > 1 else 1.0
        if self.cp == 1 and plan.is_long:  # a shard of 4,096 to 8,192 tokens, less what TP cuts
            cp = max(1.0, plan.job.seq_len / max(self.seq_len, 4096) / self.tp)
        pairs = ((layout.tp, self.tp), (layout.cp, cp), (layout.pp, self.pp), (layout.ep, self.ep))
        steps = sum(abs(log2(here / there)) for here, there in pairs) + log2(layout.etp / self.etp if self.etp else 1)
        return round(steps + (plan.knobs.data_parallel != self.data_parallel), 2)


@cache
def published_layouts() -> tuple[PublishedLayout, ...]:
    text = resources.files("threefold.spec").joinpath("published_layouts.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return tuple(PublishedLayout(**{**row, "recompute": tuple(row["recompute"])}) for row in rows)


@cache
def _comparable(model: ModelSpec, architecture: str, task: str) -> tuple[PublishedLayout, ...]:
    """Layouts of the model for the task on chips of a generation; of a model of its family and of at most twice the
    size or half of it where there are none; for another task where these lack."""
    known = [one for one in published_layouts() if CHIPS[one.chip].architecture == architecture]
    size = count_params(model, 0).main
    same = [one for one in known if one.model == model.name]
    alike = [one for one in known if _is_alike(model, size, one.model)]
    for some in (same, alike):
        if some:
            return tuple([one for one in some if one.task == task] or some)
    return ()


def _is_alike(model: ModelSpec, size: float, name: str) -> bool:
    other = MODELS[name]
    return other.family == model.family and 0.5 <= count_params(other, 0).main / size <= 2.0


def nearest_published(plan: Plan) -> tuple[PublishedLayout, ...]:
    """The comparable layouts whose requests are nearest to the plan's, if any is near; several where they are equally
    far."""
    known = _comparable(plan.model, plan.chip.architecture, plan.job.task)
    least = min((one.request_distance(plan) for one in known), default=NEAR + 1)
    return tuple(one for one in known if one.request_distance(plan) <= min(least + 0.5, NEAR))
