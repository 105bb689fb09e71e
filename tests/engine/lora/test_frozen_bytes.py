"""Frozen weights cost their own bytes and nothing else: no gradient, no optimizer state, no weight-gradient GEMM."""

from typing import Any

import pytest
import torch
from oracle_layouts import BASE
from plans import build as plan_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from threefold.engine.build import Parts, build
from threefold.engine.data_parallel.fsdp import Fsdp
from threefold.engine.data_parallel.single_rank import SingleRank
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.mesh import Mesh
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

LANGUAGE_BUT = ["layers.*", "embed.weight"]  # norm and head train
FREEZE = {"all but the head": LANGUAGE_BUT, "experts": ["*.experts.*"], "attention": ["*.mixer.*"]}


def plan(**changes: Any) -> Plan:
    return plan_of({**BASE, "knobs.dispatcher": "local", "knobs.precision": "bf16", **changes})


def state_bytes(parts: Parts) -> dict[str, int]:
    """Bytes of gradients and of optimizer states on this rank, after a step."""
    data = parts.data
    zero1 = data if isinstance(data, Zero1) else data.others if isinstance(data, Fsdp) else None
    grads = {bucket.grads.data_ptr(): bucket.grads.nbytes for bucket in (zero1.buckets if zero1 else ())}
    within = [(start, start + size) for start, size in grads.items()]
    for chunk in parts.chunks.values():
        for p in chunk.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            if grad is not None and not any(low <= grad.data_ptr() < high for low, high in within):
                grads[grad.data_ptr()] = grad.nbytes
    states = {value.data_ptr(): value.nbytes for value in parts.optimizer.state_dict().values() if value.dim()}
    return {"gradients": sum(grads.values()), "optimizer": sum(states.values())}


def elements(parts: Parts, trained: bool) -> int:
    held = parts.data.local_tensors()
    return sum(memory.numel() for name, _, memory, _ in held if (name not in parts.data.frozen) == trained)


def run_step(rank: int, fields: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    made = plan(**fields)
    parts = build(made, Mesh(made.layout, rank), with_data=False)
    batches = [synthetic_batch(made, 0, m, parts.mesh.coordinate("dp")) for m in range(made.num_microbatches)]
    train_step(parts, batches, 1e-3, made.job)
    found = state_bytes(parts)
    kind = {SingleRank: 0, Zero1: 1, Fsdp: 2}[type(parts.data)]
    bucketed = sum(len(bucket.entries) for bucket in parts.data.buckets) if isinstance(parts.data, Zero1) else 0
    return {
        **found,
        "trained": elements(parts, True),
        "frozen": elements(parts, False),
        "kind": kind,
        "bucketed": bucketed + made.layout.gpus * bool(bucketed),
    }


# Gradients, and master weight with two moments, in bytes for each element that trains. One rank's gradients of one
# microbatch are autograd's own, in bf16; FSDP's weights are their own master weights. Buckets of ZeRO-1 pad each
# parameter to 64 elements, and each of two ranks has half of the states.
KINDS: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "one rank": ({"job.global_batch": 1}, 0, 2, 12),
    "one rank, sums in fp32": ({"job.global_batch": 2}, 1, 4, 12),
    "zero1": ({"job.global_batch": 2, "cluster.gpus": 2, "knobs.dispatcher": "alltoall"}, 1, 4, 6),
    "fsdp": ({"job.global_batch": 2, "cluster.gpus": 2, "knobs.data_parallel": "fsdp"}, 2, 4, 12),
}


@pytest.mark.parametrize(
    "freeze", ["experts", *(pytest.param(name, marks=pytest.mark.slow) for name in FREEZE if name != "experts")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_trains_has_gradients_and_states(kind: str, freeze: str) -> None:
    fields, number, grad_bytes, state_bytes_each = KINDS[kind]
    gpus = fields.get("cluster.gpus", 1)
    ranks = run_ranks(gpus, run_step, {**fields, "job.freeze": FREEZE[freeze]}, limit=120)
    for found in ranks:
        assert found["kind"] == number
        assert found["frozen"] > 0
        padding = 4 * 64 * found["bucketed"]
        assert 0 <= found["gradients"] - grad_bytes * found["trained"] <= padding
    states = sum(found["optimizer"] for found in ranks)
    assert states == state_bytes_each * sum(found["trained"] for found in ranks)


def model_of(freeze: tuple[str, ...] = ()) -> nn.Module:
    options = Options(freeze=freeze, expert_backend="loop")
    return build_model(plan().model, options=options)


def backward_flops(model: nn.Module) -> int:
    batch = synthetic_batch(plan(), 0, 0, 0)
    loss = model(batch.tokens_BS, batch.labels_BS).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("freeze", "weights"),
    [
        (("*.experts.*",), ("experts.gate_up", "experts.down")),
        (("*.mixer.*",), ("mixer.q.weight", "mixer.k.weight", "mixer.v.weight", "mixer.out.weight")),
    ],
)
def test_a_frozen_weight_has_no_gemm_for_its_gradient(freeze: tuple[str, ...], weights: tuple[str, ...]) -> None:
    """The backward of a weight is two GEMMs of 2 x rows x in x out FLOPs; one of them is left."""
    spec, batch = plan().model, synthetic_batch(plan(), 0, 0, 0)
    assert spec.moe is not None
    tokens, saved = batch.tokens_BS.numel(), 0
    for name, p in model_of().named_parameters():
        if name.endswith(weights):
            rows = tokens * spec.moe.top_k / spec.moe.num_experts if p.dim() == 3 else tokens
            saved += int(2 * rows * p.numel())
    assert saved > 0
    assert backward_flops(model_of()) - backward_flops(model_of(freeze)) == saved


def saved_bytes(model: nn.Module) -> int:
    """Bytes that autograd saves in a forward, weights aside; each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    batch = synthetic_batch(plan(), 0, 0, 0)
    with saved_tensors_hooks(pack, lambda x: x):
        model(batch.tokens_BS, batch.labels_BS)
    return sum(storage.nbytes() for pointer, storage in found.items() if pointer not in weights)


def test_inputs_of_frozen_experts_are_not_saved() -> None:
    """Rows that only FC1's and FC2's weight gradients read: dim and expert_dim numbers in fp32 for each of them."""
    spec = plan().model
    assert spec.moe is not None
    rows = synthetic_batch(plan(), 0, 0, 0).tokens_BS.numel() * spec.moe.top_k * spec.num_layers
    less = saved_bytes(model_of()) - saved_bytes(model_of(("*.experts.*",)))
    assert less == 4 * rows * (spec.dim + spec.moe.expert_dim)


def test_layers_below_the_first_that_trains_save_nothing() -> None:
    assert saved_bytes(model_of(("layers.*", "embed.*", "norm.*", "head.*"))) == 0
