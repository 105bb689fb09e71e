"""The microbatches of a rank with dynamic context parallelism: rows of documents, or nothing to compute.

`Loader` asks `DynamicSteps` for the batch of a round, and the oracle does. All ranks read the document lengths of all
samples of a step and pack them alike (`pack_step.py`), so that no rank need be told; a rank then reads the tokens of
its own rows only. The samples of a step are those of any other run: only who computes them, and beside what, differs.

Shapes: S tokens of a sample, N tokens of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from threefold.engine.batch import Batch
from threefold.engine.data.dynamic_cp.pack_step import CostOf, Document, Round, Row, pack_step
from threefold.engine.data.packing import IGNORED, PAD, Sample, pad_sample
from threefold.layout.dynamic_cp import row_multiple


@dataclass(frozen=True)
class DynamicGrid:
    """The ranks that share the documents of a step, and the place of this rank among them."""

    dp: int
    cp: int
    tp: int
    rank: int  # among the dp x cp ranks: dp coordinate x cp + cp coordinate
    cost_of: CostOf  # FLOPs of a document by its length


class DynamicSteps:
    """The batches of every step. The packing of the last steps is remembered, since it is asked for round by round."""

    def __init__(self, grid: DynamicGrid, sample_of: Callable[[int], Sample], global_batch: int, seq_len: int) -> None:
        self.grid, self.sample_of, self.global_batch, self.seq_len = grid, sample_of, global_batch, seq_len
        self._packed: dict[int, list[Round]] = {}

    def rounds(self, first: int) -> list[Round]:
        """The rounds of the step that begins at sample `first`, for all ranks."""
        rounds = self._packed.get(first)
        if rounds is None:
            numbers = range(first, first + self.global_batch)
            documents = [document for number in numbers for document in documents_of(self.sample_of(number), number)]
            grid = self.grid
            rounds = pack_step(documents, grid.dp, grid.cp, self.seq_len, grid.cost_of)
            # A new table: the prefetch thread and the training loop may both ask.
            self._packed = dict([*list(self._packed.items())[-3:], (first, rounds)])
        return rounds

    def batch(self, first: int, number: int) -> Batch:
        """This rank's microbatch of a round."""
        mine = [row for row in self.rounds(first)[number] if row.has_rank(self.grid.rank)]
        return self.row_batch(mine[0]) if mine else self.empty_batch()

    def all_rows(self, first: int) -> Iterator[Batch]:
        """Every row of a step, each for one rank alone: what a single rank computes to compare with."""
        for each in self.rounds(first):
            for row in each:
                yield replace(self.row_batch(row), cp_degree=1)

    def row_batch(self, row: Row) -> Batch:
        """The documents of a row one behind the other, padded to what its degree asks for."""
        samples = {document.sample: self.sample_of(document.sample) for document in row.documents}
        tokens, labels = (
            np.concatenate([_cut(getattr(samples[document.sample], name), document) for document in row.documents])
            for name in ("tokens_S", "labels_S")
        )
        lengths = [document.length for document in row.documents]
        starts = np.cumsum([0, *lengths[:-1]])
        multiple = row_multiple(row.degree, self.grid.tp)
        sample = pad_sample(tokens, labels, -(-len(tokens) // multiple) * multiple, starts)
        assert sample.documents_S is not None
        assert sample.positions_S is not None
        arrays = sample.tokens_S, sample.labels_S, sample.documents_S, sample.positions_S
        tokens_BS, labels_BS, documents_BS, positions_BS = (torch.from_numpy(x)[None] for x in arrays)
        return Batch(
            *(tokens_BS, labels_BS, documents_BS, positions_BS, tuple(lengths)),
            cp_degree=row.degree,
            sample_lengths=tuple(samples[document.sample].num_useful for document in row.documents),
        )

    def empty_batch(self) -> Batch:
        """The fewest tokens that a forward can take, without a label: for a round in which this rank has no row."""
        length = row_multiple(1, self.grid.tp)
        tokens, labels = torch.full((1, length), PAD), torch.full((1, length), IGNORED)
        documents, positions = torch.zeros_like(tokens), torch.arange(length)[None]
        return Batch(tokens, labels, documents, positions, lengths=(), cp_degree=1)


def documents_of(sample: Sample, number: int) -> list[Document]:
    """The documents of a sample, without its padding; one where attention sees the whole sample."""
    count = sample.num_useful
    if sample.documents_S is None or count == 0:
        return [Document(number, 0, count)] if count else []
    edges = [0, *(np.flatnonzero(np.diff(sample.documents_S[:count])) + 1).tolist(), count]
    return [Document(number, start, stop - start) for start, stop in pairwise(edges)]


def _cut(values_S: NDArray[np.int64], document: Document) -> NDArray[np.int64]:
    return values_S[document.start : document.start + document.length]
