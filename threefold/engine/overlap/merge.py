"""Two streams of steps beside each other: whenever one has started an exchange, the other computes.

The order never depends on how long anything takes: every rank starts its collectives in the same one.
"""

from collections.abc import Callable, Generator

from threefold.engine.pipeline.passage import Passage, Steps

Stream = Generator[None, None, None]


def alternate(one: Stream, other: Stream) -> None:
    """`one` to its first stop, then `other` to its, and so on; what is left of the longer runs alone."""
    streams = [one, other]
    while streams:
        for stream in list(streams):
            try:
                next(stream)
            except StopIteration:
                streams.remove(stream)


def in_pairs(open_passage: Callable[[int], Passage], count: int) -> None:
    """Forward and backward of `count` microbatches: each forward beside the backward of the one before.

    Only the first forward and the last backward have nothing beside them.
    """
    before: Passage | None = None
    for number in range(count):
        passage = open_passage(number)
        alternate(_until_done(before.backward(None)) if before else _nothing(), _until_done(passage.forward(None)))
        before = passage
    if before is not None:
        alternate(_until_done(before.backward(None)), _nothing())


def _until_done(steps: Steps[object]) -> Stream:
    yield from steps


def _nothing() -> Stream:
    yield from ()
