"""A pending tensor waits by itself: whatever reads its values waits first, and what only describes it does not."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from threefold.engine.optim.pending_updates import is_pending, mark_pending, mark_ready, wait_for, without_waiting


class Late:
    """A parameter whose ones arrive when it is waited for."""

    def __init__(self) -> None:
        self.parameter, self.num_waits = nn.Parameter(torch.zeros(3, 3)), 0
        self.raw = self.parameter.detach()
        mark_pending([self.parameter], self._wait)

    def _wait(self) -> None:
        self.num_waits += 1
        self.raw.fill_(1.0)
        mark_ready([self.parameter])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def linear_with(weight: nn.Parameter) -> Tensor:
    linear = nn.Linear(3, 3, bias=False)
    linear.weight = weight
    result: Tensor = linear(torch.eye(3))
    return result


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "a function": lambda p: F.linear(torch.eye(3), p),
    "a module": linear_with,
    "an autograd function": _Product.apply,
    "an operator of the dispatcher": lambda p: torch.ops.aten.mul.Tensor(p, 1.0),
    "a list of tensors": lambda p: torch.cat([torch.ones(3, 3), p])[3:],
    "lists of torch's optimizers": lambda p: torch._foreach_mul([p], 1.0)[0],
    "a named argument": lambda p: torch.mul(torch.ones(3, 3), other=p),
    "a view": lambda p: p.view(3, 3),
    "a detached alias": lambda p: p.detach(),
    "data": lambda p: p.data,
    "a copy": lambda p: torch.zeros(3, 3).copy_(p.detach()),
    "an element": lambda p: p[0].expand(3, 3),
    "numpy": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "a deep copy": copy.deepcopy,
    "a pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "a gradient": lambda p: torch.autograd.grad((p * p).sum(), p)[0] / 2,
    "a comparison": lambda p: torch.full((3, 3), float(torch.equal(p, torch.ones(3, 3)))),
}


@pytest.mark.parametrize("kind", READS)
def test_a_read_waits_once_and_sees_the_new_values(kind: str) -> None:
    late = Late()
    for _ in range(2):
        made = READS[kind](late.parameter)
        assert torch.equal(made.detach(), torch.ones(3, 3))
        assert type(late.parameter) is nn.Parameter
        assert not is_pending(made)
    assert late.num_waits == 1
    assert vars(late.parameter) == {}


def put_as_data(p: nn.Parameter) -> Tensor:
    made = torch.zeros(3, 3)
    made.data = p
    return made


def scripted(p: nn.Parameter) -> Tensor:
    linear = nn.Linear(3, 3, bias=False)
    linear.weight = p
    result: Tensor = torch.jit.script(linear)(torch.eye(3))
    return result


# Functions of torch that do not ask the class of a tensor.
AROUND: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "a tensor of its values": torch.tensor,
    "a new tensor of its values": lambda p: torch.zeros(1).new_tensor(p),
    "another class": lambda p: p.as_subclass(Tensor),
    "data of another tensor": put_as_data,
    "memory of another tensor": lambda p: torch.zeros(0).set_(p),
    "a nested tensor": lambda p: torch.nested.nested_tensor([p]).unbind()[0],
    "a transform": lambda p: torch.func.grad(lambda x: (x * x).sum())(p),
    "a map": lambda p: torch.vmap(lambda row: row * 1.0)(p),
    "a scripted module": scripted,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", AROUND)
def test_a_read_that_does_not_wait_finds_no_values(kind: str) -> None:
    """Neither the old ones nor the new ones, so that it cannot go on unseen; whoever waits finds them afterwards."""
    late = Late()
    assert AROUND[kind](late.parameter).isnan().all()
    assert late.num_waits == 0
    address = late.raw.data_ptr()
    assert late.parameter.data_ptr() == address
    assert torch.equal(late.parameter, torch.ones(3, 3))
    assert late.parameter.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_and_versions_are_those_of_the_parameter(dtype: torch.dtype) -> None:
    """A backward over a parameter that was updated since its forward is refused, pending or not."""
    parameter = nn.Parameter(torch.ones(4, 2, dtype=dtype))
    raw = parameter.detach().view(-1)
    y = (parameter * parameter).sum()

    def wait() -> None:
        raw.mul_(2)
        mark_ready([parameter])

    mark_pending([parameter], wait)
    parameter.grad = torch.zeros(4, 2, dtype=dtype)
    assert float(parameter.detach().sum()) == 16
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    (3 * parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.full((4, 2), 3.0, dtype=dtype))


def test_the_address_of_memory_is_a_read() -> None:
    """Kernels and graphs get addresses."""
    for read in (lambda p: p.data_ptr(), lambda p: p.untyped_storage(), lambda p: p._version):
        late = Late()
        read(late.parameter)
        assert late.num_waits == 1


def test_what_describes_a_tensor_does_not_wait() -> None:
    late = Late()
    p = late.parameter
    assert isinstance(p, nn.Parameter)
    assert (p.shape, p.ndim, p.numel(), len(p), p.size(0), p.dim()) == ((3, 3), 2, 9, 3, 3, 2)
    assert (p.dtype, p.device.type, p.is_cuda, p.requires_grad, p.is_leaf) == (torch.float32, "cpu", False, True, True)
    p.grad = torch.ones(3, 3)
    assert p.grad.sum() == 9
    assert {p: "found"}[p] == "found"
    assert p in [p]
    model = nn.Linear(3, 3, bias=False)
    model.weight = p
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    model.zero_grad()
    assert late.num_waits == 0
    assert is_pending(p)


def test_another_pending_tensor_that_is_read_meanwhile_waits_too() -> None:
    """As a recompute does, which reads weights while torch computes the gradient of another."""
    late, other = Late(), Late()
    y = late.parameter * 1.0
    y.register_hook(lambda grad: grad * other.parameter.detach().sum())
    mark_pending([late.parameter], late._wait)
    (grad,) = torch.autograd.grad(y.sum(), late.parameter)
    assert other.num_waits == 1
    assert torch.equal(grad, torch.full((3, 3), 9.0))


def test_marking_again_replaces_the_wait() -> None:
    late, waits = Late(), []

    def wait() -> None:
        waits.append("the second")
        late._wait()

    mark_pending([late.parameter], wait)
    wait_for([torch.ones(1), [late.parameter], None])
    assert (waits, late.num_waits) == (["the second"], 1)
    wait_for([late.parameter])
    mark_ready([late.parameter])
    assert (waits, late.num_waits) == (["the second"], 1)


def test_a_plain_tensor_and_one_of_a_rehearsal_wait_as_parameters_do() -> None:
    waits = []

    def wait_of(tensor: Tensor) -> Callable[[], None]:
        return lambda: (waits.append(tensor), mark_ready([tensor]))[0]

    plain = torch.ones(3)
    mark_pending([plain], wait_of(plain))
    assert plain.sum() == 3
    assert type(plain) is Tensor
    with FakeTensorMode():
        fake = nn.Parameter(torch.ones(3, 3))
        mark_pending([fake], wait_of(fake))
        assert fake.shape == (3, 3)
        assert len(waits) == 1
        assert F.linear(torch.ones(2, 3), fake).shape == (2, 3)
    assert type(fake) is FakeTensor
    assert len(waits) == 2


def test_nothing_waits_where_that_is_switched_off() -> None:
    late = Late()
    with without_waiting():
        late.parameter.grad = None
    assert is_pending(late.parameter)
    assert late.num_waits == 0


def test_a_pending_parameter_is_freed_with_what_it_waits_for() -> None:
    late = Late()
    weak = weakref.ref(late)
    del late
    gc.collect()
    assert weak() is None
