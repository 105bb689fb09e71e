"""The packer of dynamic CP: every document once, at the degree it needs, with level FLOPs over ranks."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.batch import Batch
from threefold.engine.data.dynamic_cp import Document, DynamicGrid, DynamicSteps, Round, documents_of, pack_step
from threefold.engine.data.loader import Loader
from threefold.engine.data.packing import Sample, pad_sample
from threefold.engine.dist.mesh import Mesh
from threefold.engine.throughput import Throughput
from threefold.layout.degrees import Layout
from threefold.spec.flops import flops_per_token


def square(length: int) -> float:
    return float(length) ** 2


def documents_with(lengths: list[int]) -> list[Document]:
    return [Document(number, 0, length) for number, length in enumerate(lengths)]


def rank_costs(rounds: list[Round], num_ranks: int) -> np.ndarray[Any, Any]:
    """The squares of the lengths that each rank computes in each round."""
    costs = np.zeros((len(rounds), num_ranks))
    for number, rows in enumerate(rounds):
        for row in rows:
            block = slice(row.first_rank, row.first_rank + row.degree)
            costs[number, block] += sum(square(document.length) for document in row.documents) / row.degree
    return costs


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4, 8]))
def test_every_document_is_packed_once_at_its_degree(data: st.DataObject, dp: int, cp: int) -> None:
    seq_len = 16 * cp
    lengths = data.draw(st.lists(st.integers(1, seq_len), max_size=60))
    documents = documents_with(lengths)
    rounds = pack_step(documents, dp, cp, seq_len, square)
    assert rounds  # a step without documents has an empty microbatch on every rank
    packed = Counter(document for rows in rounds for row in rows for document in row.documents)
    assert packed == Counter(documents)
    for rows in rounds:
        ranks = [rank for row in rows for rank in range(row.first_rank, row.first_rank + row.degree)]
        assert len(ranks) == len(set(ranks))
        assert all(0 <= rank < dp * cp for rank in ranks)
        for row in rows:
            assert row.first_rank % row.degree == 0  # inside one CP group, since CP is a multiple of the degree
            assert sum(document.length for document in row.documents) <= 16 * row.degree
            for document in row.documents:
                assert document.length <= 16 * row.degree
                assert row.degree == 1 or document.length > 16 * row.degree // 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=80), st.sampled_from([2, 4]))
def test_costs_of_short_documents_are_level(lengths: list[int], cp: int) -> None:
    """The largest document goes to the rank with least to do: two ranks of a round differ by one document at most."""
    documents = documents_with([min(length, 4) for length in lengths] + [8])
    costs = rank_costs(pack_step(documents, 1, cp, 1024 * cp, square), cp)
    assert len(costs) == 1
    assert costs.max() - costs.min() <= square(8)


def test_costs_count_and_not_tokens_alone() -> None:
    """One document of 8 tokens costs as much as sixteen of 2: the others go to the other rank."""
    [rows] = pack_step(documents_with([8, *[2] * 16]), 1, 2, 128, square)
    by_length = {row.documents[0].length: sum(document.length for document in row.documents) for row in rows}
    assert by_length == {8: 8, 2: 32}


def test_documents_that_cost_alike_share_a_round() -> None:
    """Ranks wait for each other in a round: two full sequences run beside each other, and short ones after them."""
    rounds = pack_step(documents_with([3] * 16 + [64, 64]), 2, 4, 64, square)
    assert [{row.degree for row in rows} for rows in rounds] == [{4}, {1}]


def long_tail(seed: int, num_long: int, seq_len: int, dp: int, num_samples: int) -> list[list[int]]:
    """The document lengths of each sample: a few fill a sequence, all others have less than 1/32 of it."""
    draw = np.random.default_rng(seed)
    samples = [[seq_len] for _ in range(num_long)]
    while len(samples) < num_samples:
        lengths = draw.integers(8, seq_len // 32, 200)
        samples.append([int(n) for n in lengths[: int(np.searchsorted(np.cumsum(lengths), seq_len))]])
    return [samples[n] for n in draw.permutation(num_samples)]


def test_fullest_rank_has_half_the_flops_of_static_cp() -> None:
    """Static: microbatch m of data-parallel rank r is sample m * dp + r, over all CP ranks."""
    dp, cp, seq_len, ratios = 8, 8, 2048, []
    for seed in range(5):
        samples = long_tail(seed, 8, seq_len, dp, 64)
        static = max(sum(square(n) for lengths in samples[rank::dp] for n in lengths) / cp for rank in range(dp))
        documents = documents_with([length for lengths in samples for length in lengths])
        rounds = pack_step(documents, dp, cp, seq_len, square)
        ratios.append(static / rank_costs(rounds, dp * cp).sum(axis=0).max())
        assert len(rounds) <= 64 // dp + 1
    assert sorted(ratios)[2] >= 2, ratios


def packed_sample(number: int, lengths: list[int], seq_len: int) -> Sample:
    tokens = np.arange(sum(lengths)) + 1000 * number
    return pad_sample(tokens, tokens + 1, seq_len, np.cumsum([0, *lengths[:-1]]))


def grid(rank: int, dp: int, cp: int, tp: int = 1) -> DynamicGrid:
    return DynamicGrid(dp, cp, tp, rank, square)


SAMPLES = {0: [64], 1: [3, 5, 40, 16], 2: [1] * 20, 3: [30, 2, 17]}
ONLY_SHORT = {number: [4] * 16 for number in range(4)}
ONLY_LONG = {number: [60] for number in range(3)}


def batches_of_all(samples: dict[int, list[int]], dp: int, cp: int, tp: int = 1) -> list[list[Batch]]:
    def sample_of(number: int) -> Sample:
        return packed_sample(number, samples[number], 64)

    steps = [DynamicSteps(grid(rank, dp, cp, tp), sample_of, len(samples), 64) for rank in range(dp * cp)]
    return [[each.batch(0, number) for number in range(len(each.rounds(0)))] for each in steps]


@pytest.mark.parametrize("samples", [SAMPLES, ONLY_SHORT, ONLY_LONG], ids=["mixed", "only short", "only long"])
@pytest.mark.parametrize(("dp", "cp", "tp"), [(1, 4, 1), (2, 2, 2), (2, 4, 1)])
def test_rows_hold_the_tokens_of_the_samples(samples: dict[int, list[int]], dp: int, cp: int, tp: int) -> None:
    ranks = batches_of_all(samples, dp, cp, tp)
    assert len({len(batches) for batches in ranks}) == 1  # as many microbatches on every rank
    found: Counter[tuple[int, int, int]] = Counter()
    for batches in ranks:
        for batch in batches:
            assert batch.cp_degree is not None
            assert batch.tokens_BS.shape[1] % ((2 * batch.cp_degree if batch.cp_degree > 1 else 1) * tp) == 0
            assert batch.tokens_BS.shape[1] <= 64 // cp * batch.cp_degree
            assert batch.is_empty == (not (batch.labels_BS != -100).any())
            assert batch.documents_BS is not None
            assert batch.positions_BS is not None
            used = sum(batch.lengths or ())
            starts = np.flatnonzero(batch.positions_BS[0, :used].numpy() == 0)
            assert tuple(np.diff([*starts, used])) == (batch.lengths or ())
            for token, label, place in zip(
                *(x[0, :used].tolist() for x in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)), strict=True
            ):
                found[token, label, place] += 24 // batch.cp_degree
    wanted = [
        (1000 * number + start + place, 1000 * number + start + place + 1, place)
        for number, lengths in samples.items()
        for start, length in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True)
        for place in range(length)
    ]
    assert found == dict.fromkeys(wanted, 24)  # once, over the ranks that share it


def test_rows_count_the_flops_of_static_batches() -> None:
    """So that `compare` divides the times of a dynamic and a static run of the same samples by the same work."""
    plan = tiny_plan({"job.seq_len": 64})
    speed = Throughput(plan, Mesh(Layout()))
    wanted = sum(sum(n) * flops_per_token(plan.model, sum(n), plan.mtp) for n in SAMPLES.values())
    found = [speed.count_work(batches) for batches in batches_of_all(SAMPLES, dp=2, cp=4)]
    assert sum(work.flops for work in found) == pytest.approx(wanted)
    assert sum(work.num_useful_tokens for work in found) == sum(map(sum, SAMPLES.values()))


def test_padding_and_unpacked_samples_are_no_documents() -> None:
    assert documents_of(packed_sample(7, [5, 3], 16), 7) == [Document(7, 0, 5), Document(7, 5, 3)]
    whole = replace(packed_sample(7, [5, 3], 16), documents_S=None)
    assert documents_of(whole, 7) == [Document(7, 0, 8)]


def open_loader(path: str, rank: int, prefetch: int = 0, **fields: Any) -> Loader:
    plan = tiny_plan({"job.data": path, "job.packing": True, "job.micro_batch": 1, **fields})
    options = {"dp_rank": rank // 2, "dp_size": 2, "prefetch": prefetch, "dynamic_cp": grid(rank, 2, 2)}
    return Loader(plan.job, 512, **options)


def flat(batch: Batch) -> tuple[Any, ...]:
    return batch.cp_degree, batch.lengths, batch.tokens_BS.tolist(), batch.labels_BS.tolist()


def test_loader_resumes_at_any_step(tmp_path: Path) -> None:
    path = tiny_shard(tmp_path / "shard.tok")
    for rank in range(4):
        with open_loader(path, rank, prefetch=2) as whole, open_loader(path, rank) as first:
            steps = [[whole.batch(step, m) for m in range(whole.num_batches(step))] for step in range(4)]
            for step in range(2):
                for m in range(first.num_batches(step)):
                    first.batch(step, m)
            state = first.state()
        assert state["step"] == 2
        with open_loader(path, rank) as resumed:
            resumed.load_state(state)
            rest = [[resumed.batch(step, m) for m in range(resumed.num_batches(step))] for step in (2, 3)]
        assert [[flat(b) for b in each] for each in rest] == [[flat(b) for b in each] for each in steps[2:]]


def test_step_has_the_samples_of_a_static_step(tmp_path: Path) -> None:
    path = tiny_shard(tmp_path / "shard.tok")
    plan = tiny_plan({"job.data": path, "job.packing": True, "job.micro_batch": 1})
    static = Counter[tuple[int, int]]()
    with Loader(plan.job, 512, prefetch=0) as loader:
        for batch in map(partial(loader.batch, 1), range(loader.num_microbatches)):
            assert batch.lengths is not None
            static.update(
                zip(*(x[0, : batch.lengths[0]].tolist() for x in (batch.tokens_BS, batch.labels_BS)), strict=True)
            )
    dynamic = Counter[tuple[int, int]]()
    for rank in range(4):
        with open_loader(path, rank) as loader:
            for batch in map(partial(loader.batch, 1), range(loader.num_batches(1))):
                used, times = sum(batch.lengths or ()), 2 // (batch.cp_degree or 1)
                pairs = zip(*(x[0, :used].tolist() for x in (batch.tokens_BS, batch.labels_BS)), strict=True)
                dynamic.update({pair: times * count for pair, count in Counter(pairs).items()})
    assert dynamic == {pair: 2 * count for pair, count in static.items()}
