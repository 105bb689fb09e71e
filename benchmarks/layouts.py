"""Whether random layouts compute what one rank computes, run by hand.

    python benchmarks/layouts.py [--count 1000] [--seed 0] [--first 0] [--as-trained] [--family nemotron_h olmoe]

Draws models, layouts, jobs and knobs (`tests/support/drawn_layouts.py`), leaves out what the rules refuse, and trains
each of the others for two steps in fp64, on forked ranks and on one. Prints every draw whose ranks differ, crash or
hang, with its model and fields, and a summary. A draw is repeated alone by its number: `--seed 0 --first 17 --count 1`.
With `--as-trained` models are trained in bf16, fp16 or a format below, and compared roughly. `--family` draws models of
these families alone: those of `tiny_models.py` and `tiny_mixtures.py`.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from layout_runs import FAULTS, LIMIT_SECONDS, Outcome, run_draws
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES


def features(outcome: Outcome) -> list[str]:
    """What the summary counts of a plan that was run."""
    plan = outcome.resolved.plan
    assert plan is not None
    layout, knobs, job = plan.layout, plan.knobs, plan.job
    found = [
        f"{axis} {layout.degree(axis)}" for axis in ("tp", "cp", "pp", "dp", "ep", "etp") if layout.degree(axis) > 1
    ]
    found += [plan.model.family, f"{layout.gpus} ranks", knobs.data_parallel, job.optimizer, f"mtp {plan.mtp}"]
    found += [layout.pipeline_schedule] if layout.pp > 1 else []
    found += [f"cp_comm {kind}" for kind in {knobs.cp_comm} if layout.cp > 1]
    found += [f"recompute {name}" for name in knobs.recompute] + [
        f"offload {name}" for name in knobs.activation_offload
    ]
    switches = (
        "ep_overlap",
        "delay_wgrad",
        "shared_expert_overlap",
        "expert_fusion",
        "tp_overlap",
        "optimizer_offload",
    )
    found += [name for name in switches if getattr(knobs, name)]
    wholes = {"stages": layout.stages, "packing": job.packing, "capacity": job.capacity_factor, "tied": plan.model.tied}
    return [*found, *(name for name, value in wholes.items() if value)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default=os.environ.get("THREEFOLD_SEED", "0"))
    parser.add_argument("--as-trained", action="store_true", help="in 16 bits and less, in place of fp64")
    parser.add_argument("--family", nargs="+", default=[], choices=[*FAMILIES, *MIXTURES], metavar="NAME")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that the ranks of a draw may take")
    args = parser.parse_args()
    kinds: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    begin = time.monotonic()
    outcomes = run_draws(args.seed, args.first, args.count, args.as_trained, args.limit, args.family)
    for done, outcome in enumerate(outcomes, 1):
        kinds[outcome.kind] += 1
        if outcome.resolved.plan is not None:
            kinds["repaired"] += bool(outcome.resolved.repaired)
            seen.update(features(outcome))
        if outcome.kind in FAULTS:
            print(outcome, flush=True)
        print(f"\r{done} of {args.count}: {dict(kinds)}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    print(f"\n{', '.join(f'{name} {count}' for name, count in sorted(seen.items()))}")
    print(f"{args.count} draws of seed {args.seed} in {seconds:.0f} s: {dict(kinds)}")
    return 1 if any(kinds[kind] for kind in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
