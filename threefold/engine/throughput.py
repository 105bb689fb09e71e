"""Throughput of a run: tokens, images, model FLOPs, MFU, memory, and the times of encoder, projector and decoder.

`train_hooks.py` asks for the numbers after every step. Padding is computed, and so it is in `tokens_per_second`; it is
in no other number. FLOPs are those that `threefold estimate` counts, with attention over the useful tokens of each
sequence; those of encoding images are a number of their own.

`PartTimes` times encoder, projector and decoder of a vision-language model apart. Hooks mark where a part begins and
ends: on a GPU a mark is a CUDA event, which nothing waits for within a step; on a CPU it is the clock. The backward of
a part begins where a gradient reaches its output. It ends where the next part's begins, or with the backward of the
microbatch: encoder and projector are the first in the forward, so that autograd runs them last. The decoder is the rest
of the microbatch loop: forward, loss and backward of everything that is no image, and on several ranks what it waits
for others, such as in the bubble of a pipeline.
"""

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from threefold.engine.batch import Batch
from threefold.engine.build import Parts
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Mesh
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token, picture_training_flops
from threefold.units import format_many

# Metrics of a vision-language model, measured by `throughput.py`.
PART_SECONDS = ("encoder_seconds", "projector_seconds", "decoder_seconds")


class StepWork(NamedTuple):
    """The work of all ranks in a step."""

    num_tokens: float  # padding included
    num_useful_tokens: float
    flops: float  # of the model, without padding and without recompute
    memory_bytes: float  # the peak of the rank that uses most
    num_images: float = 0.0  # a temporal patch of a video counts as one
    num_vision_tokens: float = 0.0  # useful tokens that stand for images
    vision_flops: float = 0.0  # of the encoder and projector
    num_bad_images: float = 0.0  # that could not be decoded
    max_vision_tokens: float = 0.0  # of the rank with most; the mean is what balancing could reach
    part_seconds: tuple[float, ...] = (0.0, 0.0, 0.0)  # of encoder, projector and decoder, mean over DP ranks
    data_seconds: float = 0.0  # that the rank which waited longest waited for its batches


class Throughput:
    """Counts the work of steps. All ranks make the same calls."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.peak_name, self.peak_flops = named_peak(plan) if mesh.device.type == "cuda" else (None, None)
        # One length is nearly all there is in pretraining; chats have thousands.
        self._flops_per_token = lru_cache(maxsize=65_536)(
            lambda length: flops_per_token(plan.model, length, plan.mtp, plan.layout.tp)
        )

    def count_work(
        self,
        batches: Sequence[Batch],
        part_seconds: Sequence[float] = (0.0, 0.0, 0.0),
        data_seconds: float = 0.0,
    ) -> StepWork:
        """The work of the step that had these microbatches on this rank. Waits for the device.

        `part_seconds` are the seconds of encoder, projector and decoder on this rank, and `data_seconds` those in which
        it waited for its batches.
        """
        # Ranks that share a microbatch by dynamic context parallelism count equal parts of it.
        parts = [1 / (batch.cp_degree or 1) for batch in batches]
        flops = sum(part * self._flops(batch) for batch, part in zip(batches, parts, strict=True))
        num_useful = sum(part * sum(useful_lengths(batch)) for batch, part in zip(batches, parts, strict=True))
        num_tokens = sum(part * batch.tokens_BS.numel() for batch, part in zip(batches, parts, strict=True))
        of_batches = [batch.images for batch in batches if batch.images is not None]
        num_images = sum(len(images.grids_I2) for images in of_batches)
        num_vision_tokens = sum(len(images.token_index_V) for images in of_batches)
        sizes = [patches for images in of_batches for patches in images.grids_I2.prod(dim=1).tolist()]
        vision_flops = sum(picture_training_flops(self.plan.model, each, self.plan.job.freeze) for each in sizes)
        device = self.mesh.device
        num_bad = sum(batch.num_bad_images for batch in batches)
        counted = [num_tokens, num_useful, flops, num_images, num_vision_tokens, vision_flops, num_bad, *part_seconds]
        counted.append(1)  # to count the ranks
        sums = torch.tensor(counted, dtype=torch.float64, device=device)
        most_of = [_peak_memory_bytes(device), num_vision_tokens, data_seconds]
        largest = torch.tensor(most_of, dtype=torch.float64, device=device)
        axes = ("dp",) if all(batch.cp_degree is None for batch in batches) else ("dp", "cp")
        pending = [all_reduce(sums, self.mesh.group(*axes)), all_reduce(largest, self.mesh.world, "max")]
        for collective in pending:
            collective.wait()
        tokens, useful, flops, images, vision_tokens, vision_flops, bad, *seconds, num_ranks = sums.tolist()
        memory_bytes, most, waited = largest.tolist()
        means = tuple(each / num_ranks for each in seconds)
        return StepWork(
            tokens, useful, flops, memory_bytes, images, vision_tokens, vision_flops, bad, most, means, waited
        )

    def _flops(self, batch: Batch) -> float:
        """FLOPs of a microbatch; a document has the attention of its whole sample, as static CP computes it."""
        lengths = useful_lengths(batch)
        attended = lengths if batch.sample_lengths is None else batch.sample_lengths
        pairs = zip(lengths, attended, strict=True)
        return float(sum(length * self._flops_per_token(whole) for length, whole in pairs if length))

    def metrics(self, work: StepWork, seconds: float) -> dict[str, Any]:
        """The numbers of a line of `metrics.jsonl`. Where no peak is known, there is no MFU."""
        per_gpu = work.flops / seconds / self.plan.layout.gpus
        named = {
            "tokens_per_second": work.num_tokens / seconds,
            "useful_tokens_per_second": work.num_useful_tokens / seconds,
            "tflops": work.flops / seconds / 1e12,
            "tflops_per_gpu": per_gpu / 1e12,
            "memory_bytes": int(work.memory_bytes),
            "data_seconds": work.data_seconds,
        }
        if self.plan.is_vlm:
            named |= {
                "images": int(work.num_images),
                "images_per_second": work.num_images / seconds,
                "vision_tokens_per_second": work.num_vision_tokens / seconds,
                "vision_tokens_imbalance": _imbalance(work, self.plan.layout.dp),
                "bad_images": int(work.num_bad_images),
                "vision_tflops": work.vision_flops / seconds / 1e12,
                **dict(zip(PART_SECONDS, work.part_seconds, strict=True)),
            }
        return (
            named if self.peak_flops is None else named | {"mfu": per_gpu / self.peak_flops, "mfu_peak": self.peak_name}
        )


def named_peak(plan: Plan) -> tuple[str | None, float | None]:
    """The dense peak of the plan's precision, in words and in FLOP/s; none for a CPU, whose figures are nominal."""
    if plan.chip.architecture == "cpu":
        return None, None
    name, flops = plan.chip.dense_peak(plan.knobs.precision)
    return f"{plan.chip.name} {name} dense", flops


def _imbalance(work: StepWork, dp: int) -> float:
    """Image tokens of the data-parallel rank with most, over the mean; 1 is level, and what no images give."""
    return work.max_vision_tokens * dp / work.num_vision_tokens if work.num_vision_tokens else 1.0


def useful_lengths(batch: Batch) -> tuple[int, ...]:
    """The tokens of each sequence that are no padding."""
    rows, length = batch.tokens_BS.shape
    return (length,) * rows if batch.lengths is None else batch.lengths


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MOST_STEPS = 1000  # the newest ones, which the summary is of
_WARM_UP = 2  # steps of this start that it leaves out, where there are more

Mark = Any  # a torch.cuda.Event, or seconds


class PartSeconds(NamedTuple):
    """Seconds of one step on one rank, forward and backward of all microbatches."""

    encoder: float
    projector: float
    decoder: float


class PartTimes:
    """Times the parts of a rank that encodes images. On any other rank nothing is hooked, and all seconds are 0."""

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
        """Describe where the time of a median step went, the useful work of a second, and whether there was any
        image."""
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
