"""How fast a run is: useful and padded tokens, pictures, model FLOPs, MFU, and the memory of the rank that uses most.

`train.py` asks for the numbers after every step. Padding is computed, and so it is in `tokens_per_second`; it is in no
other number. FLOPs are those that `threefold estimate` counts, with attention over the useful tokens of each sequence;
those of encoding pictures are a number of their own.
"""

import resource
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from threefold.engine.batch import Batch
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Mesh
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token, picture_training_flops

# Metrics of a vision-language model, measured by `effects/part_times.py`.
PART_SECONDS = ("encoder_seconds", "projector_seconds", "decoder_seconds")


class StepWork(NamedTuple):
    """What all ranks together did in a step."""

    num_tokens: float  # padding included
    num_useful_tokens: float
    flops: float  # of the model, without padding and without recompute
    memory_bytes: float  # the peak of the rank that uses most
    num_images: float = 0.0  # a temporal patch of a video counts as one
    num_vision_tokens: float = 0.0  # useful tokens that stand for pictures
    vision_flops: float = 0.0  # of the encoder and projector
    num_bad_pictures: float = 0.0  # that could not be decoded
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
        pictures = [batch.images for batch in batches if batch.images is not None]
        num_images = sum(len(images.grids_I2) for images in pictures)
        num_vision_tokens = sum(len(images.token_index_V) for images in pictures)
        sizes = [patches for images in pictures for patches in images.grids_I2.prod(dim=1).tolist()]
        vision_flops = sum(picture_training_flops(self.plan.model, each, self.plan.job.freeze) for each in sizes)
        device = self.mesh.device
        num_bad = sum(batch.num_bad_pictures for batch in batches)
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
                "bad_images": int(work.num_bad_pictures),
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
    """Picture tokens of the data-parallel rank with most, over the mean; 1 is level, and what no pictures give."""
    return work.max_vision_tokens * dp / work.num_vision_tokens if work.num_vision_tokens else 1.0


def useful_lengths(batch: Batch) -> tuple[int, ...]:
    """The tokens of each sequence that are no padding."""
    rows, length = batch.tokens_BS.shape
    return (length,) * rows if batch.lengths is None else batch.lengths


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
