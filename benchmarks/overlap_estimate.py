"""What `threefold estimate` says of the overlap benchmarks, calibrated on their runs without overlap.

    python benchmarks/overlap_estimate.py [--write] benchmarks/results/overlap-h200.json     of results that were kept

Only the seconds of compute and of an exchange come from there; every gain of overlap is the estimate's own. The plan is
the benchmark's, on a chip that computes and sends as fast as was measured.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.cost.layer_work import layer_case, layer_work
from threefold.cost.rates import Rates, calibration
from threefold.cost.time.communication import latency_seconds
from threefold.cost.time.step import step_time
from threefold.cost.traffic.dispatch import dispatch_bytes
from threefold.plan.plan import Plan
from threefold.spec.chips import ChipSpec

VARIANTS = {"no overlap": (False, False), "overlap": (True, False), "overlap, delayed weights": (True, True)}
NONE, MUCH = 1e-12, 1e12  # seconds and fractions that are to play no part
RANKS = 8  # of which the held benchmark is one


def estimate_beside(found: dict[str, Any], tiny: bool = False) -> dict[str, Any]:
    """Prints estimated and measured seconds side by side; what it returns belongs into the benchmark's result."""
    rows = _held(found, tiny) if "hold_seconds" in found else _network(found, tiny)
    print(f"\n{'estimate, calibrated without overlap':<46}{'measured':>13}{'estimated':>13}{'off':>8}")
    for row in rows:
        measured, estimated = f"{row['measured'] * 1e3:.2f} ms", f"{row['estimated'] * 1e3:.2f} ms"
        print(f"{row['name']:<46}{measured:>13}{estimated:>13}{row['off']:>+8.1%}")
    return {"rows": rows, "worst": max(abs(row["off"]) for row in rows)}


def _network(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """A step of two ranks. What an exchange takes beyond its bytes is start-up, and that counts of tokens take too."""
    from overlap_network import plan_of

    plan, first, count = plan_of(tiny), found["rows"][0], found["microbatches"]
    times = count * plan.model.num_layers
    sent = 8 * found["bytes_sent_a_step"] / found["bits_per_second"]
    start = max(0.0, first["exposed_seconds"] - sent) / (5 * times)
    exchange = (first["exposed_seconds"] / times - start) / 4
    rates = replace(_rates(plan), sync_seconds=max(NONE, start))

    def seconds(plan: Plan) -> float:
        return step_time(_with_microbatches(plan, count), rates).step_seconds

    compute = first["seconds"] - first["exposed_seconds"]
    like_it = _calibrated(plan, rates, seconds, compute, exchange)
    return [_row(row["variant"], row["seconds"], seconds(_variant(like_it, row["variant"]))) for row in found["rows"]]


def _held(found: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """A microbatch more in the steady state. Nothing travels, so that an exchange takes nothing from compute."""
    from overlap_held import FEW, MORE, plan_of

    plan, instant = _one_of_many(plan_of(tiny)), found["microbatch_seconds"]["instant"]
    rates = replace(_rates(plan), contention=NONE, sync_seconds=NONE)

    def seconds(plan: Plan) -> float:
        few, more = (step_time(_with_microbatches(plan, count), rates).step_seconds for count in (FEW, MORE))
        return (more - few) / (MORE - FEW)

    rows = [_row(f"instant, {name}", instant[name], instant["no overlap"]) for name in list(VARIANTS)[1:]]
    main = {"hold_seconds": found["hold_seconds"], "held": found["microbatch_seconds"]["held"]}
    for case in found.get("sweep", [main]):
        held = case["held"]
        exchange = (held["no overlap"] - instant["no overlap"]) / (4 * plan.model.num_layers)
        like_it = _calibrated(plan, rates, seconds, instant["no overlap"], exchange)
        for name in VARIANTS:
            what = f"held {case['hold_seconds'] * 1e3:.2f} ms, {name}"
            rows.append(_row(what, held[name], seconds(_variant(like_it, name))))
    return rows


def _rates(plan: Plan) -> Rates:
    """The shipped ones, less what these runs have none of: launches that lag behind, a slow data-parallel network."""
    quiet = {"host_mixer_seconds": NONE, "host_moe_seconds": NONE, "step_seconds": NONE, "collective": MUCH}
    return replace(calibration(plan.target).rates, **quiet, drift={})


def _calibrated(plan: Plan, rates: Rates, seconds: Callable[[Plan], float], compute: float, exchange: float) -> Plan:
    """On a chip on which compute and one exchange take so long."""
    chip, work = plan.chip, layer_work(layer_case(plan, plan.model.layers[-1]))
    link = dispatch_bytes(plan, work).domain / rates.alltoall / max(NONE, exchange - latency_seconds(rates, "domain"))
    at_once = _scaled(plan, replace(chip, domain_bandwidth=MUCH), MUCH)
    fixed, shipped = seconds(at_once), seconds(_scaled(plan, replace(chip, domain_bandwidth=MUCH), 1.0))
    return _scaled(plan, replace(chip, domain_bandwidth=link), (shipped - fixed) / compute)


def _scaled(plan: Plan, chip: ChipSpec, times: float) -> Plan:
    peaks = {name: flops * times for name, flops in chip.peak_flops.items()}
    return plan.on_chip(replace(chip, peak_flops=peaks, memory_bandwidth=chip.memory_bandwidth * times))


def _one_of_many(plan: Plan) -> Plan:
    """The benchmark has the experts of one rank: here are all ranks, with a part of the experts each."""
    moe = plan.model.moe
    assert moe is not None
    model = replace(plan.model, moe=replace(moe, num_experts=RANKS * moe.num_experts))
    layout = replace(plan.layout, gpus=RANKS, ep=RANKS)
    return replace(plan, model=model, layout=layout, cluster=replace(plan.cluster, gpus=RANKS))


def _with_microbatches(plan: Plan, count: int) -> Plan:
    return replace(plan, job=replace(plan.job, global_batch=count * plan.layout.dp * plan.job.micro_batch))


def _variant(plan: Plan, name: str) -> Plan:
    overlap, delay = VARIANTS[name]
    return replace(plan, knobs=replace(plan.knobs, ep_overlap=overlap, delay_wgrad=delay))


def _row(name: str, measured: float, estimated: float) -> dict[str, Any]:
    return {"name": name, "measured": measured, "estimated": estimated, "off": estimated / measured - 1}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="keep it in the results, as the benchmark does")
    args = parser.parse_args()
    for path in args.results:
        print(f"\n{path}", end="")
        found = json.loads(path.read_text(encoding="utf-8"))
        found["estimate"] = estimate_beside(found)
        if args.write:
            path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
