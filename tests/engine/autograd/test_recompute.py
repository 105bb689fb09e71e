"""Recompute changes no bit, keeps what is promised and nothing else, on one rank and on many; budgets become names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors
from oracle_layouts import FOUR, FSDP, MTP1, PACKED, case
from plans import build
from tiny_models import FAMILIES, spec_of

from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import calibration
from threefold.cost.time.step import step_time
from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.autograd.recompute import recompute, recompute_output
from threefold.engine.build import options_of
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder, Output
from threefold.engine.moe import experts
from threefold.engine.verify.compare import compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank
from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.remedies.recompute_sets import every_set
from threefold.search.recompute import resolve_recompute
from threefold.units import GIB, format_bytes

HAVE = {
    "mlp": {"llama", "qwen3", "deepseek_v3"},
    "moe": set(FAMILIES) - {"llama", "qwen3"},
    "moe_act": set(FAMILIES) - {"llama", "qwen3"},
    "shared_experts": {"deepseek_v3", "qwen3_next"},
    "mla_up_proj": {"deepseek_v3"},
    "gdn_norm_out": {"qwen3_next"},
}
EACH = ("layernorm", "core_attn", *HAVE)
FINE = tuple(name for name in EACH if name != "moe")
CASES = [(family, (name,)) for name in (*EACH, "full") for family in FAMILIES if family in HAVE.get(name, FAMILIES)]
CASES += [(family, names) for family in FAMILIES for names in (FINE, EACH)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(family: str, dtype: torch.dtype, num_layers: int | None = None, **options: Any) -> Decoder:
    spec = spec_of(family, **({"num_hidden_layers": num_layers} if num_layers else {}))
    return build_model(spec, int(family == "deepseek_v3"), dtype, options=Options(aux_loss=0.01, **options))


def forward(model: Decoder) -> Output:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.spec.vocab, (2, 16), generator=draw)
    documents = (torch.rand(2, 16, generator=draw) < 0.2).long().cumsum(1)
    return model(tokens, tokens.roll(-1, 1), documents)


def gradients(family: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    model = make(family, dtype, **options)
    out = forward(model)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def often(names: tuple[str, ...], dtype: torch.dtype) -> bool:
    """Each alone in fp64, all at once in fp32; the others now and then."""
    return (len(names) == 1) == (dtype == torch.float64)


BITS = [
    pytest.param(family, names, dtype, marks=() if often(names, dtype) else pytest.mark.slow)
    for family, names in CASES
    for dtype in (torch.float32, torch.float64)
]


@pytest.mark.parametrize(("family", "names", "dtype"), BITS)
def test_gradients_are_the_same_bits(family: str, names: tuple[str, ...], dtype: torch.dtype) -> None:
    assert_same(gradients(family, dtype, recompute=names), gradients(family, dtype))


@pytest.mark.parametrize("names", [("moe",), ("full",)])
def test_experts_that_first_run_in_a_recompute(names: tuple[str, ...]) -> None:
    """Whether there is a grouped product is tried with the first rows: that is no part of what is made again."""
    experts._probe.cache_clear()
    found = gradients("qwen3_moe", torch.float32, recompute=names)
    assert_same(found, gradients("qwen3_moe", torch.float32))


def test_trying_a_product_leaves_nothing_behind() -> None:
    """Both its gradients are tried then and there, whatever schedule it is in."""
    experts._probe.cache_clear()
    delay = WgradQueue()
    with delay:
        experts._probe("cpu", torch.float32)
    assert delay.pending == []


@pytest.mark.parametrize(("method", "size"), [("uniform", 2), ("uniform", 3), ("block", 2), ("block", 9)])
def test_full_recompute_by_units(method: str, size: int) -> None:
    plain = gradients("qwen3_moe", torch.float64, num_layers=4)
    found = gradients("qwen3_moe", torch.float64, num_layers=4, **full(method, size))
    assert_same(found, plain)


def full(method: str, size: int) -> dict[str, Any]:
    return {"recompute": ("full",), "recompute_method": method, "recompute_layers": size}


# Values that a token no longer keeps, by hand from the sizes in tiny_models.py: model dim 32, 4 heads of 8 (of 12 with
# latents), MLP 48, experts 24 with 3 of them a token, shared experts 48 (2 x 24), delta rule 4 heads of 6. On the CPU a
# norm keeps its input over its size, that times the weight, and the size.
NORM = 32 + 32 + 1
FREED = {
    ("llama", "layernorm"): 2 * 2 * NORM,
    ("llama", "core_attn"): 2 * (32 + 4),  # output, which the projection reads as it is, and log-sum-exp
    ("llama", "mlp"): 2 * (4 * 48),  # gate, up, silu, product
    ("qwen3_moe", "moe_act"): 2 * 3 * (3 * 24),  # silu, product, weighted product
    ("deepseek_v3", "shared_experts"): 2 * (4 * 48),  # layers 1 and that of the MTP depth
    # q, k, and v with what k is made of, heads of 8 + 10; rotation's tables in fp64, of q and of k.
    ("deepseek_v3", "mla_up_proj"): 3 * (2 * 48 + 72 + 4 * 2),
    ("qwen3_next", "gdn_norm_out"): 4 * 24 + 4,  # normed, weighted, silu of the gate, product; sizes
}
# Bytes a token that a second run must look up: position, document, and tables of rotation in fp32, 8 values at most.
LOOKED_UP = 8 + 8 + 8 * 4


def kept(family: str, **options: Any) -> float:
    """Values of fp64 a token, 32 tokens."""
    model = make(family, torch.float64, expert_backend="loop", **options)
    with LiveTensors() as living:
        out = forward(model)
        num_bytes = living.num_bytes
    del out
    return num_bytes / 8 / 32


@pytest.mark.parametrize(("family", "name"), FREED, ids=[name for _, name in FREED])
def test_what_goes_is_what_was_counted(family: str, name: str) -> None:
    freed = kept(family) - kept(family, recompute=(name,))
    assert FREED[family, name] - LOOKED_UP / 8 <= freed <= FREED[family, name]


def test_experts_keep_their_input_only() -> None:
    """Rows of input, FC1, silu, product and weighted product are the most of it; the router keeps some more."""
    freed = kept("qwen3_moe") - kept("qwen3_moe", recompute=("moe",))
    assert freed >= 2 * 3 * (32 + 48 + 24 + 24 + 24)
    # A layer more: two inputs; queries and keys (32 + 16) before, within and behind their norms, and their sizes
    # (4 + 2); rotation's tables of both, in fp64; values. Nothing of the experts but what is said of them.
    more = kept("qwen3_moe", num_layers=4, recompute=EACH) - kept("qwen3_moe", num_layers=3, recompute=EACH)
    said = (8 * 8 + 8 + 8) / 32  # load_LE and two numbers a layer, in all
    assert more <= 2 * 32 + 4 * (32 + 16) + 4 + 2 + 2 * 2 * 4 + 16 + said


def test_full_recompute_keeps_inputs_of_units() -> None:
    def of(layers: int, method: str, size: int) -> float:
        return kept("llama", num_layers=layers, **full(method, size))

    assert of(6, "uniform", 1) - of(3, "uniform", 1) == 3 * 32
    assert of(6, "uniform", 3) - of(3, "uniform", 3) == 32
    plain = kept("llama", num_layers=3) - kept("llama", num_layers=2)
    assert of(3, "block", 2) - of(2, "block", 2) == plain


def test_outputs_are_made_once_and_go_with_their_readers() -> None:
    runs = []

    def double(x: Any) -> Any:
        runs.append(torch.is_grad_enabled())
        return x * 2.0

    x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    with LiveTensors() as living:
        with recompute_output(double, x) as y:
            out = (y @ weight).sum() + (y.view(8, 4)[1:].mT ** 2).sum()
        del y
        assert living.num_bytes <= 3 * 8  # sums
        out.backward()
    assert runs == [True, True]
    assert torch.equal(weight.grad, torch.full((8, 8), 8.0, dtype=torch.float64))
    expected = torch.full((4, 8), 16.0, dtype=torch.float64)
    expected.view(8, 4)[1:] += 8.0
    assert torch.equal(x.grad, expected)


def test_another_second_run_is_noticed() -> None:
    x, runs = torch.ones(3, requires_grad=True), []

    def fickle(x: Any) -> Any:
        runs.append(0)
        return x.exp() if len(runs) == 1 else x.repeat(2).exp()[:3]

    out = recompute(fickle, x)
    with pytest.raises(AssertionError, match="first run"):
        out.sum().backward()


def test_a_view_that_one_run_takes_changes_nothing_that_is_saved() -> None:
    """FSDP's hooks return a view in the first run alone. `F.linear` with a frozen weight goes by strides, which a dim
    of size 1 may have in several ways."""
    weight, is_first = torch.randn(4, 3, dtype=torch.float64), iter([True])
    x = torch.randn(5, 3, dtype=torch.float64).as_strided((1, 5, 3), (3, 3, 1)).requires_grad_()

    def square(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.view_as(x) if next(is_first, False) else x, weight).square()

    recompute(square, x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * (x.detach() @ weight.T) @ weight, rtol=1e-14, atol=1e-14)


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad(), recompute_output(torch.exp, torch.ones(2)) as y:
        assert not y.requires_grad
    assert not recompute(torch.exp, torch.ones(2)).requires_grad


LAYOUTS = {
    "tp cp ep": case("", "deepseek_v3", 4, tp=2, cp=2, ep=4, job=PACKED, spec=MTP1),
    "interleaved": case("", "qwen3_moe", 2, pp=2, vpp=2, spec=FOUR),
    "1f1b ep": case("", "qwen3_next", 4, pp=2, ep=2),
    "zero-bubble": case("", "qwen3_moe", 2, pp=2, schedule="zero-bubble", spec=FOUR),
    "fsdp ep": case("", "qwen3_moe", 4, ep=2, knobs=FSDP),
}
KINDS: dict[str, dict[str, Any]] = {
    "fine": {"recompute": FINE},
    "moe": {"recompute": EACH},
    "full": {"recompute": ("full",)},
    "units": {"recompute": ("full",), "recompute_layers": 2},
    "block": {"recompute": ("full",), "recompute_method": "block", "recompute_layers": 1},
}
OFTEN = {("tp cp ep", "fine"), ("interleaved", "moe"), ("1f1b ep", "full"), ("zero-bubble", "fine"), ("fsdp ep", "moe")}
RANKS = [
    pytest.param(layout, kind, marks=() if (layout, kind) in OFTEN else pytest.mark.slow)
    for layout in LAYOUTS
    for kind in KINDS
]


@pytest.mark.parametrize(("layout", "kind"), RANKS)
def test_ranks_that_recompute_are_one_rank_that_does_not(layout: str, kind: str) -> None:
    plan = LAYOUTS[layout].plan
    plain = replace(options_of(plan), expert_backend="loop")
    alone = run_one_rank(plan, 2, torch.float64, plain)
    ranks = run_ranks(plan.layout.gpus, run_rank, plan, 2, torch.float64, replace(plain, **KINDS[kind]))
    found = compare_results(plan, alone, ranks)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # as in test_oracle.py: sums in another order, and AdamW's division


def test_layers_are_counted_over_the_chunks_of_a_rank() -> None:
    options = Options(**full("block", 3), activation_offload_layers=5)
    spread = [(each.recompute_layers, each.activation_offload_layers) for each in options.for_chunks([2, 2, 2])]
    assert spread == [(2, 2), (1, 2), (0, 1)]
    (none,) = Options(**full("block", 3)).for_chunks([0])
    assert [recomputed for _, recomputed in none.layer_groups([1, 2])] == [False, False]


ON_HOST = {
    "model": "qwen3-next-80b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 64,
    "layout.ep": 32,
    "job.seq_len": 8192,
    "job.micro_batch": 2,
    "job.global_batch": 256,
}


def with_budget(num_bytes: float) -> Any:
    return build({**ON_HOST, "knobs.recompute": f"auto:{num_bytes / GIB:.6f}GiB"})


def test_budget_becomes_the_cheapest_names() -> None:
    """Against a search of our own over everything the budget may choose from."""
    rates = calibration("threefold").rates

    def cost(names: tuple[str, ...]) -> tuple[float, float]:
        plan = build({**ON_HOST, "knobs.recompute": list(names)})
        return memory(plan).peak_bytes, step_time(plan, rates).step_seconds

    priced = {names: cost(names) for names in every_set(build(ON_HOST))}
    assert {(), ("full",), ("layernorm", "moe")} <= priced.keys()
    most, least = priced[()][0], min(need for need, _ in priced.values())
    for share in (0.9, 0.5, 0.1):
        budget = least + share * (most - least)
        plan, said = resolve_recompute(with_budget(budget))
        chosen = priced[plan.knobs.recompute]
        assert chosen[0] <= budget
        assert chosen[1] == min(seconds for need, seconds in priced.values() if need <= budget)
        assert plan.recompute_budget is None
        assert said[0].fix == {"knobs.recompute": list(plan.knobs.recompute)}
    assert resolve_recompute(with_budget(2 * most))[0].knobs.recompute == ()
    with pytest.raises(FindingsError) as refused:
        resolve_recompute(with_budget(0.9 * least))
    assert refused.value.findings[0].rule == "recompute-chosen"


def test_budget_obeys_rules() -> None:
    """EP overlap redoes no exchange: of what meets the budget only sets without `moe` and `full` are left."""
    fields = {**ON_HOST, "knobs.ep_overlap": True}
    every = {
        names: memory(build({**fields, "knobs.recompute": list(names)})).peak_bytes
        for names in every_set(build(fields))
    }
    least = min(need for names, need in every.items() if not {"moe", "full"} & set(names))
    assert min(every.values()) < 0.999 * least

    def resolved(num_bytes: float) -> Any:
        return resolve_recompute(build({**fields, "knobs.recompute": f"auto:{num_bytes / GIB:.6f}GiB"}))[0]

    assert not {"moe", "full"} & set(resolved(1.001 * least).knobs.recompute)
    with pytest.raises(FindingsError, match="break a rule"):
        resolved(0.999 * least)


def resolved_near(fields: dict[str, Any], num_bytes: float) -> Any:
    return resolve_recompute(build({**fields, "knobs.recompute": f"auto:{1.0001 * num_bytes / GIB:.6f}GiB"}))[0]


def needs(fields: dict[str, Any]) -> dict[tuple[str, ...], float]:
    plan = build(fields)
    return {
        names: memory(replace(plan, knobs=replace(plan.knobs, recompute=names))).peak_bytes for names in every_set(plan)
    }


def test_budget_obeys_a_rule_about_graphs() -> None:
    """Its fix gives up the graphs. The message names the least of what is left, not what the rule refuses."""
    fields = {**ON_HOST, "knobs.graphs": ["attn"]}
    need = needs(fields)
    least = min(need.keys() - {("full",)}, key=lambda names: need[names])
    assert need[("full",)] < 0.9 * need[least]
    assert resolved_near(fields, need[least]).knobs.recompute == least
    with pytest.raises(FindingsError) as stopped:
        resolved_near(fields, need[("full",)])
    (said,) = stopped.value.findings
    assert "break a rule (graph-excludes-full-recompute)" in said.problem
    assert f"{', '.join(least)} needs the least, {format_bytes(need[least])}" in said.problem


def test_budget_obeys_a_rule_about_overlap() -> None:
    """Its fix gives up the overlap of shared experts."""
    fields = {**ON_HOST, "knobs.shared_expert_overlap": True}
    for names, num_bytes in needs(fields).items():
        if "shared_experts" in names:
            assert "shared_experts" not in resolved_near(fields, num_bytes).knobs.recompute


def test_a_rule_that_is_broken_anyway_refuses_no_set() -> None:
    """`check` names it, with its fix; a budget that speaks of it would hide that."""
    fields = {**ON_HOST, "knobs.recompute_layers": 2, "knobs.recompute": "auto:1000GiB"}
    assert resolve_recompute(build(fields))[0].knobs.recompute == ()


@pytest.mark.parametrize("word", ["auto:", "auto:0GiB", "auto:-3GiB", "auto:60", "auto:60 GiB", "auto:muchGiB"])
def test_nonsense_for_a_budget_is_refused(word: str) -> None:
    parsed = parse({**ON_HOST, "knobs.recompute": word})
    assert [finding.at for finding in parsed.findings] == ["knobs.recompute"]


def test_a_line_end_is_no_part_of_a_budget() -> None:
    parsed = parse({**ON_HOST, "knobs.recompute": ["auto:60GiB\n"]})
    assert [finding.at for finding in parsed.findings] == ["knobs.recompute"]


def test_budget_stands_alone() -> None:
    parsed = parse({**ON_HOST, "knobs.recompute": ["auto:60GiB", "moe_act"]})
    assert parsed.findings[0].fix == {"knobs.recompute": ["auto:60GiB"]}
