"""The search: what it returns obeys the rules and fits; the documents' families come out or are beaten."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import CLEAN, make
from repository import ROOT

from threefold.cli.main import main
from threefold.cost.estimate import estimate
from threefold.cost.time.step import TERMS
from threefold.findings import FindingsError
from threefold.layout.stages import balance
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.remedies.recompute_sets import selective_sets
from threefold.rules.all import check, errors
from threefold.search.explore import is_last_resort, with_balanced_stages
from threefold.search.neighbors import attempt
from threefold.search.price import Priced, Pricer
from threefold.search.published_layouts import nearest_published, published_layouts
from threefold.search.rank import LITTLE_ROOM, are_told_apart, grouped, why_after
from threefold.search.search import SearchResult, search
from threefold.search.space import default_batch, layouts, read_draft

RECIPES = ROOT / "recipes"
SMALL: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 16,
    "job.seq_len": 4096,
    "knobs.precision": "bf16",
}
HUGE_ON_8: dict[str, Any] = {
    "model": "deepseek-v3",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 8,
    "job.seq_len": 4096,
}


@pytest.fixture(scope="module")
def small() -> SearchResult:
    said: list[str] = []
    found = search(SMALL, progress=said.append)
    assert " of " in said[0]  # done of total
    return found


def check_candidates(found: SearchResult, fixed: dict[str, Any]) -> None:
    """No error for the target, within memory, fields of the draft untouched, and a reason for everything."""
    assert found.finding is None
    assert 0 < found.feasible <= found.priced <= found.searched
    for one in found.candidates:
        assert errors(check(one.plan)) == []
        assert one.estimate.fits
        assert one.estimate == estimate(one.plan)
        assert len(one.why) >= 4
        written = dict(one.plan.written)
        assert {path: written.get(path, FIELDS[path].default) for path in fixed} == fixed
    different = {
        (degrees(one.plan), one.plan.knobs.data_parallel, one.plan.knobs.precision) for one in found.candidates
    }
    assert len(different) == len(found.candidates)  # plans, not settings of one plan


def degrees(plan: Plan) -> tuple[int, int, int, int]:
    return (plan.layout.tp, plan.layout.cp, plan.layout.pp, plan.layout.ep)


# Families of the documents (Megatron Bridge's MoE guides, kept as recipes) with their degrees TP, CP, PP, EP.
FAMILIES = {
    "deepseek-v3-128k-256xh100-fp8": (1, 32, 8, 32),
    "deepseek-v3-256k-512xh100-fp8": (1, 64, 8, 32),
    "qwen3-235b-a22b-128k-128xgb200-bf16": (4, 4, 4, 32),
    "deepseek-v3-4k-1024xh100-fp8": (2, 1, 8, 64),
    "deepseek-v3-4k-256xgb200-mxfp8": (1, 1, 4, 64),
    "qwen3-next-80b-a3b-8k-32xgb200-bf16": (1, 1, 1, 32),
    "qwen3-next-80b-a3b-32k-32xgb200-bf16": (1, 4, 1, 32),
    "qwen3-30b-a3b-4k-16xh100-bf16-overlap": (1, 1, 1, 16),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_or_beaten(name: str) -> None:
    recipe = read_plan(str(RECIPES / f"{name}.toml")).plan
    assert recipe is not None
    assert degrees(recipe) == FAMILIES[name]
    tables = ("model", "target", "cluster", "job", "stack", "knobs.precision")
    draft = {path: value for path, value in recipe.written if path.startswith(tables)}
    draft |= {"job.micro_batch": recipe.job.micro_batch, "knobs.precision": recipe.knobs.precision}
    draft |= {"stack.measured": ("dispatcher", "graphs")}  # as those of the recipe were
    found = search(draft)
    check_candidates(found, draft)
    listed = FAMILIES[name] in [degrees(one.plan) for one in found.candidates]
    best = max(one.estimate.tokens_per_second_per_gpu for one in found.candidates)
    # The search takes offload last: a plan without it may be slower by less than estimates tell apart.
    assert listed or best >= 0.97 * estimate(recipe).tokens_per_second_per_gpu


def test_the_answer_is_fast_and_complete_at_1024_gpus() -> None:
    draft = {**HUGE_ON_8, "cluster.gpus": 1024}
    found = search(draft)
    check_candidates(found, draft)
    assert len(found.candidates) == 5
    assert found.searched > 100_000
    assert found.priced < found.searched / 100  # what makes it fast; benchmarks/search.py has the seconds


def test_the_best_is_ranked_with_its_neighborhood(small: SearchResult) -> None:
    check_candidates(small, SMALL)
    said = " ".join(small.candidates[0].why)
    assert "selective-before-full" in said
    assert "ep-traffic-hidden-or-inside" in said
    assert "(ep)" in said  # the cost term
    paths = {path for step in small.sensitivity for path in step.changes}
    assert {"layout.tp", "layout.cp", "layout.pp", "layout.ep", "layout.etp", "job.micro_batch"} <= paths
    assert all((step.effect is None) == bool(step.reason) for step in small.sensitivity)
    assert small.group is not None
    assert small.group.size >= 1


def test_sensitivity_gives_the_change_or_the_reason() -> None:
    plan = make()
    guess = estimate(plan)
    impossible = attempt(plan, guess, {"layout.ep": 512})  # 8 stages of 512 on 1,024 ranks
    assert impossible.effect is None
    assert impossible.reason.startswith("grids-divide-ranks: ")
    halved = attempt(plan, guess, {"layout.tp": 1})
    both = estimate(make(layout_tp=1))
    if both.fits:
        assert halved.effect == pytest.approx(both.tokens_per_second_per_gpu / guess.tokens_per_second_per_gpu - 1)
    else:
        assert halved.reason.startswith("memory: ")


def test_the_next_better_plan_is_faster_and_does_not_fit() -> None:
    found = search({**SMALL, "cluster.gpus": 8})
    better = found.next_better
    assert better is not None
    assert better.effect > 0
    assert better.need_bytes > better.have_bytes
    for cure in better.cures:
        assert cure.effect is not None
        assert cure.effect > 0  # better still, once it fits


def test_an_impossible_request_is_one_finding_with_a_fix_that_works() -> None:
    found = search(HUGE_ON_8)
    assert found.candidates == ()
    assert found.finding is not None
    assert found.finding.rule == "plan-exists"
    assert "671" not in found.finding.problem  # names, not sizes
    fix = found.finding.fix_data
    assert fix
    assert fix["cluster.gpus"] > 8
    cured = search({**HUGE_ON_8, **fix}, top=1)
    check_candidates(cured, {**HUGE_ON_8, **fix})


def test_a_fixed_field_in_the_way_is_named() -> None:
    found = search({**SMALL, "layout.ep": 48})  # 128 experts
    assert found.finding is not None
    assert found.finding.fix_data == {"layout.ep": None}
    no_room = search(
        {**SMALL, "cluster.gpus": 8, "knobs.recompute": [], "knobs.optimizer_offload": 0.0, "layout.ep": 1}
    )
    assert no_room.finding is None or no_room.finding.fix


def test_fixed_fields_stay_and_auto_is_free() -> None:
    draft = {**SMALL, "layout.tp": 2, "layout.ep": "auto", "knobs.dispatcher": "alltoall", "job.global_batch": 512}
    found = search(draft, top=3)
    fixed = {path: value for path, value in draft.items() if value != "auto"}
    check_candidates(found, fixed)
    for one in found.candidates:
        assert one.plan.layout.tp == 2
        assert one.plan.knobs.dispatcher == "alltoall"
        assert one.plan.job.global_batch == 512
    nested = {"model": "qwen3-30b-a3b", "cluster": {"chip": "h100", "gpus": 16}, "layout": {"pp": 2, "ep": "auto"}}
    assert all(one.plan.layout.pp == 2 for one in search(nested, top=2).candidates)


def test_what_the_draft_states_is_not_called_a_choice() -> None:
    stated = {"layout.tp": 2, "layout.pp": 2, "layout.ep": 8, "knobs.recompute": "full"}
    [best] = search({**SMALL, **stated}, top=1).candidates
    said = " ".join(best.reasons.all)
    assert "Full recompute, as the draft states" in said
    assert "The draft states layout.tp, layout.pp, layout.ep, knobs.recompute" in said
    [best] = search({**SMALL, **stated, "layout.ep": "auto"}, top=1).candidates
    assert "The draft states" not in " ".join(best.reasons.all)


def test_free_gpus_are_as_few_as_work() -> None:
    found = search({**SMALL, "cluster.gpus": "auto"}, top=1)
    assert found.candidates[0].plan.layout.gpus == 8  # one node: 30B parameters at 16 bytes, and 8 x 80 GB


def test_a_dense_model_and_a_cpu_have_plans() -> None:
    dense = search(
        {"model": "llama3-70b", "target": "megatron-bridge", "cluster.chip": "h100", "cluster.gpus": 64}, top=2
    )
    assert all(one.plan.layout.ep == 1 for one in dense.candidates)
    tiny = search({"model": "tiny-qwen3-moe", "cluster.gpus": 4, "job.seq_len": 256}, top=2)
    check_candidates(tiny, {})


def test_a_draft_that_cannot_be_read_raises_findings() -> None:
    with pytest.raises(FindingsError) as caught:
        search({**SMALL, "model": "qwen3-30b", "layout.epp": 4})
    assert {finding.rule for finding in caught.value.findings} == {"unknown-field"}
    with pytest.raises(FindingsError) as caught:
        search({**SMALL, "model": "qwen3-30b-a3"})
    assert caught.value.findings[0].fix_data == {"model": "qwen3-30b-a3b"}


def test_full_recompute_and_offload_are_last() -> None:
    """Where they are chosen, the heaviest selective set does not fit the same degrees."""
    found = search({**SMALL, "cluster.gpus": 8}, top=5)
    forced = [one.plan for one in found.candidates if is_last_resort(one.plan)]
    assert forced
    for plan in forced:
        mild = replace(plan.knobs, recompute=("layernorm", "moe"), optimizer_offload=0.0, ep_overlap=False, graphs=())
        smallest = replace(plan, knobs=mild, job=replace(plan.job, micro_batch=1), layout=replace(plan.layout, vpp=1))
        # The search takes memory at the top of its band where it can.
        assert estimate(smallest).device_bytes_band[1] > plan.chip.memory_bytes


def test_a_layout_that_fits_with_a_selective_set_comes_before_full_recompute() -> None:
    """The 9 % that full recompute on TP 2 x CP 8 x PP 16 is predicted to gain are no reason: TP x CP x PP of 256 fits
    with a selective set on stages of one chunk, which hold the fewest microbatches."""
    draft = {"model": "qwen3-235b-a22b", "cluster.chip": "h100", "cluster.gpus": 256, "job.seq_len": 131_072}
    found = search({**draft, "target": "threefold"}, top=5)
    assert not found.best.full_recompute
    assert found.best.knobs.optimizer_offload == 0
    assert found.best.link("ep").link == "domain"
    assert found.group is not None
    assert found.group.fastest < 0.2


def test_selective_sets_grow_and_end_with_the_moe_layer() -> None:
    sets = selective_sets(["mla_up_proj", "moe_act", "layernorm"], is_moe=True)
    assert sets[:3] == [(), ("mla_up_proj",), ("mla_up_proj", "moe_act")]
    assert sets[-1] == ("mla_up_proj", "layernorm", "moe")


def test_layouts_follow_the_documents() -> None:
    space = read_draft({**CLEAN, "job.seq_len": 131_072, **{p: "auto" for p in CLEAN if p.startswith("layout.")}})
    found = list(layouts(space))
    assert all(one.fits_ranks for one in found)
    assert all(one.etp == 1 and one.tp <= 8 for one in found)  # EP before ETP; TP inside the node
    shards = {131_072 // (one.cp * one.tp) for one in found}
    assert max(shards) == 8192  # half of CP = sequence / 4096
    assert 131_072 // max(one.cp for one in found) == 2048  # double
    short = read_draft({**CLEAN, **{p: "auto" for p in CLEAN if p.startswith("layout.")}})
    assert {one.cp for one in layouts(short)} == {1}


@pytest.mark.parametrize(
    ("gpus", "seq_len", "batch"), [(1024, 4096, 4096), (256, 131_072, 128), (512, 262_144, 64), (16, 4096, 1024)]
)
def test_default_batch_is_4m_or_16m_tokens(gpus: int, seq_len: int, batch: int) -> None:
    assert default_batch(gpus, seq_len) == batch


def test_default_batch_divides_odd_gpu_counts() -> None:
    assert default_batch(72, 4096) % 9 == 0
    assert default_batch(1000, 4096) % 125 == 0


def test_stages_are_weighed_by_seconds() -> None:
    """A written layout is only taken where it beats the one that counts every layer alike."""
    plan = make(knobs_recompute=None)
    space = read_draft(dict(plan.written))
    pricer = Pricer(space)
    plain = pricer.priced(replace(plan, layout=replace(plan.layout, stages=None)))
    other = with_balanced_stages(pricer, plain)
    assert other.tokens_per_second >= plain.tokens_per_second
    if other.plan.layout.stages is not None:
        assert other.plan.chunks != balance(61, 32, 1)
        assert errors(check(other.plan)) == []


def priced(plan: Plan, full: float = 0.5, **terms: float) -> Priced:
    """A candidate whose step takes 10 s for its experts and what `terms` say."""
    times = dict.fromkeys(TERMS, 0.0) | {"experts": 10.0} | terms
    speed = plan.tokens_per_step / sum(times.values())
    return Priced(plan, full * plan.chip.memory_bytes, speed, speed, times)


def test_what_rests_on_a_rate_that_nobody_measured_does_not_decide() -> None:
    """The threefold engine ran on one GPU: three seconds of exchanges of experts do not decide, thirty of GEMMs do."""
    plan = make(target="threefold")
    fast, exchanging, computing = priced(plan), priced(plan, ep=3.0), priced(plan, gemm=3.0)
    assert not are_told_apart(exchanging, fast)
    assert are_told_apart(priced(plan, gemm=30.0), fast)
    assert not are_told_apart(fast, exchanging)
    bridge = make()
    assert are_told_apart(priced(bridge, gemm=3.0), priced(bridge))  # its band is a third of that of the engine
    assert not are_told_apart(priced(bridge, gemm=0.4), priced(bridge))
    assert computing.step_seconds == pytest.approx(13.0)


def test_the_recommended_order_decides_inside_a_group() -> None:
    full = make(knobs_recompute=("full",))
    hosted = make(knobs_optimizer_offload=1.0)
    plain, tight = priced(make(), gemm=0.3), priced(make(), full=1 - LITTLE_ROOM / 2, gemm=0.2)
    order, size = grouped([priced(hosted), priced(full), tight, plain])
    assert size == 4
    assert order == [plain, tight, *order[2:]]
    assert [one.plan for one in order[2:]] == [full, hosted]  # offload last at 4K
    assert why_after(order[2], plain) == "full recompute"
    assert why_after(order[3], plain) == "100% of the optimizer on the host"
    slow = priced(make(), gemm=9.0)
    order, size = grouped([slow, priced(full)])
    assert (order[0].plan, size) == (full, 1)  # a selective set that is certainly slower does not win
    assert "more than the band" in why_after(slow, order[0])


def test_a_member_because_it_was_published_is_not_called_slower_than_the_band() -> None:
    """EP 16 between nodes was published beside PP 2 with EP 8, and is a fifth slower by its exchanges."""
    base = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16, "target": "megatron-bridge"}
    plans = [read_draft({**base, **more}).base for more in ({"layout.pp": 2, "layout.ep": 8}, {"layout.ep": 16})]
    inside, crossing = priced(plans[0]), priced(plans[1], gemm=2.0)
    assert are_told_apart(crossing, inside)
    assert grouped([inside, crossing]) == ([inside, crossing], 2)
    assert why_after(crossing, inside) == "EP between NVLink domains"


def test_hidden_exchanges_between_nodes_come_before_bare_ones() -> None:
    """Twice the model parallelism, with exchanges that another microbatch hides; of the same length as predicted."""
    base = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 64, "target": "megatron-bridge"}
    bare = read_draft({**base, "layout.ep": 32, "layout.pp": 2}).base
    hidden = read_draft({**base, "layout.ep": 16, "layout.pp": 4, "layout.vpp": 2, "knobs.ep_overlap": True}).base
    assert [one.plan for one in grouped([priced(bare), priced(hidden)])[0]] == [hidden, bare]


def test_a_published_layout_guides_requests_near_to_it() -> None:
    long = {"model": "deepseek-v3", "cluster.chip": "h100", "target": "megatron-bridge", "knobs.precision": "bf16"}
    for gpus, seq_len, cp in ((256, 131_072, 32), (512, 262_144, 64), (256, 65_536, 16)):
        plan = read_draft({**long, "cluster.gpus": gpus, "job.seq_len": seq_len, "layout.cp": cp}).base
        plan = replace(plan, layout=replace(plan.layout, pp=8, ep=32))
        assert min(one.distance(plan) for one in nearest_published(plan)) == 0
    far = read_draft({**long, "cluster.chip": "gb200", "cluster.gpus": 128, "job.seq_len": 131_072}).base
    assert nearest_published(far) == ()  # on GB200 it was published at 4K only
    small = read_draft({**long, "model": "kimi-k2", "cluster.gpus": 256, "job.seq_len": 131_072}).base
    assert {one.model for one in nearest_published(small)} == {"deepseek-v3"}  # of its family, and of its size


def test_the_table_of_published_layouts_is_that_of_runs_and_recipes() -> None:
    import published_layouts as tool

    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/published_layouts.py"
    assert len(published_layouts()) == len(tool.layouts())


# The documents' families for requests as people make them: degrees TP, CP, PP, EP, and targets.
ASKED = {
    "qwen3-30b": (("qwen3-30b-a3b", "h100", 16, 4096), {(1, 1, 2, 8), (1, 1, 1, 16)}, "megatron-bridge threefold"),
    "deepseek": (("deepseek-v3", "h100", 256, 131_072), {(1, 32, 8, 32)}, "megatron-bridge threefold"),
    "qwen3-235b": (("qwen3-235b-a22b", "gb200", 128, 131_072), {(4, 4, 4, 32)}, "megatron-bridge threefold"),
    "qwen3-next": (("qwen3-next-80b-a3b", "gb200", 32, 32_768), {(1, 4, 1, 32)}, "megatron-bridge threefold"),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_documents_families_come_out(name: str) -> None:
    (model, chip, gpus, seq_len), expected, targets = ASKED[name]
    for target in targets.split():
        draft = {"model": model, "cluster.chip": chip, "cluster.gpus": gpus, "job.seq_len": seq_len, "target": target}
        found = search({**draft, "knobs.precision": "auto"}, top=2)
        first = found.candidates[0]
        assert degrees(first.plan) in expected
        assert first.plan.knobs.precision == "bf16"
        assert not first.plan.full_recompute
        assert bool(first.plan.knobs.optimizer_offload) == (model == "deepseek-v3")  # as in its recipe
        assert first.estimate.headroom_bytes > 0


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


ASK = ("plan", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "16", "--seq-len", "4096")


def test_json_has_the_agreed_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*ASK, "--precision", "bf16", "--micro-batch", "1", "--top", "2", "--json", capsys=capsys)
    said = json.loads(out)
    assert code == 0
    assert {"candidates", "searched", "feasible", "seconds"} <= set(said)
    assert len(said["candidates"]) == 2
    first = said["candidates"][0]
    assert {"plan", "estimate", "why"} <= set(first)
    assert first["plan"]["model"] == "qwen3-30b-a3b"
    assert "target" not in first["plan"]  # threefold, the default for a model that our engine trains
    assert said["target_because"] == "for threefold, because our engine trains qwen3_moe models"
    assert {"level", "memory", "time", "wall", "band"} <= set(first["estimate"])
    assert "finding" not in said


def test_text_goes_fit_scale_profile_retune(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*ASK, "--top", "2", "--details", capsys=capsys)
    assert code == 0
    titles = ["\nFit\n", "\nScale\n", "\nProfile\n", "\nRetune\n", "\nCandidates\n"]
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    assert "attention  PP" in out
    assert "experts    PP" in out
    assert "fp8-blockwise" in out  # the platform's default, with its date
    assert "2026-08" in out
    assert "searched" in out


def test_out_writes_a_plan_that_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    draft, best = tmp_path / "draft.toml", tmp_path / "best.toml"
    head = 'model = "qwen3-30b-a3b"\ncluster = { chip = "h100", gpus = 16 }\n'
    draft.write_text(head + '[layout]\nep = "auto"\n[knobs]\nprecision = "bf16"\n')
    code, out, _ = run("plan", str(draft), "layout.pp=1", "--json", "--out", str(best), capsys=capsys)
    assert code == 0
    plan = read_plan(str(best)).plan
    assert plan is not None
    assert plan.hash == json.loads(out)["candidates"][0]["hash"]
    assert plan.layout.pp == 1
    assert run("check", str(best), capsys=capsys)[0] == 0
    assert run("plan", str(draft), "--out", "/no/such/folder/x.toml", "--top", "1", capsys=capsys)[0] == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan",), 2),
        (("plan", "--model", "qwen3-30b-a3b"), 2),
        ((*ASK, "--top", "0"), 2),
        (("plan", "--model", "x", "--chip", "h100", "--gpus", "eight", "--seq-len", "4096"), 2),
        (("plan", "--model", "qwen3-30", "--chip", "h100", "--gpus", "8", "--seq-len", "4096"), 1),
        ((*ASK, "layout.epp=4"), 1),
        ((*ASK, "--micro-batch", "0"), 1),
        (("plan", "/no/such/draft.toml"), 1),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = run(*words, capsys=capsys)
    assert got == code
    assert out + err
    assert "Traceback" not in out + err


def test_impossible_in_json_has_the_finding(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", "deepseek-v3", "--chip", "h100", "--gpus", "8", "--seq-len", "4096", "--json")
    code, out, _ = run(*words, capsys=capsys)
    assert code == 1
    said = json.loads(out)
    assert said["candidates"] == []
    assert said["finding"]["rule"] == "plan-exists"
    assert said["finding"]["fix_data"]
    code, out, _ = run("check", "--explain", "plan-exists", capsys=capsys)
    assert code == 0
    assert "nearest change" in out


@pytest.mark.slow
def test_a_contradiction_is_told_at_once() -> None:
    """No number of GPUs makes a plan of recomputed layers, which are full recompute's, beside EP overlap."""
    given = {"model": "deepseek-v3", "cluster.chip": "h100", "cluster.gpus": "auto", "job.seq_len": 4096}
    found = search({**given, "target": "threefold", "knobs.recompute_layers": 1, "knobs.ep_overlap": True})
    assert found.searched == 0
    assert found.finding is not None
    assert "recompute-method-needs-full" in found.finding.problem


def test_layers_are_recomputed_where_the_draft_names_their_number() -> None:
    """A number of layers belongs to full recompute: other rungs are not climbed to be refused at the end."""
    found = search({**SMALL, "knobs.recompute_layers": 1}, top=1)
    assert found.candidates[0].plan.full_recompute
