"""The tracker counts each storage once and says which module and phase made it."""

import torch
from torch import nn

from threefold.dryrun.simulated.meta_operators import MetaOperators
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.memory_tracker import MemoryTracker


def test_tracker_counts_storages_once() -> None:
    tracker = MemoryTracker(OriginTracker())
    with tracker:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a.view(10, 100)[:5]  # nothing
        c = a + 1  # 4,000
        del a, c
        d = torch.zeros(250)  # 1,000: a lives on in b
        del b, d
    assert (tracker.peak_bytes, tracker.live_bytes) == (8000, 0)
    assert sum(size for _, size in tracker.live_at_peak()) == 8000


def test_a_product_that_is_viewed_takes_no_more() -> None:
    """A stack of products ends in a view that torch's schema calls a new tensor."""
    tracker = MemoryTracker(OriginTracker(), run_operator=MetaOperators({}), ignored_device="cpu")
    with tracker:
        a = torch.zeros(3, 10, 10, device="meta")  # 1,200 bytes
        kept = [a @ a, a @ a]  # the second time what is known of the operator answers
        del a, kept
    assert tracker.peak_bytes == 3 * 1200


def test_peak_is_named_by_module_phase_and_microbatch() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.repeat(8, 1).sigmoid() ** 2).sum()

    origins = OriginTracker()
    tracker = MemoryTracker(origins, run_operator=MetaOperators({}), ignored_device="cpu")
    with tracker, origins.module_hooks(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), Wide())
        origins.register_modules({0: model})
        x = torch.zeros(4, 64, requires_grad=True)
        with origins.in_phase("forward"):
            for _ in range(2):
                model(x).backward()
    # The backward of a power holds its input, its gradient and products of both, all eight times as wide.
    assert (tracker.peak_origin.phase, tracker.peak_origin.module) == ("backward", "1")
    assert tracker.peak_origin.microbatch in (0, 1)
