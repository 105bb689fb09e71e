"""Batches of a job.

B: sequences of a microbatch; S: tokens of a sequence.

All ranks together read one sequence of samples. Step s takes `global_batch` of them; microbatch m of data-parallel rank
r holds B neighbours, beginning at (m * dp_size + r) * B. So the samples of a step, and their order, do not depend on
the number of ranks, and a position in the data is one number.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from threefold.engine.data.choose import choose_sources
from threefold.engine.data.mix import Mix
from threefold.engine.data.packing import Sample
from threefold.engine.data.prefetch import Place, Prefetch
from threefold.engine.data.source import split
from threefold.engine.data.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Job


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch of one rank, int64. Labels are shifted already, -100 where nothing is learned.

    With boundaries, `documents_BS` numbers the documents of each sequence from 0 and `positions_BS` restarts in each.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    documents_BS: Tensor | None = None
    positions_BS: Tensor | None = None


@dataclass(frozen=True)
class _Maker:
    """Everything that decides a batch, and nothing that changes."""

    mix: Mix
    job: Job
    dp_rank: int
    dp_size: int
    length_multiple: int
    start_step: int = 0
    start_sample: int = 0

    @property
    def num_microbatches(self) -> int:
        return self.job.global_batch // (self.dp_size * self.job.micro_batch)

    def first_sample(self, step: int) -> int:
        return self.start_sample + (step - self.start_step) * self.job.global_batch

    def samples(self, step: int, microbatch: int) -> range:
        first = self.first_sample(step) + (microbatch * self.dp_size + self.dp_rank) * self.job.micro_batch
        return range(first, first + self.job.micro_batch)

    def make(self, step: int, microbatch: int) -> Batch:
        rows = [self.mix.sample(n) for n in self.samples(step, microbatch)]
        length = self.job.seq_len
        if self.job.dynamic_length:
            used = length - min(row.num_padding for row in rows)
            length = min(length, -(-used // self.length_multiple) * self.length_multiple)
        return _stack(rows, length)

    def places(self, step: int, microbatch: int) -> Iterator[Place]:
        while True:
            yield step, microbatch
            step, microbatch = self.after(step, microbatch)

    def after(self, step: int, microbatch: int) -> Place:
        return (step, microbatch + 1) if microbatch + 1 < self.num_microbatches else (step + 1, 0)


class Loader:
    """The batches of one data-parallel rank. Any of them can be asked for; asked in order, they are made ahead."""

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
    ) -> None:
        """`held_out` is the share of each source kept for `evaluation`. `tokenizer` reads JSONL; absent: bytes.

        `prefetch` microbatches are made ahead, 0 for none. With job.dynamic_length a microbatch is as long as its
        longest sequence, rounded up to `length_multiple`.
        """
        if not 0 <= dp_rank < dp_size or job.global_batch % (dp_size * job.micro_batch):
            raise ValueError(f"rank {dp_rank} of {dp_size}, batch {job.global_batch}, microbatch {job.micro_batch}")
        sources, weights = choose_sources(job, vocab, seed, tokenizer, cache)
        self._check_split([source.num_samples for source in sources], held_out, evaluation)
        parts = [split(source, held_out, evaluation) for source in sources]
        self._maker = _Maker(Mix(parts, weights, seed), job, dp_rank, dp_size, length_multiple)
        self._depth = prefetch
        self._ahead: Prefetch[Batch] | None = None
        self._next: Place = (0, 0)

    @property
    def mix(self) -> Mix:
        return self._maker.mix

    @property
    def num_microbatches(self) -> int:
        return self._maker.num_microbatches

    @property
    def benchmark_only(self) -> bool:
        """Part of the data is synthetic: results say nothing about learning."""
        return self.mix.benchmark_only

    def samples(self, step: int, microbatch: int) -> range:
        """The global numbers of the samples of a microbatch."""
        return self._maker.samples(step, microbatch)

    def batch(self, step: int, microbatch: int = 0) -> Batch:
        if not 0 <= microbatch < self.num_microbatches or step < self._maker.start_step:
            raise IndexError(f"step {step} microbatch {microbatch}: there are {self.num_microbatches} in a step")
        place = (step, microbatch)
        made = self._maker.make(*place) if self._depth == 0 else self._take(place)
        self._next = self._maker.after(*place)
        return made

    def state(self) -> dict[str, Any]:
        """Where the next step begins: the one after the last step whose batches were all taken."""
        step = self._next[0]
        return {"step": step, "sample": self._maker.first_sample(step), "fingerprint": self.fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks and any batch."""
        if state["fingerprint"] != self.fingerprint():
            problem = "the data, its mixture, seq_len, packing, task or seed are not those of the saved run"
            found = Finding(rule="data-unchanged", at="job.data", problem=problem, advice="give the data as it was")
            raise FindingsError([found])
        self.close()
        self._maker = replace(self._maker, start_step=int(state["step"]), start_sample=int(state["sample"]))
        self._next = (int(state["step"]), 0)

    def fingerprint(self) -> str:
        """Identity of the sequence of samples: equal for any number of ranks and any batch."""
        job = self._maker.job
        facts = [self.mix.fingerprint(), job.seq_len, job.packing, job.task]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def close(self) -> None:
        """Stop making batches ahead; asking for one starts again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, place: Place) -> Batch:
        if self._ahead is None or place != self._next:
            self.close()
            self._ahead = Prefetch(self._maker.make, self._maker.places(*place), self._depth)
        try:
            return self._ahead.take()[1]
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _check_split(sizes: list[int], held_out: float, evaluation: bool) -> None:
        if (evaluation or held_out) and (not 0 < held_out < 1 or min(sizes) < 2):
            problem = f"{held_out:g} of {min(sizes)} sequences cannot be held out for evaluation"
            found = Finding(
                rule="data-empty", at="job.data", problem=problem, advice="more data, or a shorter job.seq_len"
            )
            raise FindingsError([found])


def _stack(rows: list[Sample], length: int) -> Batch:
    """Sources of one job either all have boundaries or none has."""

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(row, name)[:length] for row in rows]))

    if rows[0].documents_S is None:
        return Batch(stacked("tokens_S"), stacked("labels_S"))
    return Batch(stacked("tokens_S"), stacked("labels_S"), stacked("documents_S"), stacked("positions_S"))
