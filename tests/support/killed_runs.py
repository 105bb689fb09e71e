"""Runs whose ranks are killed with SIGKILL at random moments, and what an undisturbed run of the same plan ends with.

`draw_case` draws a plan of one to four ranks, the moments and the victims. `KilledRun` starts the ranks as forks of a
process that has imported torch, which takes a tenth of a second, and acts as the agent does: when a rank ends, all are
killed and started again. A part of the cases goes through `threefold train` and the agent itself.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from random_layouts import same_bits
from repository import ROOT
from tiny_runs import DEEPSEEK, tiny_plan
from torch.distributed import TCPStore

from threefold.engine.dist.join import leave
from threefold.engine.run.checkpoint_io import step_of_folder
from threefold.engine.run.checkpoints import read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, METRICS
from threefold.engine.train import train
from threefold.engine.train_setup import enter_world
from threefold.plan.file import dump_plan

HANG_SECONDS = 600.0  # after which a case fails: long enough for a machine with much other work
STEPS = 8
MOMENTS = {"start": 2, "step": 4, "save": 4, "evaluation": 3, "end": 1}  # and how often each is drawn
# Lines of metrics have these beside what is trained.
TIMES = ("seconds", "tokens_per_second", "useful_tokens_per_second", "tflops", "tflops_per_gpu", "memory_bytes",
         "data_seconds")  # fmt: skip
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"knobs.precision": "bf16"}, DEEPSEEK],
    2: [
        {"layout.ep": 2},
        {"layout.ep": 2, "knobs.expert_balance": "replicate", "knobs.expert_balance_every": 2},
        {"layout.tp": 2},
        {"layout.pp": 2, "model.num_layers": 2},
        {"knobs.data_parallel": "fsdp", "knobs.precision": "bf16"},
    ],
    3: [{}, {"knobs.data_parallel": "fsdp"}],
    4: [
        {"layout.ep": 2, "layout.pp": 2, "model.num_layers": 2},
        {**DEEPSEEK, "layout.ep": 4, "knobs.precision": "bf16"},
        {**DEEPSEEK, "layout.ep": 4, "knobs.precision": "bf16", "knobs.expert_balance": "replicate"},
        {"layout.tp": 2, "layout.ep": 2},
    ],
}
# Pipelines with multi-token prediction, where several chunks share the head or the embedding, on one rank or on two.
_TWO, _MTP = {"model.num_layers": 2}, {"model.num_layers": 2, "job.mtp": 1}
PIPELINES: dict[int, list[dict[str, Any]]] = {
    2: [
        {**_MTP, "layout.pp": 2, "layout.stages": "Et*2m|L"},
        {**_MTP, "layout.pp": 2, "layout.vpp": 2, "layout.stages": "Et|t|m|L"},
        {**_MTP, "layout.pp": 2, "layout.vpp": 2, "layout.stages": "Et|t|m|L", "layout.schedule": "dualpipev"},
        {**DEEPSEEK, "job.mtp": 2, "layout.pp": 2, "layout.stages": "Et|tmmL"},
        {**_TWO, "layout.pp": 2, "layout.schedule": "zero-bubble"},
    ],
    4: [
        {**_MTP, "layout.pp": 4, "layout.stages": "E|t*2|m|L"},
        {**_MTP, "layout.pp": 2, "layout.tp": 2, "layout.stages": "Et*2m|L"},
        {**_MTP, "layout.pp": 2, "layout.ep": 2, "layout.stages": "Et*2|mL", "layout.schedule": "zero-bubble"},
    ],
}


@dataclass(frozen=True)
class Case:
    """A plan, and when and how its ranks are killed."""

    fields: dict[str, Any]
    moments: tuple[str, ...]  # of MOMENTS, one a kill, each behind a step that is drawn
    with_agent: bool  # through `threefold train` in processes of its own
    seed: int  # of delays and victims

    @property
    def num_ranks(self) -> int:
        return int(self.fields["cluster.gpus"])


def draw_layout(draw: random.Random, ranks: int) -> dict[str, Any]:
    """A layout on so many ranks. Two thirds of those that can are pipelines, most of them with optimizer offload."""
    if ranks not in PIPELINES or draw.random() < 1 / 3:
        return draw.choice(LAYOUTS[ranks])
    fields = {**draw.choice(PIPELINES[ranks]), "knobs.precision": draw.choice(["fp32", "bf16"])}
    offload = draw.choice([0.0, 0.5, 0.9, 1.0, 1.0])
    return fields | ({"knobs.optimizer_offload": offload} if offload else {})


def draw_case(draw: random.Random) -> Case:
    ranks = draw.choice([1, 2, 2, 2, 3, 4, 4])
    fields = {"cluster.gpus": ranks, "job.data": "synthetic", "job.steps": STEPS, "job.micro_batch": 1}
    fields |= {"job.global_batch": 12 if ranks == 3 else 8, **draw_layout(draw, ranks)}
    fields |= {"run.save_every": draw.choice([1, 1, 2, 3]), "run.keep": draw.choice([1, 2])}
    fields["run.eval_every"] = draw.choice([0, 1, 2])
    weights = MOMENTS | ({} if fields["run.eval_every"] else {"evaluation": 0})
    moments = draw.choices(list(weights), list(weights.values()), k=draw.randrange(2, 5))
    if draw.random() < 0.7:  # most runs have something to go on from before a start is killed
        moments.sort(key=lambda moment: moment == "start")
    return Case(fields, tuple(moments), draw.random() < 0.1, draw.randrange(2**32))


def run_rank(fields: dict[str, Any], folder: Path, variables: dict[str, str], said: Path) -> None:
    """The main function of a rank's process: what `threefold train` does in each."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    with said.open("a", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    plan = tiny_plan(fields)

    def say(text: str) -> None:
        os.write(1, f"{text}\n".encode())

    train(plan, folder, say, threads=1, world=enter_world(plan))
    leave()


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["threefold.engine.train", "torch._dynamo", "killed_runs"])


class ForkedRanks:
    """All ranks of one start, as forks."""

    def __init__(self, case: Case, folder: Path, said: Path, store: TCPStore, attempt: int) -> None:
        size = case.num_ranks
        names = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": store.port}
        names |= {"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_USE_AGENT_STORE": True}
        self.ranks: list[BaseProcess] = []
        for rank in range(size):
            here = {**names, "RANK": rank, "LOCAL_RANK": rank} if size > 1 else {}
            variables = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in here.items()}
            words = (case.fields, folder, variables, said if rank == 0 else said.with_suffix(f".{rank}"))
            self.ranks.append(_FORKS.Process(target=run_rank, args=words))
            self.ranks[-1].start()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks if rank.pid and rank.is_alive()]

    def codes(self) -> list[int | None]:
        """The exit code of each rank; None where it still runs."""
        return [rank.exitcode for rank in self.ranks]

    def end(self) -> None:
        """Kill and collect the ranks, as the agent does with all when one ended."""
        for rank in self.ranks:
            rank.kill()
            rank.join()


class CommandRanks:
    """`threefold train`, which starts ranks and starts them again."""

    def __init__(self, case: Case, folder: Path, said: Path) -> None:
        path = folder.with_suffix(".toml")
        path.write_text(dump_plan(tiny_plan(case.fields)), encoding="utf-8")
        words = ["train", str(path), "--run", str(folder), "--threads", "1", "--max-restarts", str(len(case.moments))]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with said.open("a", encoding="utf-8") as out:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "threefold", *words], env=env, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def pids(self) -> list[int]:
        """The agent, and its ranks."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        with suppress(OSError):
            return [self.agent.pid, *map(int, children.read_text().split())]
        return []

    def codes(self) -> list[int | None]:
        return [self.agent.poll()]

    def end(self) -> None:
        self.agent.kill()  # its ranks end with it
        self.agent.wait()


@dataclass
class KilledRun:
    """Runs a case to its end, in a folder of its own."""

    case: Case
    folder: Path
    num_kills: int = 0
    num_resumed: int = 0  # starts that went on from a checkpoint
    attempts: int = 0
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.case.seed)
        self.said = self.folder.with_suffix(".said")
        self._newest = self._lines = 0  # the newest checkpoint, and lines that were said, before the present start

    def run(self, start_seconds: float) -> None:
        """Run to the end. `start_seconds` is how long an undisturbed start took."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kills = list(self.case.moments)
        end = time.monotonic() + HANG_SECONDS
        ranks = self._start(store)
        try:
            while codes := [code for code in ranks.codes() if code != 0]:  # not all have ended well
                assert time.monotonic() < end, f"it hangs: {self.text()}"
                if any(codes):
                    assert self._is_killed(ranks), f"{codes}: {self.text()}"
                    ranks.end()
                    ranks = self._start(store)
                elif kills and self._wait_for(kills[0], start_seconds, ranks):
                    kills.pop(0)
                    self._kill(ranks)
                time.sleep(0.002)
        finally:
            ranks.end()
        self._check_start(has_ended=True)

    def _start(self, store: TCPStore) -> ForkedRanks | CommandRanks:
        self.attempts += 1
        if self.case.with_agent:
            return CommandRanks(self.case, self.folder, self.said)
        self._newest, self._lines = max(self.steps(), default=0), len(self.text().splitlines())
        return ForkedRanks(self.case, self.folder, self.said, store, self.attempts)

    def _kill(self, ranks: ForkedRanks | CommandRanks) -> None:
        pids = ranks.pids
        victims = pids if self.draw.random() < 0.2 else self.draw.sample(pids, min(1, len(pids)))
        for pid in victims:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.num_kills += bool(victims)
        if isinstance(ranks, ForkedRanks):
            for rank in ranks.ranks:
                if rank.pid in victims:
                    rank.join()
        self._check_start()

    def _check_start(self, has_ended: bool = False) -> None:
        """Each start, if it came so far, went on from the newest checkpoint that was there when it began.

        An agent starts ranks by itself, so that only its word tells how often they went on, and from where.
        """
        told = [line for line in self.text().splitlines()[self._lines :] if line.startswith("resuming")]
        if self.case.with_agent:
            self.num_resumed += len(told) if has_ended else 0
            return
        wanted = [f"resuming after step {self._newest} of {STEPS}"] if self._newest else []
        assert told == wanted or (not told and not has_ended), f"{told}, not {wanted}"
        self.num_resumed += len(told)

    @staticmethod
    def _is_killed(ranks: ForkedRanks | CommandRanks) -> bool:
        """Whether a kill explains the end; ranks that lost a peer may have ended meanwhile too."""
        return -signal.SIGKILL in ranks.codes()

    def _wait_for(self, moment: str, start_seconds: float, ranks: ForkedRanks | CommandRanks) -> bool:
        """Wait for the moment of the next kill. False where the run ended before it came."""
        every = self.case.fields["run.eval_every"]
        step = self.draw.randrange(1, STEPS)
        happens: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "step": lambda: self.last_line()[0] >= step,
            "save": lambda: self.last_line()[0] >= step and any((self.folder / CHECKPOINTS).glob("*.partial")),
            "evaluation": lambda: self._evaluates(step, every),
            "end": lambda: STEPS in self.steps(),
        }
        delay = {"start": start_seconds, "step": 0.05, "save": 0.003, "evaluation": 0.005, "end": 0.1}[moment]
        end = time.monotonic() + HANG_SECONDS
        while not happens[moment]():
            if any(code is not None for code in ranks.codes()):
                return False
            assert time.monotonic() < end, f"no {moment}: {self.text()}"
            time.sleep(0.001)
        time.sleep(self.draw.uniform(0, delay))
        return True

    def _evaluates(self, step: int, every: int) -> bool:
        last, is_done = self.last_line()
        return last >= step and last % every == 0 and not is_done

    def steps(self) -> list[int]:
        found = [step_of_folder(path.name) for path in (self.folder / CHECKPOINTS).glob("step-*")]
        return [step for step in found if step is not None]

    def last_line(self) -> tuple[int, bool]:
        """The step of the last whole line of metrics, and whether it is of an evaluation."""
        path = self.folder / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        values = json.loads(whole[-1]) if whole else {"step": 0}
        return values["step"], "eval_loss" in values

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8") if self.said.exists() else ""


def differences(left: Path, right: Path) -> list[str]:
    """What two finished runs differ in: tensors, facts, lines of metrics. Times are left out."""
    last = f"{CHECKPOINTS}/step-{STEPS:08d}"
    (a, facts_a), (b, facts_b) = (read_checkpoint(folder / last) for folder in (left, right))
    assert {"rng.cpu", "optimizer.steps"} <= a.keys()
    found = sorted(a.keys() ^ b.keys())
    found += [name for name in sorted(a.keys() & b.keys()) if not same_bits(a[name], b[name])]
    found += ["facts"] if facts_a != facts_b else []
    return found + (["metrics"] if log_of(left) != log_of(right) else [])


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
