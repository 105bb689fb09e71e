"""Small TOML files of users: plans and chip files. A file that cannot be read is a finding, never an exception."""

import os
import select
import tomllib
from pathlib import Path
from typing import Any

from threefold.findings import Finding

MAX_KEY_PARTS = 100  # reading one of thousands takes seconds
MAX_FILE_BYTES = 2**20  # a plan is a page of text; a larger file is something else
SILENT_SECONDS = 10.0  # that a pipe may be silent, as that of `threefold check <(make_plan)`


def load_toml(
    path: Path, kind: str = "plan", example: str = 'model = "qwen3-30b-a3b"'
) -> tuple[dict[str, Any], list[Finding]]:
    """The tables of a small TOML file, or a finding that says why there are none."""

    def refuse(problem: str, advice: str) -> tuple[dict[str, Any], list[Finding]]:
        return {}, [Finding(rule="file-readable", at=str(path), problem=problem, advice=advice)]

    give = f"give the path of a {kind} file"
    try:
        if path.is_dir():
            return refuse("this is a folder", give)
        data = _read_some(path)
    except OSError as error:
        return refuse(f"cannot be read: {error.strerror or error}", give)
    except ValueError as error:
        return refuse(f"cannot be read: {error}", give)
    if len(data) > MAX_FILE_BYTES:
        return refuse(f"more than {MAX_FILE_BYTES} bytes are too many for a {kind}", give)
    if not data.strip():
        return refuse("the file is empty", f"begin with {example}")
    try:
        text = data.decode("utf-8")
        if any(line.partition("=")[0].count(".") > MAX_KEY_PARTS for line in text.splitlines()):
            return refuse(f"a key of more than {MAX_KEY_PARTS} parts", "no field has more than three")
        return tomllib.loads(text), []
    except UnicodeDecodeError as error:
        return refuse(f"not UTF-8 text (byte {error.start})", "save the file as UTF-8")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        return refuse(f"not valid TOML: {error}", "correct the TOML")


def _read_some(path: Path) -> bytes:
    """The first bytes of a file or of a pipe. A FIFO into which nobody writes is empty, and no reason to wait."""
    data = b""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        while len(data) <= MAX_FILE_BYTES:
            if not select.select([file], [], [], SILENT_SECONDS)[0]:
                raise OSError(f"a pipe into which nothing was written for {SILENT_SECONDS:.0f} s")
            part = file.read(MAX_FILE_BYTES + 1 - len(data))
            if not part:
                break
            data += part
    return data
