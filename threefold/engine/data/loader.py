"""`Loader` gives each data-parallel rank the batches of its job, and can be resumed at any step.

All ranks read one global sequence of samples. A step takes the next `global_batch` of them. Microbatch m of
data-parallel rank r takes B consecutive samples of the step, from number (m * dp_size + r) * B on. The samples of a
step and their order therefore do not depend on the number of ranks, and a position in the data is one number. For a
vision-language model the samples of a step are dealt out by their images instead, and batches have images
(`images/batch_images.py`). With dynamic context parallelism the documents of a step are dealt out to all
ranks, in as many microbatches as they need (`dynamic_cp.py`).

Shapes: B sequences of a microbatch, S tokens of a sequence.
"""

import contextlib
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.data.dynamic_cp import DynamicGrid, DynamicSteps
from threefold.engine.data.held_out import HeldOut
from threefold.engine.data.images.batch_images import BalancedSteps, BatchImages, SkippedImages
from threefold.engine.data.images.decode import DecodePool
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.mixture import Mixture
from threefold.engine.data.open_sources import DataSettings, open_job_data
from threefold.engine.data.packing import Sample
from threefold.engine.data.sources import whole_range
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import parse_entries
from threefold.plan.plan import Job
from threefold.spec.model import VisionSpec

T = TypeVar("T")
BatchIndex = tuple[int, int]  # (step, microbatch)


class Prefetcher(Generic[T]):
    """A thread that calls `make(step, microbatch)` for each index, at most `depth` calls ahead of `take`.

    An exception of `make` is raised by the `take` that would have returned its batch.
    """

    def __init__(self, make: Callable[[int, int], T], indices: Iterator[BatchIndex], depth: int) -> None:
        self._queue: queue.Queue[tuple[BatchIndex, T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        args = (make, indices, self._queue, self._stop)
        # The thread has no reference to this object, so that dropping it without `close` ends the thread as well.
        self._thread = threading.Thread(target=_make_batches, args=args, name="threefold-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[BatchIndex, T]:
        index, made, error = self._queue.get()
        if error is not None:
            raise error
        assert made is not None
        return index, made

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout=10)

    def __del__(self) -> None:
        self._stop.set()


def _make_batches(
    make: Callable[[int, int], T],
    indices: Iterator[BatchIndex],
    results: "queue.Queue[tuple[BatchIndex, T | None, BaseException | None]]",
    stop: threading.Event,
) -> None:
    for index in indices:
        made, error = None, None
        try:
            made = make(*index)
        except BaseException as problem:
            error = problem
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put((index, made, error), timeout=0.1)
                break
        if stop.is_set() or error is not None:
            return


@dataclass(frozen=True)
class _BatchMaker:
    """Makes the batch of any (step, microbatch). It is immutable, so that the prefetch thread can use it."""

    mixture: Mixture
    job: Job
    dp_rank: int
    dp_size: int
    length_multiple: int
    start_step: int = 0
    start_sample: int = 0
    images: BatchImages | None = None  # of a vision-language model, and so is `balance`
    balance: BalancedSteps | None = None
    dynamic: DynamicSteps | None = None  # with dynamic context parallelism

    @property
    def num_microbatches(self) -> int:
        return self.job.global_batch // (self.dp_size * self.job.micro_batch)

    def num_batches(self, step: int) -> int:
        return self.num_microbatches if self.dynamic is None else len(self.dynamic.rounds(self.first_sample(step)))

    def first_sample(self, step: int) -> int:
        return self.start_sample + (step - self.start_step) * self.job.global_batch

    def samples(self, step: int, microbatch: int) -> Sequence[int]:
        slot = microbatch * self.dp_size + self.dp_rank
        if self.balance is not None:
            return self.balance.samples(self.first_sample(step), slot)
        first = self.first_sample(step) + slot * self.job.micro_batch
        return range(first, first + self.job.micro_batch)

    def make(self, step: int, microbatch: int) -> Batch:
        if self.dynamic is not None:
            return self.dynamic.batch(self.first_sample(step), microbatch)
        rows = [self.mixture.sample(n) for n in self.samples(step, microbatch)]
        length = self.job.seq_len
        if self.job.dynamic_length:
            used = length - min(row.num_padding for row in rows)
            length = min(length, -(-used // self.length_multiple) * self.length_multiple)
        batch = _stack(rows, length, self.job.task == "sft" or self.images is not None)
        return batch if self.images is None else self.images.add(batch, rows)

    def indices_from(self, step: int, microbatch: int) -> Iterator[BatchIndex]:
        """This index and all that follow."""
        while True:
            yield step, microbatch
            step, microbatch = self.next_index(step, microbatch)

    def next_index(self, step: int, microbatch: int) -> BatchIndex:
        return (step, microbatch + 1) if microbatch + 1 < self.num_batches(step) else (step + 1, 0)


class Loader:
    """The batches of one data-parallel rank.

    Any batch can be asked for. While batches are asked for in order, the next ones are made ahead of time.
    """

    def __init__(
        self,
        job: Job,
        vocab: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        held_out: float = 0.0,
        evaluation: bool = False,
        tokenizer: Tokenizer | None = None,
        cache: str | Path | None = None,
        prefetch: int = 2,
        length_multiple: int = 1,
        vision: VisionSpec | None = None,
        image_workers: int = 0,
        dynamic_cp: DynamicGrid | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Open the data of a job for one data-parallel rank.

        Args:
            job: the data, its mixture, sequence length and batch sizes.
            vocab: the model's vocabulary; data with larger tokens is refused.
            dp_rank: this rank among the `dp_size` data-parallel ranks.
            dp_size: number of data-parallel ranks.
            seed: chooses the order of samples.
            held_out: share of each source that is held out for evaluation, by the hash of its documents.
            evaluation: give the held-out samples instead of the others.
            tokenizer: encodes text; None takes that of job.tokenizer, or bytes.
            cache: folder for shards made from text and for the embedded corpus.
            prefetch: microbatches that are made ahead of time; 0 for none.
            length_multiple: job.dynamic_length rounds the length of a microbatch up to a multiple of this.
            vision: the model's vision part; None for a text model.
            image_workers: processes that decode images; 0 decodes them in the thread that makes batches.
            dynamic_cp: the ranks that share the documents of a step; None: each microbatch is one of a CP group.
            device: where batches will be copied; those that are made ahead of time for a GPU are pinned for it.
        """
        if not 0 <= dp_rank < dp_size or job.global_batch % (dp_size * job.micro_batch):
            raise ValueError(f"rank {dp_rank} of {dp_size}, batch {job.global_batch}, microbatch {job.micro_batch}")
        split = HeldOut(held_out, seed, evaluation) if held_out or evaluation else None
        settings = DataSettings(vocab, seed, tokenizer, cache, vision, split)
        sources, weights = open_job_data(job, settings)
        assert settings.tokenizer is not None
        self.tokenizer, self.tokenizer_labels = settings.tokenizer, frozenset(settings.labels)
        self.warnings = settings.warnings
        parts = [whole_range(source) for source in sources]
        self._maker = _BatchMaker(Mixture(parts, weights, seed), job, dp_rank, dp_size, length_multiple)
        if vision is not None:
            images = BatchImages(patch_rules(vision, job.max_pixels), vision.tokens, DecodePool(image_workers))
            balance = BalancedSteps(self.mixture.num_vision_tokens, job.global_batch, job.micro_batch)
            self._maker = replace(self._maker, images=images, balance=balance)
        if dynamic_cp is not None:
            dynamic = DynamicSteps(dynamic_cp, self.mixture.sample, job.global_batch, job.seq_len)
            self._maker = replace(self._maker, dynamic=dynamic)
        self._prefetch_depth = prefetch
        self._pinned_for = device if device is not None and device.type == "cuda" else None
        self._prefetcher: Prefetcher[Batch] | None = None
        self._next: BatchIndex = (0, 0)

    @property
    def mixture(self) -> Mixture:
        return self._maker.mixture

    @property
    def num_microbatches(self) -> int:
        return self._maker.num_microbatches

    def num_batches(self, step: int) -> int:
        """Microbatches of a step: `num_microbatches`, unless dynamic context parallelism packs each step anew."""
        return self._maker.num_batches(step)

    @property
    def benchmark_only(self) -> bool:
        """Return whether part of the data is synthetic, so that the loss says nothing about learning."""
        return self.mixture.benchmark_only

    def samples(self, step: int, microbatch: int) -> Sequence[int]:
        """The numbers of a microbatch's samples in the global sequence."""
        return self._maker.samples(step, microbatch)

    def epoch_sequences(self) -> float:
        """Sequences of a pass over the data; entries such as `chats.jsonl:2x` count so many times."""
        entries = parse_entries(self._maker.job.data)
        pairs = zip(self.mixture.sources, entries, strict=True)
        return sum(source.num_samples * (entry.epochs or 1.0) for source, entry in pairs)

    def packing_summary(self) -> str | None:
        """Describe the padding of packed sequences; None where conversations are not packed."""
        whole = [getattr(source, "source", source) for source in self.mixture.sources]
        parts = [part for source in whole for part in getattr(source, "parts", (source,))]
        counts = [(getattr(part, "packed_tokens", None), part.num_samples) for part in parts]
        packed = [(count, sequences) for count, sequences in counts if count is not None]
        if not packed:
            return None
        tokens, sequences = (sum(each) for each in zip(*packed, strict=True))
        slots = sequences * self._maker.job.seq_len
        return f"packing: {tokens:,} tokens in {sequences:,} sequences, {tokens / slots:.1%} of their {slots:,} slots"

    def skipped_images(self) -> SkippedImages:
        """The records that cannot be used, and the images that this rank could not decode so far."""
        return SkippedImages.of(self.mixture.sources, self._maker.images)

    def batch(self, step: int, microbatch: int = 0) -> Batch:
        if step < self._maker.start_step or not 0 <= microbatch < self.num_batches(step):
            raise IndexError(f"step {step} microbatch {microbatch}: not in a step from {self._maker.start_step} on")
        index = (step, microbatch)
        batch = self._maker.make(*index) if self._prefetch_depth == 0 else self._take_prefetched(index)
        self._next = self._maker.next_index(*index)
        return batch

    def state(self) -> dict[str, Any]:
        """The position of the next step, which is the one after the last step whose batches were all taken."""
        step = self._next[0]
        return {"step": step, "sample": self._maker.first_sample(step), "fingerprint": self.fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, with any number of ranks and any batch size."""
        if state["fingerprint"] != self.fingerprint():
            problem = "the data, its mixture, seq_len, packing, task or seed are not those of the saved run"
            finding = Finding(rule="data-unchanged", at="job.data", problem=problem, advice="give the data as it was")
            raise FindingsError([finding])
        self.close()
        self._maker = replace(self._maker, start_step=int(state["step"]), start_sample=int(state["sample"]))
        self._next = (int(state["step"]), 0)

    def fingerprint(self) -> str:
        """A digest of the global sequence of samples, which does not depend on ranks and batch sizes."""
        job = self._maker.job
        facts = [self.mixture.fingerprint(), job.seq_len, job.packing, job.task]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def content(self) -> list[dict[str, Any]]:
        """The content of each source of the mixture, wherever it lies, and its share: the fingerprint is made of it."""
        mixture = self.mixture
        pairs = zip(mixture.sources, mixture.counts, strict=True)
        return [{**source.content(), "samples_of_4096": count} for source, count in pairs]

    def close(self) -> None:
        """Stop the prefetch thread and decoding processes. Asking for a batch starts them again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        if self._maker.images is not None:
            self._maker.images.pool.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_prefetched(self, index: BatchIndex) -> Batch:
        if self._prefetcher is None or index != self._next:
            self.close()
            make = partial(_make_pinned, self._maker, self._pinned_for)
            self._prefetcher = Prefetcher(make, self._maker.indices_from(*index), self._prefetch_depth)
        try:
            return self._prefetcher.take()[1]
        except BaseException:
            self.close()
            raise


def _make_pinned(maker: _BatchMaker, device: torch.device | None, step: int, microbatch: int) -> Batch:
    batch = maker.make(step, microbatch)
    return batch if device is None else batch.pin(device)


def _stack(rows: list[Sample], length: int, pads: bool) -> Batch:
    """One batch from the samples of its rows. Either all sources of a job have document boundaries or none has.

    `pads`: the job pads its sequences, though perhaps none of these rows.
    """

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(row, name)[:length] for row in rows]))

    lengths = tuple(row.num_useful for row in rows)
    num_useful_B = torch.tensor(lengths) if pads or any(row.num_padding for row in rows) else None
    batch = Batch(stacked("tokens_S"), stacked("labels_S"), lengths=lengths, num_useful_B=num_useful_B)
    if rows[0].documents_S is None:
        return batch
    return replace(batch, documents_BS=stacked("documents_S"), positions_BS=stacked("positions_S"))
