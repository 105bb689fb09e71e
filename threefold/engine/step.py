"""One optimizer step on one screen."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threefold.engine.data.loader import Batch
from threefold.engine.loss import IGNORE
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.balance import health, update_bias
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon
from threefold.plan.plan import Job


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `applied` is False where loss or gradients were not finite and nothing was changed."""

    loss: float
    grad_norm: float
    num_tokens: int
    applied: bool
    aux: dict[str, float]


def train_step(model: Decoder, optimizer: AdamW | Muon, batches: list[Batch], lr: float, job: Job) -> StepResult:
    """Forward and backward over the microbatches, clip, update. The loss is the mean over all labels of the step."""
    counts = torch.stack([(batch.labels_BS != IGNORE).sum() for batch in batches]).tolist()
    labels = max(1, sum(counts))
    model.zero_grad(set_to_none=True)
    named: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for batch, count in zip(batches, counts, strict=True):
        out = model(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS)
        assert out.loss is not None
        (out.loss * (count / labels)).backward()
        for name, value in out.aux.items():
            sums, share = (seen, 1.0) if value.dim() else (named, count / labels)
            sums[name] = sums[name] + value * share if name in sums else value * share
    named.pop("num_labels", None)
    named["grad_norm"] = clip_gradients(model, job.clip_norm)
    # The one place where the host waits for the device.
    values = dict(zip(named, torch.stack([v.float() for v in named.values()]).tolist(), strict=True))
    loss, norm = values.pop("ce"), values.pop("grad_norm")
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(lr)
        if "load_LE" in seen:
            update_bias(model.routers(), seen["load_LE"], job.bias_rate)
    if "load_LE" in seen:
        entropy_L = seen["entropy_L"] / len(batches)
        values |= health(seen["load_LE"], seen["dropped_L"], entropy_L, model.routers())
    return StepResult(loss, norm, labels, applied, values)


@torch.no_grad()
def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """The norm of all gradients, in fp32; they are scaled down to `clip_norm` where they exceed it."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if clip_norm > 0:
        torch._foreach_mul_(grads, torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
    return norm
