"""Training from the library and from `threefold train`: the plan on the ranks at hand, one rank, or ranks to start.

Torch loads with the first function that trains.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from threefold.api.plans import for_our_engine
from threefold.diagnose.run_health import judge_run
from threefold.findings import Finding, FindingsError, in_order
from threefold.launch.agent import launch_ranks
from threefold.launch.cpu_cores import core_sets
from threefold.plan.cores import AUTO
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.plan.ranks import on_ranks
from threefold.profile.readers.run_record import RunRecord
from threefold.profile.readers.run_record import read_run as read_record
from threefold.rules.all import check, errors, judge, promoted


def train(
    plan: Plan,
    folder: str | Path,
    ranks: int | None = None,
    threads: int | None = None,
    stop_at: int | None = None,
    profile: str | None = None,
    max_restarts: int = 3,
    origin: str | Path | None = None,
    with_optimizer: bool = False,
    say: Callable[[str], None] | None = None,
) -> RunRecord:
    """Train a plan in a folder of its own, or go on with the run there, and read what it has logged.

    One rank trains in this process, several are started as processes of this machine (`ranks`; by default as many as
    the plan has GPUs). `stop_at` saves and stops behind a step; the same call goes on later. `profile` ("torch" or
    "nsys") traces some steps. A new run starts from the newest checkpoint of the run in `origin`, with the optimizer's
    state where `with_optimizer` says so. `say` gets the lines of one rank. Raises what the rules and the run folder
    refuse.
    """
    ready = plan_on_ranks(plan, ranks or plan.cluster.gpus)
    if blocking := training_errors(ready):
        raise FindingsError(blocking)
    if ready.cluster.gpus == 1:
        start = Path(origin) if origin else None
        train_rank(ready, Path(folder), threads, stop_at, profile, start, with_optimizer, say)
        return read_run(folder)
    options = [*(["--threads", str(threads)] if threads else []), *(["--stop-at", str(stop_at)] if stop_at else [])]
    options += ["--profile", "--profile-with", profile] if profile else []
    options += ["--from", str(origin)] if origin else []
    options += ["--with-optimizer"] if with_optimizer else []
    with tempfile.TemporaryDirectory() as aside:
        file = Path(aside) / "plan.toml"
        file.write_text(dump_plan(ready), encoding="utf-8")
        code = start_ranks(ready, Path(folder), [str(file), "--run", str(folder), *options], max_restarts)
    if code:
        raise RuntimeError(f"the ranks ended with exit code {code}; their logs are in {folder}/logs")
    return read_run(folder)


def read_run(folder: str | Path) -> RunRecord:
    """The folder of a run: its plan, what it ran on, and its metrics, also while it goes on. No torch."""
    return read_record(Path(folder))


def health_of_run(folder: str | Path) -> list[Finding]:
    """What is not as it should be in a run: routers, losses, data; nothing where it logged no step. The engine itself
    names slow ranks."""
    try:
        return judge_run(read_run(folder))
    except FindingsError:
        return []


def plan_on_ranks(given: Plan, ranks: int) -> Plan:
    """The plan for our engine on so many ranks; raises where no layout of it has as many.

    Whatever stack the plan is for, it is judged by the limits of the engine that runs it.
    """
    return on_ranks(for_our_engine(given), ranks, lambda candidate: errors(judge(candidate)))


def training_errors(plan: Plan) -> list[Finding]:
    """What keeps our engine from training the plan."""
    return in_order(errors(promoted(check(plan, notes=False))))


def train_rank(
    plan: Plan,
    folder: Path,
    threads: int | None = None,
    stop_at: int | None = None,
    profile: str | None = None,
    origin: Path | None = None,
    with_optimizer: bool = False,
    say: Callable[[str], None] | None = None,
) -> tuple[int, bool]:
    """Train as the rank that this process is. Gives the last step, and whether this rank speaks for the run."""
    from threefold.engine.dist.join import leave
    from threefold.engine.start import Origin
    from threefold.engine.train import train as train_steps
    from threefold.engine.train_setup import enter_world

    world = enter_world(plan)
    start = Origin(origin, with_optimizer) if origin else None
    state = train_steps(plan, folder, say, threads=threads, world=world, stop_at=stop_at, profile=profile, origin=start)
    leave()
    return state.step, world.is_leader


def start_ranks(plan: Plan, folder: Path, words: Sequence[str], max_restarts: int) -> int:
    """Run `threefold train` with these words once a rank of this machine, and return its exit code."""
    from threefold.engine.dist.join import check_ranks_start_here, open_store
    from threefold.engine.run.folder import check_run_folder
    from threefold.engine.start import remove_empty_start

    ranks = plan.cluster.gpus
    check_ranks_start_here(
        plan, "start them on the cluster: `threefold launch --slurm` writes a script, --torchrun the commands"
    )
    if plan.run.cores and plan.run.cores != AUTO:
        core_sets(plan.run.cores, ranks)  # one finding here, and not one a rank
    check_run_folder(folder)  # before logs are written there
    try:
        argv = [sys.executable, "-m", "threefold", "train", *words]
        return launch_ranks(argv, ranks, max_restarts, folder, open_store)
    finally:
        remove_empty_start(folder)
