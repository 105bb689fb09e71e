"""Explanations of the findings that `threefold profile` raises about trace files. `rules/base.py` lists them."""

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
}
