"""Ranks entries for a query: rare words count more, names than answers, and answers more than the text of an entry.

Called by `threefold find`, and the library's `find`. There is no index: the pages are about a megabyte, which is read
and counted in a tenth of a second.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from threefold.lookup.entries import Entry, all_entries
from threefold.lookup.names import setting_entries
from threefold.lookup.runs import run_entries
from threefold.lookup.synonyms import related

Searched = tuple[Entry, str, str, str, str]  # its name, answer and text in plain words, and all of these
_NAME, _ANSWER, _TEXT = 5.0, 2.5, 1.0
_BEHIND = 0.6  # the prior of logs of measurements, and of arguments
_LOG = 3.0  # the text of a death has the words of logs
_LONG = 1500.0  # letters beyond which a text says less by having a word
# Guides and rules answer; logs and lists of coverage back them up.
_PRIOR = {"rule": 1.2, "field": 1.25, "command": 1.1, "word": 1.1, "recipe": 0.8, "row": 0.7, "run": 0.5, "name": 0.7}
_KEPT = "abcdefghijklmnopqrstuvwxyz0123456789+"
_PLAIN = defaultdict(lambda: " ", {ord(letter): letter for letter in _KEPT})
_STOP = set(
    re.findall(
        r"\w+",
        "a an and are be can do does for from how i in into is it my of on or the to what when which with why should "
        "use using we you not",
    )
)


def find(query: str, kind: str | None = None, most: int = 8) -> list[Entry]:
    """The best entries for a query, best first; with `kind` those of one kind alone."""
    phrases = related(query)
    weights = dict.fromkeys(_words(query), 0.5 if 1.0 in phrases.values() else 1.0)  # another word is the better one
    for phrase, weight in phrases.items():
        for word in _words(phrase):
            weights[word] = max(weight, weights.get(word, 0.0))
    if not weights:
        return []
    return [entry for _, entry in _ranked(_spaced(query), weights, _pool(kind))[:most]]


@cache
def _pool(kind: str | None) -> tuple[Searched, ...]:
    """The entries to search, with their name, answer and text in plain words."""
    every = run_entries() if kind == "run" else (*all_entries(), *setting_entries())
    return tuple(_searched(entry) for entry in every if kind in (None, entry.kind))


def _searched(entry: Entry) -> Searched:
    name, answer, text = _spaced(entry.name), _spaced(entry.answer), _spaced(entry.text)
    return entry, name, answer, text, name + answer + text


def _spaced(text: str) -> str:
    """Lower case, with one space before each word and nothing else between them."""
    return " " + " ".join(text.lower().translate(_PLAIN).split())


def _words(text: str) -> list[str]:
    """Words in lower case without their endings, names with underscores both whole and in parts."""
    found = []
    for word in re.findall(r"[a-z0-9][a-z0-9_+.\-/]*", text.lower()):
        parts = [word.rstrip(".-"), *re.split(r"[_.\-/]", word)] if re.search(r"[_.\-/]", word) else [word]
        found += [_stem(part) for part in parts if part and part not in _STOP]
    return list(dict.fromkeys(found))


def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word


def _ranked(query: str, weights: dict[str, float], texts: Sequence[Searched]) -> list[tuple[float, Entry]]:
    scores = [0.0] * len(texts)
    own = [0] * len(texts)
    for word, weight in weights.items():
        spaced = _spaced(word)
        hits = {index: _hit(spaced, searched) for index, searched in enumerate(texts) if spaced in searched[-1]}
        spread = math.log(1 + len(texts) / (1 + len(hits)))
        for index, hit in hits.items():
            scores[index] += weight * spread * hit / (hit + 2.0)
            own[index] += weight == 1.0
    asked = sum(weight == 1.0 for weight in weights.values()) or 1
    stems = tuple(_spaced(word)[1:] for word in weights)
    ranked = [
        (_final(score, own[index] / asked, query, stems, texts[index]), texts[index][0])
        for index, score in enumerate(scores)
        if score
    ]
    return sorted(ranked, key=lambda item: (-item[0], item[1].kind, item[1].name))


def _hit(word: str, searched: Searched) -> float:
    entry, name, answer, text, _ = searched
    count = text.count(word)
    in_text = _TEXT * math.log1p(count) / (1.0 + len(text) / _LONG) if count else 0.0
    return _NAME * (word in name) + _ANSWER * (word in answer) + in_text * (_LOG if entry.kind == "death" else 1.0)


def _final(score: float, share: float, query: str, stems: tuple[str, ...], texts: Searched) -> float:
    """Entries that have more of the query's own words, its very phrase, or its name, come first."""
    entry, name, answer, _, _ = texts
    is_behind = entry.read_on.startswith("docs/log/") or entry.name.startswith("--")  # arguments repeat fields
    names = (name, _spaced(entry.name.rpartition(".")[2]), name.replace(" threefold", "", 1))
    prior = _BEHIND if is_behind else _PRIOR.get(entry.kind, 1.0)
    phrase = 3.0 if query in names and not is_behind else 1.25 if query in name or query in answer else 1.0
    return prior * score * (0.4 + 0.6 * share) * (1.0 + 0.6 * _share_of_name(name, stems)) * phrase


def _share_of_name(name: str, stems: tuple[str, ...]) -> float:
    """How much of a name the query says: of two names that have a word, the shorter one is about it."""
    parts = [part for part in name.split() if part not in _STOP]
    return sum(part.startswith(stems) for part in parts) / len(parts) if parts else 0.0
