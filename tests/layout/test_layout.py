"""Grids, links and pipeline strings against brute force and the documents' examples."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from threefold.findings import FindingsError
from threefold.layout.degrees import AXES, DENSE_AXES, EXPERT_AXES, Layout, axis_link, domain_ranks
from threefold.layout.stages import Chunk, balance, chunk_rank, format_stages, parse_stages
from threefold.spec.chips import CHIPS

MAX_RANKS = 96


@st.composite
def layouts(draw: st.DrawFn, degrees: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> Layout:
    """Any layout that divides its ranks, up to 96 of them."""
    degree = st.sampled_from(degrees)
    layout = Layout(tp=draw(degree), cp=draw(degree), pp=draw(degree), ep=draw(degree), etp=draw(degree))
    copies = [n for n in degrees if n * layout.min_gpus <= MAX_RANKS]
    assume(copies)
    return replace(layout, gpus=layout.min_gpus * draw(st.sampled_from(copies)))


def oracle(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """The groups of an axis as numpy makes them: reshape to the grid, move the axis last, read the rows."""
    axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
    grid = np.arange(layout.gpus).reshape([layout.degree(a) for a in axes])
    rows = np.moveaxis(grid, axes.index(axis), -1).reshape(-1, layout.degree(axis))
    return sorted(tuple(row) for row in rows.tolist())


@given(layouts())
def test_groups_are_those_of_a_numpy_grid(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert groups == oracle(layout, axis)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.gpus))


@given(layouts())
def test_coordinates_are_those_of_a_numpy_grid(layout: Layout) -> None:
    for axes in (DENSE_AXES, EXPERT_AXES):
        shape = [layout.degree(a) for a in axes]
        for rank in range(layout.gpus):
            expected = [int(i) for i in np.unravel_index(rank, shape)]
            assert [layout.coordinates(rank)[a] for a in axes] == expected
            assert all(rank in layout.group(a, rank) for a in axes)


@given(layouts())
def test_both_grids_cut_the_same_stages(layout: Layout) -> None:
    size = layout.gpus // layout.pp
    for stage in range(layout.pp):
        block = range(stage * size, (stage + 1) * size)
        assert {layout.coordinate("pp", rank) for rank in block} == {stage}
    assert layout.dp * layout.cp * layout.tp == layout.edp * layout.ep * layout.etp == size


def test_strides_by_hand() -> None:
    layout = Layout(tp=2, cp=4, pp=2, ep=8, etp=1, gpus=32)
    assert (layout.dp, layout.edp, layout.chunks) == (2, 2, 2)
    strides = {"tp": 1, "cp": 2, "dp": 8, "pp": 16, "etp": 1, "ep": 1, "edp": 8}
    assert {axis: layout.stride(axis) for axis in AXES} == strides
    assert layout.group("cp", 9) == (9, 11, 13, 15)
    assert layout.group("ep", 9) == (8, 9, 10, 11, 12, 13, 14, 15)


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [
        (Layout(pp=8, cp=32, ep=32), 256),  # DeepSeek-V3 at 128K
        (Layout(pp=8, cp=64, ep=32), 512),  # DeepSeek-V3 at 256K
        (Layout(tp=4, cp=4, pp=4, ep=32), 128),  # 4 x lcm(16, 32), not the product 2048
        (Layout(tp=3, cp=1, ep=2), 6),
        (Layout(tp=2, ep=4, etp=2), 8),
        (Layout(), 1),
    ],
)
def test_smallest_number_of_gpus(layout: Layout, gpus: int) -> None:
    assert layout.min_gpus == gpus


@given(layouts())
def test_min_gpus_is_the_first_count_both_grids_divide(layout: Layout) -> None:
    dense = layout.tp * layout.cp * layout.pp
    expert = layout.ep * layout.etp * layout.pp
    first = next(count for count in itertools.count(1) if count % dense == 0 and count % expert == 0)
    assert layout.min_gpus == first
    assert layout.fits_ranks


def test_too_few_ranks_are_no_error_here() -> None:
    layout = Layout(tp=8, cp=8, ep=8, pp=4, gpus=4)
    assert (layout.dp, layout.edp, layout.fits_ranks) == (0, 0, False)
    for axis in AXES:
        layout.coordinate(axis, 3)
        assert axis_link(layout, axis, 8).degree == layout.degree(axis)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(pp=4), "1f1b"),
        (Layout(pp=4, vpp=2), "interleaved"),
        (Layout(pp=4, vpp=2, schedule="dualpipev"), "dualpipev"),
    ],
)
def test_schedule_follows_vpp(layout: Layout, schedule: str) -> None:
    assert layout.pipeline_schedule == schedule


def links(layout: Layout, chip: str) -> dict[str, tuple[int, str]]:
    ranks = domain_ranks(CHIPS[chip], layout.gpus)
    found = {axis: axis_link(layout, axis, ranks) for axis in AXES}
    return {axis: (link.in_domain, link.link) for axis, link in found.items() if link.degree > 1}


def test_links_of_h100() -> None:
    # Domains of 8: an EP group of 32 neighbors has 8 of them in its first domain; stages are 32 ranks apart.
    layout = Layout(pp=8, cp=32, ep=32, gpus=256)
    assert links(layout, "h100") == {"pp": (1, "network"), "cp": (8, "network"), "ep": (8, "network")}
    assert links(Layout(tp=4, ep=8, gpus=16), "h100") == {
        "dp": (2, "network"),
        "tp": (4, "domain"),
        "edp": (1, "network"),
        "ep": (8, "domain"),
    }


def test_links_of_gb200() -> None:
    # Racks of 72 are used in blocks of 64 by larger jobs, so both groups of 32 stay inside one.
    layout = Layout(pp=8, cp=32, ep=32, gpus=256)
    assert links(layout, "gb200") == {"pp": (2, "network"), "cp": (32, "domain"), "ep": (32, "domain")}


@pytest.mark.parametrize(
    ("chip", "gpus", "ranks"),
    [("h100", 4, 4), ("h100", 8, 8), ("h100", 12, 8), ("gb200", 72, 72), ("gb200", 73, 64), ("gb200", 4096, 64)],
)
def test_ranks_of_a_domain(chip: str, gpus: int, ranks: int) -> None:
    assert domain_ranks(CHIPS[chip], gpus) == ranks


def test_a_written_domain_replaces_the_chips() -> None:
    assert domain_ranks(CHIPS["gb200"], 256, domain=36) == 32


@given(layouts(degrees=(1, 2, 4)), st.sampled_from([4, 8, 16]))
def test_the_first_group_speaks_for_all(layout: Layout, domain: int) -> None:
    for axis in AXES:
        link = axis_link(layout, axis, domain)
        for group in layout.groups(axis):
            neighbors = [rank for rank in group if rank // domain == group[0] // domain]
            assert len(neighbors) == link.in_domain


@pytest.mark.parametrize(
    ("text", "chunks", "layers", "mtp"),
    [
        # Megatron-LM's documentation and tests/unit_tests/transformer, where commas are decoration
        ("Et*3|(tt|)*29,m|L", 32, 61, 1),
        ("Et*2|(tt|)*29,t|mL", 32, 61, 1),
        ("E|t|t*2|t||(t|)*2,t*2,L", 8, 8, 0),
        ("Et*3|(tt|)*29m|L", 32, 61, 1),
        ("Et*4|(t*4|)*14tmL", 16, 61, 1),
        ("Et|(tt|)*30mL", 32, 61, 1),
        ("EtL", 1, 1, 0),
        ("E|t|L", 3, 1, 0),
        ("E t * 2 | t m L", 2, 3, 1),
        ("E((t|)*2t|)*3L", 10, 9, 0),
    ],
)
def test_documented_strings(text: str, chunks: int, layers: int, mtp: int) -> None:
    parsed = parse_stages(text)
    assert len(parsed) == chunks
    assert list(itertools.chain.from_iterable(chunk.layers for chunk in parsed)) == list(range(layers))
    assert sum(chunk.mtp for chunk in parsed) == mtp
    assert [parsed[0].embedding, parsed[-1].loss] == [True, True]
    assert sum(chunk.embedding for chunk in parsed) == sum(chunk.loss for chunk in parsed) == 1


def test_chunks_by_hand() -> None:
    assert parse_stages("Et*2|t|mL") == (
        Chunk(layers=(0, 1), embedding=True),
        Chunk(layers=(2,)),
        Chunk(layers=(), mtp=1, loss=True),
    )


@pytest.mark.parametrize(
    ("text", "folded"),
    [("EtttL", "Et*3L"), ("Et|tt|tt|tt|mL", "Et|(tt|)*3mL"), ("E||||L", "E|(|)*3L"), ("E|tL", "E|tL")],
)
def test_folding(text: str, folded: str) -> None:
    assert format_stages(parse_stages(text)) == folded


@pytest.mark.parametrize(
    "text",
    [
        *("", "|", "t", "Et", "tL", "EEtL", "EtLL", "E|E|L", "tEL", "ELt", "EmtL", "Etx", "E t ! L", "Et**2L", "Et*L"),
        *("Et*-1L", "Et*1234567L", "E(tL", "Et)L", "E(t))L", "*3", "E(t*99999)*99999L", "(" * 500 + ")" * 500),
        *("Et*999999L", "E" + "()" * 100_000 + "L", "\0", "Et\nL", "Ét", "E(t|)*0(*2L"),
    ],
)
def test_bad_strings_are_findings(text: str) -> None:
    with pytest.raises(FindingsError) as caught:
        parse_stages(text)
    (finding,) = caught.value.findings
    assert (finding.rule, finding.at) == ("stages-readable", "layout.stages")
    assert finding.advice
    assert len(finding.problem) < 200


@given(st.text(alphabet="EtmL|()*0123456789 x", max_size=40) | st.text(max_size=20))
def test_any_text_is_chunks_or_one_finding(text: str) -> None:
    try:
        chunks = parse_stages(text)
    except FindingsError:
        return
    assert parse_stages(format_stages(chunks)) == chunks


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Chunk, ...]:
    """A plain string cut at random places, empty chunks among them."""
    items = "E" + "t" * draw(st.integers(0, 30)) + "m" * draw(st.integers(0, 3)) + "L"
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=12)))
    edges = [0, *cuts, len(items)]
    return parse_stages("|".join(items[a:b] for a, b in itertools.pairwise(edges)))


@given(chunked())
def test_format_and_parse_are_inverse(chunks: tuple[Chunk, ...]) -> None:
    assert parse_stages(format_stages(chunks)) == chunks


def lightest(weights: list[float], parts: int) -> float:
    """The smallest possible heaviest part, by trying every cut."""
    return min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *cuts, len(weights)]))
        for cuts in itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    )


WEIGHTS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 1.7, 2.0, 3.5])


@given(st.lists(WEIGHTS, max_size=7), st.integers(1, 4), st.integers(0, 2), WEIGHTS, WEIGHTS, WEIGHTS)
def test_balance_is_optimal(
    layers: list[float], parts: int, mtp: int, embedding: float, mtp_weight: float, loss: float
) -> None:
    chunks = balance(len(layers), parts, mtp, layers, embedding, mtp_weight, loss)
    loads = [
        c.embedding * embedding + sum(layers[i] for i in c.layers) + c.mtp * mtp_weight + c.loss * loss for c in chunks
    ]
    best = lightest([embedding, *layers, *[mtp_weight] * mtp, loss], parts)
    assert max(loads) == pytest.approx(best, rel=1e-6)  # sums in another order differ in the last bits
    assert len(chunks) == parts
    assert [i for c in chunks for i in c.layers] == list(range(len(layers)))
    assert sum(c.mtp for c in chunks) == mtp


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2))
def test_balance_without_weights(layers: int, parts: int, mtp: int) -> None:
    chunks = balance(layers, parts, mtp)
    counts = [len(chunk.layers) for chunk in chunks]
    assert sum(counts) == layers
    if layers % parts == 0:
        assert set(counts) == {layers // parts}
    else:
        # Embedding, loss and MTP depths count as a layer each; nothing beats the rounded-up mean.
        loads = [c.embedding + len(c.layers) + c.mtp + c.loss for c in chunks]
        assert max(loads) == math.ceil((layers + mtp + 2) / parts)


def test_balance_of_deepseek() -> None:
    # 61 layers, embedding, MTP and loss are 64 items: 2 on each of 32 chunks, 4 on each of 16.
    assert format_stages(balance(61, 32, mtp=1)) == "Et|(tt|)*30mL"
    assert format_stages(balance(61, 16, mtp=1)) == "Et*3|(t*4|)*14ttmL"


@pytest.mark.parametrize(("layers", "parts"), [(4, 0), (4, -1), (-1, 2)])
def test_balance_needs_a_chunk(layers: int, parts: int) -> None:
    with pytest.raises(ValueError, match="at least one chunk"):
        balance(layers, parts)


def test_chunk_ranks_by_hand() -> None:
    assert [chunk_rank(chunk, pp=4) for chunk in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [chunk_rank(chunk, pp=4, v_shaped=True) for chunk in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [chunk_rank(chunk, pp=2, v_shaped=True) for chunk in range(6)] == [0, 1, 1, 0, 0, 1]
