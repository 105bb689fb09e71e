"""A folder of safetensors files: which file holds which tensor, with tensors read on request.

`read_hf` opens the folder. Every failure (a missing or truncated file, a wrong index) is a finding.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from threefold.findings import Finding, FindingsError, shown
from threefold.safe_files import open_regular, read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_OPEN = 4  # files that are mapped at a time; a layer lies in at most two files
_MAX_NAME_BYTES = 255  # of a file, on all file systems in use
_MAX_BLOCK = 2**20
_MOST_FINDINGS = 100
# What safetensors and torch raise for a file that is damaged or of a dtype that torch lacks.
READ_ERRORS = (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)


def finding(problem: str, advice: str) -> Finding:
    return Finding(rule="hf-weights", at="weights", problem=problem, advice=advice)


def refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([finding(problem, advice)])


class SafetensorsFolder:
    """The tensors of a folder. Files are opened, and tensors read, when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.file_of = self._keys_of_index() if _is_there(folder / INDEX) else self._keys_of_files()

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says; empty where there is none that can be read."""
        try:
            return read_json_object(self.folder / "config.json", within=self.folder)
        except (OSError, ValueError):
            return {}

    @cached_property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns of a block of fp8 weights: `weight_block_size` of config.json, by default 128 x 128."""
        quantization = self.config.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if block is None:
            return 128, 128
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(side) is int and 0 < side <= _MAX_BLOCK for side in block)
        ):
            problem = f"weight_block_size of config.json is {shown(block)}, not rows and columns of a block"
            raise refuse(problem, "download config.json again")
        return block[0], block[1]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The dtype as safetensors names it: F32, BF16, F8_E4M3, U8, ..."""
        return str(self._slice(key).get_dtype())

    def tensor(self, key: str) -> Tensor:
        try:
            return self._file(self.file_of[key]).get_tensor(key)
        except READ_ERRORS as error:
            raise refuse(f"cannot read {key} from {self.file_of[key]}: {error}", "download that file again") from None

    def _slice(self, key: str) -> Any:
        try:
            return self._file(self.file_of[key]).get_slice(key)
        except READ_ERRORS as error:
            raise refuse(f"cannot read {key} from {self.file_of[key]}: {error}", "download that file again") from None

    def _file(self, name: str) -> Any:
        if name not in self._open:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open)))
            try:
                open_regular(self.folder / name, within=self.folder).close()
                self._open[name] = safe_open(str(self.folder / name), framework="pt")
            except READ_ERRORS as error:
                raise refuse(f"{name} is no whole safetensors file: {error}", "download that file again") from None
        return self._open[name]

    def _keys_of_files(self) -> dict[str, str]:
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise refuse(f"{self.folder} holds no safetensors", "only safetensors is loaded: convert or download them")
        return {key: name for name in names for key in self._file(name).keys()}  # noqa: SIM118

    def _keys_of_index(self) -> dict[str, str]:
        try:
            files = read_json_object(self.folder / INDEX, within=self.folder)["weight_map"]
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise ValueError("weight_map is no table of file names")
        except (OSError, ValueError, KeyError) as error:
            raise refuse(f"{INDEX} is no index of weights: {error!r}", "download it again") from None
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key, name in files.items():
            keys_of[name].append(key)
        problems = list(islice(self._check_index(keys_of), _MOST_FINDINGS))
        if problems:
            raise FindingsError(problems)
        return files

    def _check_index(self, keys_of: dict[str, list[str]]) -> Iterable[Finding]:
        """A finding for each file that is missing, is damaged, or lacks a tensor that the index names."""
        for name, keys in sorted(keys_of.items()):
            path = self.folder / name
            if path.name != name or path.suffix != ".safetensors" or len(os.fsencode(name)) > _MAX_NAME_BYTES:
                yield finding(f"{INDEX} names {shown(name)}, no safetensors file of the folder", "correct the index")
            elif not _is_there(path):
                yield finding(f"{name}, named in {INDEX}, is missing", "download it, or correct its name")
            else:
                try:
                    held = set(self._file(name).keys())
                except FindingsError as error:
                    yield from error.findings
                    continue
                lost = sorted(key for key in keys if key not in held)
                if lost:
                    yield finding(f"{name} lacks {abbreviate(lost)}", f"download it and {INDEX} again")


def _is_there(path: Path) -> bool:
    """Whether there is something of this name, be it a link to nothing or no file at all: opening it says so."""
    return os.path.lexists(path)


def abbreviate(names: list[str]) -> str:
    """At most three names, and how many more there are."""
    first = ", ".join(name if len(name) <= 200 else f"{name[:200]}..." for name in names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
