"""How fast `threefold profile` reads a large PyTorch trace, beside HolisticTraceAnalysis on the same file.

The trace is synthetic: GPU kernels on a compute and a communication stream, each with the CPU operator that launched
it, its runtime call and the two ends of its flow, written as Kineto writes them (about 1.9 KB of JSON a kernel). The
walls of the file are known, and the answer is compared with them. The peer is skipped where it is not installed;
`--peer` names a Python that has it (pip install HolisticTraceAnalysis).

python benchmarks/trace_reading.py [--kernels 500000] [--peer PYTHON] [--folder DIR] [--json FILE]
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT_SECONDS, LIMIT_BYTES, TIMES_THE_PEER = 20.0, 2 * 2**30, 5.0
SUFFIXES = (".json", ".json.gz")
PERIOD = 10  # kernels of a block: nine compute kernels of 9 us, one collective of 20 us
COMPUTE_US, COLLECTIVE_US, GAP_US = 9.0, 20.0, 1.0
PEER_PROGRAM = """
import sys, time
from hta.trace_analysis import TraceAnalysis
begin = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
overlap = analysis.get_comm_comp_overlap(visualize=False)
print("seconds", time.perf_counter() - begin)
print(overlap.to_json())
"""
_CUTLASS = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<7, "
    "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, cutlass::gemm::KernelTmaWarpSpecializedPingpong>, "
    "cute::tuple<cute::C<64>, cute::C<128>, cute::C<64> >, cutlass::bfloat16_t, cute::tuple<long, cute::C<1>, long>, "
    "cutlass::bfloat16_t, cute::tuple<long, cute::C<1>, long> > > >(Params)"
)
_ATEN = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3>"
)
NAMES = (
    _CUTLASS,
    f"{_ATEN} >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 1, 4, cudnn::fusion::Layout<0> >",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>",
)
OPERATORS = ("aten::mm", "aten::add_", "aten::_scaled_dot_product_cudnn_attention_backward", "aten::index_select")


def events(num_kernels: int) -> Iterator[str]:
    """Five events a kernel. Every block of ten kernels takes `PERIOD * 10` us and ends with a collective of 20 us that
    starts 1 us before the last compute kernel ends."""
    for number in range(num_kernels):
        block, place = divmod(number, PERIOD)
        begin = 1e12 + block * 120.0
        is_collective = place == PERIOD - 1
        if is_collective:
            start, dur, stream = begin + place * 10.0 - 2.0, COLLECTIVE_US, 20
        else:
            start, dur, stream = begin + place * 10.0, COMPUTE_US, 7
        yield from _five(number, start, dur, stream, is_collective)


def _five(number: int, start: float, dur: float, stream: int, is_collective: bool) -> Iterator[str]:
    kind, corr, ext = number % len(NAMES), number + 10, 2 * number + 2
    launch = start - 40.0
    operator = "c10d::alltoall_base_" if is_collective else OPERATORS[kind]
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)" if is_collective else NAMES[kind]
    collective = _COLLECTIVE if is_collective else ""
    yield (
        f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "{operator}", "pid": 4242, "tid": 4242,\n'
        f'    "ts": {launch - 4:.3f}, "dur": 8.250,\n    "args": {{\n      "External id": {ext}, '
        f'"Sequence number": {number}, "Fwd thread id": 0, "Record function id": 0,\n      "Concrete Inputs": ["", ""],'
        f'"Input type": ["c10::BFloat16", "c10::BFloat16"],\n      "Input Strides": [[4096, 1], [1, 4096]], '
        f'"Input Dims": [[8192, 4096], [4096, {1024 * (1 + kind)}]], "Ev Idx": {number}\n    }}\n  }}'
    )
    yield (
        f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 4242, "tid": 4242,\n'
        f'    "ts": {launch:.3f}, "dur": 2.750,\n    "args": {{\n      "External id": {ext}, "cbid": 430, '
        f'"correlation": {corr}\n    }}\n  }}'
    )
    yield (
        f'  {{\n    "ph": "s", "id": {corr}, "pid": 4242, "tid": 4242, "ts": {launch:.3f},\n'
        f'    "cat": "ac2g", "name": "ac2g"\n  }}'
    )
    yield (
        f'  {{\n    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},\n'
        f'    "ts": {start:.3f}, "dur": {dur:.3f},\n    "args": {{\n      "External id": {ext}, {collective}\n'
        f'      "queued": 0, "device": 0, "context": 1,\n      "stream": {stream}, "correlation": {corr},\n'
        f'      "registers per thread": 168,\n      "shared memory": 213248,\n      "blocks per SM": 1.000000,\n'
        f'      "warps per SM": 12.000000,\n      "registers spilled": 0, "local memory per thread": 0,\n'
        f'      "priority": 0, "graph id": 0, "graph node id": 0, "launch type": "regular",\n'
        f'      "grid": [132, 1, 1],\n      "block": [384, 1, 1],\n'
        f'      "est. achieved occupancy %": 19\n    }}\n  }}'
    )
    yield (
        f'  {{\n    "ph": "f", "id": {corr}, "pid": 0, "tid": {stream}, "ts": {start:.3f},\n'
        f'    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}'
    )


_COLLECTIVE = (
    '"Collective name": "all_to_allv", "In msg nelems": 33554432, "Out msg nelems": 33554432, "Group size": 8, '
    '"dtype": "BFloat16", "In split size": "[1, 1, 1, 1, 1, 1, 1, 1]", "Process Group Name": "3", '
    '"Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",'
)
_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096, "computeMajor": 9, "computeMinor": 0,
     "maxThreadsPerBlock": 1024, "numSms": 132}
  ],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 0,
  "traceEvents": [
"""


def write_trace(path: Path, num_kernels: int) -> dict[str, float]:
    """Write the trace, gzipped where the name says so; returns what is known of its communication."""
    with gzip.open(path, "wt", compresslevel=5) if path.suffix == ".gz" else path.open("w") as file:
        file.write(_HEAD)
        pending: list[str] = []
        for number, event in enumerate(events(num_kernels)):
            pending.append(event)
            if len(pending) == 10_000:
                file.write(("" if number < 10_000 else ",\n") + ",\n".join(pending))
                pending = []
        file.write(("" if num_kernels * 5 < 10_000 else ",\n" if pending else "") + ",\n".join(pending))
        file.write('\n  ],\n  "traceName": "rank-0.json"\n}\n')
    blocks = num_kernels // PERIOD
    # A collective runs from 88 to 108 us of its block, and the last compute kernel ends at 89 us.
    return {
        "span_seconds": ((blocks - 1) * 120.0 + 108.0) / 1e6,
        "total_seconds": blocks * COLLECTIVE_US / 1e6,
        "exposed_seconds": blocks * (COLLECTIVE_US - 1.0) / 1e6,
    }


def timed(words: list[str]) -> tuple[str, dict[str, float]]:
    """What a command prints, its time, its processor time, which other work on the machine hardly moves, and memory."""
    begin = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{words[:4]} failed: {status}")
    used = {"seconds": time.perf_counter() - begin, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return printed, used | {"peak_bytes": usage.ru_maxrss * 1024.0}  # Linux counts in KiB


def peer(python: str, path: Path) -> dict[str, float] | None:
    """HolisticTraceAnalysis on the same file, its time without that of its import; None where it is not installed."""
    if subprocess.run([python, "-c", "import hta"], capture_output=True).returncode:
        return None
    printed, used = timed([python, "-c", PEER_PROGRAM, str(path)])
    inner = next(float(line.split()[1]) for line in printed.splitlines() if line.startswith("seconds"))
    return used | {"seconds": inner}


def measure(num_kernels: int, folder: Path, python: str) -> dict[str, Any]:
    said: dict[str, Any] = {"kernels": num_kernels, "events": 5 * num_kernels}
    for suffix in SUFFIXES:
        path = folder / f"trace{suffix}"
        known = write_trace(path, num_kernels)
        printed, used = timed([sys.executable, "-m", "threefold", "profile", str(path), "--json"])
        answer = json.loads(printed)
        found = answer["walls"]["communication"] | {"span_seconds": answer["span_seconds"]}
        wrong = {name: (found[name], value) for name, value in known.items() if abs(found[name] - value) > 1e-4 * value}
        if wrong:
            raise SystemExit(f"{suffix}: known answers are missed: {wrong}")
        said[suffix] = {"bytes": path.stat().st_size, "threefold": used, "peer": peer(python, path)}
    return said


def _row(name: str, used: dict[str, float]) -> str:
    times = f"{used['seconds']:.1f} s, {used['cpu_seconds']:.1f} s of processors"
    return f"  {name:<22} {times}, {used['peak_bytes'] / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=500_000)
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="a Python with HolisticTraceAnalysis")
    parser.add_argument("--folder", type=Path, help="where traces are written (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        said = measure(args.kernels, args.folder or Path(temporary), args.peer)
    print(
        f"limits: {LIMIT_SECONDS:.0f} s, {LIMIT_BYTES / 2**30:.0f} GiB, {TIMES_THE_PEER:.0f} times as fast as the peer"
    )
    for suffix in SUFFIXES:
        row = said[suffix]
        print(f"{suffix}: {row['bytes'] / 1e9:.2f} GB, {said['events']:,} events")
        print(_row("threefold profile", row["threefold"]))
        if row["peer"] is None:
            print("  HolisticTraceAnalysis is not installed: skipped")
        else:
            print(_row("HolisticTraceAnalysis", row["peer"]))
            ratios = [row["peer"][kind] / row["threefold"][kind] for kind in ("seconds", "cpu_seconds")]
            print(f"  as fast by {ratios[0]:.1f} in time, {ratios[1]:.1f} in processor time")
    if args.json:
        args.json.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
