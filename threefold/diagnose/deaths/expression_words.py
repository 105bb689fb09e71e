"""Words that stand in every text an expression matches, and one expression that finds any of many words fast.

A log of a gigabyte has ten million lines, and the catalogue hundreds of expressions. `catalogue.py` and `logs/scan.py`
search for words first.
"""

import re
from collections.abc import Iterable, Sequence
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any


def words_of(expression: str) -> frozenset[str]:
    """Words in lower case, of which one is in the lower-case form of every text that the expression matches. Raises
    where the expression has none."""
    found = _words(_parser.parse(expression))
    if not found:
        raise ValueError(f"an expression without a fixed word matches anything: {expression}")
    return found


def _words(parts: Sequence[tuple[Any, Any]]) -> frozenset[str]:
    """The candidate whose shortest word is longest; empty where there is none."""
    candidates: list[frozenset[str]] = []
    run = ""
    for kind, value in [*parts, (None, None)]:
        if kind is _constants.LITERAL:
            run += chr(value).lower()
            continue
        if run:
            candidates.append(frozenset([run]))
            run = ""
        if kind is _constants.SUBPATTERN:
            candidates.append(_words(value[3]))
        elif kind is _constants.MAX_REPEAT and value[0] > 0:
            candidates.append(_words(value[2]))
        elif kind is _constants.BRANCH:
            branches = [_words(branch) for branch in value[1]]
            candidates.append(frozenset().union(*branches) if all(branches) else frozenset())
    return max(filter(None, candidates), key=lambda words: min(map(len, words)), default=frozenset())


def any_of(words: Iterable[str]) -> str:
    """An expression that is found where any of the words is: as a tree by letters, which fails fast."""
    shortest = sorted(set(words), key=len)
    kept: list[str] = []
    for word in shortest:  # one that holds another one is found with it
        if not any(other in word for other in kept):
            kept.append(word)
    return _tree(sorted(kept))


def _tree(words: Sequence[str]) -> str:
    by_letter: dict[str, list[str]] = {}
    for word in words:
        by_letter.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(letter) + ("" if "" in rests else _tree(rests)) for letter, rests in by_letter.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
