"""The index of a checkpoint in torch's format (`.metadata`): which rectangles of a tensor lie where in which file.

The index is a pickle of torch's own classes (torch/distributed/checkpoint/metadata.py, as of torch 2.13; the fields
that are used here are older). It may come from a stranger, so that it is read as plain data (`inert_pickle.py`), and
every value is checked before anything is allocated: `dcp.py` can rely on it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threefold.engine.run.checkpoint_manifest import DTYPES, INDEX, MAX_DIMS, MAX_ELEMENTS, damaged
from threefold.inert_pickle import MAX_OPERATIONS, Global, Record, read_inert
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
