"""The kernels of the output layer in FP8: on a GPU with cuBLAS's GEMMs, in Triton's interpreter with emulated ones.

Shapes: C tokens of a chunk, T tokens, D model dim, V vocabulary.
"""

import os
from typing import Any

import pytest
import torch

from threefold.engine.context import override
from threefold.engine.dist.mesh import Mesh
from threefold.engine.kernels.fp8.blockwise_quantize import empty_columns
from threefold.engine.kernels.loss_and_optimizer.cross_entropy_fp8 import softmax_grad_fp8
from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import (
    softmax_grad_in_place,
    softmax_statistics,
)
from threefold.engine.layers import head_gemms
from threefold.engine.layers.cross_entropy import IGNORE, VocabShard, cross_entropy_sum, reference
from threefold.engine.model_options import Options
from threefold.engine.models.head import head_precision
from threefold.engine.precision.emulated_backend import EmulatedBackend
from threefold.engine.precision.quantize_for_cublas import quantize_blocks
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import EMULATED, BlockwiseBackend, RowwiseBackend
from threefold.layout.degrees import Layout

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if ON_HOPPER else "cpu"
# `test_interpreter.py` runs the tests whose names begin with test_interpreted.
runs = pytest.mark.skipif(
    not (ON_HOPPER or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs a Hopper GPU or triton's interpreter"
)
NARROW = torch.bfloat16 if ON_HOPPER else torch.float16  # the interpreter cuts to bf16 instead of rounding

FP8_HEAD = Options(recipe=RECIPES["fp8-blockwise"], fp8_output=True)

pytestmark = pytest.mark.usefixtures("poisoned")


class _InterpretedBackend(BlockwiseBackend):
    """Quantizes with the kernels, and multiplies what their numbers stand for."""

    matmul = EmulatedBackend.matmul


@runs
@pytest.mark.parametrize(
    ("num_tokens", "vocab"), [(128, 256), (48, 400), (144, 144), pytest.param(272, 144, marks=pytest.mark.slow)]
)
def test_interpreted_softmax_grad_in_one_pass_equals_two(num_tokens: int, vocab: int) -> None:
    """Bit for bit, with rows of ignored tokens, a label in the padding, and room for other tokens in the transpose."""
    torch.manual_seed(0)
    logits_CV = (4 * torch.randn(num_tokens, vocab, device=DEVICE)).to(NARROW)
    at_C = torch.randint(vocab, (num_tokens,), device=DEVICE)
    at_C[::5], at_C[1] = IGNORE, vocab + 3  # the latter is in the next shard of the vocabulary
    top_C, sum_C, _ = softmax_statistics(logits_CV, at_C)
    log_sum_C = (top_C + sum_C.log()).masked_fill(at_C == IGNORE, float("inf"))
    blocks = -(-num_tokens // 128)
    columns = empty_columns(blocks + 2, vocab, False, logits_CV.device)
    rows = softmax_grad_fp8(logits_CV, at_C, log_sum_C, columns, 128)
    only_rows = softmax_grad_fp8(logits_CV, at_C, log_sum_C, None)
    grad_CV = logits_CV.float()
    softmax_grad_in_place(grad_CV, at_C, log_sum_C)
    wanted_rows, wanted_columns = quantize_blocks(grad_CV, rows=True, columns=True, square=False)
    here = slice(128, 128 * (blocks + 1))
    found = [(rows.value_RK, rows.scale_CR.T), (only_rows.value_RK, only_rows.scale_CR.T)]
    found.append((columns.value_KP[:, here], columns.scale[1 : blocks + 1].T))
    for (value, scale), (other, other_scale) in zip(found, [wanted_rows] * 2 + [wanted_columns], strict=True):
        assert torch.equal(value.float(), other.float())
        assert torch.equal(scale, other_scale)
    assert not rows.value_RK[::5].float().any()


@runs
@pytest.mark.parametrize(
    ("num_tokens", "chunk"), [(96, 128), pytest.param(400, 128, marks=pytest.mark.slow), (112, 48)]
)
def test_interpreted_loss_with_fused_quantization_equals_that_without(
    num_tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks' transposed gradients are multiplied together, two chunks at a time here. Both sides quantize the
    same numbers but for the last bit of a softmax, which moves some by a step of e4m3. A GPU also equals emulation; the
    interpreter cuts to FP8 instead of rounding."""
    torch.manual_seed(1)
    monkeypatch.setattr(head_gemms, "CHUNKS_PER_WGRAD", 2)
    x_TD = torch.randn(num_tokens, 128, device=DEVICE).to(NARROW).requires_grad_()
    weight_VD = (0.1 * torch.randn(144, 128, device=DEVICE)).to(NARROW).requires_grad_()
    labels_T = torch.randint(144, (num_tokens,), device=DEVICE)
    labels_T[::6] = IGNORE

    def run(backend: Any, by_rows: Any, fused: bool) -> tuple[Any, ...]:
        chosen = {"fp8-blockwise": backend, "fp8-rowwise": by_rows}
        monkeypatch.setattr(head_gemms, "choose_backend", lambda recipe, *_: chosen[recipe.name])
        monkeypatch.setattr(head_gemms, "RowwiseBackend", RowwiseBackend if fused else BlockwiseBackend)
        precision = head_precision(FP8_HEAD)
        loss = cross_entropy_sum(x_TD, weight_VD, labels_T, chunk, precision=precision)
        return loss, *torch.autograd.grad(loss / num_tokens, (x_TD, weight_VD))

    backends = (BlockwiseBackend(), RowwiseBackend()) if ON_HOPPER else (_InterpretedBackend(), EMULATED)
    found = run(*backends, fused=True)
    for wanted in [run(*backends, fused=False), *([run(EMULATED, EMULATED, fused=False)] if ON_HOPPER else [])]:
        assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-4)
        for one, other in zip(found[1:], wanted[1:], strict=True):
            assert one.dtype == other.dtype == NARROW
            assert (one.float() - other.float()).norm() < 5e-3 * other.float().norm()
    assert not found[1][::6].any()


@runs
def test_interpreted_shard_of_the_vocabulary_reduces_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is the whole vocabulary, in a group of one rank, has the loss and gradients of no shard."""
    torch.manual_seed(4)
    backend, by_rows = (BlockwiseBackend(), RowwiseBackend()) if ON_HOPPER else (_InterpretedBackend(), EMULATED)
    chosen = {"fp8-blockwise": backend, "fp8-rowwise": by_rows}
    monkeypatch.setattr(head_gemms, "choose_backend", lambda recipe, *_: chosen[recipe.name])
    x_TD = torch.randn(64, 128, device=DEVICE).to(NARROW).requires_grad_()
    weight_VD = (0.1 * torch.randn(144, 128, device=DEVICE)).to(NARROW).requires_grad_()
    labels_T = torch.randint(144, (64,), device=DEVICE)
    labels_T[::6] = IGNORE
    whole = VocabShard(0, 144, Mesh(Layout(gpus=1), 0).group("tp"))
    found = []
    for shard in (None, whole):
        loss = cross_entropy_sum(x_TD, weight_VD, labels_T, vocab_shard=shard, precision=head_precision(FP8_HEAD))
        found.append((loss, *torch.autograd.grad(loss / 64, (x_TD, weight_VD))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", ["fp8-blockwise", "fp8-rowwise", "fp8-cs"])
def test_the_head_of_a_large_vocabulary_is_near_fp32(name: str) -> None:
    """Whole chunks and a short one, and a vocabulary that is no multiple of 128."""
    torch.manual_seed(2)
    x_TD = torch.randn(8192 + 1040, 1024, device="cuda").bfloat16().requires_grad_()
    weight_VD = (0.02 * torch.randn(50_000, 1024, device="cuda")).bfloat16().requires_grad_()
    labels_T = torch.randint(50_000, (len(x_TD),), device="cuda")
    precision = head_precision(Options(recipe=RECIPES[name], fp8_output=True))
    losses = []
    for chunk in (4096, None):
        loss = cross_entropy_sum(x_TD, weight_VD, labels_T, chunk, precision=precision)
        losses.append((loss.item(), *torch.autograd.grad(loss / len(x_TD), (x_TD, weight_VD))))
    wide = [tensor.detach().float().requires_grad_() for tensor in (x_TD, weight_VD)]
    wanted = reference(*wide, labels_T)
    wanted_grads = torch.autograd.grad(wanted / len(x_TD), wide)
    for loss, *grads in losses:
        assert loss == pytest.approx(wanted.item(), rel=1e-3)
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            assert (grad.float() - wanted_grad).norm() < 0.06 * wanted_grad.norm()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_the_head_is_replayed_in_a_graph_with_new_weights() -> None:
    """The graph reads the cached copies at fixed addresses; they are quantized in place when the weight has changed."""
    torch.manual_seed(3)
    x_TD = torch.randn(512, 256, device="cuda").bfloat16().requires_grad_()
    weight_VD = (0.1 * torch.randn(1024, 256, device="cuda")).bfloat16().requires_grad_()
    labels_T = torch.randint(1024, (512,), device="cuda")
    precision = head_precision(FP8_HEAD)
    assert precision is not None

    def run() -> Any:
        return cross_entropy_sum(x_TD, weight_VD, labels_T, 128, precision=precision)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), override("recording_graph", True):
        recorded = run()
    with torch.no_grad():
        weight_VD.mul_(1.5)
    precision.cache.refresh()
    graph.replay()
    assert recorded.item() == pytest.approx(run().item(), rel=1e-6)
    assert recorded.item() != pytest.approx(reference(x_TD, weight_VD / 1.5, labels_T).item(), rel=1e-2)
