"""The catalogue of remedies: what each says of itself holds on plans, and the page lists it."""

from typing import Any

import pytest
from plans import build
from repository import ROOT

from threefold.interop.megatron.field_names import PLAIN
from threefold.interop.megatron.releases import known_releases
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.remedies.catalogue import CATALOGUE, Remedy
from threefold.remedies.trial import try_change
from threefold.spec.megatron import version
from threefold.tune.labels import label_change

MEGATRON = {"target": "megatron-bridge", "cluster.chip": "h100", "job.seq_len": 8192, "job.global_batch": 512}
QWEN = {**MEGATRON, "model": "qwen3-30b-a3b", "cluster.gpus": 64, "job.micro_batch": 2, "layout.ep": 8}
PLANS: list[dict[str, Any]] = [
    QWEN,
    {**QWEN, "target": "threefold", "run.gc_every": 0, "job.load": "zipf"},
    {**QWEN, "layout.ep": 4, "layout.etp": 2, "layout.tp": 4, "knobs.ep_overlap": True, "knobs.recompute": ["moe"]},
    {**QWEN, "knobs.recompute": ["full"], "knobs.grad_reduce_overlap": False, "knobs.permute_fusion": False},
    {**QWEN, "layout.cp": 16, "layout.tp": 16, "layout.ep": 64, "knobs.dispatcher": "deepep", "knobs.dispatch_sms": 32,
     "cluster.gpus": 256},
    {**QWEN, "model": "qwen3-next-80b-a3b", "target": "threefold", "layout.cp": 4, "layout.ep": 32},
]  # fmt: skip


def ways(remedy: Remedy) -> list[tuple[Plan, dict[str, Any]]]:
    plans = [build(fields) for fields in PLANS]
    return [(plan, way) for plan in plans if remedy.ways for way in list(remedy.ways(plan))[:12]]


@pytest.mark.parametrize("remedy", CATALOGUE, ids=lambda remedy: remedy.name)
def test_a_remedy_sets_its_fields_and_keeps_the_training(remedy: Remedy) -> None:
    """By the label with which `tune` tells what is another experiment, and what is another training."""
    found = ways(remedy)
    assert found or remedy.ways is None, "no plan here has a use for it"
    assert set(remedy.fields) <= set(FIELDS)
    for plan, way in found:
        assert set(way) <= set(remedy.fields)
        trial = try_change(plan, way, lambda other: ())
        if trial.plan is None:
            continue
        kind = label_change(plan, trial.plan).kind
        if remedy.is_priced:  # settings of the run itself are part of no label
            assert kind == "training-equivalent" or (kind == "new experiment" and remedy.numbers == "rounded")


@pytest.mark.parametrize("remedy", CATALOGUE, ids=lambda remedy: remedy.name)
def test_a_remedy_is_there_from_its_release_on(remedy: Remedy) -> None:
    """By the names in the wheels of every supported release."""
    names = [row.path for row in PLAIN if row.field in remedy.fields]
    for release in known_releases():
        is_there = all(release.has_field(name) for name in names)
        assert is_there == (release.number >= version(remedy.since)), release.bridge


def test_the_order_is_the_recommended_one() -> None:
    """Selective before full recompute, degrees before formats, offload last; overlap before placement."""
    names = [remedy.name for remedy in CATALOGUE]
    for earlier, later in [
        ("selective-recompute", "spread"),
        ("spread", "low-precision-weights"),
        ("selective-recompute", "full-recompute"),
        ("full-recompute", "offload"),
        ("overlap-experts", "delay-weight-gradients"),
        ("overlap-experts", "dispatcher"),
        ("dispatcher", "ep-inside-domain"),
        ("graphs", "larger-microbatch"),
        ("fused-experts", "low-precision"),
    ]:
        assert names.index(earlier) < names.index(later)
    memory = [remedy.name for remedy in CATALOGUE if "memory" in remedy.answers]
    assert memory[-1] == "offload"
    assert len(set(names)) == len(names)


def test_the_page_lists_the_catalogue() -> None:
    page = (ROOT / "docs" / "reference" / "remedies.md").read_text(encoding="utf-8")
    listed = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert listed == [remedy.name for remedy in CATALOGUE]
    for remedy in CATALOGUE:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{remedy.name}` |"))
        assert [cell.strip() for cell in row.split("|")[2:-1]] == [
            ", ".join(remedy.answers),
            remedy.what,
            ", ".join(f"`{field}`" for field in remedy.fields),
            remedy.needs,
            remedy.numbers,
        ]
