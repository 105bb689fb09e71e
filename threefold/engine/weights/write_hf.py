"""Writes the engine's weights as a folder that `transformers` loads, with one shard in memory at a time.

`export_hf` calls `write_hf`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from threefold.engine.weights.hf_names import HfTensor, duplicated_keys, hf_layouts, names_of
from threefold.engine.weights.safetensors_files import INDEX, SINGLE, refuse
from threefold.spec.hf import hf_config_of
from threefold.spec.model import ModelSpec

MAX_SHARD_BYTES = 5_000_000_000  # what transformers writes by default


@dataclass(frozen=True)
class _Item:
    """One Hugging Face tensor to write."""

    name: str  # of the engine tensor
    tensor: HfTensor
    num_bytes: int


def write_hf(
    model_or_state: nn.Module | Mapping[str, Tensor],
    spec: ModelSpec,
    folder: Path,
    hf_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write safetensors and config.json. Tensors keep their dtype.

    `hf_config` is the configuration of the imported model; None makes one from the spec. The index and config.json are
    written last, so that an incomplete folder does not load.
    """
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    shards = _split_into_shards(list(_items(state, spec)), max_shard_bytes)
    config = _config_to_write(hf_config or hf_config_of(spec), state)
    names = _shard_names(len(shards))
    with _removed_on_failure(folder, [*names, INDEX, "config.json"]):
        for name, items in zip(names, shards, strict=True):
            _save(folder / name, {item.tensor.key: item.tensor.read(state[item.name]) for item in items})
        if len(shards) > 1:
            _save_index(folder / INDEX, names, shards)
        _write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


@contextmanager
def _removed_on_failure(folder: Path, names: list[str]) -> Iterator[None]:
    """Make the folder; where writing fails, as on a full disk, remove what was not there before."""
    before = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        new = [f"{name}.part" for name in names] + [name for name in names if name not in (before or ())]
        for name in new:
            with suppress(OSError):  # the folder could not be made
                (folder / name).unlink(missing_ok=True)
        if before is None:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            advice = "give a folder that can be written, with enough space"
            raise refuse(f"cannot write {folder}: {error}", advice) from None
        raise


def _items(state: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[_Item]:
    depths = {name.split(".")[1] for name in state if name.startswith("mtp.")}
    if names_of(spec.family).mtp == "one" and len(depths) > 1:
        raise refuse(f"{spec.family} checkpoints hold one MTP depth", "train with job.mtp = 1 or 0")
    for name, tensor in state.items():
        for hf_tensor in hf_layouts(name, spec)[0]:
            yield _Item(name, hf_tensor, hf_tensor.num_elements(tensor) * tensor.element_size())
    for key, name in duplicated_keys(spec, len(depths)).items():
        yield _Item(name, HfTensor(key), state[name].numel() * state[name].element_size())


def _split_into_shards(items: list[_Item], max_bytes: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.num_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _config_to_write(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration with the dtype that the weights have now, and without quantization."""
    unchanged = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    return {**unchanged, "dtype": str(state["embed.weight"].dtype).removeprefix("torch.")}


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(path.name + ".part")
    save_file({key: _unshared(tensor) for key, tensor in tensors.items()}, str(part), metadata={"format": "pt"})
    part.replace(path)


def _unshared(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in memory that no other tensor shares: safetensors refuses shared memory.

    Two keys may hold the same engine tensor.
    """
    moved = tensor.detach().to("cpu")
    return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved


def _save_index(path: Path, names: list[str], shards: list[list[_Item]]) -> None:
    files = {item.tensor.key: name for name, items in zip(names, shards, strict=True) for item in items}
    total = sum(item.num_bytes for items in shards for item in items)
    _write_atomically(path, json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n")


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
