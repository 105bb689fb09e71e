"""Natural routing on CPU ranks over a throttled link: forced balance, a Zipf load, and the same with copied experts.

    python benchmarks/natural_routing.py                    # four ranks whose experts wait a set time a row
    python benchmarks/natural_routing.py --ranks 2 --compute     # two ranks that compute, one a core

Each rank is in a network namespace; `tc` holds what it sends and what it gets to a rate. The routers' choices are drawn
by `job.load`, other ones in each step, layer and rank; everything else is the engine: its dispatcher, its placement
from the step before, its copies of weights and its sums of gradients. Experts that wait sleep for each row they get,
twice as long in the backward, so that ranks without cores of their own show what transport and placement do. This is
evidence of those and no speed of a GPU. It needs root, `ip` and `tc`.
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.cost.expert_load import load_of
from threefold.engine.build import Parts, build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.router import Router
from threefold.engine.step import train_step
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.load import drawn_choices
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MoeSpec
from threefold.spec.models import MODELS

PORT, MICROBATCHES, WARMUP = 29531, 4, 2
RATES = (50e6, 100e6, 200e6)  # bits a second
ROW_SECONDS = 200e-6  # of a row in an expert's forward
VARIANTS = ("balanced", "unbalanced", "replicate")
WANTED = {"of_balanced": 0.85, "over_unbalanced": 1.3}


def plan_of(variant: str, ranks: int, load: str) -> Plan:
    model = replace(
        MODELS["qwen3-30b-a3b"],
        dim=128,
        dense_dim=128,
        vocab=256,
        num_layers=3,
        attention=GqaSpec(num_heads=2, num_kv_heads=1, head_dim=32, qk_norm=True, rope_theta=1e6),
        moe=MoeSpec(num_experts=16, top_k=2, expert_dim=256 if ranks == 2 else 128),
    )
    fields = {
        "model": "qwen3-30b-a3b",
        "target": "threefold",
        "cluster.chip": "cpu",
        "cluster.gpus": ranks,
        "layout.ep": ranks,
        "job.seq_len": 512,
        "job.global_batch": ranks * MICROBATCHES,
        "job.data": "synthetic",
        "job.routing": "forced-balance" if variant == "balanced" else "learned",
        "job.load": "balanced" if variant == "balanced" else load,
        "knobs.precision": "fp32",
        "knobs.expert_balance": "replicate" if variant == "replicate" else "none",
        "knobs.expert_copies": 2 if variant == "replicate" else 1,
    }
    parsed = parse(fields, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


@contextmanager
def network(num_ranks: int, bits_per_second: float) -> Iterator[list[str]]:
    """Names of namespaces on one bridge, each of which sends and receives at most so much."""
    bridge = f"tfb{os.getpid() % 100_000}"
    names = [f"threefold-{os.getpid()}-{rank}" for rank in range(num_ranks)]
    links = [f"tf{os.getpid() % 100_000}r{rank}" for rank in range(num_ranks)]
    shaped = ("root", "tbf", "rate", f"{int(bits_per_second)}bit", "burst", "32kb", "limit", "8mb")
    try:
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        for rank, (name, link) in enumerate(zip(names, links, strict=True)):
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", link, "type", "veth", "peer", "name", "tf0", "netns", name)
            _do("ip", "link", "set", link, "master", bridge, "up")
            _do("tc", "qdisc", "add", "dev", link, *shaped)
            inside = ("ip", "netns", "exec", name)
            _do(*inside, "ip", "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "tf0")
            _do(*inside, "ip", "link", "set", "tf0", "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            _do(*inside, "tc", "qdisc", "add", "dev", "tf0", *shaped)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class _Wait(torch.autograd.Function):
    """Rows as they are, after a set time for each."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_R: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight_R)
        ctx.seconds = seconds
        time.sleep(seconds * len(x_RD))
        return x_RD * weight_R[:, None]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (weight_R,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds * len(grad_RD))
        return grad_RD * weight_R[:, None], None, None


def wait_instead(self: Experts, x_RD: Tensor, weight_R: Tensor, count_E: Tensor, order: Any = None) -> Tensor:
    """In place of `Experts.forward`. Every weight has a gradient, of zeros, so that gradients travel as ever."""
    nothing = sum(getattr(self, name).flatten()[:1].sum() * 0 for name in ("gate_up", "down"))
    return _Wait.apply(x_RD, weight_R, ROW_SECONDS) + nothing


class DrawnRouting:
    """Choices of experts drawn by the load, in place of the router's."""

    def __init__(self, parts: Parts, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.step = plan, rank, 0
        for number, router in enumerate(parts.model.routers()):
            router.choose_experts = partial(self.choose, router, number)  # type: ignore[method-assign]

    def choose(self, router: Router, number: int, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        sizes = router.spec.num_experts, len(logits_TE), router.spec.top_k
        return torch.from_numpy(drawn_choices(self.plan.job.load, *sizes, number, self.step, self.rank))


def one_rank(work: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = work["rank"], work["ranks"]
    if work["compute"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    else:
        Experts.forward = wait_instead  # type: ignore[method-assign]
    store = dist.TCPStore("10.78.0.1", PORT, ranks, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    runs = {}
    for variant in VARIANTS:
        plan = plan_of(variant, ranks, work["load"])
        parts = build(plan, Mesh(plan.layout, rank), with_data=False)
        runs[variant] = (plan, parts, DrawnRouting(parts, plan, rank) if variant != "balanced" else None)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for step in range(WARMUP + work["steps"]):
        for variant, (plan, parts, routing) in runs.items():  # by turns: what else the machine does falls on all
            batches = [synthetic_batch(plan, step, m, rank) for m in range(plan.num_microbatches)]
            if routing is not None:
                routing.step = step
            dist.barrier()
            start = time.perf_counter()
            train_step(parts, batches, 1e-4, plan.job)
            parts.data.finish_param_sync()
            if step >= WARMUP:
                seconds[variant].append(time.perf_counter() - start)
    Path(work["out"]).write_bytes(pickle.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def run(rate: float, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, by variant: of the slowest rank in each step, their median over the steps."""
    with network(args.ranks, rate) as names, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            env = {"GLOO_SOCKET_IFNAME": "tf0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            given = Path(folder) / f"{rank}.in"
            work = {**vars(args), "rank": rank, "out": f"{folder}/{rank}.out"}
            given.write_bytes(pickle.dumps(work))
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--work", str(given)]
            ranks.append(subprocess.Popen(command, env=os.environ | env))
        codes = [process.wait() for process in ranks]
        assert not any(codes), f"ranks ended with {codes}"
        found = [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(args.ranks)]
    return {
        variant: statistics.median(map(max, zip(*(one[variant] for one in found), strict=True))) for variant in VARIANTS
    }


def predicted(variant: str, ranks: int, load: str, rate: float) -> float:
    """Seconds of a step without the host's own, by the load that `estimate` prices: rows of the largest rank, which
    wait and travel, and copies of experts. Rate and seconds a row are those that were set."""
    plan = plan_of(variant, ranks, load)
    skews, moe, dim = load_of(plan), plan.model.moe, plan.model.dim
    assert moe is not None
    rows = plan.job.seq_len * moe.top_k
    times = plan.model.num_layers * MICROBATCHES
    travel = 4 * rows * (1 - 1 / ranks) * dim * 4 * 8 / rate  # dispatch and combine, and their gradients
    copies = plan.model.num_layers * skews.copied * 2 * 3 * dim * moe.expert_dim * 4 * 8 / rate
    return times * skews.skew * (3 * ROW_SECONDS * rows + travel) + copies


def with_predictions(rows: list[dict[str, Any]]) -> None:
    """Add predictions to the measured rows. The host's own seconds are those of the first row's balanced step."""
    first = rows[0]
    args = first["ranks"], first["load"]
    host = first["seconds"]["balanced"] - predicted("balanced", *args, first["bits_per_second"])
    for row in rows:
        row["predicted"] = {v: host + predicted(v, *args, row["bits_per_second"]) for v in VARIANTS}
        row["errors"] = {v: row["predicted"][v] / row["seconds"][v] - 1 for v in VARIANTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute", action="store_true", help="experts compute, one rank a core")
    parser.add_argument("--load", default="zipf", help="as job.load")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="bits a second")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        one_rank(pickle.loads(args.work.read_bytes()))
        return 0
    rows = []
    for rate in args.rates:
        seconds = run(rate, args)
        gains = {
            "of_balanced": seconds["balanced"] / seconds["replicate"],
            "over_unbalanced": seconds["unbalanced"] / seconds["replicate"],
        }
        row = {"bits_per_second": rate, "ranks": args.ranks, "load": args.load, "seconds": seconds, **gains}
        row["reached"] = all(gains[name] >= wanted for name, wanted in WANTED.items())
        rows.append(row)
        print(json.dumps(row), flush=True)
    if not args.compute:
        with_predictions(rows)
        print(json.dumps([row["errors"] for row in rows]))
    if args.json:
        args.json.write_text(json.dumps({"load_average": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    return 0 if all(row["reached"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
