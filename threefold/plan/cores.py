"""CPU cores of ranks: the text of `run.cores`, and how many threads a rank has use for.

The text is "auto", one set of cores for all ranks of a machine ("0-7,16"), or one for each local rank ("0-7;8-15"). The
rule `cores-exist` and the engine, which pins processes (`launch/cpu_cores.py`), parse it.
"""

from threefold.plan.plan import Plan

# FLOPs that a thread should have in a GEMM of a microbatch: some milliseconds of a core, so that waking threads up and
# waiting for the last of them is little beside it.
FLOPS_PER_THREAD = 100e6
AUTO = "auto"
MAX_CORES = 2**16  # no machine has more; keeps a range such as 0-9999999999 from filling the memory
CORES_ADVICE = "write cores as 0-7,16, as one set for each rank of a machine (0-7;8-15), or auto"


def parse_core_sets(text: str, local_size: int) -> list[set[int]]:
    """The sets that are written in `text`. Raises ValueError with the reason where they are none, or too few."""
    try:
        sets = [{core for part in one.split(",") for core in parse_core_range(part)} for one in text.split(";")]
    except ValueError as error:
        raise ValueError(f"{text!r} names no cores: {error}") from None
    if 1 < len(sets) < local_size:
        raise ValueError(f"{text!r} has {len(sets)} sets of cores for {local_size} ranks of a machine")
    return sets


def parse_core_range(part: str) -> range:
    """One core, or the cores from one to another, as the kernel writes them: "3", "0-7"."""
    first, dash, last = part.strip().partition("-")
    found = range(_core(first), _core(last if dash else first) + 1)
    if not found:
        raise ValueError(f"{part.strip()!r} ends before it begins")
    return found


def _core(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is no number of a core")
    if len(text) > len(str(MAX_CORES)) or int(text) >= MAX_CORES:
        raise ValueError(f"no machine has a core {text[:20]}")
    return int(text)


def num_threads(plan: Plan, cores: int) -> int:
    """The threads of a rank where all ranks of the plan share so many cores."""
    return min(max(1, cores // plan.layout.gpus), useful_threads(plan))


def useful_threads(plan: Plan) -> int:
    """The threads that have enough to do in a GEMM of a microbatch on one rank: a square one, as projections are."""
    tokens = plan.job.micro_batch * plan.job.seq_len / (plan.layout.cp * plan.layout.tp)
    return max(1, round(2.0 * tokens * plan.model.dim**2 / FLOPS_PER_THREAD))
