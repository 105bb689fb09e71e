"""Attention in recomputed layers: outputs can be saved, and some heads run at a time. Neither changes a gradient."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors, peak_bytes
from oracle_layouts import LATENTS, PACKED, case
from plans import build
from test_long_context import assert_close, make, trained
from tiny_models import FAMILIES, spec_of

from threefold.cost.memory.by_stack import memory
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.engine.attention import query_blocks
from threefold.engine.attention.attend_tiles import BLOCKS
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.head_groups import cudnn_head_groups as cudnn
from threefold.engine.attention.mask_tiles import Tile
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.autograd import offload
from threefold.engine.build import options_of
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.verify.compare import compare_results
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import run_one_rank, run_rank
from threefold.units import GIB

SAVE = {"recompute": ("full",), "recompute_save": ("core_attn",)}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often attention to documents ran on the CPU, by the number of query heads."""
    calls: Counter[int] = Counter()
    forward = query_blocks.forward_blocks

    def counted(q: torch.Tensor, *rest: Any) -> Any:
        calls[q.shape[1]] += 1
        return forward(q, *rest)

    monkeypatch.setattr(query_blocks, "forward_blocks", counted)
    return calls


def group_heads(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(GqaAttention, "heads_per_group", size)
    monkeypatch.setattr(MlaAttention, "heads_per_group", size)


@pytest.mark.parametrize("heads", [None, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_outputs_and_groups_change_no_gradient(
    family: str, heads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(make(family))
    if heads is not None:
        group_heads(monkeypatch, heads)
        assert_close(trained(make(family, recompute=("full",))), wanted)
    assert_close(trained(make(family, **SAVE, ffn_chunk=5)), wanted)


@pytest.mark.parametrize(
    "more",
    [
        {"ffn_chunk": 5},
        {"recompute_method": "uniform", "recompute_layers": 2},
        {"recompute_method": "block", "recompute_layers": 1},
        {"activation_offload_layers": 2},
        {"activation_offload": ("core_attn",)},
    ],
    ids=["chunks", "uniform", "block", "offloaded layers", "offloaded outputs"],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_runs_once(
    heads: int, more: dict[str, Any], attended: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(make("qwen3_moe"))
    group_heads(monkeypatch, heads)
    attended.clear()
    assert_close(trained(make("qwen3_moe", **SAVE, **more)), wanted)
    alone = 1 if more.get("recompute_method") == "block" and heads < 4 else 0  # of two layers, the one not recomputed
    assert attended == Counter({heads: (2 - alone) * 4 // heads}) + Counter({4: alone})


@pytest.mark.parametrize("heads", [4, 2])
def test_without_saving_attention_runs_twice(
    heads: int, attended: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a third time: the backward of a group has the outputs of the second run."""
    group_heads(monkeypatch, heads)
    trained(make("qwen3_moe", recompute=("full",)))
    assert attended == {heads: 2 * 2 * 4 // heads}


def saved_bytes(**options: Any) -> int:
    model, tokens = make("qwen3_moe", **options), torch.zeros(1, 64, dtype=torch.long)
    with LiveTensors() as living:
        out = model(tokens, tokens)
        saved = living.num_bytes
    del out
    return saved


@pytest.mark.parametrize("heads", [4, 1])
def test_outputs_are_saved_beside_the_layers_input(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, 64 tokens, 4 heads of 8: outputs and a log-sum-exp a head in fp64."""
    group_heads(monkeypatch, heads)
    assert saved_bytes(**SAVE) - saved_bytes(recompute=("full",)) == 2 * 64 * 4 * (8 + 1) * 8


def test_saved_outputs_go_to_the_host_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    copy = offload._copy_to_host

    def seen(tensor: torch.Tensor, name: str) -> Any:
        sent.append((name, tensor.numel()))
        return copy(tensor, name)

    monkeypatch.setattr(offload, "_copy_to_host", seen)
    trained(make("qwen3_moe", **SAVE, activation_offload=("core_attn",)))
    assert sent == [("core_attn", 32 * 4 * 8), ("core_attn", 32 * 4)] * 2


def most(heads: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that are alive at once, of 512 tokens to 16 heads as wide as the model."""
    group_heads(monkeypatch, heads)
    spec = spec_of("qwen3", num_attention_heads=16, num_key_value_heads=4, head_dim=32, intermediate_size=8)
    return peak_bytes(build_model(spec, 0, torch.float64, options=Options(**SAVE)), 512)


def test_the_backward_holds_one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries before and behind their norm, their gradients and that of the output: of 16 heads, or of 2."""
    heads = 512 * 16 * 32 * 8
    assert most(16, monkeypatch) - most(2, monkeypatch) > 3 * heads * 14 / 16


def test_frozen_projections_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    group_heads(monkeypatch, 1)
    found = []
    for options in ({}, SAVE):
        model = make("gpt_oss", **options)
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith(("mixer.q.weight", "mixer.k.bias", "mixer.out.weight", "mixer.sinks")))
        found.append(trained(model))
    assert_close(found[1], found[0])
    assert not any(name.endswith("mixer.q.weight") for name in found[1])


# 32 query heads of 128 and 4 of keys: the gradient of 131,072 queries takes 2 GiB in fp32.
@pytest.mark.parametrize(
    ("tokens", "size"), [(4096, 32), (131072, 32), (131073, 16), (262144, 16), (524288, 8), (2**20, 4), (2**21, 2)]
)
def test_query_heads_per_group(tokens: int, size: int) -> None:
    assert cudnn.query_heads_per_group(32, 4, 4 * 128 * tokens) == size


# 12 query heads to 4, 2 and 12 of keys; so many fit.
@pytest.mark.parametrize(
    ("num_kv", "fitting", "size"),
    [(4, 100, 12), (4, 11, 6), (4, 5, 3), (4, 2, 1), (2, 5, 3), (2, 4, 3), (12, 7, 6), (12, 5, 4), (12, 0, 1)],
)
def test_groups_have_whole_key_heads_or_an_equal_part_of_one(num_kv: int, fitting: int, size: int) -> None:
    assert cudnn.query_heads_per_group(12, num_kv, 10, limit=10 * fitting + 9) == size


@pytest.mark.parametrize(("queries", "keys"), [(4, 2), (8, 8), (6, 3), (16, 4)])
def test_blocks_of_keys_are_the_whole_attention(queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        q: Any, k: Any, v: Any, bias: Any, wants_lse: Any, dropout: Any, is_causal: bool, *rest: Any, scale: float
    ):
        tile = Tile(slice(None), slice(None), slice(None), causal=is_causal)
        out, lse = BLOCKS.forward(q, k, v, scale, tile)
        return out, lse[..., None], None, None, 0, 0, torch.zeros(()), torch.zeros(()), None

    monkeypatch.setattr(cudnn, "_CUDNN", kernel)
    monkeypatch.setattr(cudnn, "QUERY_BLOCK", queries)
    monkeypatch.setattr(cudnn, "KEY_BLOCK", keys)
    q, k, v = (torch.randn(2, 15, n, 8, dtype=torch.float64).transpose(1, 2) for n in (4, 2, 2))
    found, wanted = cudnn.attend_in_key_blocks(q, k, v, 0.3), cudnn._attend(q, k, v, 0.3)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)  # merged in fp32
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-6, atol=1e-6)
    assert found[0].stride() == q.stride()


RANKS = {
    "ring": case("", "qwen3_moe", 2, cp=2, job=PACKED),
    "all_gather": case("", "gpt_oss", 2, cp=2, knobs={"cp_comm": "all_gather"}),
    "a2a": case("", "qwen3_moe", 2, cp=2, knobs={"cp_comm": "a2a"}),
    "latents": case("", "deepseek_v3", 2, cp=2, knobs=LATENTS),
    "fsdp": case("", "qwen3_moe", 2, knobs={"data_parallel": "fsdp"}),
    "tp": case("", "qwen3_moe", 2, tp=2),
}


@pytest.mark.parametrize(
    "name", ["ring", "latents", *(pytest.param(n, marks=pytest.mark.slow) for n in ("all_gather", "a2a", "fsdp", "tp"))]
)
def test_ranks_that_save_outputs_are_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RANKS[name].plan
    plain = replace(options_of(plan), expert_backend="loop")
    alone = run_one_rank(plan, 2, torch.float64, plain)
    group_heads(monkeypatch, 2)
    ranks = run_ranks(plan.layout.gpus, run_rank, plan, 2, torch.float64, replace(plain, **SAVE))
    found = compare_results(plan, alone, ranks)
    assert found.problems == ()
    assert found.largest <= 1e-10, found  # as in test_oracle.py: sums in another order, and AdamW's division


LONG = {
    "model": "qwen3-30b-a3b",
    "model.num_layers": 4,
    "target": "threefold",
    "cluster.chip": "h200",
    "job.global_batch": 1,
    "job.aux_loss": 0.0,
    "knobs.expert_fusion": True,
    "knobs.optimizer_dtype": "bf16",
    "knobs.grad_dtype": "bf16",
    "knobs.master_weights": False,
    "knobs.recompute": ["full"],
    "knobs.recompute_save": ["core_attn"],
}


@pytest.mark.parametrize(("tokens", "offloaded", "limit"), [(2**20, 0, 100), (2**21, 4, 125)])
def test_a_million_tokens_fit_an_h200(tokens: int, offloaded: int, limit: int) -> None:
    """No tensor has all heads of the sequence, which take 8 KiB a token."""
    plan = build({**LONG, "job.seq_len": tokens, "knobs.activation_offload_layers": offloaded})
    found = rehearse_rank(plan, 0)
    assert memory(plan).peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)
    assert max(one.bytes for one in found.top) < 8192 * tokens
    assert found.peak_bytes < limit * GIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_groups_and_saved_outputs_on_a_gpu(family: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"head_dim": 64} if family != "deepseek_v3" else {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
    wide |= {"v_head_dim": 64, "q_lora_rank": 64} if family == "deepseek_v3" else {}

    def gradients(**options: Any) -> dict[str, torch.Tensor]:
        spec = spec_of(family, hidden_size=256, **wide)
        model = build_model(spec, 0, torch.bfloat16, torch.device("cuda"), Options(**options), seed=0)
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(spec.vocab, (2, 512), generator=draw).cuda()
        documents = (torch.rand(2, 512, generator=draw) < 0.02).long().cumsum(1).cuda() if packed else None
        out = model(tokens, tokens.roll(-1, 1), documents)
        assert out.loss is not None
        out.loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    wanted = gradients()
    for heads in (4, 2, 1):
        group_heads(monkeypatch, heads)
        for name, found in gradients(**SAVE, activation_offload_layers=heads % 2).items():
            # Sums over groups are rounded to bf16 (2^-8), once a group and projection.
            assert float((found - wanted[name]).norm()) <= 2**-5 * float(wanted[name].norm()), (heads, name)
