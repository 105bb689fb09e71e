"""The engine on a GPU against itself on the CPU. Skipped where there is none."""

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from attention_reference import reference

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tiny_models import FAMILIES, spec_of

from threefold.engine.attention.backend import attend
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.moe.experts import Experts, can_use_grouped_mm

BF16 = 2e-2  # relative to the largest entry: bf16 keeps 8 bits, and attention rounds twice


def close(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    error = (found.double().cpu() - expected.double().cpu()).abs().max()
    assert error <= tolerance * expected.double().abs().max().cpu() + 1e-6, (what, float(error))


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=["plain", "latent"])
@pytest.mark.parametrize(
    ("window", "sinks", "packed"), [*product([None, 2, 37], [False, True], [False, True])], ids=str
)
def test_attention_equals_fp64(window: int | None, sinks: bool, packed: bool, head_dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    shapes = [(2, 8, 300, head_dims[0]), (2, 2, 300, head_dims[0]), (2, 2, 300, head_dims[1])]
    inputs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    sink = torch.randn(8, device="cuda", requires_grad=True) if sinks else None
    ids = [[0] * 120 + [1] * 1 + [2] * 179, [0] * 300]
    asked: dict[str, Any] = {"scale": head_dims[0] ** -0.5, "window": window}
    asked["documents_BS"] = torch.tensor(ids, device="cuda") if packed else None
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wide_sink = sink.detach().double().requires_grad_() if sink is not None else None
    found = attend(*inputs, sinks=sink, **asked)
    expected = reference(*wide, sinks=wide_sink, **asked)
    close(found, expected, BF16)
    slope = torch.randn_like(found)
    one = torch.autograd.grad(found, [*inputs, *([sink] if sinks else [])], slope)
    other = torch.autograd.grad(expected, [*wide, *([wide_sink] if sinks else [])], slope.double())
    for what, a, b in zip(("q", "k", "v", "sinks"), one, other, strict=False):
        close(a, b, BF16, what)


def test_others_keep_the_order_of_attention_kernels_that_torch_chose() -> None:
    """In processes of their own: torch chooses once."""
    q = "q = torch.randn(1, 2, 64, 64, device='cuda', dtype=torch.bfloat16); "
    plain = "torch.nn.functional.scaled_dot_product_attention(q, q, q); "
    ours = "from threefold.engine.attention.backend import attend; attend(q, q, q, scale=1.0); "
    found = []
    for call in (plain, ours):
        work = f"import torch; {q}{call}print(torch._C._get_sdp_priority_order())"
        done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=600, check=True)
        found.append(done.stdout)
    assert found[0] == found[1]


def test_grouped_product_is_used_in_bf16() -> None:
    assert can_use_grouped_mm(torch.empty(3, 8, device="cuda", dtype=torch.bfloat16), torch.empty(2, 8, 16))


@pytest.mark.parametrize("counts", [[40, 0, 3, 21], [0, 0, 64, 0], [0, 0, 0, 0]], ids=str)
def test_grouped_experts_equal_the_loop(counts: list[int]) -> None:
    torch.manual_seed(0)
    experts = Experts(4, 64, 96, bias=True, activation="clamped swiglu").to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(sum(counts), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(sum(counts), device="cuda", requires_grad=True)
    slope = torch.randn_like(x)
    results = []
    for backend in ("grouped", "loop"):
        experts.backend = backend
        out = experts(x, weight, torch.tensor(counts, device="cuda"))
        results.append([out, *torch.autograd.grad(out, [x, weight, *experts.parameters()], slope)])
    for a, b in zip(*results, strict=True):
        if b.numel():
            close(a, b, BF16)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_fp32_equal_the_cpu(family: str) -> None:
    mtp = 1 if family in ("deepseek_v3", "qwen3_next") else 0
    torch.manual_seed(0)
    cpu = build_model(spec_of(family), mtp=mtp, options=Options(aux_loss=0.01))
    gpu = build_model(spec_of(family), mtp=mtp, device="cuda", options=Options(aux_loss=0.01))
    gpu.load_state_dict(cpu.state_dict())
    tokens, labels = (torch.randint(0, cpu.spec.vocab, (2, 13)) for _ in range(2))
    documents = torch.tensor([[0] * 5 + [1] * 8, [0] * 13])
    cpu(tokens, labels, documents).loss.backward()
    gpu(tokens.cuda(), labels.cuda(), documents.cuda()).loss.backward()
    for (name, one), other in zip(gpu.named_parameters(), cpu.parameters(), strict=True):
        if other.grad is None:  # an indexer of sparse attention
            assert one.grad is None
        else:
            close(one.grad, other.grad, 1e-3, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_overfits_one_batch(family: str) -> None:
    torch.manual_seed(0)
    model = build_model(spec_of(family), dtype=torch.bfloat16, device="cuda")
    tokens, labels = (torch.randint(0, model.spec.vocab, (2, 12), device="cuda") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(80 if family == "glm_moe_dsa" else 60):  # whose indexer is not trained
        out = model(tokens, labels)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(out.aux["ce"]) < 0.3  # from log(67) = 4.2; bf16 weights move in steps of 1/256
