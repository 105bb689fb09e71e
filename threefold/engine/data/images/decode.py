"""Opens images with Pillow: their size from the header, and their pixels, resized, in worker processes.

Images are untrusted. Only a few formats are tried, the size is checked before anything is decoded, and every failure is
a `BadImageError`, for which the caller skips, counts and names the image. Workers keep Pillow away from the Python of
the training step. They are fresh processes (spawned): a fork would copy locks of torch's threads. A worker that dies,
as one may that a damaged file crashes, is replaced, and its image counts as bad. Workers end with their rank, however
that ends.

This module imports no torch, so that a worker process starts quickly.
"""

import io
import multiprocessing
import os
import signal
import struct
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from threefold.findings import Finding, FindingsError
from threefold.plan.ranks import rank_environment
from threefold.safe_files import open_regular
from threefold.units import MIB

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # of a GIF, the first frame
MAX_FILE_BYTES = 256 * MIB
MAX_SOURCE_PIXELS = 89_478_485  # Pillow's Image.MAX_IMAGE_PIXELS: a quarter of a GiB as RGB
_ORIENTATION = 0x0112  # EXIF tag; from 5 on the image is turned by a quarter
# What Pillow raises for damaged files, and for those that would decode to too much.
_PILLOW_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError)
_PILLOW_ERRORS += (AttributeError, struct.error, zlib.error, ArithmeticError, MemoryError, RecursionError)


class BadImageError(Exception):
    """An image that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The place of the bytes of an image: a file, or a member of a tar shard."""

    path: str
    offset: int = 0
    num_bytes: int | None = None  # None: all of the file
    within: str | None = None  # the folder that a link may not leave

    @property
    def place(self) -> str:
        """The name of the file in a message."""
        return f"{self.path} (byte {self.offset})" if self.offset else self.path

    def read(self, most: int = MAX_FILE_BYTES) -> bytes:
        """The bytes, or BadImageError."""
        try:
            with open_regular(Path(self.path), Path(self.within) if self.within else None) as file:
                size = os.fstat(file.fileno()).st_size - self.offset if self.num_bytes is None else self.num_bytes
                if size > MAX_FILE_BYTES:
                    raise BadImageError(f"its file has {size} bytes, more than {MAX_FILE_BYTES}")
                file.seek(self.offset)
                data = file.read(min(size, most))
        except OSError as error:
            raise BadImageError(f"cannot be read: {error.strerror or error}") from None
        if len(data) < min(size, most):
            raise BadImageError("its file ends too early")
        return data


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """One image to decode and resize."""

    file: ImageFile
    height: int
    width: int


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels, upright, from the header; raises BadImageError also for too many pixels."""
    try:
        with _open(data) as image:
            width, height = image.size
            orientation = _orientation(image)
    except BadImageError:
        raise
    except _PILLOW_ERRORS as error:
        raise BadImageError(f"no readable image: {_reason(error)}") from None
    return (width, height) if 5 <= orientation <= 8 else (height, width)


def decode(request: ResizeRequest) -> NDArray[np.uint8]:
    """The pixels (height, width, 3) of an image, upright, in RGB, resized as the image processor resizes."""
    from PIL import Image, ImageOps

    data = request.file.read()
    try:
        with _open(data) as opened:
            upright = opened if _orientation(opened) == 1 else ImageOps.exif_transpose(opened)
            rgb = upright.convert("RGB")
            resized = rgb.resize((request.width, request.height), resample=Image.Resampling.BICUBIC)
            return np.asarray(resized, np.uint8)
    except BadImageError:
        raise
    except _PILLOW_ERRORS as error:
        raise BadImageError(f"cannot be decoded: {_reason(error)}") from None


def decode_or_reason(request: ResizeRequest) -> NDArray[np.uint8] | str:
    """The pixels, or why there are none: what a worker process sends back."""
    try:
        return decode(request)
    except BadImageError as problem:
        return str(problem)


def start_worker() -> None:
    """Prepare a worker: Ctrl-C is for its rank, and it ends when its rank is gone, which a killed one cannot tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="threefold-parent", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def require_pillow() -> None:
    """Raise a finding where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        problem, advice = "images need Pillow, which is not installed", "pip install threefold[train]"
        raise FindingsError([Finding(rule="pillow-installed", at="job.data", problem=problem, advice=advice)]) from None


def _open(data: bytes) -> "Image.Image":
    """Open an image without decoding it, and refuse one that would be too large."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImageError("it would decode to too many pixels") from None
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        image.close()
        raise BadImageError(f"{width} x {height} pixels, more than {MAX_SOURCE_PIXELS}")
    if min(width, height) < 1:
        raise BadImageError("it has no pixels")
    return image


def _orientation(image: "Image.Image") -> int:
    """The orientation of the image, by its EXIF data; 1 is upright.

    PNG can have them after the pixels. They are not read then: the size must be known before the pixels are.
    """
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _reason(error: BaseException) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its message has the address of a buffer
        return f"none of {', '.join(FORMATS)}"
    lines: list[Any] = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


Decoded = NDArray[np.uint8] | str  # the pixels, or why there are none
MAX_WORKERS = 4
MAX_DEATHS = 3  # in a row: then it is not the images


class DecodePool:
    """Decodes images in `num_workers` processes, or in the calling thread where there are none."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._num_deaths = 0  # one after another

    def decode(self, requests: Sequence[ResizeRequest]) -> list[Decoded]:
        """The images, in the order of the requests."""
        if not self.num_workers:
            return [decode_or_reason(request) for request in requests]
        try:
            return list(self._running().map(decode_or_reason, requests))
        except BrokenProcessPool:
            return [self._decode_alone(request) for request in requests]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _running(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, context, initializer=start_worker)
        return self._pool

    def _decode_alone(self, request: ResizeRequest) -> Decoded:
        """One image at a time, so that it is known which one ends its worker."""
        for _ in range(2):  # the first one may find the pool that broke before
            try:
                decoded = self._running().submit(decode_or_reason, request).result()
                self._num_deaths = 0
                return decoded
            except BrokenProcessPool:
                self.close()
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            problem = f"the processes that decode images died {self._num_deaths} times in a row"
            advice = "look for the reason above; memory may be short, or decode without them"
            fix = {"run.image_workers": 0}
            finding = Finding(rule="image-workers-run", at="run.image_workers", problem=problem, fix=fix, advice=advice)
            raise FindingsError([finding])
        return "the process that decoded it died"


def image_workers(asked: int | None) -> int:
    """As many decoding processes as the plan asks for, or half of the cores that a rank has, from 1 to 4."""
    if asked is not None:
        return asked
    env = rank_environment(os.environ)
    num_local_ranks = env.local_size if env else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores // num_local_ranks // 2))
