"""Explanations of the findings that `profile`, `diagnose`, `report` and the end of `train` raise about traces,
snapshots and the health of runs. `rules/base.py` lists them."""

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
    "router-collapsed": Explanation(
        what="Tokens spread over the experts of every layer.",
        why="A router that sends nearly all tokens to the same few experts trains only these: the model is a dense "
        "one with idle weights, and the busiest expert rank holds up all others.",
        confirm="`router/load_max` in metrics.jsonl is the busiest expert of the worst layer over the mean: 1 is "
        "level, experts over top_k is a full collapse. loads.json has every expert of the last step.",
        fix="Raise job.aux_loss, or job.bias_rate for models with a balancing bias; warm up longer or lower job.lr. A "
        "router that has collapsed rarely recovers: go back to a checkpoint before it.",
    ),
    "experts-idle": Explanation(
        what="Every expert gets tokens.",
        why="An expert without tokens has no gradient: its weights stay as they were initialized.",
        confirm="`router/idle_experts` in metrics.jsonl counts them in each step; loads.json says which.",
        fix="Raise job.aux_loss, or job.bias_rate for models with a balancing bias.",
    ),
    "steps-skipped": Explanation(
        what="Loss and gradients of every step are finite.",
        why="A step that is not finite is skipped: its data is lost, and more of them will follow.",
        confirm="`skipped_steps` in metrics.jsonl.",
        fix="Look at the data of those steps, then lower job.lr.",
    ),
    "loss-spikes": Explanation(
        what="The loss does not jump.",
        why="A jump that does not heal costs the steps since the last checkpoint; many say that the rate is too high.",
        confirm="A step counts whose loss lies 0.3 nats and six median deviations above the 32 steps before.",
        fix="Look at the data of those steps; then a lower job.lr, a longer job.warmup_steps, a lower job.clip_norm.",
    ),
    "gradient-spikes": Explanation(
        what="The gradient norm stays within ten times its median.",
        why="A jump of the gradient comes before one of the loss, or is one bad batch.",
        confirm="`grad_norm` in metrics.jsonl, against the median of the 32 steps before.",
        fix="Look at the data of those steps; clipping (job.clip_norm) bounds what one batch can do.",
    ),
    "data-stalls": Explanation(
        what="Batches are ready before the step that needs them.",
        why="While a rank waits for its batch, all ranks wait for it.",
        confirm="`data_seconds` over `seconds` in metrics.jsonl; the first two steps do not count.",
        fix="Tokenize ahead (`threefold tokenize`), put the data on a faster disk, give ranks more cores.",
    ),
    "rank-is-slow": Explanation(
        what="Ranks with the same work take equally long for it.",
        why="All ranks wait for the slowest one in every step.",
        confirm="`own_times` in effects.json: the median time of a rank without its waits. A rank counts that is 10 % "
        "and three standard errors above the median of its pipeline stage.",
        fix="Compare clocks, temperature and other processes of that host with another one's; leave the host out.",
    ),
}
