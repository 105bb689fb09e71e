"""Splits documents into a part to train on and a part that is held out for evaluation, by the hash of their content.

`open_sources` calls `split_stores` before anything is packed, so that the length of a document has no influence on the
part it falls into, and equal documents fall into the same one. The split depends on the content and the seed alone: not
on `seq_len`, packing, the number of ranks, or where the files lie.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.packing import DocumentSpans, DocumentStore, Ints, Sample
from threefold.engine.data.sources import Source, num_vision_tokens
from threefold.engine.data.token_shard import CONTINUES

UNIT_TOKENS = 4096  # a longer document of a stream is split in pieces of this size, each with a hash of its own
FEWEST_UNITS = 64  # a stream of fewer pieces is split in smaller ones
LEAST_UNIT_TOKENS = 32
HASHED_TOKENS = 256  # at the start of a unit, that its hash is made of, with its size
_HASHES = 2.0**64


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out part: its share, the seed of the hash, and the part that is asked for."""

    share: float  # of the tokens, between 0 and 1
    seed: int
    evaluation: bool  # whether the part for evaluation is asked for, not that for training

    @property
    def facts(self) -> dict[str, Any]:
        return {"part": "evaluation" if self.evaluation else "training", "share": self.share, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class _Units:
    """The units of one store that fall into a part as a whole: documents, or pieces of long ones."""

    begin_U: Ints
    size_U: Ints
    opens_U: NDArray[np.bool_]  # whether a unit is the first of its document
    hash_U: NDArray[np.float64]  # between 0 and 1


def split_stores(stores: Sequence[DocumentStore], held_out: HeldOut, whole: bool) -> list[DocumentStore]:
    """The asked-for part of each store of one source; stores without any are left out.

    `whole`: documents are never split, as conversations must be, and those of one conversation stay together. Each part
    gets at least one unit where there are two.
    """
    units = [_hashed_units(store, held_out.seed, whole) for store in stores]
    hashes = np.concatenate([each.hash_U for each in units]) if units else np.array([])
    below = _threshold(hashes, held_out.share)
    parts: list[DocumentStore] = []
    for store, each in zip(stores, units, strict=True):
        part = _chosen(store, each, (each.hash_U < below) == held_out.evaluation, held_out)
        if part.num_tokens:
            parts.append(part)
    return parts


def _threshold(hashes: NDArray[np.float64], share: float) -> float:
    """Units with a hash below it are held out: the share of them, but at least one and not all."""
    ordered = np.unique(hashes)
    if len(ordered) < 2:
        return 0.0
    return float(min(max(share, np.nextafter(ordered[0], 1)), ordered[-1]))


def _chosen(store: DocumentStore, units: _Units, chosen_U: NDArray[np.bool_], held_out: HeldOut) -> DocumentSpans:
    # A piece continues its document where the piece before it is in the same part.
    follows_U = np.append(False, chosen_U[:-1]) & ~units.opens_U
    opens_U = ~follows_U[chosen_U]
    return DocumentSpans(store, units.begin_U[chosen_U], units.size_U[chosen_U], opens_U, held_out.facts)


def _hashed_units(store: DocumentStore, seed: int, whole: bool) -> _Units:
    offsets = np.asarray(store.offsets).astype(np.int64)
    sizes = np.diff(offsets)
    unit = int(sizes.max(initial=1)) if whole else _unit_tokens(sizes)
    counts = -(-sizes // unit)
    first_of_document = np.cumsum(counts) - counts
    number_in_document = np.arange(int(counts.sum())) - np.repeat(first_of_document, counts)
    begin_U = np.repeat(offsets[:-1], counts) + unit * number_in_document
    size_U = np.minimum(unit, np.repeat(offsets[1:], counts) - begin_U)
    hash_U = np.array(
        [_hash(store, int(begin), int(size), seed) for begin, size in zip(begin_U, size_U, strict=True)], np.float64
    )
    if whole and store.masked:
        for unit_number, begin in enumerate(begin_U[1:].tolist(), 1):
            if store.read_mask(begin, begin + 1)[0] & CONTINUES:
                hash_U[unit_number] = hash_U[unit_number - 1]
    return _Units(begin_U, size_U, number_in_document == 0, hash_U)


def _unit_tokens(sizes: Ints) -> int:
    unit = UNIT_TOKENS
    while unit > LEAST_UNIT_TOKENS and int((-(-sizes // unit)).sum()) < FEWEST_UNITS:
        unit //= 2
    return unit


def _hash(store: DocumentStore, begin: int, size: int, seed: int) -> float:
    tokens = store.read(begin, begin + min(size, HASHED_TOKENS))
    return _uniform(tokens.astype("<i8").tobytes(), f"{seed} {size}")


def _uniform(content: bytes, key: str) -> float:
    """A number between 0 and 1 for a content."""
    digest = hashlib.blake2b(content, digest_size=8, key=key.encode())
    return int.from_bytes(digest.digest(), "little") / _HASHES


@dataclass(frozen=True)
class ChosenSamples:
    """Some samples of a source, of which no two share a document."""

    source: Source
    indices: Ints
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    @property
    def benchmark_only(self) -> bool:
        return self.source.benchmark_only

    def sample(self, index: int) -> Sample:
        return self.source.sample(int(self.indices[index]))

    def num_vision_tokens(self, index: int) -> int:
        return num_vision_tokens(self.source, int(self.indices[index]))

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}({self.facts})"

    def content(self) -> dict[str, Any]:
        return {**self.source.content(), "split": self.facts}


def split_samples(source: Source, held_out: HeldOut) -> ChosenSamples:
    """The asked-for samples of a source of images, chosen by the hash of their number: packing orders by length."""
    numbers = np.arange(source.num_samples)
    hashes = np.array([_uniform(str(number).encode(), f"{held_out.seed}") for number in numbers], np.float64)
    chosen = (hashes < _threshold(hashes, held_out.share)) == held_out.evaluation
    return ChosenSamples(source, numbers[chosen], held_out.facts)
