"""Optimizer states on the host of a GPU: the same bits as states on the device, also where the link is slow."""

from functools import cache
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from test_pending_updates import KINDS, differing, parts_of, run

from threefold.engine.optim import cpu_offload
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.cpu_offload import HostStates

CUDA = torch.device("cuda")
WAIT_CYCLES = 500_000  # about a quarter of a millisecond


@pytest.fixture(params=["fast", "slow in", "slow out", "slow update"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few elements, and copies or updates that start late: what does not wait for them reads old values."""
    monkeypatch.setattr(cpu_offload, "MAX_CHUNK", 1 << 13)
    slow = {"slow in": "_copy_in", "slow out": "_copy_out"}.get(request.param)
    if slow:
        original = getattr(HostStates, slow)

        def late(self: HostStates, *args: Any) -> None:
            with torch.cuda.stream(self._streams[slow == "_copy_out"]):
                torch.cuda._sleep(WAIT_CYCLES)
            original(self, *args)

        monkeypatch.setattr(HostStates, slow, late)
    if request.param == "slow update":
        update = AdamW._update_one

        def late_update(self: AdamW, *args: Any) -> None:
            torch.cuda._sleep(WAIT_CYCLES // 4)
            update(self, *args)

        monkeypatch.setattr(AdamW, "_update_one", late_update)


EVENTS = {"nothing between steps": {}, "events": {"evaluate": 0, "nan": 1, "save": 2}}


@cache
def plain_runs(kind: str, events: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with states on the device, and the same once more."""
    return run(KINDS[kind][0], 0.0, CUDA, **EVENTS[events]), run(KINDS[kind][0], 0.0, CUDA, **EVENTS[events])


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("kind", ["one microbatch", "sums in fp32", "part of the states"])
def test_deferred_updates_are_those_of_a_plain_step(kind: str, events: str, link: None) -> None:
    plan, _ = KINDS[kind]
    plain, again = plain_runs(kind, events)
    found = run(plan, plan.knobs.optimizer_offload or 1.0, CUDA, **EVENTS[events])
    unsteady = differing(again, plain)  # some kernels add in no fixed order
    assert set(differing(found, plain)) <= set(unsteady)
    for name in unsteady:
        torch.testing.assert_close(found[name].cpu(), plain[name].cpu(), rtol=2e-2, atol=2e-2)


def test_states_are_pinned_and_slots_are_all_the_device_memory() -> None:
    weights = {f"w{n}": torch.randn(700, 900, device=CUDA).bfloat16().requires_grad_() for n in range(10)}
    before = torch.cuda.memory_allocated()
    optimizer = AdamW(weights.items(), 0.1, offload=1.0)
    slots = optimizer.host.slot_memory
    assert len(slots) == cpu_offload.NUM_SLOTS
    more = torch.cuda.memory_allocated() - before - sum(slot.numel() for slot in slots)
    assert 0 <= more <= len(slots) * 2**20  # a block is not cut where less than 1 MiB would be left
    assert all(value.is_pinned() for name, value in optimizer.state_dict().items() if name != "steps")


def test_the_host_does_not_wait_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_step` returns while all updates are pending, and the next forward waits on the device alone."""
    original = HostStates._copy_in

    def late(self: HostStates, *args: Any) -> None:
        with torch.cuda.stream(self._streams[0]):
            torch.cuda._sleep(40 * WAIT_CYCLES)
        original(self, *args)

    plan, _ = KINDS["one microbatch"]
    optimizer = parts_of(plan, 1.0, CUDA).optimizer
    for param in optimizer.params:
        param.value.grad = torch.ones_like(param.value)
    torch.cuda.synchronize()
    monkeypatch.setattr(HostStates, "_copy_in", late)
    optimizer.step(1e-3)
    updates = optimizer.updates
    last = updates._pending[-1][1]
    assert not last.query()
    updates.wait_through(0)
    assert not last.query()
    optimizer.state_dict()
    assert last.query()
