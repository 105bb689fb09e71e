"""Plan -> model, optimizer, loader: the map of the engine on one screen."""

from dataclasses import dataclass

import torch

from threefold.engine.data.loader import Loader
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon
from threefold.engine.options import Options
from threefold.engine.rng import seed_all
from threefold.plan.plan import Plan

HELD_OUT = 0.02  # of the data, for evaluation where the plan asks for it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a step needs."""

    model: Decoder
    optimizer: AdamW | Muon
    loader: Loader
    held_out: Loader | None
    device: torch.device

    def close(self) -> None:
        self.loader.close()
        if self.held_out:
            self.held_out.close()


def device_of(plan: Plan) -> torch.device:
    return torch.device("cuda" if plan.cluster.chip != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(plan: Plan) -> torch.dtype:
    """Of the weights: the precision's own, or bf16 below sixteen bits."""
    return DTYPES.get(plan.knobs.precision, torch.bfloat16)


def options_of(plan: Plan) -> Options:
    """What of the job the model's forward must know."""
    job = plan.job
    return Options(
        aux_loss=job.aux_loss,
        seq_aux_loss=job.seq_aux_loss,
        z_loss=job.z_loss,
        capacity_factor=job.capacity_factor if job.capacity_scope == "expert" else None,
        forced_balance=job.routing == "forced-balance",
    )


def build(plan: Plan) -> Parts:
    """A trainable model as the plan says, on this process's device."""
    device = device_of(plan)
    seed_all(plan.job.seed)
    model = build_model(plan.model, plan.mtp, dtype_of(plan), device, options_of(plan), plan.job.seed)
    kind = Muon if plan.job.optimizer == "muon" else AdamW
    optimizer = kind(model.named_parameters(), plan.job.weight_decay, plan.knobs.optimizer_dtype)
    share = HELD_OUT if plan.run.eval_every else 0.0
    loader = Loader(plan.job, plan.model.vocab, seed=plan.job.seed, held_out=share)
    held_out = None
    if share:
        held_out = Loader(plan.job, plan.model.vocab, seed=plan.job.seed, held_out=share, evaluation=True, prefetch=0)
    return Parts(model, optimizer, loader, held_out, device)
