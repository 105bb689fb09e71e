"""Shapes of results on meta tensors."""

import torch

from threefold.dryrun.simulated.meta_operators import META, MetaOperators


def test_a_cpu_tensor_is_not_mistaken_for_one_that_is_gone() -> None:
    """Each tensor may lie at the address of the one before, which is freed by then."""
    run = MetaOperators({})
    for rows in range(1, 50):
        made = run(torch.ops.aten._to_copy.default, (torch.empty(rows, 4),), {"device": META})
        assert made.shape == (rows, 4)


def test_shapes_are_remembered() -> None:
    calls = []

    def add(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return torch.ops.aten.add.Tensor(*args)

    run, one = MetaOperators({torch.ops.aten.add.Tensor: add}), torch.empty(3, 1, device=META)
    for other in (torch.empty(1, 4, device=META), torch.empty(1, 4, device=META), torch.empty(1, 5, device=META)):
        assert run(torch.ops.aten.add.Tensor, (one, other), {}).shape == (3, other.shape[1])
    assert len(calls) == 2
