"""Two streams of steps beside each other: whenever one has started an exchange, the other computes.

The order never depends on how long anything takes: every rank starts its collectives in the same one.
"""

from collections.abc import Callable, Generator

from threefold.engine.pipeline.passage import Passage, Stop, run_out

Stream = Generator[Stop, None, object]


def alternate(one: Stream, other: Stream, fill: Callable[[], object]) -> None:
    """`one` to its first stop, then `other` to its, and so on; what is left of the longer runs alone.

    Counts are few and needed at once: `fill`, not the other stream, runs beside them.
    """
    streams = [one, other]
    while streams:
        for stream in list(streams):
            try:
                while next(stream) == "counts":
                    fill()
            except StopIteration:
                streams.remove(stream)


def in_pairs(open_passage: Callable[[int], Passage], count: int) -> None:
    """Forward and backward of `count` microbatches: each forward beside the backward of the one before.

    Only the first forward and the last backward have nothing beside them.
    """
    before = open_passage(0)
    run_out(before.forward(None))
    for number in range(1, count):
        passage = open_passage(number)
        alternate(before.backward(None), passage.forward(None), before.fill)
        before = passage
    run_out(before.backward(None))
