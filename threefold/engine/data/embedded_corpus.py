"""The embedded corpus (`job.data = "embedded"`): text that comes with every Python, so that no download is needed.

It consists of sources of the standard library and of the language reference that `help()` shows, as byte tokens. The
choice and order of documents depend on their names and content only, so that one Python release always has the same
corpus. `open_sources` calls `embedded_corpus`, which writes the shard to the cache folder once.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from threefold.engine.data.cache_files import cache_folder
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data.text.tokenizer import BYTE_SPECIALS, ByteTokenizer
from threefold.engine.data.token_shard import SUFFIX, TokenShard
from threefold.findings import Finding, FindingsError
from threefold.units import KIB, MIB

RECIPE = 1  # version of the selection below; it is part of the file name
MAX_BYTES = 4 * MIB
MIN_BYTES = 256 * KIB  # a smaller corpus would be memorized within a minute of training
DOCUMENT_BYTES = (512, 128 * KIB)  # smallest and largest document
MAX_LINE = 200  # characters; tables and generated code have longer lines
# Generated files, tests, demos, and tables of characters.
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "encodings",
    "ensurepip",
}


def embedded_corpus(folder: str | Path | None = None) -> TokenShard:
    """The corpus as a shard in the cache folder. It is made if it is missing or damaged."""
    path = corpus_path(folder)
    try:
        return TokenShard(path, verify=True)
    except FindingsError:
        return _write_corpus(path)


def corpus_path(folder: str | Path | None = None) -> Path:
    return cache_folder(folder) / f"embedded-{RECIPE}-{platform.python_version()}{SUFFIX}"


def corpus_documents() -> list[tuple[str, str]]:
    """Names and texts, ordered by the hash of the name, so that any part of the corpus resembles the whole."""
    documents = [(name, text) for name, text in [*_library_sources(), *_help_topics()] if _is_suitable(text)]
    documents.sort(key=lambda document: hashlib.sha256(document[0].encode()).digest())
    chosen, size = [], 0
    for name, text in documents:
        size += len(text.encode())
        if size > MAX_BYTES:
            break
        chosen.append((name, text))
    return chosen


def _write_corpus(path: Path) -> TokenShard:
    tokenizer = ByteTokenizer()
    documents = corpus_documents()
    if sum(len(text) for _, text in documents) < MIN_BYTES:
        problem = "this Python has no standard library sources to make the embedded corpus from"
        advice = "make a shard with threefold tokenize and give its path"
        raise FindingsError([Finding(rule="data-empty", at="job.data", problem=problem, advice=advice)])
    with ShardWriter(path, tokenizer.vocab, tokenizer.label) as writer:
        for _, text in documents:
            writer.add(np.append(tokenizer.encode(text), BYTE_SPECIALS["<|endoftext|>"]))
    return TokenShard(path, verify=True)


def _library_sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        top = name.parts[0].removesuffix(".py")
        if top not in sys.stdlib_module_names or EXCLUDED_FOLDERS & set(name.parts):
            continue
        try:
            yield name.as_posix(), file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue


def _help_topics() -> Iterator[tuple[str, str]]:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:  # some Linux distributions package it separately
        return
    yield from ((f"topic {name}", str(text)) for name, text in topics.items())


def _is_suitable(text: str) -> bool:
    least, most = DOCUMENT_BYTES
    return (
        least <= len(text.encode()) <= most
        and text.isascii()
        and "\0" not in text
        and max(map(len, text.splitlines())) <= MAX_LINE
    )
