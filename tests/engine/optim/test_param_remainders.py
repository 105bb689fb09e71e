"""Master weights kept as 16-bit remainders: split and joined, in every optimizer, against fp32 master weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_layouts import case
from tiny_runs import tiny_plan, tiny_shard
from torch import Tensor

from threefold.engine.build import build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon
from threefold.engine.optim.param_remainders import join_master, store_master
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.step import train_step
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

BF16 = {"knobs.precision": "bf16"}
REMAINDERS = {**BF16, "knobs.store_param_remainders": True}
OPTIMIZERS = {
    "adamw": {},
    "bf16 moments": {"knobs.optimizer_dtype": "bf16"},
    "offload": {"knobs.optimizer_offload": 0.5},
    "muon": {"job.optimizer": "muon"},
}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def quiet(_: str) -> None:
    pass


def units_apart(one: Tensor, other: Tensor) -> int:
    """The largest distance in fp32 units in the last place."""
    return int((one.view(torch.int32) - other.view(torch.int32)).abs().max())


@pytest.mark.parametrize("upper", [0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F, 0x7F80])
def test_every_remainder_of_a_weight(upper: int) -> None:
    """The weight is rounded as torch rounds, and only the tie above an even weight is not stored exactly."""
    bits = torch.arange(2**16) + (upper << 16)
    master = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)
    weight, remainder = torch.empty(2**16, dtype=torch.bfloat16), torch.empty(2**16, dtype=torch.int16)
    store_master(master, weight, remainder)
    joined = join_master(weight, remainder)
    numbers = ~master.isnan()
    assert torch.equal(weight.view(torch.int16), master.bfloat16().view(torch.int16))
    assert torch.equal(joined[numbers].bfloat16(), weight[numbers])
    assert torch.equal(joined.isnan(), ~numbers)
    differs = (joined.view(torch.int32) != master.view(torch.int32)) & numbers
    is_even = upper % 2 == 0 and upper != 0x7F80
    assert bits[differs].tolist() == ([(upper << 16) + 0x8000] if is_even else [])
    assert units_apart(joined[differs], master[differs]) == 1 if is_even else not differs.any()


def lower_ties(optimizer: Any) -> None:
    """Change fp32 masters in the middle between an even weight and the next one as remainders change them."""
    optimizer.state_dict()  # waits for updates that run beside the next forward
    for master in optimizer.master.values():
        bits = master.view(torch.int32)
        bits.sub_(((bits & 0x1FFFF) == 0x8000).to(torch.int32))


def loss_curve(plan: Plan, steps: int, after_step: Callable[[Any], None]) -> tuple[list[float], dict[str, Any]]:
    parts = build(plan)
    assert parts.loader is not None
    losses = []
    for step in range(steps):
        batches = [parts.loader.batch(step, m) for m in range(plan.num_microbatches)]
        losses.append(train_step(parts, batches, 1e-2, plan.job).loss)
        after_step(parts.optimizer)
        if isinstance(parts.optimizer, Muon):
            after_step(parts.optimizer.adamw)
    parts.close()
    return losses, parts.optimizer.state_dict()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_are_those_of_fp32_masters(kind: str, tmp_path: Path) -> None:
    """Losses and states are bit for bit those of fp32 masters whose ties are lowered too.

    With plain fp32 masters losses stay the same for a while: some three of 280,000 masters meet a tie in a step, and a
    master that is one unit off changes its weight only where it meets the edge between two weights.
    """
    fields = {"job.data": tiny_shard(tmp_path / "shard"), "job.seq_len": 16, **OPTIMIZERS[kind]}
    steps = 120 if kind == "adamw" else 8
    found, joined = loss_curve(tiny_plan({**fields, **REMAINDERS}), steps, lambda _: None)
    expected, masters = loss_curve(tiny_plan({**fields, **BF16}), steps, lower_ties)
    assert found == expected
    assert found[-1] < found[0]
    assert joined.keys() == masters.keys()
    assert any("master" in name for name in masters)
    assert [name for name in masters if not torch.equal(masters[name], joined[name])] == []
    plain, _ = loss_curve(tiny_plan({**fields, **BF16}), min(steps, 40), lambda _: None)
    assert found[: len(plain)] == plain


def test_what_has_no_upper_half_keeps_its_masters() -> None:
    """fp16 weights have other exponents than fp32, and fp32 weights need no master."""
    weights = {dtype: torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.float16, torch.float32)}
    for make in (AdamW, Muon):
        made: Any = make([(str(dtype), p) for dtype, p in weights.items()], 0.1, store_param_remainders=True)
        assert not made.remainders
        assert set(made.master) == {"torch.float16"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoints_have_whole_masters(kind: str, tmp_path: Path) -> None:
    """A run goes on with remainders where it had fp32 masters, and back, as if it had had one kind all the time."""
    data = {"job.data": tiny_shard(tmp_path / "shard"), "job.lr_schedule": "constant", **OPTIMIZERS[kind]}
    plans = [tiny_plan({**data, **kind_of_masters, "job.steps": 6}) for kind_of_masters in (BF16, REMAINDERS)]
    for folder, plan in zip(("fp32", "split"), plans, strict=True):
        train(plan, tmp_path / folder, quiet)
    for number, steps in enumerate((2, 4, 6)):
        part = tiny_plan({**data, **(REMAINDERS if number % 2 == 0 else BF16), "job.steps": steps})
        train(part, tmp_path / "mixed", quiet)
    tensors = {}
    for folder in ("fp32", "split", "mixed"):
        found = Checkpoints(tmp_path / folder / CHECKPOINTS, 9).load_latest(quiet)
        assert found is not None
        tensors[folder] = found[0]
    for name, expected in tensors["fp32"].items():
        for folder in ("split", "mixed"):
            value = tensors[folder][name]
            assert value.dtype == expected.dtype
            if "master" in name:
                assert units_apart(value, expected) <= 8
            else:
                assert torch.equal(value, expected), name


def masters_of_rank(rank: int, plan: Plan, steps: int) -> list[tuple[Tensor, Tensor, bool]]:
    parts = build(plan, Mesh(plan.layout, rank), torch.bfloat16, with_data=False)
    for step in range(steps):
        batches = [synthetic_batch(plan, step, m, rank) for m in range(plan.num_microbatches)]
        train_step(parts, batches, 1e-2, plan.job)
    parts.data.finish_param_sync()
    state: Any = parts.optimizer.state_dict()
    kept = parts.optimizer.remainders
    adamw = parts.optimizer.adamw if isinstance(parts.optimizer, Muon) else parts.optimizer
    return [
        (state[kind + one.name], one.value.clone(), one.name in kept or one.name in adamw.remainders)
        for one in parts.data.updated
        for kind in ("master.", "muon_master.")
        if kind + one.name in state
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("data_parallel", ["zero1", "fsdp"])
def test_ranks_keep_remainders_of_what_they_own(data_parallel: str, optimizer: str) -> None:
    """Under ZeRO-1; the weights of FSDP are in fp32 and are their own masters."""
    plans = [
        case("", "qwen3_moe", 2, knobs={"data_parallel": data_parallel, **knobs}, job={"optimizer": optimizer}).plan
        for knobs in ({}, {"store_param_remainders": True})
    ]
    sides = [run_ranks(2, masters_of_rank, plan, 3) for plan in plans]
    for expected, found in zip(*sides, strict=True):
        assert len(found) == len(expected) > 0
        for (master, value, _), (joined, weight, has_remainder) in zip(expected, found, strict=True):
            assert has_remainder == (data_parallel == "zero1")
            assert torch.equal(weight, value)
            assert units_apart(joined, master) <= 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("make", [AdamW, Muon])
def test_states_are_saved_and_loaded(make: Any, device: str) -> None:
    """In memory and offloaded: the masters of a state dict are whole, and fill remainders and weights again."""
    torch.manual_seed(0)
    shapes = {"layers.0.proj": (64, 48), "embed.weight": (33, 16), "norm": (48,)}
    first = {name: torch.randn(shape, device=device).bfloat16() for name, shape in shapes.items()}
    offloads = [{"offload": 0.0}, {"offload": 1.0}] if make is AdamW else [{}]
    states = []
    for offload in offloads:
        draw = torch.Generator(device).manual_seed(1)
        params = {name: torch.nn.Parameter(value.clone()) for name, value in first.items()}
        made = make(params.items(), 0.1, store_param_remainders=True, **offload)
        for _ in range(3):
            for p in params.values():
                p.grad = torch.randn(p.shape, device=device, generator=draw).bfloat16()
            made.step(1e-2)
        states.append(made.state_dict())
        for name, p in params.items():
            kind = "muon_master" if f"muon_master.{name}" in states[-1] else "master"
            assert torch.equal(states[-1][f"{kind}.{name}"].bfloat16(), p.detach().cpu())
        loaded_params = {name: torch.nn.Parameter(torch.zeros_like(value)) for name, value in first.items()}
        loaded = make(loaded_params.items(), 0.1, store_param_remainders=True, **offload)
        loaded.load_state_dict(states[-1])
        assert all(torch.equal(one, two) for one, two in zip(params.values(), loaded_params.values(), strict=True))
        assert all(torch.equal(value, states[-1][name]) for name, value in loaded.state_dict().items())
        loaded.refresh()  # the weights are the masters again, as behind an import
        assert not any(value.any() for name, value in loaded.states_in_memory() if "remainder" in name)
    assert all(torch.equal(states[0][name].cpu(), states[-1][name].cpu()) for name in states[0])
