"""What a run with pictures reports: images, useful picture tokens, FLOPs of the encoder, level ranks, bad pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import encoded, noise, write_tar
from tiny_runs import tiny_plan
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from threefold.engine.batch import Batch, Images
from threefold.engine.dist.mesh import Mesh
from threefold.engine.throughput import Throughput
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.vision import Projector, VisionEncoder
from threefold.plan.plan import Plan
from threefold.spec.flops import picture_flops
from threefold.spec.models import MODELS

TINY = MODELS["tiny-qwen3-vl-moe"]
SMALL = {
    "model": "tiny-qwen3-vl-moe",
    "model.num_layers": 4,
    "job.micro_batch": 2,
    "job.global_batch": 2,
    "job.steps": 2,
    "job.seq_len": 128,
}


def images_of(*grids: tuple[int, int]) -> Images:
    patches = sum(height * width for height, width in grids)
    return Images(torch.randn(patches, 3 * 2 * 8 * 8), torch.tensor(grids), torch.arange(patches // 4))


def test_flops_of_a_picture_are_those_that_torch_counts() -> None:
    assert TINY.vision is not None
    encoder, projector = VisionEncoder(TINY.vision), Projector(TINY.vision, TINY.dim)
    # Torch counts matmuls, and no FLOPs of its fused attention on a CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        states = encoder(images_of((6, 8)))
        of_encoder = counter.get_total_flops()
        projector(states)
    counted = of_encoder, counter.get_total_flops() - of_encoder
    assert picture_flops(TINY.vision, TINY.dim, 48) == pytest.approx(counted)


def work_of_rank(rank: int, plan: Plan) -> dict[str, Any]:
    """The first rank has two pictures, the second one none."""
    tokens = torch.zeros(2, 32, dtype=torch.long)
    images = None if rank else images_of((4, 4), (4, 8))
    speed = Throughput(plan, Mesh(plan.layout, rank))
    batch = Batch(tokens, tokens, lengths=(32, 20), images=images, num_bad_images=1 - rank)
    return speed.metrics(speed.count_work([batch]), seconds=2.0)


@pytest.mark.parametrize("freeze", [(), ("vision",)])
def test_ranks_add_their_pictures(freeze: tuple[str, ...]) -> None:
    plan = tiny_plan({**SMALL, "cluster.gpus": 2, "job.freeze": list(freeze)})
    first, second = run_ranks(2, work_of_rank, plan)
    assert first == {**second, "memory_bytes": first["memory_bytes"]}
    assert (first["images"], first["images_per_second"], first["bad_images"]) == (2, 1.0, 1)
    assert first["vision_tokens_per_second"] == 6.0
    assert first["useful_tokens_per_second"] == 52.0
    assert first["vision_tokens_imbalance"] == 2.0  # all on one of two
    assert TINY.vision is not None
    parts = [picture_flops(TINY.vision, TINY.dim, patches) for patches in (16, 32)]
    encoder, projector = (sum(part[number] for part in parts) for number in range(2))
    expected = encoder * (1 if freeze else 3) + projector * 3
    assert first["vision_tflops"] * 2e12 == pytest.approx(expected)


def test_a_run_counts_and_names_bad_pictures(tmp_path: Path) -> None:
    whole = encoded(noise(40, 40), "JPEG")
    members: dict[str, Any] = {"0.jpg": b"no picture", "0.json": {"caption": "never seen"}}
    for number in range(1, 5):
        members[f"{number}.jpg"] = whole if number > 1 else whole[: len(whole) // 2]
        members[f"{number}.json"] = {"caption": f"noise {number}"}
    path = write_tar(tmp_path / "data.tar", members)
    said: list[str] = []
    plan = tiny_plan({**SMALL, "job.data": str(path), "run.image_workers": 0})
    train(plan, tmp_path / "run", said.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["images"] for line in lines] == [2, 2]
    assert sum(line["bad_images"] for line in lines) == 1
    assert "skipped 1 record that cannot be used:" in said
    assert "skipped 1 record and 1 image that cannot be used:" in said
    assert any(f"{path}:0: no readable image" in text for text in said)
    assert any(f"{path} (byte" in text and "truncated" in text for text in said)
