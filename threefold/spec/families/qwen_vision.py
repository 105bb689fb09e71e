"""The image encoder of the Qwen families: its configuration, its names in checkpoints, and multimodal positions."""

import re
import reprlib
from typing import Any

from threefold.spec.family import EncoderClass, Fields, Parts
from threefold.spec.model import ModelSpec, VisionSpec, VisionTokens

# Fields of `vision_config`, and where they stand in a VisionSpec.
_PLACES = {
    "depth": "depth",
    "hidden_size": "dim",
    "intermediate_size": "mlp_dim",
    "num_heads": "num_heads",
    "patch_size": "patch",
    "temporal_patch_size": "temporal_patch",
    "spatial_merge_size": "merge",
    "num_position_embeddings": "num_positions",
}
# The ids around pictures and in their place, beside `vision_config`.
TOKEN_KEYS = {
    "vision_start_token_id": "start",
    "vision_end_token_id": "end",
    "image_token_id": "image",
    "video_token_id": "video",
}
ENCODER_CLASS = EncoderClass(
    defaults=dict(zip(_PLACES, (27, 1152, 4304, 16, 16, 2, 2, 2304), strict=True)),
    tokens=dict(zip(TOKEN_KEYS, (151652, 151653, 151655, 151656), strict=True)),
)
UNREAD = frozenset({"hidden_act", "in_channels", "out_hidden_size", "rope_parameters", "initializer_range"})
# The engine supports one value of these fields; a file that states another is refused. `out_hidden_size` is the model
# dim.
_ONLY: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3}

TINY_ENCODER = VisionSpec(
    depth=3, dim=64, mlp_dim=128, num_heads=4, patch=8, temporal_patch=2, merge=2, num_positions=64
)


def read_encoder(config: Fields, kind: EncoderClass) -> VisionSpec:
    """The image encoder, from `vision_config` and the table around it, which has the ids of its tokens."""
    c = {**kind.defaults, **(config.get("vision_config") or {})}
    only = {**_ONLY, "out_hidden_size": (config.get("text_config") or {}).get("hidden_size")}
    for name, value in only.items():
        if name in c and value is not None and c[name] != value:
            raise ValueError(f"{name} {reprlib.repr(c[name])} of the image encoder is not supported, only {value!r}")
    ids = {**kind.tokens, **config}
    return VisionSpec(
        **{place: c[key] for key, place in _PLACES.items()},
        deepstack=tuple(c.get("deepstack_visual_indexes") or ()),
        tokens=VisionTokens(**{place: ids[key] for key, place in TOKEN_KEYS.items()}),
    )


def write_encoder(spec: ModelSpec) -> Parts:
    """The configuration of the encoder, and the ids of the tokens around pictures and in their place."""
    vision = spec.vision
    assert vision is not None
    return {
        "vision_config": {
            "model_type": f"{spec.family}_vision",
            **{key: getattr(vision, place) for key, place in _PLACES.items()},
            "out_hidden_size": spec.dim,
            "deepstack_visual_indexes": list(vision.deepstack),  # also where it is empty: Bridge 0.4 reads it
        },
        **{key: getattr(vision.tokens, place) for key, place in TOKEN_KEYS.items()},
    }


def read_sections(c: Fields, default: tuple[int, ...]) -> tuple[int, ...]:
    """The multimodal rotary sections. `default` is what transformers takes where a file has none."""
    found = (c["rope_scaling"] or c["rope_parameters"] or {}).get("mrope_section", default)
    if len(found) != len(default):
        raise ValueError(f"mrope_section is {reprlib.repr(found)}, not one number for time, height and width each")
    return tuple(found)


_BLOCK = {
    "attention_norm": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp_norm": "norm2",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
PATCH_WEIGHT = "vision.embed.patch.weight"  # a convolution in checkpoints, with as many values


def is_encoder_name(name: str) -> bool:
    return name.startswith(("vision.", "projector."))


def encoder_key(name: str) -> str:
    """The stored name of an engine tensor of the encoder or the projector: `vision.layers.3.attention.out.weight` is
    `model.visual.blocks.3.attn.proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if match := re.fullmatch(r"vision\.embed\.(\w+)", module):
        return f"model.visual.{ {'patch': 'patch_embed.proj', 'positions': 'pos_embed'}[match[1]] }.{leaf}"
    if match := re.fullmatch(r"vision\.layers\.(\d+)\.(.+)", module):
        return f"model.visual.blocks.{match[1]}.{_BLOCK[match[2]]}.{leaf}"
    match = re.fullmatch(r"projector\.(?:main|deepstack\.(\d+))\.(\w+)", module)
    assert match, name
    merger = "merger" if match[1] is None else f"deepstack_merger_list.{match[1]}"
    return f"model.visual.{merger}.{_MERGER[match[2]]}.{leaf}"
