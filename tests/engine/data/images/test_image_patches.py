"""Sizes and patches of pictures against transformers' processors of Qwen2-VL and Qwen3-VL."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import VISION, encoded, noise, patches_of, picture_bomb
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

from threefold.engine.data.images import decode as decode_module
from threefold.engine.data.images.decode import BadImageError, ImageFile, ResizeRequest, decode, image_size
from threefold.engine.data.images.patches import (
    ImageSizeError,
    PatchRules,
    patch_rules,
    resized_frames,
    resized_image,
)
from threefold.spec.models import MODELS

QWEN3_VL = patch_rules(MODELS["qwen3-vl-30b-a3b"].vision)
RULES = {"qwen3-vl": replace(QWEN3_VL, max_pixels=90_000), "tiny": patch_rules(VISION)}


def their_processor(rules: PatchRules) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=rules.patch,
        temporal_patch_size=rules.temporal_patch,
        merge_size=rules.merge,
        image_mean=[rules.mean] * 3,
        image_std=[rules.std] * 3,
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
    )


def our_patches(data: bytes, rules: PatchRules, folder: Path) -> tuple[tuple[int, int], np.ndarray]:
    path = folder / "picture"
    path.write_bytes(data)
    size = resized_image(image_size(data), rules)
    pixels_HWC = decode(ResizeRequest(ImageFile(str(path)), *size))
    return rules.grid(size), patches_of(pixels_HWC[None], rules)


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([QWEN3_VL, *RULES.values()]))
def test_image_sizes_are_those_of_the_processor(height: int, width: int, rules: PatchRules) -> None:
    try:
        theirs = smart_resize(height, width, rules.factor, rules.min_pixels, rules.max_pixels)
    except ValueError:
        with pytest.raises(ImageSizeError):
            resized_image((height, width), rules)
        return
    assert resized_image((height, width), rules) == theirs


@given(st.integers(1, 64), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([QWEN3_VL, *RULES.values()]))
def test_video_sizes_are_those_of_the_processor(frames: int, height: int, width: int, rules: PatchRules) -> None:
    limits = {"min_pixels": rules.video_min_pixels, "max_pixels": rules.video_max_pixels}
    try:
        theirs = smart_resize_video(frames, height, width, rules.temporal_patch, rules.factor, **limits)
    except ValueError:
        with pytest.raises(ImageSizeError):
            resized_frames(frames, (height, width), rules)
        return
    assert resized_frames(frames, (height, width), rules) == theirs


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(9, 400),
    width=st.integers(9, 400),
    seed=st.integers(0, 99),
    kind=st.sampled_from([("RGB", "PNG"), ("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "PNG"), ("RGB", "WEBP")]),
    name=st.sampled_from(list(RULES)),
)
def test_patches_are_those_of_the_image_processor(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, seed: int, kind: tuple[str, str], name: str
) -> None:
    """Bit for bit: both resize with Pillow and round at the same places."""
    rules = RULES[name]
    data = encoded(noise(height, width, seed, kind[0]), kind[1])
    theirs = their_processor(rules)(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="np")
    grid, patches_PC = our_patches(data, rules, tmp_path_factory.mktemp("picture"))
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]]
    assert np.array_equal(patches_PC, theirs["pixel_values"])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_photos_are_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(48, 96), "JPEG", exif=exif)
    (tmp_path / "photo.jpg").write_bytes(data)
    upright = load_image(str(tmp_path / "photo.jpg"))
    assert image_size(data) == (upright.height, upright.width)
    theirs = their_processor(RULES["tiny"])(images=[upright], return_tensors="np")
    assert np.array_equal(our_patches(data, RULES["tiny"], tmp_path)[1], theirs["pixel_values"])


@pytest.mark.parametrize(("height", "width"), [(37, 151), (300, 200), (64, 64)])
def test_pixels_are_near_those_of_the_torchvision_backend(tmp_path: Path, height: int, width: int) -> None:
    """The other backend resizes uint8 tensors with torch, whose weights have fewer bits: one level of 255 at most."""
    data = encoded(noise(height, width))
    (tmp_path / "picture.png").write_bytes(data)
    size = resized_image((height, width), RULES["tiny"])
    ours = decode(ResizeRequest(ImageFile(str(tmp_path / "picture.png")), *size))
    tensor = torch.from_numpy(np.asarray(Image.open(io.BytesIO(data)))).permute(2, 0, 1)[None]
    theirs = torch.nn.functional.interpolate(tensor, size=size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    assert np.abs(ours.astype(int) - theirs.numpy().astype(int)).max() <= 1


def test_frames_are_cut_as_the_video_processor_cuts_them() -> None:
    rules = RULES["tiny"]
    frames = np.stack([np.asarray(noise(48, 64, seed)) for seed in range(4)])
    values = (torch.from_numpy(frames).permute(0, 3, 1, 2)[None].double() / 255 - rules.mean) / rules.std
    patchify = Qwen3VLVideoProcessor.patchify
    theirs, *grid = patchify(None, values, rules.patch, rules.merge, rules.temporal_patch)
    ours = np.concatenate([patches_of(frames[:2], rules), patches_of(frames[2:], rules)])
    assert grid == [2, *rules.grid((48, 64))]
    # Theirs is in fp64 here; one rounding to fp32 before and one behind the subtraction differ.
    np.testing.assert_allclose(ours, theirs[0].numpy(), atol=2e-7)


def test_a_smaller_limit_makes_smaller_pictures() -> None:
    limited = patch_rules(VISION, max_pixels=2_048)
    height, width = resized_image((400, 300), limited)
    assert height * width <= 2_048 < np.prod(resized_image((400, 300), patch_rules(VISION)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of JPEG"),
        (b"GIF89a", "no readable image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of JPEG"),
        (picture_bomb(), "pixels"),
        (picture_bomb(9_500), "more than 89478485"),
    ],
)
def test_bad_headers_are_refused_before_anything_is_decoded(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        image_size(data)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_files_that_are_cut_off_are_bad_pictures(tmp_path: Path, file_format: str) -> None:
    whole = encoded(noise(64, 64), file_format)
    for share in (0.02, 0.3, 0.9):
        (tmp_path / "picture").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(BadImageError):
            decode(ResizeRequest(ImageFile(str(tmp_path / "picture")), 32, 32))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_never_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file_format = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]))
    content = bytearray(encoded(noise(24, 24), file_format))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flipped") / "picture"
    path.write_bytes(content)
    try:
        image_size(bytes(content))
        assert decode(ResizeRequest(ImageFile(str(path)), 16, 16)).shape == (16, 16, 3)
    except BadImageError:
        pass


def test_a_file_that_changed_or_is_too_large_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(noise(32, 32)))
    with pytest.raises(BadImageError, match="ends too early"):
        ImageFile(str(path), 0, path.stat().st_size + 1).read()
    monkeypatch.setattr(decode_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(BadImageError, match="more than 100"):
        ImageFile(str(path)).read()
    with pytest.raises(BadImageError, match="cannot be read"):
        ImageFile(str(tmp_path / "absent.png")).read()
