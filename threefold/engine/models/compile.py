"""torch.compile for elementwise modules that have no fused kernel on this device (`knobs.compile`).

Where our kernels run, only the gated norms of Mamba are left to compile; elsewhere the other norms, routers and MLPs
are compiled too. Modules that launch our kernels are not: inductor would compile the kernels once more with
other types.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from threefold.engine.kernels.availability import runs_fused_on
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.norm import GatedRMSNorm, GroupedGatedRMSNorm, RMSNorm
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.router import Router
from threefold.engine.optim.pending_updates import wait_for

_HAVE_KERNELS = (RMSNorm, GatedRMSNorm, Router, Mlp)


def compile_parts(model: Decoder, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile modules in place, where the options ask for it. A microbatch of another shape compiles once more.

    A dry run computes nothing, so nothing is compiled for it.
    """
    first = next(model.parameters(), None)  # a pipeline chunk may be empty
    if not model.options.compile or first is None or first.is_meta:
        return
    parts = (GroupedGatedRMSNorm, *(() if runs_fused_on(first.device) else _HAVE_KERNELS))
    for module in model.modules():
        if isinstance(module, parts):
            module.compile(dynamic=False, backend=backend)
            compiled = module._compiled_call_impl
            assert compiled is not None
            module._compiled_call_impl = partial(_wait_and_call, compiled, module)  # type: ignore[assignment]


def _wait_and_call(compiled: Callable[..., Any], module: nn.Module, *args: Any, **more: Any) -> Any:
    """Call a compiled module. Its parameters are ready before: a wait inside would be compiled too."""
    wait_for(module.parameters())
    return compiled(*args, **more)
