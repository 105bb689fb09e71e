"""Batches on their way to a device, and steps that the host launches without waiting for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_gpu_model import SMALL, small_parts, small_plan

from threefold.engine.attention.mask_tiles import host_documents
from threefold.engine.batch import Batch, Images
from threefold.engine.data.loader import Loader
from threefold.engine.layers.positions import document_bounds
from threefold.engine.step import to_device, train_step
from threefold.plan.plan import Job

META = torch.device("meta")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def packed_batch(seed: int = 0) -> Batch:
    """Two rows with documents of 50, 30 and 48, and of 128 tokens."""
    tokens_BS = torch.randint(SMALL.vocab, (2, 128), generator=torch.Generator().manual_seed(seed))
    documents_BS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor([50, 30, 48])), torch.zeros(128)])
    positions_BS = torch.stack([torch.cat([torch.arange(n) for n in (50, 30, 48)]), torch.arange(128)])
    return Batch(tokens_BS, tokens_BS.roll(-1, 1), documents_BS.long(), positions_BS)


def test_bounds_of_documents_are_known_on_the_device() -> None:
    """On a device without numbers, so that nothing can be read from there."""
    moved = to_device(packed_batch(), META)
    assert moved.documents_BS is not None
    bounds = document_bounds(moved.documents_BS)
    assert bounds.edges == (0, 50, 80, 128, 256)
    assert (bounds.max_seqlen, bounds.cu_seqlens.device, len(bounds.cu_seqlens)) == (128, META, 5)
    assert host_documents(moved.documents_BS, bounds).row_starts == [[0, 50, 80], [0]]


def test_bounds_of_documents_that_changed_are_computed() -> None:
    moved = to_device(packed_batch(), META)
    assert moved.documents_BS is not None
    moved.documents_BS.add_(1)
    with pytest.raises(NotImplementedError):  # they cannot be read
        document_bounds(moved.documents_BS)


def test_bounds_on_the_host_are_those_of_the_numbers() -> None:
    documents_BS = packed_batch().documents_BS
    assert documents_BS is not None
    bounds = document_bounds(documents_BS)
    assert (list(bounds.edges_on_host()), bounds.max_seqlen) == ([0, 50, 80, 128, 256], 128)
    assert bounds.cu_seqlens.tolist() == [0, 50, 80, 128, 256]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the tensors that were pinned, with a stand-in for a GPU."""
    found: list[int] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        assert device.type == "cuda"
        yield

    def pin_memory(x: torch.Tensor) -> torch.Tensor:
        found.append(x.data_ptr())
        return x

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return found


def test_every_tensor_that_is_copied_is_pinned(pinned: list[int]) -> None:
    batch = packed_batch()
    images = Images(torch.zeros(4, 3), torch.tensor([[2, 2]]), torch.tensor([5]))
    batch = Batch(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS, images=images)
    assert batch.pin(torch.device("cuda", 1)) == batch
    given = [batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS, images.token_index_V]
    assert sorted(pinned) == sorted(x.data_ptr() for x in given if x is not None)


@pytest.mark.parametrize(("device", "prefetch", "count"), [("cuda", 2, 2), ("cuda", 0, 0), ("cpu", 2, 0), (None, 2, 0)])
def test_batches_made_ahead_for_a_gpu_are_pinned(
    device: str | None, prefetch: int, count: int, pinned: list[int]
) -> None:
    job = Job(seq_len=16, global_batch=2, micro_batch=2, data="synthetic")
    where = None if device is None else torch.device(device)
    with Loader(job, 100, prefetch=prefetch, device=where) as loader:
        batch = loader.batch(0)
        addresses = [x.data_ptr() for x in (batch.tokens_BS, batch.labels_BS)]
    assert len(set(addresses) & set(pinned)) == count


@contextmanager
def refused_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("graphs", [[], ["full_iteration"]], ids=str)
@pytest.mark.parametrize("bias_rate", [0.0, 1e-3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_waits_for_loss_and_norm_alone(packed: bool, bias_rate: float, graphs: list[str]) -> None:
    """From the batch on the host on. Reading loss and norm waits for an event behind them, which torch allows."""
    plan = small_plan(1, {"knobs.graphs": graphs, "job.bias_rate": bias_rate})
    parts = small_parts(plan)

    def run(seed: int) -> Any:
        batch = packed_batch(seed)
        if not packed:
            batch = Batch(batch.tokens_BS, batch.labels_BS)
        moved = to_device(batch.pin(parts.device), parts.device)
        return train_step(parts, [moved], 1e-4, plan.job)

    for seed in range(4):  # kernels are compiled, and graphs recorded
        run(seed)
    with refused_waits():
        result = run(4)
    assert result.applied
