"""Dynamic against static context parallelism on documents of which most are short and some fill a sequence.

python benchmarks/dynamic_cp.py [--steps 8] [--timed-steps 6] [--json FILE]

First the attention FLOPs of every rank, by the packers that training uses and the shards that its ranks hold: 128K
tokens over CP 8 with DP 32 and DP 8, most documents under 4K tokens and some of 128K. `fullest_rank_ratio_bound` is
what a perfect packer would reach, since a document of 128K has all ranks of one CP group; `_cp_16` and `_cp_32` are
dynamic plans of a larger CP against the same static one. Then the same distribution at 1/32 of the lengths trains on
four CPU ranks (CP 2, DP 2, EP 4), static and dynamic in turns, on the same samples with the same model. Ranks wait for
each other in every microbatch, because experts are sharded over all of them; so beside the wall time the benchmark
takes the CPU seconds of every microbatch and adds up those of the busiest rank, which is the step time of a machine
with a core for each rank.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from threefold.engine.batch import Batch
from threefold.engine.build import build, dynamic_grid
from threefold.engine.data.dynamic_cp import Document, DynamicSteps, Round, pack_step
from threefold.engine.data.packing import Sample, pack_documents, pad_sample
from threefold.engine.dist.mesh import Mesh
from threefold.engine.schedule.microbatch_runners import Sequential
from threefold.engine.shard.sequence_layout import rank_spans
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

LONG_SHARES = (0.001, 0.002, 0.003, 0.006)  # of all documents; each fills a sequence
TIMED_SHARE = 0.002
SHORTEST, MEDIAN, SIGMA, LONGEST_SHORT = 1 / 2048, 1 / 160, 1.0, 1 / 32  # of a sequence: 64, 820 and 4,096 of 128K
CP = 8
WIDER_CP = (16, 32)  # of dynamic plans on the same ranks
BATCHES = ((32, 128), (8, 32), (8, 64), (8, 128))  # DP ranks and sequences a step
PLANNED = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "job.seq_len": 131_072}
TIMED = {
    "model": "tiny-qwen3-moe",
    "model.num_layers": 2,
    "cluster.chip": "cpu",
    "cluster.gpus": 4,
    "job.seq_len": 4_096,
    "job.global_batch": 16,
    "knobs.precision": "fp32",
}
Costs = NDArray[np.float64]


def plan_of(fields: dict[str, Any], cp: int, ep: int) -> Plan:
    dynamic = {"target": "threefold", "job.packing": True, "knobs.cp_dynamic": True, "layout.cp": cp, "layout.ep": ep}
    parsed = parse({**fields, **dynamic})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def draw_samples(draw: np.random.Generator, seq_len: int, count: int, long_share: float) -> list[list[int]]:
    """The document lengths of `count` samples of a shuffled stream: whole documents, packed as for fine-tuning."""
    num_documents = 4 * count * round(1 / MEDIAN / 2)
    sizes = np.exp(np.log(MEDIAN) + SIGMA * draw.standard_normal(num_documents))
    lengths = (np.clip(sizes, SHORTEST, LONGEST_SHORT) * seq_len).astype(np.int64)
    lengths[draw.random(num_documents) < long_share] = seq_len
    order, starts = pack_documents(lengths, seq_len, window=num_documents)
    samples = [lengths[order[first:after]].tolist() for first, after in pairwise(starts)]
    return [samples[number] for number in draw.permutation(len(samples))[:count]]


def static_costs(samples: list[list[int]], seq_len: int, dp: int, cp: int) -> Costs:
    """Pairs of a query and a key that each rank computes in each microbatch: microbatches x ranks."""
    costs = np.zeros((len(samples) // dp, dp * cp))
    for number, lengths in enumerate(samples):
        keys_S = np.concatenate([*(np.arange(1, n + 1) for n in lengths), np.zeros(seq_len - sum(lengths), np.int64)])
        for rank in range(cp):
            pairs = sum(int(keys_S[span.start : span.stop].sum()) for span in rank_spans(seq_len, cp, rank))
            costs[number // dp, number % dp * cp + rank] += pairs
    return costs


def dynamic_costs(rounds: list[Round], num_ranks: int) -> Costs:
    """The same of dynamic context parallelism; a zigzag shard of one document has its part of the pairs."""
    costs = np.zeros((len(rounds), num_ranks))
    for number, rows in enumerate(rounds):
        for row in rows:
            pairs = sum(d.length * (d.length + 1) / 2 for d in row.documents)
            costs[number, row.first_rank : row.first_rank + row.degree] += pairs / row.degree
    return costs


def least_fullest(samples: list[list[int]], seq_len: int, dp: int, cp: int, mean: float) -> float:
    """Pairs that some rank has at least, however documents are packed: the mean, or its full sequences.

    Each full sequence takes all ranks of a CP group, so that one of the `dp` groups has its part of them, rounded up.
    """
    num_long = sum(lengths == [seq_len] for lengths in samples)
    return max(mean, -(-num_long // dp) * seq_len * (seq_len + 1) / 2 / cp)


def compare_flops(plan: Plan, num_steps: int, long_share: float) -> dict[str, Any]:
    """Attention of the fullest rank, and of the slowest rank of every microbatch, over many steps."""
    layout, job = plan.layout, plan.job
    cost_of = dynamic_grid(plan, Mesh(Layout())).cost_of
    fullest, wider_max, slowest, rounds_of, num_long = [], [], [], [], []
    for step in range(num_steps):
        samples = draw_samples(np.random.default_rng(step), job.seq_len, job.global_batch, long_share)
        documents = [Document(n, 0, length) for n, lengths in enumerate(samples) for length in lengths]
        rounds = pack_step(documents, layout.dp, layout.cp, job.seq_len, cost_of)
        static = static_costs(samples, job.seq_len, layout.dp, layout.cp)
        dynamic = dynamic_costs(rounds, layout.dp * layout.cp)
        assert np.isclose(static.sum(), dynamic.sum())  # the same pairs, on other ranks
        mean = static.sum(0).mean()
        least = least_fullest(samples, job.seq_len, layout.dp, layout.cp, mean)
        fullest.append((static.sum(0).max(), dynamic.sum(0).max(), least, mean))
        num_ranks = layout.dp * layout.cp
        wider = [pack_step(documents, num_ranks // cp, cp, job.seq_len, cost_of) for cp in WIDER_CP]
        wider_max.append([dynamic_costs(each, num_ranks).sum(0).max() for each in wider])
        slowest.append((static.max(1).sum(), dynamic.max(1).sum()))
        rounds_of.append(len(rounds))
        num_long.append(sum(lengths == [job.seq_len] for lengths in samples))
    static_max, dynamic_max, least_max, means = np.array(fullest).T
    static_path, dynamic_path = np.array(slowest).T
    return {
        "fullest_rank_ratio": float(np.mean(static_max / dynamic_max)),
        "fullest_rank_ratio_least": float(np.min(static_max / dynamic_max)),
        "fullest_rank_ratio_bound": float(np.mean(static_max / least_max)),
        **{
            f"fullest_rank_ratio_cp_{cp}": float(np.mean(static_max / of_cp))
            for cp, of_cp in zip(WIDER_CP, np.array(wider_max).T, strict=True)
        },
        "static_fullest_over_mean": float(np.mean(static_max / means)),
        "dynamic_fullest_over_mean": float(np.mean(dynamic_max / means)),
        "slowest_of_microbatches_ratio": float(np.mean(static_path / dynamic_path)),
        "static_microbatches": job.global_batch // layout.dp,
        "dynamic_microbatches": float(np.mean(rounds_of)),
        "long_documents": float(np.mean(num_long)),
    }


@dataclass
class CpuClock:
    """CPU seconds of each microbatch on this rank."""

    seconds: list[float]

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.process_time()
            result = run(*args)
            self.seconds.append(time.process_time() - began)
            return result

        return timed


def time_rank(rank: int, plan: Plan, num_steps: int) -> list[dict[str, Any]]:
    """Train static and dynamic steps in turns as one rank: wall and CPU seconds of each."""
    mesh = Mesh(plan.layout, rank)
    parts = build(plan, mesh, with_data=False)
    assert isinstance(parts.runner, Sequential)
    clock = CpuClock([])
    parts.runner._run = clock.wrap(parts.runner._run)  # type: ignore[method-assign]
    times = []
    for step in range(num_steps + 1):  # the first one warms up
        draw = np.random.default_rng(1000 + step)
        samples = draw_samples(draw, plan.job.seq_len, plan.job.global_batch, TIMED_SHARE)
        tokens = [draw.integers(0, plan.model.vocab, sum(lengths)) for lengths in samples]
        packed = [make_sample(*each, plan.job.seq_len) for each in zip(tokens, samples, strict=True)]
        rows = DynamicSteps(dynamic_grid(plan, mesh), packed.__getitem__, len(packed), plan.job.seq_len)
        batches = {
            "static": [static_batch(sample) for sample in packed[mesh.coordinate("dp") :: plan.layout.dp]],
            "dynamic": [rows.batch(0, number) for number in range(len(rows.rounds(0)))],
        }
        names = sorted(batches, reverse=step % 2 == 0)
        for name in names:
            clock.seconds = []
            torch.distributed.barrier()
            began = time.perf_counter()
            result = train_step(parts, batches[name], 0.0, plan.job)
            wall = time.perf_counter() - began
            if step:
                times.append({"name": name, "wall": wall, "cpu": clock.seconds, "loss": result.loss, "step": step})
    return times


def make_sample(tokens: NDArray[np.int64], lengths: list[int], seq_len: int) -> Sample:
    starts = np.cumsum([0, *lengths[:-1]])
    labels = np.append(tokens[1:], -100)
    labels[np.cumsum(lengths) - 1] = -100
    return pad_sample(tokens, labels, seq_len, starts)


def static_batch(sample: Sample) -> Batch:
    names = ("tokens_S", "labels_S", "documents_S", "positions_S")
    tokens_BS, labels_BS, documents_BS, positions_BS = (torch.from_numpy(getattr(sample, n))[None] for n in names)
    return Batch(tokens_BS, labels_BS, documents_BS, positions_BS)


def compare_times(plan: Plan, num_steps: int) -> dict[str, Any]:
    """Medians over steps. Losses of both must agree: they are of the same weights on the same samples."""
    ranks = run_ranks(plan.layout.gpus, time_rank, plan, num_steps)
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for entries in zip(*ranks, strict=True):
        busiest = np.array([entry["cpu"] for entry in entries]).max(axis=0).sum()
        wall, first = max(entry["wall"] for entry in entries), entries[0]
        steps[first["name"], first["step"]] = {"wall": wall, "busiest": float(busiest), "loss": first["loss"]}
    numbers = range(1, num_steps + 1)
    for number in numbers:
        losses = [steps[name, number]["loss"] for name in ("static", "dynamic")]
        assert abs(losses[0] - losses[1]) < 1e-3, losses
    found: dict[str, Any] = {}
    for key in ("wall", "busiest"):
        for name in ("static", "dynamic"):
            found[f"{name}_{key}_seconds"] = median(steps[name, number][key] for number in numbers)
        ratios = [steps["static", number][key] / steps["dynamic", number][key] for number in numbers]
        found[f"{key}_ratio"] = median(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8, help="steps of which FLOPs are counted")
    parser.add_argument("--timed-steps", type=int, default=6, help="steps that are trained; 0: none")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    flops = {}
    for dp, global_batch in BATCHES:
        plan = plan_of({**PLANNED, "cluster.gpus": dp * CP, "job.global_batch": global_batch}, cp=CP, ep=CP)
        found_of = {str(share): compare_flops(plan, args.steps, share) for share in LONG_SHARES}
        flops[f"dp {dp}, {global_batch} sequences"] = found_of
        print(f"DP {dp} x CP {CP}, {global_batch} sequences a step")
        print("share of long documents         ", *(f"{share:>8}" for share in found_of))
        for name in found_of[str(TIMED_SHARE)]:
            print(f"{name:32}", *(f"{each[name]:8.2f}" for each in found_of.values()))
    found: dict[str, Any] = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": os.cpu_count()}
    found |= {"timed_share": TIMED_SHARE, "flops": flops}
    if args.timed_steps:
        times = compare_times(plan_of(TIMED, cp=2, ep=4), args.timed_steps)
        for name, value in times.items():
            print(f"{name:32} {value:8.3f}")
        found["times"] = times
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
