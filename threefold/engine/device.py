"""Says which device's code path to take: that of the tensor's device, or that of the GPU that a dry run simulates.

The tensors of a dry run have no memory and lie on no GPU, because a backward on CUDA tensors needs a driver. Kernels,
buffer sizes and chunk sizes depend on the answer. `dryrun` enters `simulate("cuda")`; everything else asks
`device_type` or `is_simulated`.
"""

from contextlib import AbstractContextManager

import torch

from threefold.engine.context import context, override


def device_type(device: torch.device) -> str:
    """The type of the device whose kernels, buffers and chunk sizes to use: "cpu" or "cuda"."""
    return context.simulated_device or device.type


def is_simulated() -> bool:
    """Return whether tensors stand for those of a GPU: then no kernel can be launched, and host memory is not
    separate."""
    return context.simulated_device == "cuda"


def simulate(device_type: str) -> AbstractContextManager[None]:
    """Take the code paths of this device type inside the `with` block."""
    return override("simulated_device", device_type)
