"""Explanations of the findings that `profile` and `diagnose` raise about traces and snapshots. `rules/base.py` lists
them."""

from threefold.findings import Explanation

EXPLANATIONS = {
    "trace-readable": Explanation(
        what="A trace is a whole file of a known kind: PyTorch's profiler (JSON, gzip), or an SQLite export of Nsight.",
        why="Walls of a trace that was cut off or damaged would be those of another run. A trace may also come from a "
        "stranger, so sizes, nesting and times are bounded, and nothing in it is executed.",
        confirm="The message has the reason and, for JSON, the place in the text; Perfetto opens what is whole.",
        fix="Record it again and let the profiler finish; for Nsight, `nsys export --type sqlite REPORT.nsys-rep`.",
    ),
    "trace-has-work": Explanation(
        what="A trace has kernels of a GPU, or operators of a CPU.",
        why="Without them there is nothing to measure.",
        confirm="Count events of the category kernel or cpu_op.",
        fix="Record CPU and CUDA activities over at least one whole step, as `threefold train --profile` does.",
    ),
    "snapshots-of-equal-ranks": Explanation(
        what="Two memory snapshots that are compared are of the same rank.",
        why="Ranks of other stages and with other experts hold other tensors: the difference is not that of the runs.",
        confirm="The rank is the number in the file's name; the file itself does not hold it.",
        fix="Give the files of equal ranks.",
    ),
    "oom-by-fragments": Explanation(
        what="An allocation that fails fails because memory is used up.",
        why="Here the allocator had enough free memory, in pieces that are each too small.",
        confirm="`threefold diagnose SNAPSHOT --json`: free_bytes is at least what was asked, largest_free_bytes less.",
        fix="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; it excludes NCCL user buffers.",
    ),
    "memory-in-fragments": Explanation(
        what="At the peak nearly all reserved memory is active.",
        why="What is reserved and not active cannot be used by other libraries, and an allocation may fail beside it.",
        confirm="The share is (reserved - active) / reserved at the moment of the highest allocated memory.",
        fix="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or make fewer sizes: pad, or preallocate.",
    ),
}
