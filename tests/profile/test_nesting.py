"""The innermost span around a moment, against a search through all spans."""

import numpy as np
import pytest

from threefold.profile.intervals import Enclosing
from threefold.profile.trace import HostSpans


def nested_spans(draw: np.random.Generator, start: float, end: float, depth: int) -> list[tuple[float, float]]:
    """A span with spans inside of it, as calls have."""
    found = [(start, end)]
    if depth and end - start > 4:
        cuts = np.sort(draw.uniform(start, end, 2 * int(draw.integers(1, 4))))
        for begin, finish in cuts.reshape(-1, 2):
            found += nested_spans(draw, float(begin), float(finish), depth - 1)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_on_several_threads(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = [(*pair, thread) for thread in range(3) for pair in nested_spans(draw, 10.0 * thread, 200.0, 4)]
    draw.shuffle(rows)
    start, end, thread = (np.array(column) for column in zip(*rows, strict=True))
    thread = thread.astype(np.int64)
    spans = HostSpans(start, end, thread, thread, thread)
    asked_thread, moment = draw.integers(-1, 4, 300), draw.uniform(-5, 230, 300)
    found = Enclosing(spans).innermost(asked_thread, moment)
    for lane, time, index in zip(asked_thread, moment, found, strict=True):
        around = [i for i in range(len(rows)) if thread[i] == lane and start[i] <= time < end[i]]
        assert index == (min(around, key=lambda i: end[i] - start[i]) if around else -1)


def test_no_spans_enclose_nothing() -> None:
    none = np.empty(0)
    spans = HostSpans(none, none, *(np.empty(0, np.int64) for _ in range(3)))
    assert Enclosing(spans).innermost(np.array([0]), np.array([1.0])).tolist() == [-1]
