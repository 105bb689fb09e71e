"""Records of Parquet and Arrow files, and the files of folders that `datasets` saves (`Dataset.save_to_disk`).

`read_documents` calls both functions. They need pyarrow (`pip install threefold[parquet]`), and not `datasets`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.engine.data.text.records import NAME_FIELD, PREFERENCES
from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, read_json_object

ARROW_SUFFIXES = (".parquet", ".arrow")
BATCH_ROWS = 256
# The fields that records of known forms have (`records.py`): other columns are not even decoded.
KNOWN_COLUMNS = (
    "messages",
    "conversations",
    "tools",
    "system",
    "prompt",
    "completion",
    "response",
    "instruction",
    "input",
    "output",
    "history",
    "chat_template_kwargs",
)
STATE, SPLITS, TRAIN = "state.json", "dataset_dict.json", "train"
_FILE_FORMAT = b"ARROW1"


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `datasets` has saved; None for any other folder.

    A folder of several splits means its split `train`; the others are folders in it, such as `data/test`.
    """
    if (folder / SPLITS).is_file():
        splits = _read_facts(folder / SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        chosen = TRAIN if TRAIN in names else names[0] if len(names) == 1 else None
        if chosen is None:
            raise _refused(folder, f"it has the splits {', '.join(names)}", f"name one of them: {folder}/SPLIT")
        folder = folder / chosen
    if not (folder / STATE).is_file():
        return None
    facts = _read_facts(folder / STATE)
    if facts.get("_indices_data_files") or facts.get("_indices_files"):
        raise _refused(folder, "its rows are chosen by an index", "save it again behind flatten_indices()")
    files = facts.get("_data_files")
    listed = [each.get("filename") for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    if not listed or not all(isinstance(name, str) and Path(name).name == name for name in listed):
        raise _refused(folder / STATE, "it names no data files", "save the dataset again")
    return [folder / str(name) for name in listed]


def read_arrow(path: Path, text_field: str, within: Path | None) -> Iterator[tuple[str, Any]]:
    """The rows of a file with their places, from 1. Fields that are null are left out: Arrow has no other absence."""
    try:
        import pyarrow
    except ImportError as error:
        problem, advice = "pyarrow, which reads Parquet and Arrow, is not installed", "pip install threefold[parquet]"
        found = Finding(rule="pyarrow-installed", at=str(path), problem=problem, advice=advice)
        raise FindingsError([found]) from error
    number = 0
    with open_regular(path, within) as file:
        try:
            for batch in _batches(file, path, (*KNOWN_COLUMNS, text_field)):
                batch.validate(full=True)  # reading rows of a damaged batch would read any memory
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", _without_nulls(row)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise _refused(path, f"it cannot be read behind row {number}: {said}", "copy or make it again") from error


def _batches(file: Any, path: Path, columns: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        table = pyarrow.parquet.ParquetFile(file)
        known = _known_columns(path, table.schema_arrow.names, columns)
        yield from table.iter_batches(batch_size=BATCH_ROWS, columns=known)
        return
    in_blocks = file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    file.seek(0)
    reader = pyarrow.ipc.open_file(file) if in_blocks else pyarrow.ipc.open_stream(file)
    known = _known_columns(path, reader.schema.names, columns)
    if in_blocks:
        batches: Iterator[Any] = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        yield batch.select(known)


def _known_columns(path: Path, names: list[str], columns: tuple[str, ...]) -> list[str]:
    known = [name for name in names if name in columns]
    judged = [name for name in PREFERENCES if name in names and name not in known]  # `parse_record` refuses them
    if not known and not {"chosen", "rejected"} <= set(judged):
        raise _refused(path, f"none of its columns is known: {', '.join(names)[:200]}", NAME_FIELD)
    return known + judged


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null. The content of a message stays: a turn may have none but tool calls."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None or name == "content"}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {error}", "save the dataset again") from error


def _refused(path: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="text-readable", at=str(path), problem=problem, advice=advice)])
