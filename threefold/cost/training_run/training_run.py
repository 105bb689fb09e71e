"""What a whole training takes: days, GPU-hours, energy, money, checkpoints, host memory, and what failures leave of it.

`threefold estimate PLAN --tokens 1.5T` and `threefold.estimate_training` call `training_run`. A step's time comes from
`cost/estimate.py` with its band, figures about the cluster from `spec/chip_description.py`, the losses to failures
from `goodput.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from threefold.cost.estimate import Estimate
from threefold.cost.expert_load import largest_rows
from threefold.cost.format_support import STATE_BYTES
from threefold.cost.memory.by_stack import memory
from threefold.cost.memory.stage_memory import in_flight
from threefold.cost.memory.threefold.timelines.optimizer_step import host_slot_bytes
from threefold.cost.rank_params import trained_params
from threefold.cost.rates import rates_of
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.stage_contents import chunk_layers, stage_contents
from threefold.cost.time.offload import offloaded_bytes
from threefold.cost.training_run.goodput import FailureModel, Goodput, best_interval, enough_spare_nodes, goodput
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.spec.chip_description import SOURCES, Operations, operations_of
from threefold.spec.params import count_params
from threefold.units import format_bytes, format_count, format_many, format_number, format_rounded, format_seconds

HOUR, DAY = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True, repr=False)
class TrainingRun(ShownAsTable):
    """A training of so many tokens, predicted."""

    tokens: float
    steps: int
    gpus: int
    nodes: int
    spare_nodes: int
    step_seconds: float
    goodput: Goodput
    failures: float  # interruptions expected in the whole run
    save_steps: int  # steps between checkpoints
    save_seconds: float  # the ranks stand still for a checkpoint
    write_seconds: float  # the checkpoint is written in the background
    restart_seconds: float  # from a failure to the first step, loading included
    checkpoint_bytes: float
    host_bytes: Mapping[str, float]  # of one GPU, by term
    seconds: float  # from the first step to the last, failures included; infinite where it never ends
    seconds_band: tuple[float, float]  # the same with the band of a step's time
    energy_joules: float | None  # of the data center; None where nobody knows what the chip draws
    price: float | None  # of a GPU-hour
    operations: Operations
    replaced: frozenset[str]  # the figures of `operations` that the user gave
    level: str  # "calibrated" or "uncalibrated", as the estimate of a step is

    def rounded(self, value: float) -> str:
        """A figure that is as sure as the time of a step: with the digits that its band leaves."""
        error = self.seconds_band[1] / self.seconds - 1 if math.isfinite(self.seconds) else 0.0
        return format_rounded(value, error)

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the ranks that train. Spare nodes come on top."""
        return self.gpus * self.seconds / HOUR

    @property
    def paid_gpu_hours(self) -> float:
        """GPU-hours with those of the spare nodes, which are held ready all the time."""
        return self.gpu_hours * (1 + self.spare_nodes / self.nodes)

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.paid_gpu_hours * self.price

    @property
    def energy_mwh(self) -> float | None:
        return None if self.energy_joules is None else self.energy_joules / HOUR / 1e6

    def summary(self) -> str:
        return (
            f"{format_count(self.tokens)} tokens on {self.gpus} GPUs: {self.days:,.4g} days, "
            f"goodput {self.goodput.useful:.1%}"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """What it takes, one figure a row, and what the figure is made of."""
        low, high = (self.rounded(seconds / DAY) for seconds in self.seconds_band)
        good, host = self.goodput, {name: size for name, size in self.host_bytes.items() if size}
        ends = math.isfinite(self.seconds)
        every = f"{format_number(self.save_steps)} steps ({format_seconds(self.save_steps * self.step_seconds)})"
        rows = [
            [
                "days",
                f"about {self.rounded(self.days)}" if ends else "never ends",
                (f"{low} to {high}; " if ends else "") + f"{format_number(self.steps)} steps",
            ],
            [
                "GPU-hours",
                f"about {self.rounded(self.paid_gpu_hours)}",
                f"{format_many(self.gpus, 'GPU')}, {format_many(self.spare_nodes, 'spare node')}",
            ],
            [
                "goodput",
                f"{good.useful:.1%}",
                f"{good.saving:.1%} saving, {good.lost:.1%} lost to failures, {good.waiting:.1%} waiting for nodes",
            ],
            ["failures", f"about {self.rounded(self.failures)}", f"restart in {format_seconds(self.restart_seconds)}"],
            [
                "checkpoint",
                format_bytes(self.checkpoint_bytes),
                f"every {every}; ranks wait {format_seconds(self.save_seconds)}, "
                f"written in {format_seconds(self.write_seconds)}",
            ],
            [
                "host memory",
                format_bytes(sum(host.values()) * self.gpus / self.nodes),
                "a node: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in host.items()) + " a GPU",
            ],
        ]
        if self.energy_mwh is not None:
            figures = f"{self.operations.power_fraction:.0%} of the servers' power, PUE {self.operations.pue:g}"
            rows.append(["energy", f"about {self.rounded(self.energy_mwh)} MWh", figures])
        if self.cost is not None:
            price = f"{self.price:g} a GPU-hour, spare nodes included"
            rows.append(["cost", f"about {self.rounded(self.cost)}", price])
        return ["", "value", "made of"], rows

    def to_json(self) -> dict[str, Any]:
        used = {name: getattr(self.operations, name) for name in SOURCES}
        good = self.goodput
        return {
            "level": "estimated",
            "tokens": self.tokens,
            "steps": self.steps,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "spare_nodes": self.spare_nodes,
            "step_seconds": self.step_seconds,
            "goodput": {"useful": good.useful, "saving": good.saving, "lost": good.lost, "waiting": good.waiting},
            "failures": _finite(self.failures),
            "seconds": _finite(self.seconds),
            "days": _finite(self.days),
            "band": {"seconds": [_finite(each) for each in self.seconds_band]},
            "gpu_hours": _finite(self.gpu_hours),
            "paid_gpu_hours": _finite(self.paid_gpu_hours),
            "energy_mwh": _finite(self.energy_mwh),
            "cost": _finite(self.cost),
            "checkpoint": {
                "bytes": round(self.checkpoint_bytes),
                "every_steps": self.save_steps,
                "save_seconds": self.save_seconds,
                "write_seconds": self.write_seconds,
                "restart_seconds": self.restart_seconds,
            },
            "host_bytes_per_gpu": {name: round(size) for name, size in self.host_bytes.items()},
            "assumed": {
                name: {"value": value, "source": "given" if name in self.replaced else SOURCES[name]}
                for name, value in used.items()
            },
        }


def training_run(
    plan: Plan, step: Estimate, tokens: float, price: float | None = None, assumed: Mapping[str, float] | None = None
) -> TrainingRun:
    """The training of a plan whose step is estimated. `assumed` replaces figures of `Operations`, after those of the
    chip's own file."""
    given = {**plan.chip.operations, **(assumed or {})}
    figures = operations_of(given)
    gpus = plan.layout.gpus
    nodes = math.ceil(gpus / plan.cluster.node)
    saved_bytes = checkpoint_bytes(plan)
    write_seconds = saved_bytes / (nodes * figures.storage_bandwidth)
    failures = FailureModel(
        failure_rate=gpus / (figures.gpu_mtbf_hours * HOUR),
        hardware_fraction=figures.hardware_fraction,
        save_seconds=saved_bytes / gpus / (plan.chip.host_bandwidth * rates_of(plan).host_copy),
        write_seconds=write_seconds,
        restart_seconds=figures.restart_seconds + write_seconds,  # a checkpoint is read as fast as it is written
        repair_seconds=figures.repair_hours * HOUR,
    )
    spares = enough_spare_nodes(failures) if figures.spare_nodes is None else round(figures.spare_nodes)
    step_seconds = step.time.step_seconds
    steps = math.ceil(tokens / plan.tokens_per_step)
    save_steps = _save_steps(failures, step_seconds, steps)
    left = goodput(failures, save_steps * step_seconds, spares)
    seconds = steps * step_seconds / left.useful if left.useful else math.inf
    low, high = (seconds * each / step_seconds for each in step.seconds_band)
    watts = plan.chip.watts
    return TrainingRun(
        tokens=tokens,
        steps=steps,
        gpus=gpus,
        nodes=nodes,
        spare_nodes=spares,
        step_seconds=step_seconds,
        goodput=left,
        failures=seconds * (1 - left.waiting) * failures.failure_rate,
        save_steps=save_steps,
        save_seconds=failures.save_seconds,
        write_seconds=write_seconds,
        restart_seconds=failures.restart_seconds,
        checkpoint_bytes=saved_bytes,
        host_bytes=host_bytes_by_term(plan),
        seconds=seconds,
        seconds_band=(low, high),
        energy_joules=None if watts is None else watts * gpus * seconds * figures.power_fraction * figures.pue,
        price=price,
        operations=figures,
        replaced=frozenset(given),
        level="calibrated" if step.calibrated else "uncalibrated",
    )


def _save_steps(failures: FailureModel, step_seconds: float, steps: int) -> int:
    """Whole steps between checkpoints, as near to the best interval as the background write allows."""
    fewest = math.ceil((failures.write_seconds - failures.save_seconds) / step_seconds)
    best = round(min(steps * step_seconds, best_interval(failures)) / step_seconds)
    return max(1, best, min(fewest, steps))


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: null where a run never ends."""
    return value if value is not None and math.isfinite(value) else None


def checkpoint_bytes(plan: Plan) -> float:
    """Bytes of one checkpoint: weights, master weights, moments. Frozen parts have weights alone."""
    knobs, params = plan.knobs, count_params(plan.model, plan.mtp)
    weight_bytes = 4 if knobs.precision == "fp32" else 2
    master_bytes = 4 if weight_bytes == 2 and knobs.master_weights else 0
    trained = _trained_of_all_ranks(plan)
    adapters = trained if plan.job.lora_rank else 0.0  # they come beside the model's own weights
    moments = 2 * STATE_BYTES[knobs.optimizer_dtype] * trained
    if plan.job.optimizer == "muon":  # one momentum in fp32; tables stay with AdamW
        tables = min(trained, params.embedding + params.head)
        moments = 4 * (trained - tables) + 2 * STATE_BYTES[knobs.optimizer_dtype] * tables
    return weight_bytes * (params.total + adapters) + master_bytes * trained + moments


def _trained_of_all_ranks(plan: Plan) -> float:
    """Parameters that get gradients, each counted once: dense ones lie on TP x PP ranks, experts on EP x ETP x PP."""
    layout, (dense, experts) = plan.layout, trained_params(plan)
    return (dense * layout.tp + experts * layout.ep * layout.etp) * layout.pp


def host_bytes_by_term(plan: Plan, skew: float | None = None) -> dict[str, float]:
    """Bytes of host memory for one GPU, at the pipeline rank that needs the most.

    `optimizer` and `activations` are what the plan offloads. `checkpoint` is the copy that is written in the
    background. The processes themselves, their libraries and the data come on top.
    """
    skew = largest_rows(plan) if skew is None else skew
    all_on_device = replace(plan, knobs=replace(plan.knobs, optimizer_offload=0.0))
    pairs = zip(memory(all_on_device, skew).stages, memory(plan, skew).stages, strict=True)
    optimizer = [before.terms.get("optimizer", 0.0) - after.terms.get("optimizer", 0.0) for before, after in pairs]
    if not STACK_TRAITS[plan.target].updates_on_host:  # states that pass through the device are on the host too
        optimizer = [
            freed + host_slot_bytes(plan, contents)
            for freed, contents in zip(optimizer, stage_contents(plan), strict=True)
        ]
    activations = [_offloaded_activations(plan, stage, skew) for stage in range(plan.layout.pp)]
    fullest = max(range(plan.layout.pp), key=lambda stage: optimizer[stage] + activations[stage])
    return {
        "optimizer": max(0.0, optimizer[fullest]),
        "activations": activations[fullest],
        "checkpoint": checkpoint_bytes(plan) / plan.layout.gpus,
    }


def _offloaded_activations(plan: Plan, stage: int, skew: float) -> float:
    """Activations of all microbatches in flight that a pipeline rank keeps on the host."""
    contents = stage_contents(plan)[stage]
    held = in_flight(plan, stage)
    counts = held if len(held) == len(contents.chunks) else [max(held)] * len(contents.chunks)
    by_chunk = zip(contents.chunks, counts, strict=True)
    return sum(offloaded_bytes(plan, chunk_layers(plan, chunk), skew) * count for chunk, count in by_chunk)
