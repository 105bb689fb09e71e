"""Long sequences on one device: chunks and groups of heads change nothing but memory."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_reference import reference
from live_tensors import LiveTensors, peak_bytes
from oracle_layouts import FOUR, FSDP, MTP1, PACKED, case
from plans import build
from tiny_models import FAMILIES, spec_of

from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.engine.attention import backend, flash_attention_4
from threefold.engine.attention.backend import attend
from threefold.engine.attention.head_groups import cudnn_head_groups as grouped
from threefold.engine.attention.head_groups.cudnn_head_groups import attend_in_head_groups
from threefold.engine.attention.kernel_speeds import MEASURED, KernelSpeed, fastest_first
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.torch_kernels import SDPA
from threefold.engine.autograd.token_chunks import chunk_size, run_in_chunks
from threefold.engine.build import options_of
from threefold.engine.layers.positions import document_bounds
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.tune import attention_kernels as tuning
from threefold.engine.verify.compare import compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank
from threefold.units import GIB

EXPERTS = sorted(set(FAMILIES) - {"llama", "qwen3"})
RECOMPUTED = [(), ("moe", "mlp"), ("layernorm", "moe", "mlp"), ("full",)]
# Sums in another order: a few roundings of fp64 at the size of the largest summand. The delta rule's inverse has more.
FP64 = 1e-12
LOSSES = {"aux_loss": 0.01, "seq_aux_loss": 0.01, "z_loss": 0.01}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(family: str, **options: Any) -> Decoder:
    return build_model(spec_of(family), 0, torch.float64, options=Options(**LOSSES, **options))


def trained(model: Decoder) -> dict[str, torch.Tensor]:
    """Loss, statistics and gradients of two sequences of 16 tokens."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.spec.vocab, (2, 16), generator=draw)
    documents = (torch.rand(2, 16, generator=draw) < 0.2).long().cumsum(1)
    out = model(tokens, tokens.roll(-1, 1), documents)
    assert out.loss is not None
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), **out.aux, **grads}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        limit = FP64 * float(exact.abs().max()) + 1e-300
        assert float((found[name] - exact).abs().max()) <= limit, name


# Qwen3-30B-A3B: 8 rows of 2,048 bf16 values a token, 2 GiB of which are 65,536 tokens.
@pytest.mark.parametrize(
    ("tokens", "size"),
    [(4096, 4096), (65536, 65536), (65537, 32896), (131072, 65536), (262144, 65536), (200000, 50048), (0, 0)],
)
def test_chunks_are_equal_tiles_within_the_limit(tokens: int, size: int) -> None:
    assert chunk_size(tokens, 8 * 2048 * 2) == size
    assert chunk_size(tokens, 8 * 2048 * 2, requested=1000) == min(tokens, 1000)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_in_chunks_is_the_function(size: int) -> None:
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad((x @ weight).sigmoid().square().sum(), [x, weight])
    for repeated in (False, True):
        y = run_in_chunks(lambda part: (part @ weight).sigmoid(), size, x, recompute=repeated)
        for found, exact in zip(torch.autograd.grad(y.square().sum(), [x, weight]), wanted, strict=True):
            torch.testing.assert_close(found, exact, rtol=FP64, atol=FP64)


@pytest.mark.parametrize("names", RECOMPUTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_no_loss_statistic_or_gradient(family: str, names: tuple[str, ...]) -> None:
    wanted = trained(make(family))
    assert_close(trained(make(family, ffn_chunk=5, recompute=names)), wanted)


@pytest.mark.parametrize("names", RECOMPUTED)
def test_chunks_of_fused_experts_too(names: tuple[str, ...]) -> None:
    wanted = trained(make("qwen3_moe", expert_fusion=True))
    assert_close(trained(make("qwen3_moe", expert_fusion=True, ffn_chunk=5, recompute=names)), wanted)


def test_two_layers_recomputed_together() -> None:
    wanted = trained(make("qwen3_moe"))
    two = {"recompute": ("full",), "recompute_method": "uniform", "recompute_layers": 2}
    assert_close(trained(make("qwen3_moe", ffn_chunk=5, **two)), wanted)


@pytest.mark.parametrize("names", [("layernorm", "moe"), ("full",)])
def test_saved_tensors_of_chunks_can_be_offloaded(names: tuple[str, ...]) -> None:
    wanted = trained(make("qwen3_moe"))
    assert_close(trained(make("qwen3_moe", ffn_chunk=5, recompute=names, activation_offload_layers=2)), wanted)
    offload = ("attn_norm", "qkv_linear", "core_attn", "mlp_norm", "fused_group_mlp")
    assert_close(trained(make("qwen3_moe", ffn_chunk=5, recompute=names, activation_offload=offload)), wanted)


@pytest.mark.parametrize(("names", "times"), [((), 1), (("moe",), 2), (("full",), 2)])
def test_each_chunk_is_recomputed_once(names: tuple[str, ...], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[int] = Counter()
    inner = MoeLayer._compute_chunk

    def counted(self: MoeLayer, x: Any, weight: Any, expert: Any) -> Any:
        seen[len(x)] += 1
        return inner(self, x, weight, expert)

    monkeypatch.setattr(MoeLayer, "_compute_chunk", counted)
    trained(make("qwen3_moe", ffn_chunk=10, recompute=names))
    # Two layers, 32 tokens each.
    assert seen == {10: 2 * 3 * times, 2: 2 * times}


def test_a_capacity_is_of_all_tokens() -> None:
    """The copies that an expert drops depend on all tokens, so a layer with a capacity does not run in chunks."""
    layer = make("qwen3_moe", ffn_chunk=5, capacity_factor=1.0).layers["0"].ffn
    assert isinstance(layer, MoeLayer)
    assert not layer.runs_in_chunks(torch.zeros(2, 16, 32))


def most(**options: Any) -> int:
    return peak_bytes(make("qwen3_moe", **options), 512)


@pytest.mark.parametrize("names", [("layernorm", "moe"), ("full",)])
def test_recomputed_experts_take_a_chunk_at_a_time(names: tuple[str, ...]) -> None:
    """512 tokens to 3 experts of width 24 at width 32, in fp64: the rows of one layer, their FC1 output, activation and
    result are 3 * (32 + 48 + 24 + 32) * 8 bytes a token, of which a chunk of 64 leaves an eighth."""
    rows = 512 * 3 * (32 + 48 + 24 + 32) * 8
    assert most(recompute=names) - most(recompute=names, ffn_chunk=64) > 0.8 * rows * 7 / 8


HEADS = [("mla_up_proj",), ("mla_up_proj", "core_attn", "layernorm"), ("full",)]


@pytest.mark.parametrize("names", HEADS)
@pytest.mark.parametrize("heads_per_group", [1, 3])
def test_groups_of_heads_change_no_gradient(
    names: tuple[str, ...], heads_per_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(make("deepseek_v3"))
    monkeypatch.setattr(MlaAttention, "heads_per_group", heads_per_group)
    assert_close(trained(make("deepseek_v3", recompute=names)), wanted)


def test_latent_attention_keeps_latents_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the forward, groups of heads have saved the same tensors as all heads at once."""
    model = make("deepseek_v3", recompute=("mla_up_proj",))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    kept = []
    for heads_per_group in (None, 1):
        monkeypatch.setattr(MlaAttention, "heads_per_group", heads_per_group)
        with LiveTensors() as living:
            out = model(tokens, tokens)
            kept.append(living.num_bytes)
        del out
    # Their weights, cut, are views; a few indices and numbers a group come on top.
    assert kept[1] <= 1.02 * kept[0]


LONG = {
    "model": "qwen3-30b-a3b",
    "model.num_layers": 2,
    "target": "threefold",
    "cluster.chip": "h200",
    "job.seq_len": 262144,
    "job.global_batch": 1,
    "job.aux_loss": 0.0,
    "knobs.expert_fusion": True,
}


@pytest.mark.parametrize("names", [("layernorm", "moe"), ("full",)])
def test_no_tensor_grows_with_rows_at_256k(names: tuple[str, ...]) -> None:
    """262,144 tokens have 2,097,152 rows of 4 KiB: 8 GiB. Nothing that lives at the peak is wider than a chunk."""
    found = rehearse_rank(build({**LONG, "knobs.recompute": list(names)}), 0)
    assert [one for one in found.top if 262144 * 8 in one.shape] == []
    activations = [one.bytes for one in found.top if one.term not in ("weights", "gradients", "optimizer")]
    # The backward of attention: for two of four key/value heads, the queries' gradient in fp32, and what the queries
    # add to the gradients of keys and values; a number a query and head.
    assert max(activations) <= (2 + 2) * GIB + 64 * 2**20


def test_the_fastest_kernel_is_the_one_measured_nearest() -> None:
    rows = {(one.dim, one.value_dim, one.length): one.kernels for one in MEASURED}
    for size, kernels in rows.items():
        assert kernels[fastest_first(*size, has_fa4=True)[0]] == max(kernels.values())
        assert "fa4" not in fastest_first(*size)  # another release of it, or none
        assert kernels.keys() <= {*SDPA, "fa4"}  # what is measured here is what can be chosen
    # Between two lengths the nearer one, as lengths double; between head dims the nearer one, whatever the length.
    assert fastest_first(128, 128, 1) == fastest_first(128, 128, 4096)
    assert fastest_first(128, 128, 10**6) == fastest_first(128, 128, 131072)
    assert fastest_first(96, 96, 32768) == fastest_first(64, 64, 32768)
    assert set(fastest_first(192, 128, 4096)) >= {"cudnn", "flash"}
    assert fastest_first(128, 128, 4096, has_fa4=True)[0] == "fa4"
    assert "fa4" not in fastest_first(120, 120, 4096, has_fa4=True)  # it may not take these heads


HERE = KernelSpeed(128, 128, 8192, {"cudnn": 300, "flash": 200, "fa4": 400})


def test_what_this_machine_measured_comes_before_the_table() -> None:
    assert fastest_first(128, 128, 32768, [HERE]) == ["fa4", "cudnn", "flash"]
    assert fastest_first(64, 64, 32768, [HERE]) == fastest_first(64, 64, 32768)  # of other head dims it says nothing
    assert fastest_first(128, 128, 8192, [KernelSpeed(128, 128, 8192, {})]) == fastest_first(128, 128, 8192)


def test_speeds_are_found_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(tuning, "runnable_kernels", lambda heads, device: {})
    monkeypatch.setattr(tuning, "measure_tflops", lambda *given: HERE.kernels)
    tuning.speeds_measured_here.cache_clear()
    gpu = torch.device("cuda")
    assert tuning.speeds_measured_here(gpu) == ()
    assert tuning.tune_attention(tuning.AttentionHeads(32, 4, 128, 128), 8192, gpu, print) == HERE
    assert tuning.speeds_measured_here(gpu) == (HERE,)
    (kept,) = (tmp_path / "threefold").glob("attention-a-gpu-*.json")
    kept.write_text("[1", encoding="utf-8")
    tuning.speeds_measured_here.cache_clear()
    assert tuning.speeds_measured_here(gpu) == ()
    kept.unlink()
    monkeypatch.setattr(tuning, "measure_tflops", lambda *given: {})
    assert tuning.tune_attention(tuning.AttentionHeads(32, 4, 128, 128), 2**24, gpu, print).kernels == {}
    assert not kept.exists()
    tuning.speeds_measured_here.cache_clear()


def test_kernels_that_do_not_run_are_left_out_and_named() -> None:
    """On a CPU torch's flash kernel runs, cuDNN's does not."""
    cpu = torch.device("cpu")
    heads, said = tuning.AttentionHeads(4, 2, 16, 8), []
    kernels = tuning.runnable_kernels(heads, cpu)
    assert set(tuning.measure_tflops(heads, (1, 64), cpu, kernels, said.append)) == {"flash"}
    assert [line.split(":")[0] for line in said] == ["attention by cudnn does not run here"]


@pytest.mark.parametrize(("works", "called"), [(True, 1), (False, 0)])
def test_flash_attention_4_attends_where_it_was_fastest(
    works: bool, called: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, 2, 8, 128) for _ in range(3))
    calls: list[float] = []

    def flash4(q: Any, k: Any, v: Any, scale: float) -> Any:
        calls.append(scale)
        return reference(q, k, v, scale=scale)

    monkeypatch.setattr(backend, "speeds_measured_here", lambda device: (HERE,))
    monkeypatch.setattr(backend, "has_flash_attention_4", lambda device: works)
    monkeypatch.setattr(backend, "flash_attention_4", flash4)
    out = backend._sdpa(q, k, v, 0.1, backend._Masking(None, None, None, None))
    torch.testing.assert_close(out, reference(q, k, v, scale=0.1))
    assert calls == [0.1] * called


@pytest.mark.parametrize(
    ("release", "imports", "major", "expected"),
    [("4.0.0b36", True, 9, True), ("4.0.0b36", True, 10, False), ("4.0.1", True, 9, False), (None, False, 9, False)],
)
def test_built_in_speeds_are_of_one_release_on_hopper(
    release: str | None, imports: bool, major: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention_4, "installed_release", lambda: release)
    monkeypatch.setattr(flash_attention_4, "has_flash_attention_4", lambda device: imports)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert flash_attention_4.has_measured_release.__wrapped__(torch.device("cuda")) is expected


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_package_that_does_not_import_is_named(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    package = tmp_path / "flash_attn/cute/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("import cutlass.cute_of_another_release")
    if is_installed:
        (tmp_path / "flash_attn_4-4.0.0b36.dist-info").mkdir()
        facts = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n"
        (tmp_path / "flash_attn_4-4.0.0b36.dist-info/METADATA").write_text(facts)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "cutlass")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not flash_attention_4.has_flash_attention_4.__wrapped__(torch.device("cuda"))
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == is_installed
    assert all("No module named 'cutlass" in line and "threefold[fa4]" in line for line in said)


def test_heads_to_measure_are_those_of_a_rank() -> None:
    plan = build({"model": "deepseek-v3", "target": "threefold", "cluster.gpus": 64, "layout.tp": 4, "layout.ep": 8})
    assert tuning.attention_heads_of(plan) == tuning.AttentionHeads(32, 32, 192, 128)
    plan = build({"model": "qwen3-30b-a3b", "target": "threefold", "cluster.gpus": 64, "layout.tp": 8, "layout.ep": 8})
    assert tuning.attention_heads_of(plan) == tuning.AttentionHeads(4, 1, 128, 128)
    sinks = build({"model": "gpt-oss-20b", "target": "threefold", "cluster.gpus": 8, "layout.ep": 8})
    assert tuning.attention_heads_of(sinks) is None


def test_one_document_a_row_needs_no_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    one, two = torch.zeros(2, 8, dtype=torch.long), torch.tensor([[0] * 8, [0] * 5 + [1] * 3])
    plain = attend(q, k, v, scale=0.5)
    apart = attend(q, k, v, scale=0.5, documents_BS=two, bounds=document_bounds(two))
    monkeypatch.setattr("threefold.engine.attention.backend.CausalMask", None)  # of documents
    assert torch.equal(attend(q, k, v, scale=0.5, documents_BS=one, bounds=document_bounds(one)), plain)
    assert not torch.equal(apart[1], plain[1])


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the CPU kernel in place of cuDNN's; the list receives the number of query heads of each backward."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    heads: list[int] = []

    def attended(q: Any, k: Any, v: Any, *rest: Any, scale: float) -> tuple[Any, ...]:
        out, lse = forward(q, k, v, 0.0, True, scale=scale)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    def back(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float) -> Any:
        heads.append(q.shape[1])
        return backward(grad, q, k, v, out, lse[..., 0], 0.0, True, scale=scale)

    monkeypatch.setattr(grouped, "_CUDNN", attended)
    monkeypatch.setattr(grouped, "_CUDNN_BACKWARD", back)
    return heads


@pytest.mark.parametrize(("size", "heads"), [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (6, [6])])
def test_a_backward_by_groups_of_heads_is_the_whole_one(
    size: int, heads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in(monkeypatch)
    q, k, v = (torch.randn(2, n, 9, 8, dtype=torch.float64, requires_grad=True) for n in (6, 3, 3))
    slope = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    found = torch.autograd.grad(attend_in_head_groups(q, k, v, 0.3, size), [q, k, v], slope)
    wanted = torch.autograd.grad(reference(q, k, v, scale=0.3), [q, k, v], slope)
    for one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, exact, rtol=FP64, atol=FP64)
    assert seen == heads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("num_kv", "value_dim"), [(2, 64), (8, 64), (8, 32)])
def test_groups_of_heads_on_a_gpu(num_kv: int, value_dim: int) -> None:
    sizes = (8, 64), (num_kv, 64), (num_kv, value_dim)
    given = [torch.randn(2, 300, *size).cuda().bfloat16().transpose(1, 2).requires_grad_() for size in sizes]
    slope = torch.randn(2, 300, 8, value_dim).cuda().bfloat16().transpose(1, 2)
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(reference(*exact, scale=0.1), exact, slope.double())
    for size in (1, 8 // num_kv, 8):
        found = torch.autograd.grad(attend_in_head_groups(*given, 0.1, size), given, slope)
        for one, whole in zip(found, wanted, strict=True):
            # Probabilities and their gradients are rounded to bf16.
            assert float((one.double() - whole).norm()) <= 2**-6 * float(whole.norm())


LAYOUTS = {
    "tp": (case("", "deepseek_v3", 2, tp=2, job=PACKED, spec=MTP1), ("layernorm", "moe", "mlp", "mla_up_proj")),
    "cp": (case("", "qwen3_moe", 2, cp=2), ("full",)),
    "zero-bubble": (case("", "qwen3_moe", 2, pp=2, schedule="zero-bubble", spec=FOUR), ("moe",)),
    "fsdp": (case("", "deepseek_v3", 2, knobs=FSDP), ("full",)),
}


@pytest.mark.parametrize("name", ["tp", "cp", pytest.param("zero-bubble", marks=pytest.mark.slow), "fsdp"])
def test_ranks_with_chunks_are_one_rank_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, names = LAYOUTS[name]
    plain = replace(options_of(layout.plan), expert_backend="loop")
    alone = run_one_rank(layout.plan, 2, torch.float64, plain)
    monkeypatch.setattr(MlaAttention, "heads_per_group", 1)
    cut = replace(plain, ffn_chunk=3, recompute=names)
    ranks = run_ranks(layout.plan.layout.gpus, run_rank, layout.plan, 2, torch.float64, cut)
    found = compare_results(layout.plan, alone, ranks)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # as in test_oracle.py: sums in another order, and AdamW's division


# Heads and widths that every kernel takes; values narrower than keys.
WIDE = {
    "deepseek_v3": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 64},
    "qwen3_moe": {"head_dim": 64},
}


def on_gpu(family: str, **options: Any) -> dict[str, torch.Tensor]:
    spec = spec_of(family, hidden_size=256, **WIDE[family])
    model = build_model(spec, 0, torch.bfloat16, torch.device("cuda"), Options(**LOSSES, **options), seed=0)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.vocab, (1, 1000), generator=draw).cuda()
    out = model(tokens, tokens.roll(-1, 1))
    assert out.loss is not None
    out.loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("names", [(), ("moe",), ("full",)])
@pytest.mark.parametrize(("family", "fusion"), [("qwen3_moe", False), ("qwen3_moe", True), ("deepseek_v3", False)])
def test_chunks_and_heads_on_a_gpu(
    family: str, fusion: bool, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = on_gpu(family, expert_fusion=fusion)
    monkeypatch.setattr(MlaAttention, "heads_per_group", 1)
    names = names if names == ("full",) else (*names, "mla_up_proj")
    found = on_gpu(family, expert_fusion=fusion, ffn_chunk=300, recompute=names)
    for name, exact in wanted.items():
        # Four chunks' gradients are rounded to bf16 (2^-8) and so are their three sums.
        assert float((found[name] - exact).norm()) <= 2**-5 * float(exact.norm()), name
