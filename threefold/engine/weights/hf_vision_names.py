"""Hugging Face names of the image encoder and the projector of the Qwen families. `hf_names.hf_layouts` asks here.

For example, the engine's `vision.layers.3.attention.out.weight` is `model.visual.blocks.3.attn.proj.weight`.
"""

import re

from threefold.engine.vision import CHANNELS
from threefold.engine.weights.hf_tensor import HfTensor
from threefold.spec.model import VisionSpec

_PREFIX = "model.visual."
_EMBED = {"patch": "patch_embed.proj", "positions": "pos_embed"}
_BLOCK = {
    "attention_norm": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp_norm": "norm2",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}


def is_vision_name(name: str) -> bool:
    return name.startswith(("vision.", "projector."))


def vision_tensor(name: str, spec: VisionSpec) -> HfTensor:
    """The Hugging Face tensor with the values of an engine tensor of the encoder or the projector."""
    module, _, leaf = name.rpartition(".")
    if match := re.fullmatch(r"vision\.embed\.(\w+)", module):
        key = f"{_PREFIX}{_EMBED[match[1]]}.{leaf}"
        if key.endswith("patch_embed.proj.weight"):  # a convolution there, with as many values
            sizes = (CHANNELS, spec.temporal_patch, spec.patch, spec.patch)
            return HfTensor(key, lambda p_DC: p_DC.unflatten(1, sizes))
        return HfTensor(key)
    if match := re.fullmatch(r"vision\.layers\.(\d+)\.(.+)", module):
        return HfTensor(f"{_PREFIX}blocks.{match[1]}.{_BLOCK[match[2]]}.{leaf}")
    match = re.fullmatch(r"projector\.(?:main|deepstack\.(\d+))\.(\w+)", module)
    assert match, name
    merger = "merger" if match[1] is None else f"deepstack_merger_list.{match[1]}"
    return HfTensor(f"{_PREFIX}{merger}.{_MERGER[match[2]]}.{leaf}")
