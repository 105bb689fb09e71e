"""How much of the experts' exchange the merged schedule hides.

python benchmarks/overlap.py [--steps 6] [--warmup 2] [--json FILE]          two ranks on a slow network of this machine
python benchmarks/overlap.py --device cuda [--json FILE]                     one GPU, exchanges held for a set time
python benchmarks/overlap.py --held --tiny                           the second on the CPU; its times mean nothing

The network: ranks in network namespaces, joined by links with a token bucket, as slow as makes exchanges 30 to 45 %
of a step without overlap. It needs root, `ip` and `tc`. The held exchange: one rank of Qwen3-30B-A3B's width with the
experts of one of eight ranks and microbatches of 16,384 tokens; each exchange stays on a side stream for a set time,
chosen for several shares of the time without overlap; the middle one counts. Times are of forward and backward, a
microbatch in the steady state: what three more microbatches cost, divided by three. Hidden is the part of the time in
which exchanges are under way that compute does not stand still for them, by events on its stream.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from overlap_estimate import estimate_beside


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--held", action="store_true", help="held exchanges on the CPU too")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.39, help="of a step, that exchanges are to take")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.15, 0.25, 0.35), help="the same, held exchanges")
    parser.add_argument("--spin", action="store_true", help="a kernel holds exchanges on the GPU, not a sleep")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" or args.held:
        from overlap_held import measure, show
    else:
        from overlap_network import measure, show, why_not

        reason = why_not()
        if reason:
            print(f"skipped: {reason}")
            return 0
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the machine is busy (load {load:.1f}): the gain comes out too small", file=sys.stderr)
    found: dict[str, Any] = {"torch": torch.__version__, "machine": _machine(args.device), "load": load}
    found |= measure(args)
    show(found)
    found["estimate"] = estimate_beside(found, args.tiny)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["reached"] else 1


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {platform.system()}"


if __name__ == "__main__":
    sys.exit(main())
