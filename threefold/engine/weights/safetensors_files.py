"""A folder of safetensors files: which file holds which tensor, with tensors read on request.

`read_hf` opens the folder. Every failure (a missing or truncated file, a wrong index) is a finding.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from threefold.findings import Finding, FindingsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_OPEN = 4  # files that are mapped at a time; a layer lies in at most two files


def finding(problem: str, advice: str) -> Finding:
    return Finding(rule="hf-weights", at="weights", problem=problem, advice=advice)


def refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([finding(problem, advice)])


class SafetensorsFolder:
    """The tensors of a folder. Files are opened, and tensors read, when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.file_of = self._keys_of_index() if (folder / INDEX).is_file() else self._keys_of_files()

    @property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns of a block of fp8 weights: `weight_block_size` of config.json, by default 128 x 128."""
        try:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            rows, columns = config["quantization_config"]["weight_block_size"]
            return int(rows), int(columns)
        except (OSError, ValueError, KeyError, TypeError):
            return 128, 128

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The dtype as safetensors names it: F32, BF16, F8_E4M3, U8, ..."""
        return str(self._slice(key).get_dtype())

    def tensor(self, key: str) -> Tensor:
        try:
            return self._file(self.file_of[key]).get_tensor(key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise refuse(f"cannot read {key} from {self.file_of[key]}: {error}", "download that file again") from None

    def _slice(self, key: str) -> Any:
        return self._file(self.file_of[key]).get_slice(key)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open)))
            try:
                self._open[name] = safe_open(str(self.folder / name), framework="pt")
            except (SafetensorError, OSError, RuntimeError) as error:
                raise refuse(f"{name} is no whole safetensors file: {error}", "download that file again") from None
        return self._open[name]

    def _keys_of_files(self) -> dict[str, str]:
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise refuse(f"{self.folder} holds no safetensors", "only safetensors is loaded: convert or download them")
        return {key: name for name in names for key in self._file(name).keys()}  # noqa: SIM118

    def _keys_of_index(self) -> dict[str, str]:
        try:
            files = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in files.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise refuse(f"{INDEX} is no index of weights: {error!r}", "download it again") from None
        problems = list(self._check_index(names, files))
        if problems:
            raise FindingsError(problems)
        return dict(files)

    def _check_index(self, names: list[str], files: dict[str, str]) -> Iterable[Finding]:
        """A finding for each file that is missing, is damaged, or lacks a tensor that the index names."""
        for name in names:
            path = self.folder / name
            if path.name != name or path.suffix != ".safetensors":
                yield finding(f"{INDEX} names {name!r}, no safetensors file of the folder", "correct the index")
            elif not path.is_file():
                yield finding(f"{name}, named in {INDEX}, is missing", "download it, or correct its name")
            else:
                try:
                    held = set(self._file(name).keys())
                except FindingsError as error:
                    yield from error.findings
                    continue
                lost = sorted(key for key, file in files.items() if file == name and key not in held)
                if lost:
                    yield finding(f"{name} lacks {abbreviate(lost)}", f"download it and {INDEX} again")


def abbreviate(names: list[str]) -> str:
    """At most three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
