"""Two ranks in network namespaces, joined by a link as slow as wanted."""

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from threefold.engine.verify.overlap_ab import VARIANTS, Trial, loss_difference, run_variants, summarize
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MoeSpec
from threefold.spec.models import MODELS

RANKS, PORT = 2, 29517
WANTED = {"share": (0.30, 0.45), "hidden": 0.80, "speedup": 1.3}
NEAR = 0.03  # how far the share may be from the one asked for
MICROBATCHES = 16


def plan_of(tiny: bool) -> Plan:
    """Attention takes about as long as the experts, as in Qwen3-30B-A3B at 4,096 tokens. Experts are wide for what they
    are sent: with two cores for two ranks, bytes cost compute too."""
    dim, width, heads, head_dim = (64, 64, 4, 16) if tiny else (128, 768, 16, 64)
    model = replace(
        MODELS["qwen3-30b-a3b"],
        dim=dim,
        dense_dim=dim,
        vocab=512,
        num_layers=2 if tiny else 3,
        attention=GqaSpec(num_heads=heads, num_kv_heads=heads // 4, head_dim=head_dim, qk_norm=True, rope_theta=1e6),
        moe=MoeSpec(num_experts=8, top_k=2, expert_dim=width),
    )
    fields = {
        "model": "qwen3-30b-a3b",
        "target": "threefold",
        "cluster.chip": "cpu",
        "cluster.gpus": RANKS,
        "layout.ep": RANKS,
        "job.seq_len": 64 if tiny else 256,
        "job.global_batch": RANKS * MICROBATCHES,
        "job.routing": "forced-balance",
        "job.data": "synthetic",
        "knobs.precision": "fp32",
    }
    parsed = parse(fields, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


def why_not() -> str | None:
    if os.geteuid():
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`"
    try:
        with network(None):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


@contextmanager
def network(bits_per_second: float | None) -> Iterator[list[str]]:
    """Names of two namespaces; None: as fast as it goes."""
    names = [f"threefold-{os.getpid()}-{rank}" for rank in range(RANKS)]
    links = [f"tf{os.getpid() % 100_000}r{rank}" for rank in range(RANKS)]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for rank, (name, link) in enumerate(zip(names, links, strict=True)):
            _do("ip", "link", "set", link, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _do(*inside, "ip", "link", "set", link, "name", "tf0")
            _do(*inside, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "tf0")
            _do(*inside, "ip", "link", "set", "tf0", "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            if bits_per_second is not None:
                # A small bucket: what one saves up while the link idles goes at once, which favors no overlap.
                rate = ("rate", f"{int(bits_per_second)}bit", "burst", "32kb", "limit", "8mb")
                _do(*inside, "tc", "qdisc", "add", "dev", "tf0", "root", "tbf", *rate)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def run(rate: float | None, args: argparse.Namespace, variants: list[str], steps: int) -> list[list[Trial]]:
    with network(rate) as names, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            env = {"GLOO_SOCKET_IFNAME": "tf0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            work = {"plan": plan_of(args.tiny), "warmup": args.warmup, "steps": steps, "variants": variants}
            given = Path(folder) / f"{rank}.in"
            given.write_bytes(pickle.dumps({**work, "rank": rank, "out": f"{folder}/{rank}.out"}))
            command = ["ip", "netns", "exec", name, sys.executable, __file__, str(given)]
            ranks.append(subprocess.Popen(command, env=os.environ | env))
        codes = [process.wait() for process in ranks]
        assert not any(codes), f"ranks ended with {codes}"
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(RANKS)]


def one_rank(work: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = work["rank"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # a rank that takes another's core makes it late
    store = dist.TCPStore("10.77.0.1", PORT, RANKS, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    trials = run_variants(rank, work["plan"], work["warmup"], work["steps"], work["variants"], by_turns=True)
    Path(work["out"]).write_bytes(pickle.dumps(trials))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    first = list(VARIANTS)[:1]
    [row] = summarize(probe := run(None, args, first, 3))
    compute = row.seconds - row.exposed_seconds
    num_bytes = max(trial.steps[-1].num_bytes for [trial] in probe)
    rate, share = 0.0, 0.0
    for _ in range(4):
        rate = 8 * num_bytes / (compute * args.share / (1 - args.share)) if not rate else rate * share / args.share
        [row] = summarize(run(rate, args, first, 3))
        share = row.exposed_seconds / row.seconds
        print(f"{rate / 1e6:.0f} Mbit/s: exchanges take {share:.1%} of {row.seconds:.2f} s", file=sys.stderr)
        if abs(share - args.share) <= NEAR:
            break
    ranks = run(rate, args, list(VARIANTS), args.steps)
    rows = summarize(ranks)
    share = rows[0].exposed_seconds / rows[0].seconds
    gains = {row.variant: {"hidden": row.hidden, "speedup": rows[0].seconds / row.seconds} for row in rows[1:]}
    enough = [name for name, gain in gains.items() if all(gain[what] >= WANTED[what] for what in gain)]
    best = max(enough or gains, key=lambda name: gains[name]["speedup"])
    reached = bool(enough) and WANTED["share"][0] <= share <= WANTED["share"][1]
    rows_json = [{**asdict(row), "hidden": row.hidden, "exposed": _named(row.exposed)} for row in rows]
    return {
        "bits_per_second": rate,
        "microbatches": MICROBATCHES,
        "bytes_sent_a_step": num_bytes,
        "rows": rows_json,
        "loss_difference": loss_difference(ranks),
        "share": share,
        "best": best,
        **gains[best],
        "reached": reached,
    }


def _named(exposed: dict[tuple[str, str], float]) -> dict[str, float]:
    return {f"{layer} {phase}".strip(): seconds for (layer, phase), seconds in exposed.items()}


def show(found: dict[str, Any]) -> None:
    print(f"{found['bits_per_second'] / 1e6:.0f} Mbit/s, {found['microbatches']} microbatches a step")
    for row in found["rows"]:
        print(f"{row['variant']:<26}{row['seconds']:>8.3f} s  exchange {row['exchange_seconds']:.3f} s"
              f"  hidden {row['hidden']:.1%}")  # fmt: skip
    print(f"exchanges were {found['share']:.1%} of a step; {found['best']}: {found['hidden']:.1%} hidden,"
          f" {found['speedup']:.3f}x; losses differ by {found['loss_difference']:.0e}")  # fmt: skip


if __name__ == "__main__":
    one_rank(pickle.loads(Path(sys.argv[1]).read_bytes()))
