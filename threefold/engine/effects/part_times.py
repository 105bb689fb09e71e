"""Times encoder, projector and decoder of a vision-language model apart, in every step of a run. `train.py` calls it.

Hooks mark where a part begins and ends: on a GPU a mark is a CUDA event, which nothing waits for within a step; on a
CPU it is the clock. The backward of a part begins where a gradient reaches its output. It ends where the next part's
begins, or with the backward of the microbatch: encoder and projector are the first in the forward, so that autograd
runs them last.

The decoder is the rest of the microbatch loop: forward, loss and backward of everything that is no picture, and on
several ranks what it waits for others, such as in the bubble of a pipeline.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from threefold.engine.build import Parts
from threefold.engine.run.throughput import PART_SECONDS
from threefold.units import format_many

_MOST_STEPS = 1000  # the newest ones, which the summary is of
_WARM_UP = 2  # steps of this start that it leaves out, where there are more

Mark = Any  # a torch.cuda.Event, or seconds


class PartSeconds(NamedTuple):
    """Seconds of one step on one rank, forward and backward of all microbatches."""

    encoder: float
    projector: float
    decoder: float


class PartTimes:
    """Times the parts of a rank that encodes pictures. On any other rank nothing is hooked, and all seconds are 0."""

    def __init__(self, parts: Parts) -> None:
        self.device = parts.device
        self.is_measured = False
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {}
        self._metrics: deque[tuple[float, ...]] = deque(maxlen=_MOST_STEPS)
        self._num_steps, self._saw_images = 0, False
        for chunk in parts.chunks.values():
            if chunk.vision is not None and chunk.projector is not None:
                self.is_measured = True
                self._hook_forward("encoder", chunk.vision)
                self._hook_forward("projector", chunk.projector)
                chunk.projector.register_forward_hook(self._hook_backward)

    @contextmanager
    def microbatches(self) -> Iterator[None]:
        """Around the microbatch loop of a training step."""
        self._spans = {}
        began = self._mark() if self.is_measured else None
        yield
        if self.is_measured:
            self._add("loop", began, self._mark())

    def seconds(self) -> PartSeconds:
        """The times of the last loop. The host has waited for the device since: it has read the loss of the step."""
        loop, encoder, projector = (self._sum(name) for name in ("loop", "encoder", "projector"))
        return PartSeconds(encoder, projector, max(0.0, loop - encoder - projector)) if self.is_measured else NONE

    def remember(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step for the summary; the first steps of a start are warm-up."""
        self._num_steps += 1
        self._saw_images = self._saw_images or metrics["images_per_second"] > 0
        if self._num_steps == _WARM_UP + 1:
            self._metrics.clear()
        self._metrics.append(tuple(float(metrics[name]) for name in SUMMARY))

    def summary(self) -> list[str]:
        """Where the time of a median step went, the useful work of a second, and whether there was any image."""
        if not self.is_measured or not self._metrics:
            return []
        median = dict(zip(SUMMARY, map(statistics.median, zip(*self._metrics, strict=True)), strict=True))
        step = median["seconds"]
        named = {name.removesuffix("_seconds"): median[name] for name in PART_SECONDS}
        named["elsewhere"] = max(0.0, step - sum(named.values()))
        each = ", ".join(f"{name} {seconds:.4g} s ({seconds / step:.0%})" for name, seconds in named.items())
        work = (
            f"{median['images_per_second']:,.4g} images/s, {median['useful_tokens_per_second']:,.0f} useful tokens/s, "
            f"{1 / step:.4g} steps/s"
        )
        head = f"median of {format_many(len(self._metrics), 'step')}:"
        label = (
            [] if self._saw_images else ["image-free: no step had an image, so its speed is no evidence for the model"]
        )
        return [f"{head} {step:.4g} s: {each}", f"{head} {work}", *label]

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _add(self, name: str, began: Mark, ended: Mark) -> None:
        self._spans.setdefault(name, []).append((began, ended))

    def _sum(self, name: str) -> float:
        spans = self._spans.get(name, [])
        if self.device.type != "cuda":
            return float(sum(ended - began for began, ended in spans))
        for _, ended in spans:
            ended.synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in spans)) / 1e3

    def _hook_forward(self, name: str, module: nn.Module) -> None:
        began: list[Mark] = []
        module.register_forward_pre_hook(lambda *_: began.append(self._mark()))
        module.register_forward_hook(lambda *_: self._add(name, began.pop(), self._mark()))

    def _hook_backward(self, module: nn.Module, inputs: tuple[list[Tensor]], features: list[Tensor]) -> None:
        """Mark the backward of a microbatch: from the first gradient of a feature to that of the encoder's output."""
        states, began = inputs[0], list[Mark]()  # `began`: of the projector

        def enter_projector(grad: Tensor) -> None:
            if began:
                return
            began.append(self._mark())
            if not states_train:
                _at_end_of_backward(lambda: self._add("projector", began[0], self._mark()))

        def enter_encoder(grad: Tensor) -> None:
            entered = self._mark()
            if began:
                self._add("projector", began[0], entered)
            _at_end_of_backward(lambda: self._add("encoder", entered, self._mark()))

        states_train = states[0].requires_grad
        for feature in features:
            if feature.requires_grad:
                feature.register_hook(enter_projector)
        if states_train:
            # The gradient of the last hidden states is whole when all mergers are done: their merger is the last.
            states[0].register_hook(enter_encoder)


def _at_end_of_backward(function: Any) -> None:
    Variable._execution_engine.queue_callback(function)


NONE = PartSeconds(0.0, 0.0, 0.0)
# What a summary needs of the metrics of a step.
SUMMARY = (*PART_SECONDS, "seconds", "images_per_second", "useful_tokens_per_second")
