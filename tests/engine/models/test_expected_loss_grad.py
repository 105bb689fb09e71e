"""`Decoder.expected_loss_grad` equals the gradient that the backward brings to the cross entropy.

Each runner of microbatches sets it before the forward, in which the loss computes the gradients of the output layer.
"""

from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan

from threefold.engine.batch import Batch
from threefold.engine.build import build
from threefold.engine.layers import cross_entropy
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models import decoder
from threefold.engine.schedule.microbatch_runners import ChunkForward, Overlapped, Sequential

FIELDS = {"model": "tiny-deepseek-v3", "job.mtp": 2, "job.mtp_weight": 0.3, "job.seq_len": 16, "job.micro_batch": 2}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """For each loss, the gradient that was expected and the one that came."""
    found: list[tuple[float, float]] = []

    def watched(*args: Any) -> torch.Tensor:
        *_, expected = args
        summed = cross_entropy.cross_entropy_sum(*args)
        summed.register_hook(lambda grad: found.append((float(expected), float(grad))))
        return summed

    monkeypatch.setattr(decoder, "cross_entropy_sum", watched)
    return found


def batch(num_labels: int) -> Batch:
    tokens_BS = torch.randint(200, (2, 16))
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS.view(-1)[num_labels:] = IGNORE
    return Batch(tokens_BS, labels_BS)


@pytest.mark.parametrize("kind", ["sequential", "overlapped", "pipeline chunk"])
@pytest.mark.parametrize("share", [torch.tensor(0.7, dtype=torch.float64), 0.25], ids=["tensor", "number"])
def test_the_gradient_of_a_loss_is_the_one_that_was_expected(
    share: Any, kind: str, seen: list[tuple[float, float]]
) -> None:
    model = build(tiny_plan(FIELDS), with_data=False).model
    if kind == "pipeline chunk":
        chunk = ChunkForward(model)
        chunk.batches, chunk.shares = [batch(20), batch(9)], [share, share]
        for number in range(2):
            chunk(None, number).backward()
    else:
        runner = Sequential(model) if kind == "sequential" else Overlapped(model, delay_wgrad=False)
        runner.run([batch(20), batch(9)], [share, share])
    assert len(seen) == 6
    for expected, came in seen:
        assert came == pytest.approx(expected, rel=1e-6)
    assert len({came for _, came in seen}) > 2


def test_a_second_backward_of_a_loss_is_refused() -> None:
    """The first one has scaled the gradients in place and handed them out: a second would scale them twice."""
    x_TD, weight_VD = (torch.randn(size, 4, requires_grad=True) for size in (6, 9))
    loss = cross_entropy.cross_entropy_sum(x_TD, weight_VD, torch.arange(6))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out by an earlier backward"):
        loss.backward()
