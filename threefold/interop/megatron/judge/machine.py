"""The machine that Megatron sees: the GPUs of the plan, tensors that go to the CPU or nowhere, and a process group of
the right size that only counts.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

from threefold.interop.megatron.judge.stand_ins import stand_in_class


class Device:
    """What Megatron asks of a GPU."""

    def __init__(self, name: str, major: int, minor: int, total_memory: int, multi_processor_count: int) -> None:
        self.name, self.major, self.minor = name, major, minor
        self.total_memory, self.multi_processor_count = total_memory, multi_processor_count


def _on_cpu() -> Any:
    """Small tensors that constructors put on "cuda", or move there, go to the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to:
                args = tuple(
                    "cpu" if isinstance(word, str | torch.device) and str(word).startswith("cuda") else word
                    for word in args
                )
            return func(*args, **kwargs)

    return OnCpu()


@contextlib.contextmanager
def simulated_machine(
    device: Device, gpus_per_node: int, gpus: int, rank: int, current: str = "meta"
) -> Iterator[None]:
    """`current`: the device where constructors of a model allocate, "meta" for shapes without numbers."""
    import torch

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: min(gpus_per_node, gpus),
        "current_device": lambda: torch.device(current),
        "set_device": lambda index: None,
        "synchronize": lambda *args: None,
        "Stream": stand_in_class("Stream"),
        "Event": stand_in_class("Event"),
        "current_stream": stand_in_class("current_stream"),
        "get_device_properties": lambda index=None: device,
        "get_device_capability": lambda index=None: (device.major, device.minor),
        "get_device_name": lambda index=None: device.name,
    }
    real = {name: getattr(torch.cuda, name) for name in fakes}
    real_cuda, saved = torch.Tensor.cuda, dict(os.environ)
    local_rank = rank % gpus_per_node
    os.environ.update({"WORLD_SIZE": str(gpus), "RANK": str(rank), "LOCAL_RANK": str(local_rank)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(min(gpus_per_node, gpus)), "MASTER_ADDR": "localhost"})
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    try:
        with _on_cpu():
            yield
    finally:
        torch.Tensor.cuda = real_cuda  # type: ignore[method-assign]
        for name, function in real.items():
            setattr(torch.cuda, name, function)
        os.environ.clear()
        os.environ.update(saved)


def join_counting_group(gpus: int, rank: int) -> None:
    """Torch's own fake process group. Megatron's groups without this rank are not made: they would be too many.

    Constructors get no states of random numbers, because no weight is drawn and a GPU would have them.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return dist.new_group(ranks) if rank in ranks else None

    dist.init_process_group("fake", rank=rank, world_size=gpus, store=FakeStore())
    parallel_state.create_group = create_group
    parallel_state.get_nccl_options = lambda *args, **kwargs: None
    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()


def globals_of_groups() -> dict[str, Any]:
    """Megatron's module variables that hold its groups, as they are before any is made."""
    from megatron.core import parallel_state

    return {
        name: copy.copy(value)
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }
