"""What our own engine emulates below sixteen bits is known, said, not recommended, and not priced as fast."""

from dataclasses import replace
from typing import Any

import pytest
from plans import build

from threefold.cli.main import main
from threefold.cost.estimate import estimate
from threefold.cost.format_support import experts_are_emulated, has_expert_kernels
from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.rules.all import check
from threefold.search.knobs import precisions
from threefold.search.neighbors import comparisons
from threefold.search.space import read_draft

FUSED, BIASED, DENSE = "qwen3-30b-a3b", "gpt-oss-20b", "llama3-8b"
LOW = ("fp8-blockwise", "fp8-rowwise", "fp8-cs", "mxfp8", "nvfp4")


def plan_of(model: str, precision: str, chip: str = "h200", **more: Any) -> Plan:
    ep = 1 if model == DENSE else 2
    fields = {"model": model, "target": "threefold", "cluster.chip": chip, "cluster.gpus": 8, "layout.ep": ep}
    job = {"job.seq_len": 4096, "job.global_batch": 64, "job.micro_batch": 4}
    written = {path.replace("__", "."): value for path, value in more.items()}
    return build({**fields, **job, "knobs.precision": precision, **written})


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("model", "etp"), [(FUSED, 1), (FUSED, 2), (FUSED, 4), (BIASED, 1), ("deepseek-v3", 1)])
def test_experts_have_the_kernels_that_the_engine_has(model: str, etp: int, precision: str) -> None:
    """768 over ETP 4 is 192, which is no multiple of 128."""
    torch = pytest.importorskip("torch")
    from threefold.engine.device import simulate
    from threefold.engine.precision.low_precision_experts import LowPrecisionExperts
    from threefold.engine.precision.recipes import RECIPES

    plan = plan_of(model, precision, layout__etp=etp)
    moe = plan.model.moe
    assert moe is not None
    down_EDH = torch.empty(2, plan.model.dim, moe.expert_dim // etp, dtype=torch.bfloat16, device="meta")
    with simulate("cuda"):
        fuses = LowPrecisionExperts(RECIPES[precision]).can_fuse(down_EDH, biased=moe.bias)
    assert has_expert_kernels(plan) == fuses == LocalSizes(plan).uses_fused_experts


@pytest.mark.parametrize(
    ("model", "precision", "chip", "more", "fix"),
    [
        (BIASED, "fp8-blockwise", "h200", {}, "bf16"),
        (BIASED, "fp8-cs", "h200", {}, "bf16"),
        (FUSED, "fp8-cs", "h200", {}, "fp8-blockwise"),
        (FUSED, "mxfp8", "h200", {}, "fp8-blockwise"),
        (FUSED, "fp8-rowwise", "h200", {"layout__etp": 4}, "bf16"),
        (FUSED, "mxfp8", "b200", {}, "bf16"),
        (FUSED, "fp8-blockwise", "b200", {}, "bf16"),
        (DENSE, "fp8-blockwise", "b200", {}, "mxfp8"),
        (FUSED, "fp8-blockwise", "h200", {}, None),
        (FUSED, "fp8-rowwise", "h200", {"layout__etp": 2}, None),
        (DENSE, "fp8-cs", "h200", {}, None),
        (DENSE, "mxfp8", "b200", {}, None),
        (BIASED, "fp8-cs", "h200", {"target": "megatron-bridge"}, None),
        (FUSED, "bf16", "h200", {}, None),
    ],
)
def test_what_is_emulated_is_said(model: str, precision: str, chip: str, more: dict[str, Any], fix: str | None) -> None:
    found = [one for one in check(plan_of(model, precision, chip, **more)) if one.rule == "precision-is-emulated"]
    assert [one.fix_data for one in found] == ([{"knobs.precision": fix}] if fix else [])


@pytest.mark.parametrize(
    ("model", "chip", "target", "wanted"),
    [
        (BIASED, "h200", "threefold", []),
        (FUSED, "h200", "threefold", ["fp8-blockwise"]),
        (FUSED, "b200", "threefold", []),
        (DENSE, "b200", "threefold", ["mxfp8", "fp8-cs", "fp8-tensor"]),
        (BIASED, "h200", "megatron-bridge", ["fp8-blockwise", "fp8-cs", "fp8-tensor"]),
    ],
)
def test_a_search_starts_in_bf16_and_never_emulates(
    model: str, chip: str, target: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats with kernels come where BF16 gives no plan, and all of them where the draft says they were measured."""
    asked: dict[str, Any] = {"model": model, "cluster.chip": chip, "cluster.gpus": 8, "job.seq_len": 4096}
    space = read_draft({**asked, "target": target, "knobs.precision": "auto"})
    assert precisions(space) == ["bf16"]
    assert precisions(replace(space, low_precision=True)) == wanted[:1]
    measured = read_draft({**asked, "target": target, "stack.measured": ["precision"]})
    assert precisions(measured) == ["bf16", *wanted]
    drafts: list[Any] = []

    def search(fields: Any, *rest: Any) -> None:
        drafts.append(fields)
        raise FindingsError([Finding("model", "enough was seen", advice="none")])

    monkeypatch.setattr("threefold.api.searches.search", search)
    words = ["--model", model, "--chip", chip, "--gpus", "8", "--seq-len", "4096", "--target", target]
    assert main(["plan", *words]) == 1
    assert drafts[0]["knobs.precision"] == "auto"


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize(
    ("model", "precision", "chip"),
    [(BIASED, "fp8-blockwise", "h200"), (FUSED, "fp8-cs", "h200"), (FUSED, "mxfp8", "b200"), (FUSED, "mxfp8", "h200")],
)
def test_emulated_experts_are_no_faster_than_in_bf16(model: str, precision: str, chip: str, fusion: bool) -> None:
    def terms(name: str, target: str = "threefold") -> dict[str, float]:
        return estimate(plan_of(model, name, chip, target=target, knobs__expert_fusion=fusion)).time.terms

    low, wide = terms(precision), terms("bf16")
    assert low["experts"] == wide["experts"]
    assert low["elementwise"] >= wide["elementwise"]
    assert low["quantize"] > 0
    assert terms(precision, "megatron-bridge")["experts"] < terms("bf16", "megatron-bridge")["experts"]


def test_a_format_that_the_chip_lacks_is_priced_as_bf16() -> None:
    low, wide, native = (
        estimate(plan_of(DENSE, *given)).time.terms["gemm"]
        for given in (("mxfp8", "h200"), ("bf16", "h200"), ("fp8-cs", "h200"))
    )
    assert low == wide > native
    assert (
        estimate(plan_of(FUSED, "fp8-blockwise")).time.terms["experts"]
        < (estimate(plan_of(FUSED, "bf16")).time.terms["experts"])
    )


@pytest.mark.parametrize(("chip", "formats"), [("h200", ["fp8-blockwise"]), ("b200", [])])
def test_emulation_is_no_remedy(chip: str, formats: list[str]) -> None:
    """Our engine has kernels for experts in FP8 on Hopper alone."""

    def offered(target: str) -> list[Any]:
        plan = plan_of("mixtral-8x7b", "bf16", chip, target=target, layout__ep=8, model__num_layers=8)
        chosen = estimate(plan)
        assert chosen.wall == "compute"
        tried = [one.trial.changes for one in comparisons(plan, chosen)]
        return [changes["knobs.precision"] for changes in tried if "knobs.precision" in changes]

    assert offered("megatron-bridge")
    assert offered("threefold") == formats


def test_only_our_own_engine_emulates() -> None:
    assert not experts_are_emulated(plan_of(FUSED, "fp8-cs", target="megatron-bridge"))
    assert experts_are_emulated(plan_of(FUSED, "fp8-cs"))
