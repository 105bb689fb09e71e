"""Reads one tensor as `torch.save` wrote it into a file of a checkpoint, without torch's unpickler.

It is a zip archive: `data.pkl` says how the tensor lies in its storage, and `data/0` is the storage, uncompressed. The
archive may come from a stranger: nothing is called (`inert_pickle.py`), and no more memory is taken than the archive
has bytes. `dcp.py` calls `read_tensor`.
"""

import io
import math
import struct
import sys
import zipfile
from typing import Any, BinaryIO

import torch
from torch import Tensor

from threefold.engine.run.checkpoint_manifest import DTYPES
from threefold.inert_pickle import PERSISTENT, Global, Record, read_inert

_MAX_PICKLE_BYTES = 2**16  # that of a tensor has some 150
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and extra field stand at its end
_REBUILD = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
_STORAGE_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.BoolStorage": torch.bool,
}
_STORAGES = {*_STORAGE_DTYPES, "torch.storage.UntypedStorage"}  # the last has its dtype beside it
_KNOWN = {*_REBUILD, *_STORAGES, *DTYPES, "collections.OrderedDict"}


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        self.file, self.start, self.num_bytes, self.at = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.num_bytes}[whence]
        if base + offset < 0:
            raise ValueError("it points before its beginning")
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as view:
            count = max(0, min(len(view), self.num_bytes - self.at))
            self.file.seek(self.start + self.at)
            got = self.file.readinto(view[:count])  # type: ignore[attr-defined]
        self.at += got
        return int(got)


def read_tensor(file: BinaryIO, start: int, num_bytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """The tensor in `num_bytes` bytes of a file; ValueError or BadZipFile where it is not of this dtype and shape."""
    if start + num_bytes > file.seek(0, io.SEEK_END):
        raise ValueError("it ends before the tensor does")
    part = _Part(file, start, num_bytes)
    with zipfile.ZipFile(part) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    order = _read_entry(part, entries["byteorder"], 16) if "byteorder" in entries else b"little"
    if order.decode("ascii", "replace") != sys.byteorder:
        raise ValueError("it was written with another order of bytes")
    content = bytes(_read_entry(part, entries["data.pkl"], _MAX_PICKLE_BYTES))
    key, offset, stored_sizes, strides = _layout_in_storage(read_inert(content, _KNOWN.__contains__), dtype)
    if stored_sizes != sizes:
        raise ValueError(f"a tensor has the shape {list(stored_sizes)}, and the index says {list(sizes)}")
    storage = _read_entry(part, entries[f"data/{key}"], num_bytes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if len(storage) % dtype.itemsize or (math.prod(sizes) and last >= len(storage) // dtype.itemsize):
        raise ValueError(f"a tensor of shape {list(sizes)} does not lie in its {len(storage)} bytes")
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(storage, dtype=dtype).as_strided(sizes, strides, offset)


def _layout_in_storage(value: Any, dtype: torch.dtype) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """Key of the storage, offset, sizes and strides of the tensor that the pickle describes."""
    if not isinstance(value, Record) or value.name not in _REBUILD or len(value.arguments) < 4:
        raise ValueError("it holds no tensor")
    storage, offset, sizes, strides = value.arguments[:4]
    if not isinstance(storage, Record) or storage.name != PERSISTENT or not isinstance(storage.arguments[0], tuple):
        raise ValueError("it holds a tensor without a storage")
    _, kind, key, *_ = storage.arguments[0]
    if not isinstance(kind, Global) or kind.name not in _STORAGES or not isinstance(key, str):
        raise ValueError("it holds a tensor without a storage")
    if not (_are_counts((offset,)) and _are_counts(sizes) and _are_counts(strides) and len(sizes) == len(strides)):
        raise ValueError("it holds a tensor without a shape")
    named = value.arguments[6] if value.name.endswith("v3") and len(value.arguments) > 6 else None
    stored = (
        DTYPES[named.name] if isinstance(named, Global) and named.name in DTYPES else _STORAGE_DTYPES.get(kind.name)
    )
    if stored != dtype:
        raise ValueError(f"a tensor has the dtype {stored}, and the index says {dtype}")
    return key, offset, sizes, strides


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _read_entry(part: _Part, entry: zipfile.ZipInfo, most_bytes: int) -> bytearray:
    """The bytes of an entry, which must be stored as they are: a compressed one could be of any size."""
    size = entry.file_size
    if entry.compress_type != zipfile.ZIP_STORED or size != entry.compress_size or size > most_bytes:
        raise ValueError(f"its entry {entry.filename[:100]!r} is compressed, or too large")
    part.seek(entry.header_offset)
    header = part.read(_LOCAL_HEADER.size)
    if header is None or len(header) < _LOCAL_HEADER.size:
        raise ValueError("it is cut off")
    begin = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    if begin + size > part.num_bytes:
        raise ValueError("it is cut off")
    content = bytearray(size)
    part.seek(begin)
    view = memoryview(content)
    done = 0
    while done < size:
        got = part.readinto(view[done:])
        if not got:
            raise ValueError("it is cut off")
        done += got
    return content
