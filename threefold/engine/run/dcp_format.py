"""Files of torch's distributed checkpoint format, read as plain data: the index, and one tensor of a file.

Both may be untrusted. The index (`.metadata`) says which rectangles of a tensor lie where in which file. It is a pickle
of torch's own classes (torch/distributed/checkpoint/metadata.py, as of torch 2.13; the fields that are used here are
older), which is read without calling anything (`inert_pickle.py`); every value is checked before anything is allocated,
so that `dcp.py` can rely on it.

A tensor is a zip archive as `torch.save` wrote it: `data.pkl` says how the tensor lies in its storage, and `data/0` is
the storage, uncompressed. It is read without torch's unpickler, and no more memory is taken than the archive has bytes.
`dcp.py` calls `read_tensor`.
"""

import io
import math
import struct
import sys
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from threefold.engine.run.checkpoint_manifest import DTYPES, INDEX, MAX_DIMS, MAX_ELEMENTS, damaged
from threefold.inert_pickle import MAX_OPERATIONS, PERSISTENT, Global, Record, read_inert
from threefold.safe_files import read_bounded

MAX_INDEX_BYTES = 2**28  # 256 MiB: two million rectangles
_OPERATIONS = 2**23  # of a pickle: three seconds, and 0.6 GiB
_OPERATIONS_OF_PART = 400  # that a file's rectangles of one tensor take at most; one takes some 70
_METADATA = "torch.distributed.checkpoint.metadata."
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_KNOWN = {
    *(
        _METADATA + name
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    _STORAGE,
    _SIZE,
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    # The folder that was written; from Python 3.13 on paths have another module. It is not used.
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    *DTYPES,
}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_index(
    folder: Path, files: Collection[str] | None = None, num_tensors: int | None = None
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by name. Rectangles in other files than `files` are refused; None takes any name.

    An index may be as long as `files` and `num_tensors`, of the manifest, make likely.
    """
    path = folder / INDEX
    try:
        content = read_bounded(path, MAX_INDEX_BYTES, within=folder)
        most = MAX_OPERATIONS
        if files is not None and num_tensors is not None:
            most = min(most, _OPERATIONS + _OPERATIONS_OF_PART * len(files) * num_tensors)
        root = read_inert(content, _KNOWN.__contains__, most=most)
        state = _state(root, _METADATA + "Metadata")
        places = _places(state["storage_data"], files)
        return {
            _text(name): _tensor(name, value, places)
            for name, value in _table(state["state_dict_metadata"]).items()
            if not (isinstance(value, Record) and value.name == _METADATA + "BytesStorageMetadata")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{folder.name}/{INDEX} is no index of a checkpoint: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return f"it lacks {str(error)[:200]}" if isinstance(error, KeyError) else str(error)


def _places(table: Any, files: Collection[str] | None) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """File, start and number of bytes of each rectangle, by the tensor's name and the rectangle's offsets."""
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, value in _table(table).items():
        index, info = _state(key, _METADATA + "MetadataIndex"), _state(value, _STORAGE)
        if index.get("offset") is None:  # an object that is no tensor
            continue
        file = _text(info["relative_path"])
        if Path(file).name != file or (files is not None and file not in files):
            raise ValueError(f"it names the file {file[:100]!r}, which the manifest does not list")
        if info.get("transform_descriptors"):
            raise ValueError(f"{file} was written with an extension of torch that is not read here")
        place = (_text(index["fqn"]), _size(index["offset"]))
        if place in places:
            raise ValueError(f"it has two places for {place[0][:100]} at {list(place[1])}")
        places[place] = (file, _count(info["offset"]), _count(info["length"]))
    return places


def _tensor(name: str, value: Any, places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]) -> StoredTensor:
    state = _state(value, _METADATA + "TensorStorageMetadata")
    shape, chunks, elements = _size(state["size"]), [], 0
    if not isinstance(state["chunks"], list):
        raise TypeError(f"{name[:100]} has no list of rectangles")
    for each in state["chunks"]:
        chunk = _state(each, _METADATA + "ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{name[:100]} has a rectangle outside of its shape {list(shape)}")
        file, start, num_bytes = places.pop((name, offsets))  # once: a list may be that of many tensors
        chunks.append(StoredChunk(offsets, sizes, file, start, num_bytes))
        elements += math.prod(sizes)
    if elements != math.prod(shape):
        raise ValueError(f"{elements} of {math.prod(shape)} elements of {name[:100]} are there")
    return StoredTensor(_dtype(state["properties"]), shape, tuple(chunks))


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) else None
    kind = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(kind, Global) or kind.name not in DTYPES:
        raise ValueError("a tensor has no dtype that is known")
    return DTYPES[kind.name]


def _state(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, Record) or value.name != name:
        raise TypeError(f"there is no {name.rpartition('.')[2]} where one belongs")
    return _table(value.state)


def _table(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError("there is no table where one belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("there is no name where one belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
        raise ValueError("there is no size where one belongs")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """The numbers of a `torch.Size`."""
    numbers = value.arguments[0] if isinstance(value, Record) and value.name == _SIZE and value.arguments else None
    if not isinstance(numbers, tuple) or len(numbers) > MAX_DIMS:
        raise TypeError("there is no shape where one belongs")
    return tuple(_count(number) for number in numbers)


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
_STORAGES = {*_STORAGE_DTYPES, "torch.storage.UntypedStorage"}  # the last has its dtype next to it
_KNOWN_IN_STORAGE = {*_REBUILD, *_STORAGES, *DTYPES, "collections.OrderedDict"}


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
    key, offset, stored_sizes, strides = _layout_in_storage(read_inert(content, _KNOWN_IN_STORAGE.__contains__), dtype)
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
