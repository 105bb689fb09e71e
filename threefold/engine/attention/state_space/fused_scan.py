"""The scan of Mamba-2 by the Triton kernels of the `mamba-ssm` package, where it is installed.

`mamba.py` asks `fused_scan` on CUDA tensors. A package that cannot be imported, or whose function does not take the
arguments below, counts as absent: the chunked scan in plain torch runs instead, and a warning says why.

Shapes: as in `chunk_scan.py`.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from threefold.engine.attention.state_space.chunk_scan import ScanInputs

PACKAGE, MODULE, FUNCTION = "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
KERNEL_CHUNK = 256  # tokens; what the package's own Mamba-2 layer takes
_ARGUMENTS = ("x", "dt", "A", "B", "C", "chunk_size", "D", "seq_idx")

ScanFn = Callable[[ScanInputs, Tensor | None], Tensor]


@cache
def fused_scan() -> ScanFn | None:
    """A function that scans with the kernels of `mamba-ssm`, or None where they are not usable."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:  # an empty folder of that name has no origin
        return None
    try:
        kernel = getattr(import_module(MODULE), FUNCTION)
        missing = [name for name in _ARGUMENTS if name not in inspect.signature(kernel).parameters]
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        warnings.warn(f"mamba-ssm is installed and cannot be used: Mamba layers run in torch ({error})", stacklevel=2)
        return None
    if missing:
        problem = f"its {FUNCTION} does not take {', '.join(missing)}"
        warnings.warn(f"mamba-ssm is installed and cannot be used: Mamba layers run in torch ({problem})", stacklevel=2)
        return None

    def scan(inputs: ScanInputs, document_BS: Tensor | None) -> Tensor:
        seq_idx = None if document_BS is None else document_BS.to(torch.int32).contiguous()
        out_BSHp: Tensor = kernel(
            inputs.x_BSHp,
            inputs.step_BSH,
            inputs.decay_rate_H,
            inputs.write_BSGn,
            inputs.read_BSGn,
            chunk_size=KERNEL_CHUNK,
            D=inputs.skip_H,
            seq_idx=seq_idx,
        )
        return out_BSHp

    return scan
