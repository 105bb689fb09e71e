"""Overlap of two microbatches: whenever one has started an exchange, the other one computes.

The order never depends on how long anything takes, so every rank starts its collectives in the same order.
`microbatch_runners.py` calls `run_overlap_pairs` without a pipeline; `pipeline.py` calls `interleave_steps` for each
pair.
"""

from collections.abc import Callable, Generator

from threefold.engine.schedule.microbatch_pass import MicrobatchPass, Pause, run_to_end

StepStream = Generator[Pause, None, object]


def interleave_steps(one: StepStream, other: StepStream, fill_gap: Callable[[], object]) -> None:
    """Run `one` to its first pause, then `other` to its first pause, and so on; the rest of the longer one runs alone.

    An exchange of counts is short and its result is needed at once: `fill_gap`, not the other stream, runs meanwhile.
    """
    streams = [one, other]
    while streams:
        for stream in list(streams):
            try:
                while next(stream) == "counts":
                    fill_gap()
            except StopIteration:
                streams.remove(stream)


def run_overlap_pairs(open_pass: Callable[[int], MicrobatchPass], count: int) -> None:
    """Forward and backward of `count` microbatches, each forward overlapped with the backward of the one before.

    Only the first forward and the last backward run alone.
    """
    before = open_pass(0)
    run_to_end(before.forward(None))
    for number in range(1, count):
        microbatch_pass = open_pass(number)
        interleave_steps(before.backward(None), microbatch_pass.forward(None), before.fill_gap)
        before = microbatch_pass
    run_to_end(before.backward(None))
