"""AdamW without master weights, as the peer in the benchmark runs it, against torch's fused kernel."""

import torch

from threefold.engine.optim.adamw import AdamW


def test_without_masters_bf16_weights_move_as_torchs_fused_kernel_moves_them() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((33, 17), (2, 8, 8))]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    optimizer = AdamW([(f"w{n}", p) for n, p in enumerate(ours)], 0.1, "bf16", master=False)
    oracle = torch.optim.AdamW(theirs, 1e-2, (0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step(1e-2)
        oracle.step()
    assert not optimizer.master
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_without_masters_fp32_moments_round_the_weights_once() -> None:
    torch.manual_seed(0)
    bf16_weight = torch.randn(9, 9).bfloat16().requires_grad_()
    fp32_weight = bf16_weight.detach().float().requires_grad_()
    bf16_weight.grad = torch.randn_like(bf16_weight)
    fp32_weight.grad = bf16_weight.grad.float()
    AdamW([("w", bf16_weight)], 0.1, "fp32", master=False).step(1e-2)
    torch.optim.AdamW([fp32_weight], 1e-2, (0.9, 0.95), weight_decay=0.1, fused=True).step()
    assert torch.equal(bf16_weight, fp32_weight.bfloat16())
