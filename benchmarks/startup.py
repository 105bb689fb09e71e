"""How long the door takes: `threefold --help` and `threefold check`, beside a bare interpreter.

python benchmarks/startup.py [--repeat 9] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml"
CASES = {
    "bare python": ["-c", "pass"],
    "threefold --help": ["-m", "threefold", "--help"],
    "threefold check": ["-m", "threefold", "check", str(RECIPE)],
    "threefold show": ["-m", "threefold", "show", str(RECIPE)],
}


def seconds(words: list[str], repeat: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=True)
        return time.perf_counter() - start

    once()  # warm the file cache
    return statistics.median(once() for _ in range(repeat))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    took = {name: seconds(words, args.repeat) for name, words in CASES.items()}
    base = took["bare python"]
    print(f"{'command':18} {'median s':>9} {'x bare':>7}")
    for name, value in took.items():
        print(f"{name:18} {value:9.3f} {value / base:7.1f}")
    if args.json:
        args.json.write_text(json.dumps(took, indent=2))


if __name__ == "__main__":
    main()
