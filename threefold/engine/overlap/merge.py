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

    Pairs do not wait for each other: when a backward comes to its last exchange, the forward after next may begin, so
    that only the first forward and the last backward have nothing beside them.
    """
    ready: dict[int, Passage] = {}

    def forwards(numbers: range) -> Stream:
        for number in numbers:
            passage = open_passage(number)
            yield from until_done(passage.forward(None))
            ready[number] = passage

    def backwards() -> Stream:
        for number in range(count):
            while number not in ready:
                yield
            yield from until_done(ready.pop(number).backward(None))

    for _ in forwards(range(1)):
        pass
    alternate(backwards(), forwards(range(1, count)))


def until_done(steps: Steps[object]) -> Stream:
    yield from steps
