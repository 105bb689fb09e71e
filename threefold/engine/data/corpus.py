"""The embedded corpus: text that every Python brings along, so that training needs no download.

Sources of the standard library and the language reference that `help()` shows, as byte tokens. Which documents, and in
which order, follows from their names and content alone, so one Python release always gives the same corpus.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from threefold.engine.data.cache import cache_folder
from threefold.engine.data.shard import SUFFIX, Shard
from threefold.engine.data.tokenizer import BYTE_SPECIALS, ByteTokenizer
from threefold.engine.data.writer import ShardWriter
from threefold.findings import Finding, FindingsError
from threefold.units import KIB, MIB

RECIPE = 1  # of the selection below: another number makes another file
MAX_BYTES = 4 * MIB
MIN_BYTES = 256 * KIB  # less would be learned by heart in a minute
DOCUMENT_BYTES = (512, 128 * KIB)
MAX_LINE = 200  # tables and generated code have longer lines
# Generated or machine-made, tests, demos, and tables of characters.
LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip"}


def embedded_corpus(folder: str | Path | None = None) -> Shard:
    """The corpus as a shard in the cache folder; made when it is not there, or damaged."""
    path = corpus_path(folder)
    try:
        return Shard(path, verify=True)
    except FindingsError:
        return _write(path)


def corpus_path(folder: str | Path | None = None) -> Path:
    return cache_folder(folder) / f"embedded-{RECIPE}-{platform.python_version()}{SUFFIX}"


def unigram_entropy(shard: Shard) -> float:
    """Nats per token of a model that knows how frequent tokens are, and nothing else: what training must beat."""
    counts = np.zeros(shard.header.vocab, np.int64)
    for start in range(0, len(shard.tokens), MIB):
        counts += np.bincount(shard.tokens[start : start + MIB], minlength=shard.header.vocab)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def corpus_documents() -> list[tuple[str, str]]:
    """Names and texts, shuffled by the hash of the name, so that any part of the corpus is like the whole."""
    found = [(name, text) for name, text in [*_sources(), *_topics()] if _suits(text)]
    found.sort(key=lambda document: hashlib.sha256(document[0].encode()).digest())
    chosen, size = [], 0
    for name, text in found:
        size += len(text.encode())
        if size > MAX_BYTES:
            break
        chosen.append((name, text))
    return chosen


def _write(path: Path) -> Shard:
    tokenizer = ByteTokenizer()
    documents = corpus_documents()
    if sum(len(text) for _, text in documents) < MIN_BYTES:
        problem = "this Python has no standard library sources to make the embedded corpus from"
        advice = "make a shard with threefold tokenize and give its path"
        raise FindingsError([Finding(rule="data-empty", at="job.data", problem=problem, advice=advice)])
    with ShardWriter(path, tokenizer.vocab, tokenizer.label) as writer:
        for _, text in documents:
            writer.add(np.append(tokenizer.encode(text), BYTE_SPECIALS["<|endoftext|>"]))
    return Shard(path, verify=True)


def _sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        top = name.parts[0].removesuffix(".py")
        if top not in sys.stdlib_module_names or LEFT_OUT & set(name.parts):
            continue
        try:
            yield name.as_posix(), file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue


def _topics() -> Iterator[tuple[str, str]]:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions split it off
        return
    yield from ((f"topic {name}", str(text)) for name, text in topics.items())


def _suits(text: str) -> bool:
    least, most = DOCUMENT_BYTES
    return (
        least <= len(text.encode()) <= most
        and text.isascii()
        and "\0" not in text
        and max(map(len, text.splitlines())) <= MAX_LINE
    )
