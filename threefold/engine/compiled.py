"""torch.compile of elementwise parts that have no kernel of ours on this device.

With our kernels that is the gated norm behind the delta rule; without them norms, routers and MLPs too. It cannot
compile around our kernels: they would be compiled anew with arguments of other types.
"""

from threefold.engine.kernels.around import fused_on
from threefold.engine.mlp import Mlp
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.router import Router
from threefold.engine.norm import GatedRMSNorm, RMSNorm

_HAVE_KERNELS = (RMSNorm, Router, Mlp)


def compile_parts(model: Decoder, backend: str = "inductor") -> None:
    """In place, where the options ask for it. Another shape than that of the first microbatch compiles anew.

    A rehearsal computes nothing, so nothing is compiled for it.
    """
    first = next(model.parameters(), None)  # a chunk of a pipeline may be empty
    if not model.options.compile or first is None or first.is_meta:
        return
    parts = (GatedRMSNorm, *(() if fused_on(first.device) else _HAVE_KERNELS))
    for module in model.modules():
        if isinstance(module, parts):
            module.compile(dynamic=False, backend=backend)
