"""Recompute and offload on a GPU: the same bits, and less memory. Skipped where there is none."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from test_recompute import EACH, FINE
from tiny_models import spec_of

from threefold.engine.autograd import offload
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.optim import cpu_offload
from threefold.engine.optim.adamw import AdamW
from threefold.plan.plan import OFFLOAD_MODULES

# Heads and widths that every kernel takes.
WIDE = {
    "deepseek_v3": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 64},
    "qwen3_moe": {"head_dim": 64},
    "gpt_oss": {"head_dim": 64},
}


def gradients(family: str, packed: bool, **options: Any) -> dict[str, Any]:
    spec = spec_of(family, hidden_size=256, **WIDE[family])
    model = build_model(spec, 0, torch.bfloat16, "cuda", Options(aux_loss=0.01, **options))
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.vocab, (2, 256), generator=draw).cuda()
    documents = (torch.rand(2, 256, generator=draw) < 0.02).long().cumsum(1).cuda() if packed else None
    out = model(tokens, tokens.roll(-1, 1), documents)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": FINE},
        {"recompute": EACH},
        {"recompute": ("full",)},
        {"activation_offload": OFFLOAD_MODULES},
        {"activation_offload_layers": 2, "recompute": ("layernorm",)},
    ],
    ids=["fine", "each", "full", "offload", "layers"],
)
def test_same_bits(family: str, packed: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    plain, once_more, found = (gradients(family, packed, **each) for each in ({}, {}, options))
    for name, wanted in plain.items():
        if torch.equal(wanted, once_more[name]):  # some kernels add in no fixed order
            assert torch.equal(found[name], wanted), name
        else:
            assert (found[name] - wanted).abs().max() <= 2e-2 * wanted.abs().max(), name  # bf16 keeps 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hosted_states_move_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_offload, "MAX_CHUNK", 1 << 16)
    draw = torch.Generator("cuda").manual_seed(0)
    first = [torch.randn(700, 900, device="cuda", generator=draw).to(dtype) for _ in range(4)]
    sides = [[value.clone().requires_grad_() for value in first] for _ in range(2)]
    optimizers = []
    for side, part in zip(sides, (0.0, 1.0), strict=True):
        before = torch.cuda.memory_allocated()
        optimizers.append(AdamW(((f"w{n}", p) for n, p in enumerate(side)), 0.1, offload=part))
        slots = optimizers[-1].host.slot_memory
        assert bool(slots) == (part == 1.0)
        if slots:
            more = torch.cuda.memory_allocated() - before - sum(slot.numel() for slot in slots)
            assert 0 <= more <= len(slots) * 2**20  # a block is not cut where less than 1 MiB would be left
    for _ in range(5):
        for mine, theirs in zip(*sides, strict=True):
            mine.grad = torch.randn(mine.shape, device="cuda", generator=draw).to(dtype)
            theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step(1e-2)
    for mine, theirs in zip(*sides, strict=True):
        assert torch.equal(mine, theirs)
    wanted, found = (optimizer.state_dict() for optimizer in optimizers)
    for name, value in wanted.items():
        assert torch.equal(value.cpu(), found[name].cpu()), name
    assert all(value.is_pinned() for name, value in found.items() if name != "steps")
