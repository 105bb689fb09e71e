"""Memory of vision-language models: `cost` counts the parameters of the engine, and estimates are near rehearsals.

A rehearsal runs the engine on fake tensors with the pictures that the plan expects.
"""

from typing import Any

import pytest
from plans import build
from rehearsal_plans import GPU
from repository import ROOT

from threefold.cost.memory.by_stack import memory
from threefold.cost.vision import expected_patches, planned_pictures, vision_parameters
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.engine.models.build import build_model
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.spec.models import MODELS
from threefold.spec.params import vision_params

NEAR = 0.03  # of the rehearsed peak: what the project holds its estimates to
VISION = {**GPU, "model": "qwen3-vl-30b-a3b", "job.images": 1.0, "model.num_layers": 4}
PLANS: dict[str, dict[str, Any]] = {
    "all trains": {},
    "encoder on its own stage": {"layout.pp": 2, "layout.stages": "E|ttttL"},
    "ep overlap": {"knobs.ep_overlap": True},
    "full recompute": {"knobs.recompute": ["full"]},
    "recompute by part": {"knobs.vision_recompute": ["attn", "projector"]},
    "several pictures": {"knobs.vision_recompute": ["mlp"], "job.images": 2.0},
    "fsdp": {"knobs.data_parallel": "fsdp"},
    "pipeline": {"layout.pp": 4, "model.num_layers": 8},
    "one GPU": {
        "cluster.gpus": 1,
        "layout.ep": 1,
        "job.global_batch": 4,
        "job.micro_batch": 4,
        "model.num_experts": 16,
    },
    "tp cp": {"layout.tp": 2, "layout.cp": 2},
    "frozen encoder": {"job.freeze": ["vision"]},
    "frozen decoder": {"job.freeze": ["language"]},
    "delta rule": {"model": "qwen3.5-35b-a3b", "job.mtp": 0},
    "mtp over stages": {"model": "qwen3.5-35b-a3b", "job.mtp": 1, "layout.pp": 2},
}
OFTEN = ("encoder on its own stage", "ep overlap")


def near(plan: Plan, stage: int = 0) -> None:
    rank = stage * (plan.layout.gpus // plan.layout.pp)
    rehearsed = rehearse_rank(plan, rank).peak_bytes
    assert sum(memory(plan).stages[stage].terms.values()) == pytest.approx(rehearsed, rel=NEAR)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_estimate_is_near_the_rehearsal(name: str) -> None:
    plan = build({**VISION, **PLANS[name]})
    for stage in range(plan.layout.pp):
        near(plan, stage)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("qwen3-vl-*.toml")), ids=lambda path: path.stem)
def test_large_recipes_fit_and_are_estimated(path: Any) -> None:
    plan = read_plan(str(path)).plan
    assert plan is not None
    plan = change(plan, {"target": "threefold", "knobs.graphs": []})
    for stage in range(plan.layout.pp):
        near(plan, stage)
        assert sum(memory(plan).stages[stage].terms.values()) < plan.chip.memory_bytes


@pytest.mark.parametrize("name", ["qwen3-vl-30b-a3b", "qwen3.5-35b-a3b", "tiny-qwen3-vl-moe", "tiny-qwen3.5"])
def test_parameters_are_those_of_the_engine(name: str) -> None:
    """Names, shapes and order, which decides the buckets of ZeRO-1; and `spec/params.py` counts as many."""
    model = MODELS[name].cut(num_layers=4)
    assert model.vision is not None
    engine = build_model(model, mtp=0, device="meta").named_parameters()
    expected = [(path, tuple(p.shape)) for path, p in engine if path.startswith(("vision.", "projector."))]
    found = list(vision_parameters(model.vision, model.dim))
    assert found == expected
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in found]
    assert sum(sizes) == vision_params(model.vision, model.dim)


def test_a_frozen_encoder_saves_nothing() -> None:
    """A rehearsal holds nothing of encoder and projector at its peak once both are frozen, and the estimate says so."""
    parts = [(), ("vision",), ("vision", "projector")]
    plans = [build({**VISION, "job.freeze": list(frozen)}) for frozen in parts]
    rehearsed = [rehearse_rank(plan).terms.get("vision", 0) for plan in plans]
    estimated = [memory(plan).stages[0].terms["vision"] for plan in plans]
    assert rehearsed[0] > 20 * rehearsed[1] > 0
    assert rehearsed[2] == estimated[2] == 0
    assert estimated[0] == pytest.approx(rehearsed[0], rel=NEAR)
    assert estimated[1] == pytest.approx(rehearsed[1], rel=NEAR)


def test_planned_pictures() -> None:
    """One megapixel is 64 x 64 patches of 16 pixels, and 1,024 tokens; less where the plan or the sequence says so."""
    pictures = planned_pictures(build(VISION))
    assert pictures is not None
    assert (pictures.count, pictures.grid, pictures.tokens) == (1, (64, 64), 1024)
    small = planned_pictures(build({**VISION, "job.max_pixels": 512 * 512, "job.images": 2.5}))
    assert small is not None
    assert (small.count, small.grid) == (3, (32, 32))
    assert expected_patches(build({**VISION, "job.images": 0.5})) == (2048.0, 4096)
    narrow = planned_pictures(build({**VISION, "job.seq_len": 256, "job.images": 9.0}))
    assert narrow is not None
    assert (narrow.count, narrow.tokens) == (1, 256)
    assert planned_pictures(build(GPU)) is None
    assert planned_pictures(build({**VISION, "job.images": 0})) is None
