"""Encoder, projector and decoder timed apart, with a clock that only chosen modules advance."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision_layouts import CASES, case

from threefold.engine import throughput as part_times
from threefold.engine.build import Parts, build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models.block import Block
from threefold.engine.step import train_step
from threefold.engine.throughput import PartSeconds, PartTimes, Throughput
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.engine.vision import Merger, VisionBlock
from threefold.plan.plan import Plan

ENCODER, PROJECTOR, DECODER = (1.0, 10.0), (100.0, 1_000.0), (1e4, 1e5)  # seconds of a forward and a backward


class Clock:
    """Stands still but where a module of a model ticks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def tick(self, module: nn.Module, forward: float, backward: float) -> None:
        """Advance with each forward of the module, and with the backward of its output."""
        clock = self

        class Tick(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                clock.now += backward
                return grads[0]

        def enter(*_: Any) -> None:  # not behind the forward: a recompute ends with the last tensor that it needs
            clock.now += forward

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda module, inputs, output: Tick.apply(output))


def ticking(parts: Parts, clock: Clock) -> None:
    for chunk in parts.chunks.values():
        for module in list(chunk.modules()):
            if isinstance(module, VisionBlock):
                clock.tick(module, *ENCODER)
            elif isinstance(module, Merger):
                clock.tick(module, *PROJECTOR)
            elif isinstance(module, Block):
                clock.tick(module.mixer, *DECODER)


def seconds_of(rank: int, plan: Plan) -> tuple[PartSeconds, list[float]]:
    """The seconds of a step on a rank, and the mean over data-parallel ranks that its metrics would have."""
    torch.set_num_threads(1)
    clock = Clock()
    part_times.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[assignment]
    mesh = Mesh(plan.layout, rank)
    parts = build(plan, mesh, with_data=False)
    ticking(parts, clock)
    times = PartTimes(parts)
    batches = [synthetic_batch(plan, 0, m, mesh.coordinate("dp")) for m in range(plan.num_microbatches)]
    train_step(parts, batches, 1e-3, plan.job, times.microbatches)
    found = times.seconds()
    return found, list(Throughput(plan, mesh).count_work(batches, found).part_seconds)


def expected(plan: Plan, recomputed: bool = False) -> PartSeconds:
    """All layers of the encoder and all mergers are on the first stage; a frozen part has no backward."""
    vision = plan.model.vision
    assert vision is not None
    trains = ("vision" not in plan.job.freeze, "projector" not in plan.job.freeze)
    counts = (vision.depth, 1 + len(vision.deepstack))
    has_backward = (trains[0], trains[0] or trains[1])
    forwards = 1 + recomputed
    encoder, projector = (
        plan.num_microbatches * count * (costs[0] * forwards + costs[1] * backward)
        for count, costs, backward in zip(counts, (ENCODER, PROJECTOR), has_backward, strict=True)
    )
    layers = plan.model.num_layers if plan.layout.pp == 1 else len(plan.chunks[0].layers)
    decoder = plan.num_microbatches * layers * (DECODER[0] * forwards + DECODER[1])
    return PartSeconds(encoder, projector, decoder)


@pytest.fixture(autouse=True)
def _real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_times, "time", part_times.time)  # put back behind the test


FREEZES: list[dict[str, Any]] = [
    {},
    {"freeze": ["vision"]},
    {"freeze": ["vision", "projector"]},
]


@pytest.mark.parametrize("job", FREEZES, ids=lambda job: "-".join(job.get("freeze", ["trained"])))
def test_parts_of_one_rank(job: dict[str, Any]) -> None:
    plan = case("one rank", 1, job=job).plan
    found, means = seconds_of(0, plan)
    assert found == expected(plan) == tuple(means)


def test_recompute_counts_for_the_part_that_is_recomputed() -> None:
    plan = case("recompute", 1, knobs={"recompute": ["full"]}).plan
    assert seconds_of(0, plan)[0] == expected(plan, recomputed=True)


def named(name: str) -> Plan:
    return next(each.plan for each in CASES if each.name == name)


PLANS: list[Callable[[], Plan]] = [
    lambda: named("frozen decoder, fsdp"),
    lambda: named("ep overlap"),
    lambda: case("pp", 2, pp=2, layers=4).plan,
]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["fsdp", "ep overlap", "pipeline"])
def test_parts_over_ranks(number: int) -> None:
    """Every rank that encodes has its own seconds; later stages have none, and their loop is not in the mean."""
    plan = PLANS[number]()
    ranks = run_ranks(plan.cluster.gpus, seconds_of, plan)
    assert ranks[0] == (expected(plan), list(expected(plan)))
    assert ranks[1][0] == (expected(plan) if plan.layout.pp == 1 else PartSeconds(0, 0, 0))


def test_a_text_model_is_not_hooked() -> None:
    from tiny_runs import tiny_plan

    plan = tiny_plan({"job.data": "synthetic"})
    times = PartTimes(build(plan, Mesh(plan.layout, 0), with_data=False))
    assert (times.is_measured, times.seconds(), times.summary()) == (False, PartSeconds(0, 0, 0), [])


def test_the_summary_is_of_steps_behind_the_warm_up() -> None:
    plan = case("one rank", 1).plan
    times = PartTimes(build(plan, Mesh(plan.layout, 0), with_data=False))
    metrics = {"encoder_seconds": 0.5, "projector_seconds": 0.1, "decoder_seconds": 1.0, "seconds": 2.0}
    metrics |= {"images_per_second": 7.0, "useful_tokens_per_second": 1234.0}
    for slow in (100.0, 100.0, 1.0, 1.0, 1.0):
        times.remember({name: value * slow for name, value in metrics.items()})
    assert times.summary() == [
        "median of 3 steps: 2 s: encoder 0.5 s (25%), projector 0.1 s (5%), decoder 1 s (50%), elsewhere 0.4 s (20%)",
        "median of 3 steps: 7 images/s, 1,234 useful tokens/s, 0.5 steps/s",
    ]


def test_a_run_without_images_is_labeled() -> None:
    plan = case("one rank", 1).plan
    times = PartTimes(build(plan, Mesh(plan.layout, 0), with_data=False))
    metrics = dict.fromkeys(part_times.SUMMARY, 1.0)
    times.remember(metrics | {"images_per_second": 0.0})
    assert times.summary()[-1].startswith("image-free: no step had an image")
    times.remember(metrics)
    assert not any(line.startswith("image-free") for line in times.summary())
