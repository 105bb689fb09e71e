"""Pictures on a GPU: attention within pictures, gradients against the CPU, part times by events, FP8, and answers.

Skipped where there is no GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from pictures import encoded, noise, write_tar
from tiny_runs import tiny_plan

from threefold.engine.attention.picture_attention import PictureBounds, attend_within_pictures
from threefold.engine.batch import Images
from threefold.engine.build import build
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.engine.dist.mesh import Mesh
from threefold.engine.generate.generate import CachedDecoder
from threefold.engine.generate.image_prompt import make_image_prompt
from threefold.engine.models.build import build_model
from threefold.engine.run.folder import METRICS
from threefold.engine.step import to_device, train_step
from threefold.engine.throughput import PartTimes
from threefold.engine.train import train
from threefold.engine.verify.oracle import synthetic_batch

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
LENGTHS = (16, 4, 64, 64, 6)
GPU = {"model": "tiny-qwen3-vl-moe", "cluster.chip": "h200", "job.seq_len": 256, "job.data": "synthetic"}
SEES = {**GPU, "job.images": 1.0, "knobs.precision": "bf16"}


def test_flash_within_pictures_is_attention_of_each_picture() -> None:
    """One kernel over all pictures, forward and backward, against fp64 attention of each picture on its own."""
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 4, sum(LENGTHS), 64, generator=draw) for _ in range(3)]
    grad = torch.randn(1, 4, sum(LENGTHS), 64, generator=draw)
    there = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in qkv]
    exact = [x.detach().double().cpu().requires_grad_() for x in there]
    out = attend_within_pictures(there[0], there[1], there[2], PictureBounds.from_lengths(LENGTHS, DEVICE))
    out.backward(grad.to(out))
    parts = zip(*(x.split(list(LENGTHS), dim=2) for x in exact), strict=True)
    expected = torch.cat([torch.nn.functional.scaled_dot_product_attention(*part) for part in parts], dim=2)
    expected.backward(grad.to(torch.bfloat16).double())
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(there, exact, strict=True))]
    for found, wanted in pairs:
        assert found is not None
        assert wanted is not None
        # bf16 keeps 8 bits: 0.4 % of each value, and probabilities are rounded once more.
        assert float((found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm()) < 0.01


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("name", ["a batch with and without", "pictures and a video", "none"])
def test_loss_and_gradients_of_a_gpu_are_those_of_the_cpu(family: str, name: str) -> None:
    """In fp32, without TF32: kernels sum in another order, which makes some 1e-6 a layer."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sample, spec = tiny_vision.sample(name), tiny_vision.spec_of(family)
    found: list[dict[str, torch.Tensor]] = []
    for device in (torch.device("cpu"), DEVICE):
        model = build_model(spec, dtype=torch.float32).to(device)
        images = sample.images
        if images is not None:
            images = Images(images.patches_PC, images.grids_I2, images.token_index_V.to(device))
        out = model(
            *(sample.tokens_BS.to(device), sample.labels_BS.to(device), None, None),
            *(images, sample.positions_3BS.to(device)),
        )
        assert out.loss is not None
        out.loss.backward()
        grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": out.loss.detach().cpu(), **grads})
    cpu, gpu = found
    assert cpu.keys() == gpu.keys()
    for key, expected in cpu.items():
        assert float((gpu[key] - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-6, key


def timed_step(fields: dict[str, Any]) -> tuple[PartTimes, list[float]]:
    plan = tiny_plan({**SEES, **fields})
    parts = build(plan, Mesh(plan.layout, device=DEVICE), with_data=False)
    times, losses = PartTimes(parts), []
    for step in range(3):
        batches = [to_device(synthetic_batch(plan, step, m, 0), DEVICE) for m in range(plan.num_microbatches)]
        losses.append(train_step(parts, batches, 1e-3, plan.job, times.microbatches).loss)
    return times, losses


@pytest.mark.parametrize(
    "freeze", [(), ("vision",), ("vision", "projector")], ids=lambda names: "-".join(names) or "no"
)
def test_parts_are_timed_by_events(freeze: tuple[str, ...]) -> None:
    """Events lie in order on one stream, so that encoder and projector fit into the loop and leave the decoder some."""
    times, losses = timed_step({"job.freeze": list(freeze)})
    seconds = times.seconds()
    assert min(seconds) > 0
    assert all(type(event).__name__ == "Event" for spans in times._spans.values() for pair in spans for event in pair)
    assert all(torch.isfinite(torch.tensor(losses)))
    backward = {"encoder": not freeze, "projector": "projector" not in freeze}
    microbatches = len(times._spans["encoder"]) // (2 if backward["encoder"] else 1)
    for part, is_trained in backward.items():
        assert len(times._spans[part]) == microbatches * (1 + is_trained)


def test_timing_does_not_synchronize() -> None:
    """The hooks themselves: marks around an empty loop raise nothing where torch refuses every wait for the device."""
    plan = tiny_plan(SEES)
    times = PartTimes(build(plan, Mesh(plan.layout, device=DEVICE), with_data=False))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with times.microbatches():
            torch.zeros(1024, device=DEVICE).add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="FP8 kernels of Hopper")
def test_an_fp8_decoder_trains_beside_a_bf16_encoder() -> None:
    losses = {name: timed_step({"knobs.precision": name})[1] for name in ("bf16", "fp8-blockwise")}
    assert losses["fp8-blockwise"] == pytest.approx(losses["bf16"], rel=0.02)  # as docs/log/fp8.md measured for text


def test_a_run_on_pictures_and_an_answer(tmp_path: Path) -> None:
    """Real files through worker-less decoding, training with recompute, metrics, and a cached answer on the GPU."""
    members: dict[str, Any] = {}
    for number in range(8):
        members[f"{number}.png"] = encoded(noise(40 + 8 * number, 64, seed=number))
        members[f"{number}.json"] = {"question": "What is it?", "answer": "Noise."}
    data = write_tar(tmp_path / "data.tar", members)
    small = {**SEES, "job.data": str(data), "job.images": None, "job.steps": 3, "run.image_workers": 0}
    small |= {"job.packing": True, "job.task": "sft", "knobs.recompute": ["full"]}
    state = train(tiny_plan(small), tmp_path / "run", lambda text: None)
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text(encoding="utf-8").splitlines()]
    assert all(line["images"] > 0 and line["encoder_seconds"] > 0 for line in lines)
    model = state.parts.model
    vision = model.spec.vision
    assert vision is not None
    (tmp_path / "one.png").write_bytes(members["0.png"])
    question = [{"role": "user", "content": "What is it?"}]
    prompt = make_image_prompt(ByteTokenizer(), vision.tokens, patch_rules(vision), question, [tmp_path / "one.png"])
    assert prompt.images is not None
    images = prompt.images._replace(token_index_V=prompt.images.token_index_V.to(DEVICE))
    tokens_1S, positions = torch.tensor([prompt.tokens], device=DEVICE), prompt.positions_3S[:, None].to(DEVICE)
    with torch.no_grad():
        full = model.eval()(tokens_1S, images=images, positions_3BS=positions).logits[0, -1].float()
    cached = CachedDecoder(model).prefill([prompt.tokens], [prompt])[0].float()
    assert float((cached - full).norm() / full.norm()) < 0.05  # bf16, other kernels of attention
