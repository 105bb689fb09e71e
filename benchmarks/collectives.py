"""Whether the collectives of all ranks match in random small plans, run by hand.

    python benchmarks/collectives.py [--plans 100] [--seed 0]

Plans of 2 to 16 ranks of tiny models, of every pipeline schedule, kind of data and context parallelism, optimizer and
dispatcher. Every rank of each is rehearsed, one after the other in this process, and their calls are compared
(`threefold/dryrun/collective_match.py`). Prints each plan whose ranks would wait for each other, and a summary.
"""

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from threefold.api.rehearsals import as_the_engine_runs
from threefold.dryrun.rehearse_plan import ALL, rehearse
from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

MODELS = ("tiny-deepseek-v3", "tiny-deepseek-v3", "tiny-qwen3-moe", "tiny-qwen3-next", "tiny-gpt-oss", "tiny-mixtral")
RECOMPUTE: tuple[tuple[str, ...], ...] = ((), (), ("layernorm", "moe_act"), ("mla_up_proj",), ("moe",), ("full",))


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Fields of a small plan, whether they go together or not."""
    pp = draw.choice((1, 2, 2, 4))
    vpp = draw.choice((1, 2)) if pp > 1 else 1
    gpus = draw.choice((2, 4, 8, 8, 16))
    ep_overlap = draw.choice((False, False, True))
    fields: dict[str, Any] = {
        "model": draw.choice(MODELS),
        "target": "threefold",
        "cluster.chip": draw.choice(("h100", "h100", "cpu")),
        "cluster.gpus": gpus,
        "model.num_layers": pp * vpp * draw.choice((1, 2)) if pp > 1 else draw.choice((2, 4)),
        "job.seq_len": draw.choice((64, 128)),
        "job.micro_batch": draw.choice((1, 2)),
        "job.global_batch": gpus * draw.choice((2, 4)),
        "job.mtp": draw.choice((None, 0, 1, 2)),
        "job.optimizer": draw.choice(("adamw", "adamw", "muon")),
        "job.capacity_factor": draw.choice((None, None, None, 1.25)),
        "layout.tp": draw.choice((1, 1, 2, 4)),
        "layout.cp": draw.choice((1, 1, 2, 4)),
        "layout.pp": pp,
        "layout.vpp": vpp,
        "layout.ep": draw.choice((1, 2, 2, 4, 8)),
        "layout.etp": draw.choice((1, 1, 1, 2)),
        "layout.schedule": draw.choice((None, None, "zero-bubble", "dualpipev")) if pp > 1 else None,
        "knobs.precision": draw.choice(("bf16", "bf16", "fp8-blockwise")),
        "knobs.dispatcher": draw.choice(("alltoall", "alltoall", "deepep", "hybridep")),
        "knobs.data_parallel": draw.choice(("zero1", "zero1", "fsdp", "hsdp")),
        "knobs.recompute": draw.choice(RECOMPUTE),
        "knobs.cp_comm": draw.choice(("p2p", "all_gather", "a2a", "a2a+p2p")),
        "knobs.cp_exchange": draw.choice((None, "latents", "expanded")),
        "knobs.ep_overlap": ep_overlap,
        "knobs.delay_wgrad": ep_overlap and draw.choice((False, True)),
        "knobs.grad_reduce_overlap": draw.choice((True, True, False)),
        "knobs.param_gather_overlap": draw.choice((True, True, False)),
        "knobs.shared_expert_overlap": not ep_overlap and draw.choice((False, True)),
        "knobs.optimizer_offload": draw.choice((0.0, 0.0, 1.0)),
    }
    if fields["layout.schedule"] == "dualpipev":
        fields["layout.vpp"] = 2
    if fields["knobs.data_parallel"] == "hsdp":
        fields["layout.replicate"] = 2
    if fields["cluster.chip"] == "cpu":
        fields |= {"knobs.precision": "fp32", "knobs.dispatcher": "alltoall", "knobs.optimizer_offload": 0.0}
    if "full" in fields["knobs.recompute"]:
        fields |= {"knobs.recompute_method": "uniform", "knobs.recompute_layers": 1}
    return fields


def accepted(seed: int) -> Iterator[Plan]:
    """Plans of more than one rank that the engine can run."""
    draw = random.Random(seed)
    while True:
        fields = {path: value for path, value in random_fields(draw).items() if value is not None}
        try:
            parsed = parse(fields)
            if parsed.plan is not None and parsed.plan.layout.gpus > 1:
                yield as_the_engine_runs(parsed.plan)[0]
        except FindingsError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    drawn: Counter[str] = Counter()
    different = failed = num_calls = 0
    for number, plan in zip(range(args.plans), accepted(args.seed), strict=False):
        drawn.update(f"{path}={value}" for path, value in plan.written if isinstance(value, str | bool | tuple))
        try:
            found = rehearse(plan, ALL, jobs=1)
        except FindingsError as error:
            failed += 1
            print(f"{number}: {dict(plan.written)}\n  {error.findings[0]}", flush=True)
            continue
        num_calls += found.num_calls
        print(f"\r{number + 1} of {args.plans}", end="", file=sys.stderr, flush=True)
        if found.mismatches:
            different += 1
            print(f"{number}: {dict(plan.written)}\n  {found.mismatches[0]}", flush=True)
    print("\n".join(f"{count:4} {name}" for name, count in sorted(drawn.items())))
    print(f"{args.plans} plans, {num_calls:,} calls: {different} whose calls differ, {failed} that the engine refused")
    return 1 if different or failed else 0


if __name__ == "__main__":
    sys.exit(main())
