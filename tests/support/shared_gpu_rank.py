"""One rank among several that share a GPU: `python tests/support/shared_gpu_rank.py JOBS RESULTS`.

`join.py` starts the ranks through a `PlanSession` and adds a line to JOBS for every piece of work: references of
one rank, a layout to compare with them, groups to start, a run to train. The first rank adds each result to RESULTS; a
rank that fails adds its error and ends, because the others may wait for it for ever.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from threefold.engine.tune.session_rank import add_result, in_words, read_jobs

import torch  # isort: skip  behind the module above, which sets a variable of OpenMP
import torch.distributed as dist
from shared_gpu_cases import CASES, SMALL, STEPS, VANISHING, case_plan, judge
from tiny_runs import tiny_plan
from torch.distributed.distributed_c10d import PrefixStore

from threefold.engine.build import dtype_of, options_of
from threefold.engine.dist.collectives import all_gather, all_reduce, all_to_all
from threefold.engine.dist.join import World, join
from threefold.engine.dist.mesh import GROUPS, Group, Mesh
from threefold.engine.model_options import Options
from threefold.engine.train import train
from threefold.engine.verify.compare import RankResults, compare_results
from threefold.engine.verify.oracle import on_one_rank, run_rank
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan

COLLECTIVE_SECONDS = 120.0  # after which a collective fails: a hang does not outlive its test


@dataclass
class RankSession:
    """This rank, and what it keeps from one piece of work to the next."""

    world: World
    chip: str
    control: dist.ProcessGroup  # on the CPU, for results
    references: dict[tuple[str, str], RankResults] = field(default_factory=dict)
    # Communicators by ranks: layouts share them, because to start one takes longer than a step.
    handles: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    second_handles: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    num_runs: int = 0

    @staticmethod
    def start(chip: str) -> "RankSession":
        torch.set_num_threads(1)
        size = int(os.environ["WORLD_SIZE"])
        plan = tiny_plan({"cluster.chip": chip, "cluster.gpus": size, "job.micro_batch": 1})
        world = join(plan, COLLECTIVE_SECONDS)
        return RankSession(world, chip, dist.new_group(backend="gloo"))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on the first one, nothing on the others."""
        found: list[Any] | None = [None] * self.world.size if self.world.is_leader else None
        dist.gather_object(value, found, dst=0, group=self.control)
        return found or []

    def compute_references(self, cases: list[str]) -> dict[str, Any]:
        """One-rank runs of cases such as "dp/fp32", each on one of the ranks, all of them at once."""
        pairs = [tuple(each.rsplit("/", 1)) for each in cases]
        mine = {(name, how): self._reference(name, how) for name, how in pairs[self.world.rank :: self.world.size]}
        for found in self.gather(mine):
            self.references |= found
        return {"kind": "equal", "said": f"of {len(self.references)} cases on one rank"}

    def compare_layout(self, name: str, precision: str) -> dict[str, Any]:
        """Train in the layout on all ranks and compare with one rank."""
        plan, options = self._settings(name, precision)
        if self.world.is_leader and (name, precision) not in self.references:
            self.references[name, precision] = self._reference(name, precision)
        mesh = Mesh(
            plan.layout,
            self.world.rank,
            self.world.device,
            _handles=self.handles,
            _second_handles=self.second_handles,
        )
        ranks = self.gather(run_rank(self.world.rank, plan, STEPS, dtype_of(plan), options, mesh))
        if not ranks:
            return {}
        bounds = (VANISHING, SMALL)
        kind, said = judge(compare_results(plan, self.references[name, precision], ranks, *bounds), precision)
        said += f"; {ranks[0].calls.total()} collectives"
        if plan.knobs.graphs and self.chip != "cpu":
            said += f"; graphs: {ranks[0].graphs}"
            if any("eager" in rank.graphs or not rank.graphs for rank in ranks):
                kind = "DIFFERENT"
        return {"kind": kind, "said": said}

    def _settings(self, name: str, precision: str) -> tuple[Plan, Options]:
        plan = case_plan(CASES[self.world.size][name], precision, self.chip)
        options = options_of(plan)
        return plan, replace(options, expert_backend="loop") if precision == "fp32" else options

    def _reference(self, name: str, precision: str) -> RankResults:
        plan, options = on_one_rank(*self._settings(name, precision))
        return run_rank(0, plan, STEPS, dtype_of(plan), options, Mesh(Layout(), device=self.world.device))

    def start_groups(self, degrees: dict[str, int]) -> dict[str, Any]:
        """Make every group of a layout anew and use each once; returns how many communicators there were."""
        mesh = Mesh(Layout(**degrees), self.world.rank, self.world.device)
        groups = [mesh.group(*axes.split()) for axes in GROUPS]
        groups = [group for group in groups if not group.is_trivial]
        seconds = [mesh.second_communicator(group) for group in groups if group.name == "ep"]
        for group in (*groups, *seconds, mesh.world):
            self._use(group)
        handles = {id(group.handle) for group in (*groups, *seconds, mesh.world)}
        return {"kind": "equal", "said": f"{min(self.gather(len(handles)), default=0)} communicators of a rank"}

    def _use(self, group: Group) -> None:
        """A sum, a gather and an all-to-all whose results are known by arithmetic on rank numbers."""
        own = self.world.rank
        x = torch.full((3,), float(own + 1), device=self.world.device)
        every = torch.empty(group.size * 3, device=self.world.device)
        all_gather(every, x, group).wait()
        swapped = torch.empty(group.size, device=self.world.device)
        sent = torch.tensor([100.0 * own + peer for peer in group.ranks], device=self.world.device)
        all_to_all(swapped, sent, group).wait()
        all_reduce(x, group).wait()
        assert x.tolist() == [float(sum(group.ranks) + group.size)] * 3, (group.name, x)
        assert every.tolist() == [float(rank + 1) for rank in group.ranks for _ in range(3)], (group.name, every)
        assert swapped.tolist() == [100.0 * peer + own for peer in group.ranks], (group.name, swapped)

    def train(self, fields: dict[str, Any], folder: str, stop_at: int | None, copies: list[str]) -> dict[str, Any]:
        """Train a tiny plan in a folder, of all ranks or of the first one alone; the folder is then copied."""
        self.num_runs += 1
        plan, world = tiny_plan({"cluster.chip": self.chip, **fields}), self.world
        if plan.cluster.gpus == 1:
            here = World(0, 1, 0, world.device, 0)
        else:
            assert world.store is not None
            here = replace(world, store=PrefixStore(f"run-{self.num_runs}", world.store))
        if plan.cluster.gpus > 1 or world.is_leader:
            train(plan, Path(folder), lambda text: None, threads=1, world=here, stop_at=stop_at)
        self.gather(None)
        if world.is_leader:
            for copy in copies:
                shutil.copytree(folder, copy)
        return {"kind": "trained"}


def main(jobs_path: str, results_path: str) -> int:
    session: RankSession | None = None
    for job in read_jobs(Path(jobs_path)):
        work = dict(job["fields"])
        try:
            session = session or RankSession.start(work.pop("chip"))
            work.pop("chip", None)
            do: Callable[..., dict[str, Any]] = getattr(session, work.pop("call"))
            found = do(**work)
        except Exception as error:
            traceback.print_exc()
            add_result(Path(results_path), {"error": f"rank {os.environ['RANK']}: {in_words(error)}"})
            sys.stderr.flush()
            os._exit(1)  # a process group may hang on its way out
        if session.world.is_leader:
            add_result(Path(results_path), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
