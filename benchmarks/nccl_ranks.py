"""Whether several real NCCL ranks compute what one rank computes, on one GPU that they share, run by hand.

    python benchmarks/nccl_ranks.py [--limit 140] [--parts groups reshard layouts faults] [--ranks 4 2] [--out FILE]

Starts four ranks and two ranks that share the first GPU (`tests/support/shared_gpu.py`) and runs in them: the groups of
the recipes' layouts on four ranks, layouts of every kind against one rank, a run that goes on with fewer ranks.
Meanwhile `threefold train` runs on two more ranks which are killed, abort and hang. Prints one line a case, then how
many were equal, and returns 1 where one was not. Kernels of the ranks are time-sliced: the seconds say nothing about
NCCL. With THREEFOLD_TEST_SHARED_ON=cpu the ranks run on gloo.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from shared_gpu import Outcome, SharedGpuRanks, chip_here, run_cases, train_and_reshard
from shared_gpu_cases import PRECISIONS
from shared_gpu_faults import compare_with_undisturbed, disturb_run

PARTS = ("groups", "reshard", "layouts", "faults")
CASE_SECONDS = 45.0  # after which a case hangs


class Table:
    """The outcomes so far, printed as they come and written to a file."""

    def __init__(self, out: Path | None) -> None:
        self.outcomes: list[Outcome] = []
        self.out, self.began = out, time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        line = f"{time.monotonic() - self.began:6.1f} {outcome}"
        print(line, flush=True)
        if self.out:
            with self.out.open("a", encoding="utf-8") as file:
                file.write("\n".join([line, *([outcome.log] if outcome.log else [])]) + "\n")

    def add_all(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.add(outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=140.0, help="seconds after which no further layout is begun")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(4, 2), default=(4, 2), help="of the layouts")
    parser.add_argument("--out", type=Path, help="a file for the table, with the logs of ranks that failed")
    args = parser.parse_args()
    chip = chip_here()
    if chip is None:
        print("nccl_ranks: no CUDA device; THREEFOLD_TEST_SHARED_ON=cpu runs the same on gloo", file=sys.stderr)
        return 2
    table = Table(args.out)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as beside:
        folder = Path(name)
        has_faults = "faults" in args.parts
        disturbed = beside.submit(disturb_run, folder / "disturbed", chip, args.limit) if has_faults else None
        with (
            SharedGpuRanks(folder / "two", 2, chip, CASE_SECONDS) as two,
            SharedGpuRanks(folder / "four", 4, chip, CASE_SECONDS) as four,
        ):
            _run_parts(table, {4: four, 2: two}, folder, args)
            if disturbed:
                table.add_all(disturbed.result())
                table.add(compare_with_undisturbed(two, folder / "calm", folder / "disturbed"))
    return _sum_up(table)


def _run_parts(table: Table, ranks: dict[int, SharedGpuRanks], folder: Path, args: argparse.Namespace) -> None:
    """What the sessions of four and of two ranks do, one case after the other."""
    if "groups" in args.parts:
        table.add_all(ranks[4].start_groups())
    if "reshard" in args.parts:
        for precision in args.precisions:
            table.add_all(train_and_reshard(ranks[4], ranks[2], folder / "resharded", precision))
    if "layouts" in args.parts:
        for count in args.ranks:
            table.add(ranks[count].compute_references(args.precisions))
            run_cases(ranks[count], args.precisions, table.add, table.began + args.limit)


def _sum_up(table: Table) -> int:
    kinds = Counter(outcome.kind for outcome in table.outcomes)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()), f"in {time.monotonic() - table.began:.0f} s")
    bad = [outcome for outcome in table.outcomes if not outcome.is_good]
    for outcome in bad:
        print(f"  {outcome}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
