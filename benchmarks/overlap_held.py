"""One rank whose exchanges are held for a set time: on a side stream of a GPU, or until a clock says so on a CPU.

Nothing travels: what is measured is whether the schedule finds compute to put beside an exchange, and what it costs.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from held_exchanges import HeldDispatcher, Transport

from threefold.engine.batch import Batch
from threefold.engine.build import build
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Mesh
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.schedule.microbatch_runners import MicrobatchRunner, Overlapped, Sequential
from threefold.engine.step import to_device
from threefold.engine.verify.exchange_times import intersection, total_length, union
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MoeSpec
from threefold.spec.models import MODELS

WANTED = {"hidden": 0.90, "cost": 0.02}
NONE = "no overlap"
FEW, MORE = 2, 5  # microbatches
FEW_TOKENS = 64  # in a sequence: so few that a GPU waits for the host, whose time is then measured
RANKS = 8  # of expert parallelism, of which this is one
# Bytes a second each way of one H200: what all-to-all gets of NVLink's 450 GB/s, and of a 400 Gbit/s card.
LINKS = {"NVLink": 300e9, "InfiniBand": 45e9}


def plan_of(tiny: bool) -> Plan:
    model = replace(
        MODELS["qwen3-30b-a3b"], num_layers=4, vocab=32_768, moe=MoeSpec(num_experts=16, top_k=8, expert_dim=768)
    )
    if tiny:
        attention = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True, rope_theta=1e6)
        small = MoeSpec(num_experts=4, top_k=2, expert_dim=64)
        model = replace(model, num_layers=2, dim=64, dense_dim=64, vocab=128, attention=attention, moe=small)
    fields = {
        "model": "qwen3-30b-a3b",
        "target": "threefold",
        "cluster.chip": "cpu" if tiny else "h200",
        "cluster.gpus": 1,
        "job.seq_len": 64 if tiny else 4096,
        "job.micro_batch": 1 if tiny else 4,
        "job.global_batch": MORE if tiny else 4 * MORE,
        "job.routing": "forced-balance",
        "job.data": "synthetic",
        "knobs.precision": "fp32" if tiny else "bf16",
        "knobs.expert_fusion": True,
    }
    parsed = parse(fields, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


@dataclass
class Steady:
    """Runs of few and of more microbatches, and of the latter the seconds of exchanges."""

    few: list[float]
    more: list[float]
    under_way: list[float]
    exposed: list[float]

    @property
    def seconds(self) -> float:
        """The seconds of one microbatch more."""
        return (statistics.median(self.more) - statistics.median(self.few)) / (MORE - FEW)

    @property
    def hidden(self) -> float:
        return 1 - sum(self.exposed) / sum(self.under_way)


class Bench:
    """A model whose exchanges are held, and the three ways to run it."""

    def __init__(self, plan: Plan, device: torch.device, spin: bool) -> None:
        self.plan, self.device, self.transport = plan, device, Transport(device, spin)
        self.parts = build(plan, Mesh(plan.layout, device=device), with_data=False)
        for layer in self.parts.model.modules():
            if isinstance(layer, MoeLayer):
                layer.dispatcher = HeldDispatcher(len(layer.experts.down), TRIVIAL_GROUP, transport=self.transport)
        model = self.parts.model
        self.runners: dict[str, MicrobatchRunner] = {
            NONE: Sequential(model),
            "overlap": Overlapped(model, False),
            "overlap, delayed weights": Overlapped(model, True),
        }

    def steady(self, holds: Sequence[float], warmup: int, turns: int, seq_len: int) -> list[dict[str, Steady]]:
        """For each hold and runner. All by turns: a slow drift of the clock cancels."""
        plan = replace(self.plan, job=replace(self.plan.job, seq_len=seq_len))
        batches = [to_device(synthetic_batch(plan, 0, number, 0), self.device) for number in range(MORE)]
        found = {(hold, name): Steady([], [], [], []) for hold, name in product(holds, self.runners)}
        for turn in range(warmup + turns):
            for (hold, name), one in found.items():
                self.transport.seconds = hold
                few, more = (self._time(self.runners[name], batches[:count]) for count in (FEW, MORE))
                if turn >= warmup:
                    one.few.append(few)
                    one.more.append(more)
                    under_way, exposed = self._exposed()
                    one.under_way.append(under_way)
                    one.exposed.append(exposed)
        return [{name: found[hold, name] for name in self.runners} for hold in holds]

    def holds(self, instant: dict[str, Steady], shares: Sequence[float]) -> list[float]:
        """So long that exchanges take these shares of the time without overlap."""
        num_exchanges = 4 * self.plan.model.num_layers
        return [instant[NONE].seconds * share / (1 - share) / num_exchanges for share in shares]

    def _time(self, runner: MicrobatchRunner, batches: list[Batch]) -> float:
        self.parts.data.begin_step(len(batches))
        self.transport.seen.clear()
        self._wait()
        start = time.perf_counter()
        runner.run(batches, [1 / len(batches)] * len(batches))
        self._wait()
        taken = time.perf_counter() - start
        self.parts.data.finish_grad_sync()
        return taken

    def _exposed(self) -> tuple[float, float]:
        """Seconds in which exchanges of the last run were under way, and in which compute stood still for them.

        The first forward and the last backward, which have nothing beside them, are left out.
        """
        ends = 2 * self.plan.model.num_layers
        exchanges = self.transport.seen[ends:-ends]
        under_way = union(exchange.under_way for exchange in exchanges)
        return total_length(under_way), total_length(
            intersection(under_way, [exchange.waited for exchange in exchanges])
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    bench = Bench(plan_of(args.tiny), torch.device(args.device), args.spin)
    seq_len = bench.plan.job.seq_len
    [host] = bench.steady([0.0], args.warmup, args.steps, seq_len=FEW_TOKENS)
    [once] = bench.steady([0.0], args.warmup, 1, seq_len)
    holds = bench.holds(once, args.shares)
    return {"held_by": "a kernel" if args.spin else "the host"} | sum_up(
        bench.plan, host, holds, bench.steady([0.0, *holds], 1, args.steps, seq_len)
    )


def sum_up(
    plan: Plan, host: dict[str, Steady], holds: Sequence[float], found: Sequence[dict[str, Steady]]
) -> dict[str, Any]:
    """`found` begins with instant exchanges."""
    instant = _seconds(found[0])
    rows = [_row(hold, held) for hold, held in zip(holds, found[1:], strict=True)]
    main = rows[len(rows) // 2]
    costs = {name: seconds / instant[NONE] - 1 for name, seconds in instant.items() if name != NONE}
    return {
        "tokens": plan.job.micro_batch * plan.job.seq_len,
        "num_layers": plan.model.num_layers,
        "num_exchanges": 4 * plan.model.num_layers,
        "exchange_bytes": _bytes_that_leave(plan),
        "hold_seconds": main["hold_seconds"],
        "microbatch_seconds": {"instant": instant, "held": main["held"]},
        "share": main["share"],
        "hidden": main["hidden"],
        "cost_with_instant_exchanges": costs["overlap"],
        "costs": costs,
        "host_seconds": _seconds(host),
        "sweep": rows,
        "reached": max(main["hidden"].values()) >= WANTED["hidden"] and costs["overlap"] <= WANTED["cost"],
    }


def _seconds(found: dict[str, Steady]) -> dict[str, float]:
    return {name: one.seconds for name, one in found.items()}


def _row(hold: float, found: dict[str, Steady]) -> dict[str, Any]:
    held = _seconds(found)
    alone = found[NONE]
    return {
        "hold_seconds": hold,
        "share": statistics.median(alone.exposed) / (MORE - 1) / held[NONE],
        "held": held,
        "hidden": {name: one.hidden for name, one in found.items() if name != NONE},
        "gain": {name: held[NONE] / seconds for name, seconds in held.items() if name != NONE},
    }


def _bytes_that_leave(plan: Plan) -> int:
    """The bytes that leave one of eight ranks in an exchange of bf16 rows; ranks hold equal parts of the experts."""
    assert plan.model.moe
    rows = plan.job.micro_batch * plan.job.seq_len * plan.model.moe.top_k
    return rows * plan.model.dim * 2 * (RANKS - 1) // RANKS


def show(found: dict[str, Any]) -> None:
    times, bytes_ = found["microbatch_seconds"], found["exchange_bytes"]
    print(f"milliseconds of a microbatch of {found['tokens']:,} tokens in {found['num_layers']} layers")
    print(_line("", "host", "instant", [f"held {_ms(row['hold_seconds'])}" for row in found["sweep"]]))
    for name, instant in times["instant"].items():
        cells = [f"{_ms(row['held'][name])}{_told(row, name):>22}" for row in found["sweep"]]
        print(_line(name, _ms(found["host_seconds"][name]), _ms(instant), cells))
    shares = ", ".join(f"{row['share']:.0%}" for row in found["sweep"])
    print(f"exchanges take {shares} of the time without overlap")
    links = ", ".join(f"{_ms(bytes_ / rate)} at {rate / 1e9:.0f} GB/s ({link})" for link, rate in LINKS.items())
    print(f"an exchange of {bytes_ / 1e6:.0f} MB, what leaves one of {RANKS} ranks, would take {links}")
    costs = ", ".join(f"{name} {cost:+.1%}" for name, cost in found["costs"].items())
    print(f"with instant exchanges the merged schedule costs: {costs}")


def _line(name: str, host: str, instant: str, cells: Sequence[str]) -> str:
    return f"{name:<26}{host:>8}{instant:>9}" + "".join(f"{cell:>30}" for cell in cells)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _told(row: dict[str, Any], name: str) -> str:
    return f"{row['gain'][name]:.2f}x, hidden {row['hidden'][name]:.1%}" if name in row["gain"] else ""
