"""Pictures and picture data for tests: encoded noise, tar shards, and files that are damaged in known ways."""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from threefold.engine.data.images.patches import PatchRules
from threefold.spec.model import PictureSpec, VisionSpec, VisionTokens

# Tokens of eight by eight pixels' patches, four of which are one token; ids behind those of the byte tokenizer.
VISION = VisionSpec(
    depth=1,
    dim=16,
    mlp_dim=16,
    num_heads=2,
    patch=8,
    temporal_patch=2,
    merge=2,
    num_positions=16,
    tokens=VisionTokens(start=260, end=261, image=262, video=263),
    pictures=PictureSpec(min_pixels=1_024, max_pixels=16_384, video_min_pixels=1_024, video_max_pixels=65_536),
)
VOCAB = 512


def noise(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of noise, in which every wrong pixel shows."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode=None if mode != "RGBA" else "RGBA")


def encoded(picture: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, file_format, **options)
    return out.getvalue()


def picture_bomb(side: int = 60_000) -> bytes:
    """A PNG of a few bytes whose header states side x side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def write_tar(path: Path, members: Mapping[str, bytes | dict[str, Any] | str]) -> Path:
    """A tar shard; tables are written as JSON."""
    with tarfile.open(path, "w") as shard:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            data = content.encode() if isinstance(content, str) else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    return path


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def patches_of(pixels_THWC: np.ndarray, rules: PatchRules) -> np.ndarray:
    """The patches of one picture."""
    from threefold.engine.data.images.patches import write_patches

    height, width = rules.grid((pixels_THWC.shape[1], pixels_THWC.shape[2]))
    out = np.full((height * width, rules.patch_values), np.nan, np.float32)
    write_patches(pixels_THWC, rules, out)
    return out
