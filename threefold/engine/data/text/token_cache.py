"""Text that is tokenized once: a shard in the cache folder for the content of files, tokenizer and chat template.

`open_sources` calls `cached_shard` for text, JSONL, JSON, Parquet, Arrow and folders of them. Beside the shard lies a
small JSON file with what was said when it was made, so that every run on it says so too.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from threefold.engine.data.cache_folder import cache_folder
from threefold.engine.data.shards.atomic_writer import unwritable
from threefold.engine.data.shards.token_shard import SUFFIX, TokenShard
from threefold.engine.data.text.read_documents import list_files
from threefold.engine.data.text.tokenize_files import MAX_BAD_RECORDS, tokenize_files
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, read_json, write_aside
from threefold.units import MIB

VERSION = 3  # of how text becomes tokens
_FIELDS = ("at", "problem", "advice", "rule")


def cached_shard(
    source: str,
    tokenizer: Tokenizer,
    cache: str | Path | None = None,
    max_bad_records: float = MAX_BAD_RECORDS,
    text_field: str = "text",
) -> tuple[TokenShard, list[Finding]]:
    """The tokenized source as a shard in the cache folder, made at first use, and warnings about it."""
    template = tokenizer.settings.template_digest
    settings = (tokenizer.label, tokenizer.end, template, max_bad_records, text_field, VERSION)
    digest = hashlib.sha256(repr(settings).encode())
    _add_files(digest, Path(source))
    out = cache_folder(cache) / f"text-{digest.hexdigest()[:24]}{SUFFIX}"
    try:
        return TokenShard(out, verify=True), _read_warnings(out)
    except FindingsError:
        pass
    with _locked(out):  # the other ranks of a machine wait, and find the shard made
        try:
            return TokenShard(out, verify=True), _read_warnings(out)
        except FindingsError:
            made = tokenize_files([source], out, tokenizer, text_field=text_field, max_bad_records=max_bad_records)
        said = [{name: getattr(found, name) for name in _FIELDS} for found in made.warnings()]
        with contextlib.suppress(OSError):  # the shard is what counts
            write_aside(out.with_suffix(".json"), json.dumps(said).encode())
        return TokenShard(out, verify=True), made.warnings()


def _add_files(digest: "hashlib._Hash", source: Path) -> None:
    """Add names and content of all files. Those of a folder that cannot be read are skipped by `read_documents` too."""
    for path, within in list_files(source):
        digest.update(f"\0{path.suffix if within is None else path.relative_to(within)}\0".encode("utf-8", "replace"))
        try:
            with open_regular(path, within) as file:
                while part := file.read(MIB):
                    digest.update(part)
        except OSError as error:
            if within is None:
                raise _unreadable(source, error) from error


def _read_warnings(shard: Path) -> list[Finding]:
    try:
        said = read_json(shard.with_suffix(".json"))
        texts = [[str(each[name]) for name in _FIELDS] for each in said]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [
        Finding(at=at, problem=problem, advice=advice, rule=rule, severity="warning")
        for at, problem, advice, rule in texts
    ]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        with contextlib.suppress(OSError):  # a file system without locks: each rank makes the shard
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unreadable(path: Path, error: OSError) -> FindingsError:
    problem = f"cannot be read: {error.strerror or error}"
    advice = "give the path of a text file, JSONL, Parquet or a folder"
    return FindingsError([Finding(rule="text-readable", at=str(path), problem=problem, advice=advice)])
