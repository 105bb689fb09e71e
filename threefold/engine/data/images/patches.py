"""Sizes and patches of images, by the rules of Qwen's image and video processors.

An image is resized (bicubic) so that each side is a multiple of patch x merge and its pixels lie within two limits.
Its values are normalized and cut into patches. Patches stand in blocks of merge x merge, which become one token; the
values of a patch are ordered channel, frame, row, column. A still image stands for two equal frames.

`image_index.py` asks for sizes, `batch_images.py` for patches. This module imports no torch, for decoding workers.

Shapes: H, W pixels; T frames; P patches; C values of a patch.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from threefold.spec.model import VisionSpec

CHANNELS = 3
MAX_ASPECT = 200  # transformers, models/qwen2_vl: longer images are refused


class ImageSizeError(ValueError):
    """An image has a size that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class PatchRules:
    """The rules of resizing and patches. Class and field names enter cached file names, so they cannot change."""

    patch: int
    temporal_patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    video_min_pixels: int  # of all frames of a video together
    video_max_pixels: int
    mean: float
    std: float

    @property
    def factor(self) -> int:
        """Pixels along the side of what becomes one token."""
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        return CHANNELS * self.temporal_patch * self.patch**2

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width in patches of an image that was resized to these pixels."""
        return size[0] // self.patch, size[1] // self.patch

    def num_tokens(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1] // self.merge**2


def patch_rules(vision: VisionSpec, max_pixels: int | None = None) -> PatchRules:
    """The rules of a model. `max_pixels` lowers the limits of images, and those of each frame of videos."""
    p = vision.pictures
    most = p.max_pixels if max_pixels is None else min(p.max_pixels, max_pixels)
    return PatchRules(
        patch=vision.patch,
        temporal_patch=vision.temporal_patch,
        merge=vision.merge,
        min_pixels=min(p.min_pixels, most),
        max_pixels=most,
        video_min_pixels=p.video_min_pixels,
        video_max_pixels=p.video_max_pixels,
        mean=p.mean,
        std=p.std,
    )


def resized_image(size: tuple[int, int], rules: PatchRules) -> tuple[int, int]:
    """Height and width in pixels that an image is resized to."""
    height, width = size
    _check_aspect(height, width)
    return _fit(height, width, 1, 1, rules.factor, rules.min_pixels, rules.max_pixels)


def resized_frames(num_frames: int, size: tuple[int, int], rules: PatchRules) -> tuple[int, int]:
    """Height and width in pixels that the frames of a video are resized to. The limits hold for all frames together."""
    height, width = size
    if num_frames < rules.temporal_patch:
        raise ImageSizeError(f"a video has at least {rules.temporal_patch} frames, not {num_frames}")
    if min(height, width) < rules.factor:
        scale = max(rules.factor / height, rules.factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    counted = round(num_frames / rules.temporal_patch) * rules.temporal_patch
    return _fit(height, width, num_frames, counted, rules.factor, rules.video_min_pixels, rules.video_max_pixels)


def _fit(
    height: int, width: int, num_frames: int, counted_frames: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """The size in whole multiples of `factor`; scaled where it lies outside the limits. Python's rounding, to even."""
    near = round(height / factor) * factor, round(width / factor) * factor
    pixels = counted_frames * near[0] * near[1]
    if pixels > most:
        shrink = math.sqrt(num_frames * height * width / most)
        rounded = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
        return rounded[0], rounded[1]
    if pixels < least:
        stretch = math.sqrt(least / (num_frames * height * width))
        return math.ceil(height * stretch / factor) * factor, math.ceil(width * stretch / factor) * factor
    return near


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageSizeError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")


def write_patches(pixels_THWC: NDArray[np.uint8], rules: PatchRules, out_PC: NDArray[np.float32]) -> None:
    """Write the patches of an image, or of the frames of one temporal patch, into rows of a larger array."""
    frames, height, width, _ = pixels_THWC.shape
    rows, columns = rules.grid((height, width))
    m, p = rules.merge, rules.patch
    blocks = pixels_THWC.reshape(frames, rows // m, m, p, columns // m, m, p, CHANNELS)
    blocks = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6)  # block row and column, patch in the block, channel, frame, pixel
    shape = (rows // m, columns // m, m, m, CHANNELS, rules.temporal_patch, p, p)
    # An image is one frame that stands for all frames of its temporal patch: it is broadcast.
    out_PC.reshape(shape)[:] = normalized_values(rules.mean, rules.std)[blocks]


@lru_cache(maxsize=8)
def normalized_values(mean: float, std: float) -> NDArray[np.float32]:
    """The normalized value of each of the 256 levels, rounded at the same places as transformers' processor rounds."""
    levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return np.asarray((levels - np.float32(mean)) / np.float32(std), np.float32)
