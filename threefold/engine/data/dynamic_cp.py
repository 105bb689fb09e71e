"""Dynamic context parallelism: the ranks that work on each document of a step, and the microbatches of one rank.

`Loader` and the oracle ask `DynamicSteps` for the batch of a round. All ranks read the document lengths of all samples
of a step and pack them alike (`pack_step`), so that no message is needed; a rank then reads the tokens of its own rows
only. The samples of a step are those of any other run: only who computes them, and next to what, differs.

A row is what the ranks of one block compute in one round: one document that is sharded over several ranks, or the short
documents of a single rank. A block of degree d is d neighboring ranks of a CP group that starts at a multiple of d. A
round is one microbatch of every rank, so that all ranks have equally many microbatches: they issue the same expert
exchanges and gather the same parameters. A rank that has no row in a round gets an empty microbatch. Documents of
similar cost are computed in the same round, because ranks wait for each other there; within a round the largest row
goes to the block that has had least to do so far.

Shapes: S tokens of a sample, N tokens of a row.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from threefold.engine.batch import Batch
from threefold.engine.data.packing import IGNORED, PAD, Sample, pack_documents, pad_sample
from threefold.layout.degrees import cp_degree, row_multiple


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of a sample that attend to each other and to no others."""

    sample: int  # number of the sample in the global sequence
    start: int  # first token in the sample
    length: int


@dataclass(frozen=True, slots=True)
class Row:
    """Documents that a block of ranks computes in one round."""

    degree: int
    first_rank: int  # of the block, among the dp x cp ranks
    documents: tuple[Document, ...]

    def has_rank(self, rank: int) -> bool:
        return self.first_rank <= rank < self.first_rank + self.degree


Round = list[Row]  # the rows of one microbatch of all ranks, by their first rank
CostOf = Callable[[int], float]  # FLOPs of a document of some length
Documents = tuple[Document, ...]


def pack_step(documents: Sequence[Document], dp: int, cp: int, seq_len: int, cost_of: CostOf) -> list[Round]:
    """The rounds of a step over dp x cp ranks; in each a rank holds at most seq_len / cp tokens."""
    degrees = {document: cp_degree(document.length, seq_len, cp) for document in documents}
    long = sorted((d for d in documents if degrees[d] > 1), key=lambda d: (-degrees[d], -d.length))
    short = sorted((d for d in documents if degrees[d] == 1), key=lambda d: -d.length)
    num_ranks, tokens_per_rank = dp * cp, seq_len // cp
    taken = sum(degrees[document] for document in long)
    # Enough rounds for the tokens at least; documents that cannot be split may need more.
    num_rounds = max(1, -(-(taken + -(-sum(d.length for d in short) // tokens_per_rank)) // num_ranks))
    while (bins := _fill_bins(short, num_rounds * num_ranks - taken, tokens_per_rank, cost_of)) is None:
        num_rounds += 1
    rows = [(degrees[document], (document,)) for document in long] + [(1, members) for members in bins]
    return _place_rows(rows, num_rounds, num_ranks, cost_of)


def _fill_bins(short: Sequence[Document], num_bins: int, room: int, cost_of: CostOf) -> list[Documents] | None:
    """Short documents in bins of at most `room` tokens, the costliest bin first; None where they do not fit.

    Where bins of level cost leave a document without a bin, they are filled by tokens alone, which wastes less room.
    """
    bins = _fill_by_cost(short, num_bins, room, cost_of)
    if bins is None:
        bins = _fill_by_tokens(short, num_bins, room)
    if bins is None:
        return None
    used = [tuple(members) for members in bins if members]
    return sorted(used, key=lambda members: -_cost(members, cost_of))


def _fill_by_cost(short: Sequence[Document], num_bins: int, room: int, cost_of: CostOf) -> list[list[Document]] | None:
    """The largest document goes next to the bin with the least cost that has room."""
    bins: list[list[Document]] = [[] for _ in range(num_bins)]
    costs = [(0.0, number) for number in range(num_bins)]  # sorted, so already a heap
    tokens = [0] * num_bins
    for document in short:
        full = []
        while costs and tokens[costs[0][1]] + document.length > room:
            full.append(heapq.heappop(costs))
        if not costs:
            return None
        cost, number = heapq.heappop(costs)
        bins[number].append(document)
        tokens[number] += document.length
        for entry in (*full, (cost + cost_of(document.length), number)):
            heapq.heappush(costs, entry)
    return bins


def _fill_by_tokens(short: Sequence[Document], num_bins: int, room: int) -> list[list[Document]] | None:
    order, starts = pack_documents(np.array([d.length for d in short]), room, window=len(short))
    if len(starts) - 1 > num_bins:
        return None
    return [[short[n] for n in order[first:after]] for first, after in pairwise(starts)]


def _place_rows(rows: Sequence[tuple[int, Documents]], num_rounds: int, num_ranks: int, cost_of: CostOf) -> list[Round]:
    """Rows in the order of rounds, in each round on the blocks with the least cost so far.

    Degrees are powers of two that divide `num_ranks` and never rise, so that rows fill rounds without a gap and an
    aligned block is free for each.
    """
    rounds: list[Round] = [[] for _ in range(num_rounds)]
    load = np.zeros(num_ranks)
    free = np.ones(num_ranks, bool)
    taken = 0
    for degree, documents in rows:
        number, at = divmod(taken, num_ranks)
        if at == 0:
            free[:] = True
        loads_of_blocks = np.where(free.reshape(-1, degree).all(axis=1), load.reshape(-1, degree).max(axis=1), np.inf)
        first = int(loads_of_blocks.argmin()) * degree
        free[first : first + degree] = False
        load[first : first + degree] += _cost(documents, cost_of) / degree
        rounds[number].append(Row(degree, first, documents))
        taken += degree
    return [sorted(each, key=lambda row: row.first_rank) for each in rounds]


def _cost(documents: Documents, cost_of: CostOf) -> float:
    return sum(cost_of(document.length) for document in documents)


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
        """The documents of a row one after the other, padded to what its degree asks for."""
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
            num_useful_B=torch.tensor([len(tokens)]),
        )

    def empty_batch(self) -> Batch:
        """The fewest tokens that a forward can take, without a label: for a round in which this rank has no row."""
        length = row_multiple(1, self.grid.tp)
        tokens, labels = torch.full((1, length), PAD), torch.full((1, length), IGNORED)
        documents, positions = torch.zeros_like(tokens), torch.arange(length)[None]
        none = torch.zeros(1, dtype=torch.long)
        return Batch(tokens, labels, documents, positions, lengths=(), cp_degree=1, num_useful_B=none)


def documents_of(sample: Sample, number: int) -> list[Document]:
    """The documents of a sample, without its padding; one where attention sees the whole sample."""
    count = sample.num_useful
    if sample.documents_S is None or count == 0:
        return [Document(number, 0, count)] if count else []
    edges = [0, *(np.flatnonzero(np.diff(sample.documents_S[:count])) + 1).tolist(), count]
    return [Document(number, start, stop - start) for start, stop in pairwise(edges)]


def _cut(values_S: NDArray[np.int64], document: Document) -> NDArray[np.int64]:
    return values_S[document.start : document.start + document.length]
