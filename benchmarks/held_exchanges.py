"""Exchanges that are held for a set time: on a side stream of a GPU, or until a clock says so on a CPU."""

import ctypes
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllState
from threefold.engine.dispatch.async_exchange import AsyncExchange, Wait, start_exchange
from threefold.engine.verify.exchange_times import DeviceClock, Exchange, HostClock


class Sleep:
    """A stream waits for a thread of the host that sleeps.

    No kernel runs meanwhile, and compute has every multiprocessor, as beside a network card or a copy engine.
    """

    def __init__(self) -> None:
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        self._launch.argtypes = [ctypes.c_void_p] * 3
        self._usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self._late = 0.0
        self._late = statistics.median(_time(self, 1e-3) for _ in range(20)) - 1e-3

    def __call__(self, stream: torch.cuda.Stream, seconds: float) -> None:
        microseconds = max(1, round((seconds - self._late) * 1e6))
        code = self._launch(stream.cuda_stream, self._usleep, microseconds)
        assert code == 0, f"cuLaunchHostFunc gave {code}"


class Spin:
    """A kernel of one thread counts cycles. It shares a multiprocessor with compute, as kernels of exchanges do."""

    def __init__(self) -> None:
        self._cycles_a_second = 1.0
        self._cycles_a_second = 1e8 / _time(self, 1e8)

    def __call__(self, stream: torch.cuda.Stream, seconds: float) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._cycles_a_second))


def _time(hold: Sleep | Spin, amount: float) -> float:
    """Seconds that it took by the clock of the device."""
    stream = torch.cuda.current_stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold(stream, amount)
    start.record()
    hold(stream, amount)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Transport:
    """Hands rows on as they are, and has them arrive `seconds` later. `seen` notes when that was."""

    def __init__(self, device: torch.device, spin: bool = False) -> None:
        self.device, self.seconds = device, 0.0
        self.seen: list[Exchange] = []
        self.clock: Any = DeviceClock(device) if device.type == "cuda" else HostClock()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.hold = Spin() if spin else Sleep()

    def start(self, *tensors: Tensor) -> tuple[Sequence[Tensor], Wait]:
        out = [tensor.view_as(tensor) for tensor in tensors]
        if not self.seconds:
            return out, lambda: None
        exchange = Exchange("held", "", 0, self.clock, self.clock.now())
        self.seen.append(exchange)
        wait = self._on_stream(exchange) if self.device.type == "cuda" else self._on_clock(exchange)

        def arrive() -> None:
            exchange.on_wait()
            wait()
            exchange.on_end()

        return out, arrive

    def _on_clock(self, exchange: Exchange) -> Wait:
        until = exchange.done = exchange.start + self.seconds

        def wait() -> None:
            left = until - time.perf_counter()
            if left > 0:  # even a sleep of nothing lets other processes in
                time.sleep(left)

        return wait

    def _on_stream(self, exchange: Exchange) -> Wait:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.hold(self.stream, self.seconds)
        with torch.cuda.stream(self.stream):
            exchange.done = self.clock.now()
        return lambda: torch.cuda.current_stream(self.device).wait_event(exchange.done)


@dataclass(frozen=True)
class HeldDispatcher(AllToAllDispatcher):
    transport: Transport | None = None

    def _held_exchange(self) -> AsyncExchange:
        assert self.transport is not None
        return AsyncExchange(self.transport.start, self.transport.start)

    def token_dispatch(self, x_TD: Tensor, weight_TK: Tensor, state: AllToAllState) -> tuple[Tensor, Tensor]:
        rows = state.rows.permute_tokens(x_TD), state.rows.permute_weights(weight_TK)
        state.counts.split_sizes()
        state.dispatch_exchange = self._held_exchange()
        x_PD, weight_P = start_exchange(state.dispatch_exchange, *rows)
        return x_PD, weight_P

    def token_combine(self, y_PD: Tensor, state: AllToAllState) -> Tensor:
        state.combine_exchange = self._held_exchange()
        (y_SD,) = start_exchange(state.combine_exchange, y_PD)
        return y_SD
