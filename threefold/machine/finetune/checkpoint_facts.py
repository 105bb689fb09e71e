"""What a plan needs to know of a Hugging Face checkpoint and of data files, read without torch.

`plan_finetune.py` chooses settings by it. The weights themselves are read by `import-hf`.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from threefold.engine.data.megatron_dataset import MegatronDataset
from threefold.engine.data.text.records import COMPLETIONS
from threefold.engine.data.text.tokenizer_files import read_tokenizer_settings
from threefold.engine.data.token_shard import SUFFIX, TokenShard
from threefold.engine.weights.stored_formats import check_stored_format
from threefold.fields import MAX_INT
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import DataEntry, megatron_prefix, parse_entries, parse_validation
from threefold.safe_files import open_regular, parse_json, read_json_object
from threefold.spec.hf import model_from_config
from threefold.spec.longer_context import num_positions
from threefold.spec.model import ModelSpec

MAX_HEADER_BYTES = 2**27
MAX_LINE_BYTES = 2**26
_HEAD_BYTES = 2**16
_RECORDS = (".jsonl", ".json", ".parquet", ".arrow")
_CHATS = ("messages", "conversations", "instruction", *COMPLETIONS)  # fields of records that have answers


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint as far as a plan depends on it."""

    folder: Path
    spec: ModelSpec
    max_len: int | None  # tokens that its positions reach; None where the configuration does not say
    dtype: str  # of the embedding: F32, BF16, F16, ...
    has_mtp: bool  # weights of multi-token prediction are stored
    has_tokenizer: bool
    has_template: bool = True  # the tokenizer has a chat template


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Data files as far as a plan depends on them."""

    entries: tuple[str, ...]  # as `job.data` takes them, with absolute paths
    num_bytes: int  # of text
    has_answers: bool  # records are chats or prompts with completions, of which the answers are learned
    num_records: int | None  # records of the files of lines; None where a file has no lines to count
    num_tokens: int = 0  # of shards and of Megatron's files, which are tokens already


def checkpoint_facts(folder: Path) -> CheckpointFacts:
    """Read the configuration and the headers of the weights. Raises a finding where there is no checkpoint."""
    spec = model_from_config(folder)
    config = read_json_object(folder / "config.json", within=folder)
    check_stored_format(config)
    dtypes = dict(_stored_dtypes(folder))
    if not dtypes:
        problem, advice = "no safetensors beside config.json", "give the folder that holds both"
        raise FindingsError([Finding(rule="convertible", at=str(folder), problem=problem, advice=advice)])
    embedding = next((dtype for key, dtype in dtypes.items() if key.endswith("embed_tokens.weight")), "BF16")
    depths = [f"model.layers.{spec.num_layers + depth}." for depth in range(spec.mtp_layers)]
    has_mtp = any(key.startswith(("mtp.", *depths)) for key in dtypes)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    has_template = has_tokenizer and bool(read_tokenizer_settings(folder).templates)
    return CheckpointFacts(folder, spec, num_positions(config), embedding, has_mtp, has_tokenizer, has_template)


def _stored_dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    """Key and dtype of each stored tensor, from the headers of the files."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open_regular(path) as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > MAX_HEADER_BYTES:
                    raise ValueError(f"a header of {size} bytes")
                header = parse_json(file.read(min(size, path.stat().st_size)))
            yield from ((key, value["dtype"]) for key, value in header.items() if key != "__metadata__")
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
            finding = Finding(
                rule="convertible", at=str(path), problem=f"cannot be read: {error}", advice="download it again"
            )
            raise FindingsError([finding]) from None


def data_facts(entries: Sequence[str]) -> DataFacts:
    """Size and kind of the data, told by the header or the first record of each file."""
    stores: list[TokenShard | MegatronDataset] = []
    texts: list[Path] = []
    parsed = parse_entries(list(entries))
    for entry in parsed:
        _check_exists(entry, "--data")
        path = Path(entry.name)
        shards = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.suffix == SUFFIX else []
        if prefix := megatron_prefix(entry.name):
            stores.append(MegatronDataset(prefix, MAX_INT))
        elif shards:  # no text is read of a folder that has them
            stores += [TokenShard(each, verify=False) for each in shards]
        elif not entry.is_built_in:
            texts += [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
    lines = [path for path in texts if path.suffix == ".jsonl"]
    records = sum(_count_lines(path) for path in lines) if lines and len(lines) == len(texts) and not stores else None
    has_answers = any(_has_answers(path) for path in texts if path.suffix in _RECORDS)
    has_answers = has_answers or any(store.masked for store in stores)
    absolute = tuple(_absolute(text, entry) for text, entry in zip(entries, parsed, strict=True))
    num_tokens = sum(store.num_tokens for store in stores)
    return DataFacts(absolute, sum(path.stat().st_size for path in texts), has_answers, records, num_tokens)


def validation_entries(sets: Sequence[str]) -> tuple[str, ...]:
    """The validation sets as `job.val_data` takes them, `NAME=path` among them, with absolute paths."""
    found = []
    for text in sets:
        [entry_text] = parse_validation(text).values()
        [entry] = parse_entries(entry_text)
        _check_exists(entry, "--val")
        found.append(text.removesuffix(entry_text) + _absolute(entry_text, entry))
    return tuple(found)


def _check_exists(entry: DataEntry, at: str) -> None:
    if not entry.exists:
        problem, advice = f"{entry.name} is not here", "give the path of a file or folder"
        raise FindingsError([Finding(rule="data-exists", at=at, problem=problem, advice=advice)])


def _absolute(text: str, entry: DataEntry) -> str:
    return text if entry.is_built_in else str(Path(entry.name).resolve()) + text[len(entry.name) :]


def _count_lines(path: Path) -> int:
    with _open_data(path) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


def _open_data(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        problem, advice = f"cannot be read: {error.strerror or error}", "give a file that you may read"
        raise FindingsError([Finding(rule="text-readable", at=str(path), problem=problem, advice=advice)]) from None


def _has_answers(path: Path) -> bool:
    """Whether the first record has an answer to learn. Parquet and Arrow name their columns at an end of the file."""
    size = path.stat().st_size
    with _open_data(path) as file:
        if path.suffix == ".jsonl":
            head = next((line for line in iter(lambda: file.readline(MAX_LINE_BYTES), b"") if line.strip()), b"")
        else:
            head = file.read(_HEAD_BYTES)
            if path.suffix != ".json" and size > _HEAD_BYTES:
                file.seek(max(_HEAD_BYTES, size - _HEAD_BYTES))
                head += file.read()
    try:
        record = json.loads(head)
    except (ValueError, RecursionError):  # columns, or the beginning of a list of records
        names = [f'"{name}"' for name in _CHATS] if path.suffix == ".json" else _CHATS
        return any(name.encode() in head for name in names)
    record = record[0] if isinstance(record, list) and record else record
    return isinstance(record, dict) and any(name in record for name in _CHATS)
