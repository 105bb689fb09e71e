"""Delta debugging (Zeller and Hildebrandt, 2002) over the fields in which two plans differ.

`minimize` finds a set of fields that shows the regression and of which no part that was tried does. Sets that rules
refuse are not tried: fields that are needed come along, as far as they are still suspected.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from threefold.compare.field_groups import Group, Groups, PlansBetween


def minimize(
    between: PlansBetween, suspects: Sequence[Group], is_bad: Callable[[Groups], bool], guess: Groups = frozenset()
) -> Groups:
    """A smallest bad set out of `suspects`, which are bad together. Likely ones come first; `guess` before all."""
    rank = {group: place for place, group in enumerate(suspects)}
    current, pieces = frozenset(suspects), 2
    if guess and guess < current:
        current = _first_bad([between.smallest(guess, current)], current, is_bad) or current
    while len(current) > 1:
        chunks = _chunks(sorted(current, key=rank.__getitem__), pieces)
        reduced = _first_bad(_smaller_sets(between, current, chunks), current, is_bad)
        if reduced is not None:
            current, pieces = reduced, 2
        elif pieces >= len(current):
            break
        else:
            pieces = min(2 * pieces, len(current))
    return current


def _smaller_sets(between: PlansBetween, current: Groups, chunks: list[Groups]) -> list[Groups]:
    """Each chunk with what it needs, then the rest without each chunk and without what needs it."""
    alone = [between.smallest(chunk, current) for chunk in chunks]
    without = [between.largest(current - chunk) for chunk in chunks]
    return [*alone, *without]


def _first_bad(sets: list[Groups], current: Groups, is_bad: Callable[[Groups], bool]) -> Groups | None:
    tried = {frozenset[Group](), current}
    for some in sets:
        if some not in tried:
            tried.add(some)
            if is_bad(some):
                return some
    return None


def _chunks(ordered: list[Group], pieces: int) -> list[Groups]:
    size, more = divmod(len(ordered), pieces)
    ends = [0]
    for piece in range(pieces):
        ends.append(ends[-1] + size + (piece < more))
    return [frozenset(ordered[start:end]) for start, end in pairwise(ends) if end > start]
