"""SwiGLU and GPT-OSS's clamped form in plain torch, with GPT-OSS's constants. `swiglu_triton.py` has both in Triton.

`moe/experts.py` and the reference steps of `experts/` and `fp8/` call it.

Shapes: R rows, H expert dim.
"""

from torch import Tensor

CLAMP, ALPHA = 7.0, 1.702  # GPT-OSS: transformers GptOssConfig swiglu_limit, swiglu_alpha


def gated_activation(gate_RH: Tensor, up_RH: Tensor, clamped: bool) -> Tensor:
    """silu(gate) * up; the clamped form clamps both, scales the sigmoid's argument and adds 1 to `up`."""
    if not clamped:
        return gate_RH * gate_RH.sigmoid() * up_RH
    gate_RH, up_RH = gate_RH.clamp(max=CLAMP), up_RH.clamp(-CLAMP, CLAMP)
    return gate_RH * (ALPHA * gate_RH).sigmoid() * (up_RH + 1)
