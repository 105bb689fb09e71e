"""Whether drawn command lines end well, run by hand; it can be stopped and goes on where it was.

    python benchmarks/command_lines.py --out lines.jsonl [--count 3000] [--first 0]

Draws lines by number (`tests/support/drawn_lines.py`), runs each in a forked child with limits, and appends to the file
how it ended. Lines that the file has already are not run again. Prints each line that failed, and a summary; a line is
repeated alone by `python tests/support/drawn_lines.py NUMBER`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import torch
from drawn_lines import drawn_line, may_take_long, pairs_drawn
from line_files import make_files
from line_runs import Scratch, run_line, shell_line


def run_number(number: int, scratch: Scratch) -> dict[str, Any]:
    words, begin = drawn_line(number), time.monotonic()
    ended = run_line(words, scratch)
    problem = ended.problem(may_be_long=may_take_long(words))
    return {
        "number": number,
        "line": shell_line(words),
        "code": ended.code,
        "cpu_seconds": round(ended.cpu_seconds, 2),
        "seconds": round(time.monotonic() - begin, 2),
        "peak_bytes": ended.peak_bytes,
        "cut_short": ended.is_cut_short,
        "problem": problem,
        "tail": (ended.out + ended.err)[-2000:] if problem else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="what was tried (JSON lines)")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    ended = {entry["number"]: entry for entry in map(json.loads, lines)}
    numbers = range(args.first, args.first + args.count)
    with tempfile.TemporaryDirectory() as folder, args.out.open("a", encoding="utf-8") as log:
        scratch = Scratch(make_files(Path(folder) / "files"))
        for number in numbers:
            if number not in ended:
                ended[number] = run_number(number, scratch)
                log.write(json.dumps(ended[number]) + "\n")
                log.flush()
        scratch.close()
    mine = [ended[number] for number in numbers]
    bad = [entry for entry in mine if entry["problem"]]
    for entry in bad:
        print(f"line {entry['number']}: {entry['line']}: {entry['problem']}")
    codes = Counter(entry["code"] for entry in mine)
    seconds = sum(entry["cpu_seconds"] for entry in mine)
    print(f"{len(mine)} lines: {len(bad)} failed; codes {dict(codes)}; {seconds:.0f} s of CPU time")
    print(f"the first {numbers.stop} lines cover {pairs_drawn(numbers.stop):.1%} of the pairs of flags of a verb")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
