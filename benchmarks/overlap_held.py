"""One rank whose exchanges are held for a set time: on a side stream of a GPU, or until a clock says so on a CPU.

Nothing travels: what is measured is whether the schedule finds compute to put beside an exchange, and what it costs.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.build import Parts, build
from threefold.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllTicket
from threefold.engine.dispatch.flight import Flight, Wait, begin
from threefold.engine.mesh import ALONE, Mesh
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.oracle import batch_of
from threefold.engine.runner import InTurn, Merged
from threefold.engine.train import to_device
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MoeSpec
from threefold.spec.models import QWEN3_30B

WANTED = {"hidden": 0.90, "cost": 0.02}
FEW, MORE = 4, 8  # microbatches


class Transport:
    """Copies rows to where they are, and has them arrive `seconds` later."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.cycles_a_second = _cycles_a_second()

    def start(self, *tensors: Tensor) -> tuple[Sequence[Tensor], Wait]:
        if self.device.type != "cuda":
            until = time.perf_counter() + self.seconds
            return [tensor.clone() for tensor in tensors], lambda: time.sleep(max(0.0, until - time.perf_counter()))
        now = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            out = [tensor.clone() for tensor in tensors]
            if self.seconds:
                torch.cuda._sleep(int(self.seconds * self.cycles_a_second))
        arrived = self.stream.record_event()

        for tensor in tensors:
            tensor.record_stream(self.stream)

        def arrive() -> None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            for tensor in out:
                tensor.record_stream(torch.cuda.current_stream(self.device))

        return out, arrive


def _cycles_a_second() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 1e8 / (start.elapsed_time(end) / 1e3)


@dataclass(frozen=True)
class HeldDispatcher(AllToAllDispatcher):
    transport: Transport | None = None

    def _flight(self) -> Flight:
        assert self.transport is not None
        return Flight(self.transport.start, self.transport.start)

    def send(self, x_TD: Tensor, weight_TK: Tensor, ticket: AllToAllTicket) -> tuple[Tensor, Tensor]:
        ticket.counts.read()
        ticket.there = self._flight()
        x_PD, weight_P = begin(ticket.there, ticket.rows.of_tokens(x_TD), ticket.rows.of_copies(weight_TK))
        return x_PD, weight_P

    def send_back(self, y_PD: Tensor, ticket: AllToAllTicket) -> Tensor:
        ticket.back = self._flight()
        (y_SD,) = begin(ticket.back, y_PD)
        return y_SD


def plan_of(tiny: bool) -> Plan:
    model = replace(QWEN3_30B, num_layers=4, vocab=32_768, moe=MoeSpec(num_experts=16, top_k=8, expert_dim=768))
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
        "job.global_batch": MORE,
        "job.routing": "forced-balance",
        "job.data": "synthetic",
        "knobs.precision": "fp32" if tiny else "bf16",
    }
    parsed = parse(fields, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.set_num_threads(1)
    plan, transport = plan_of(args.tiny), Transport(device)
    parts = build(plan, Mesh(plan.layout, device=device), with_data=False)
    for layer in parts.model.modules():
        if isinstance(layer, MoeLayer):
            layer.dispatcher = HeldDispatcher(len(layer.experts.down), ALONE, transport=transport)
    runners = {
        "no overlap": InTurn(parts.model),
        "overlap": Merged(parts.model, False),
        "overlap, delayed weights": Merged(parts.model, True),
    }
    batches = [to_device(batch_of(plan, 0, number, 0), device) for number in range(MORE)]

    def steady(name: str, seconds: float) -> float:
        """Of one microbatch more; the two counts by turns, so that a slow drift of the clock cancels out."""
        transport.seconds = seconds
        times: dict[int, list[float]] = {FEW: [], MORE: []}
        for turn in range(args.warmup + args.steps):
            for count, row in times.items():
                seconds_taken = _time(parts, runners[name].run, batches[:count], device)
                if turn >= args.warmup:
                    row.append(seconds_taken)
        return (statistics.median(times[MORE]) - statistics.median(times[FEW])) / (MORE - FEW)

    instant = {name: steady(name, 0.0) for name in runners}
    num_exchanges = 4 * plan.model.num_layers
    hold = instant["no overlap"] * args.share / (1 - args.share) / num_exchanges
    held = {name: steady(name, hold) for name in runners}
    total = held["no overlap"] - instant["no overlap"]
    hidden = {name: 1 - (held[name] - instant[name]) / total for name in list(runners)[1:]}
    cost = instant["overlap"] / instant["no overlap"] - 1
    return {
        "hold_seconds": hold,
        "microbatch_seconds": {"instant": instant, "held": held},
        "share": total / held["no overlap"],
        "hidden": hidden,
        "cost_with_instant_exchanges": cost,
        "reached": max(hidden.values()) >= WANTED["hidden"] and cost <= WANTED["cost"],
    }


def _time(parts: Parts, run: Callable[..., Any], batches: list[Any], device: torch.device) -> float:
    parts.data.begin(len(batches))
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(batches, [1 / len(batches)] * len(batches))
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    parts.data.finish()
    return taken


def show(found: dict[str, Any]) -> None:
    times = found["microbatch_seconds"]
    print(
        f"each exchange held for {found['hold_seconds'] * 1e3:.3f} ms; {found['share']:.1%} of the time without overlap"
    )
    for name, seconds in times["held"].items():
        hidden = f"  hidden {found['hidden'][name]:.1%}" if name in found["hidden"] else ""
        print(f"{name:<26}{times['instant'][name] * 1e3:>9.3f} ms instant{seconds * 1e3:>9.3f} ms held{hidden}")
    print(f"with instant exchanges the merged schedule costs {found['cost_with_instant_exchanges']:+.1%}")
