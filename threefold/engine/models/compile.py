"""torch.compile for elementwise modules that have no fused kernel on this device (`knobs.compile`).

Where our kernels run, only the gated norms of Mamba are left to compile; elsewhere the other norms, routers and MLPs
are compiled too. Modules that launch our kernels are not: inductor would compile the kernels once more with
other types.
"""

from threefold.engine.kernels.fusion_switch import runs_fused_on
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.norm import GatedRMSNorm, GroupedGatedRMSNorm, RMSNorm
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.router import Router

_HAVE_KERNELS = (RMSNorm, GatedRMSNorm, Router, Mlp)


def compile_parts(model: Decoder, backend: str = "inductor") -> None:
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
