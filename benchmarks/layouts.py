"""Whether random layouts compute what one rank computes, run by hand.

    python benchmarks/layouts.py --out FILE [--count 1000] [--seed 0] [--first 0] [--as-trained] [--family olmoe dots1]
    python benchmarks/layouts.py --out FILE --count 0     # only the summary

Draws models, layouts, jobs and knobs (`tests/support/drawn_layouts.py`), leaves out what the rules refuse, and trains
each of the others for two steps on forked ranks and on one: in fp64, and some in bf16, fp16 or a format below, which
are compared roughly. Every draw is written to FILE when it is done. The script may be stopped at any time; run again,
it continues after the draws that FILE has. It prints every draw whose ranks differ, crash or hang, then how many draws
there are of each kind and which pairs of fields were never turned together. A draw is repeated alone by its number:
`--seed 0 --first 17 --count 1` with another FILE.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from drawn_layouts import draw_layout
from layout_ledger import read_ledger, run_ledger, summary
from layout_runs import FAULTS, LIMIT_SECONDS
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="ledger of the draws, one JSON object a line")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default=os.environ.get("THREEFOLD_SEED", "0"))
    parser.add_argument("--as-trained", action="store_true", help="all in 16 bits and less")
    parser.add_argument("--family", nargs="+", default=[], choices=[*FAMILIES, *MIXTURES], metavar="NAME")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that the ranks of a draw may take")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count)
    as_trained = True if args.as_trained else None
    draws = (draw_layout(f"{args.seed}/{number}", args.family, as_trained) for number in numbers)
    kinds: Counter[str] = Counter()
    for record in run_ledger(args.out, draws, args.limit):
        kinds[record["kind"]] += 1
        if record["kind"] in FAULTS:
            print(
                f"{record['seed']}: {record['kind']} {record['model']} {record['theme']}\n  {record['said']}",
                flush=True,
            )
        print(f"\r{kinds.total()} more of {args.count}: {dict(kinds)}", end="", file=sys.stderr, flush=True)
    records = read_ledger(args.out)
    print("\n".join(["", *summary(records)]))
    return 1 if any(record["kind"] in FAULTS for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
