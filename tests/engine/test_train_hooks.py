"""The moments of the training loop on which everything else hangs."""

import ast
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine import train as train_module
from threefold.engine.train import train
from threefold.engine.train_hooks import Hook, Step
from threefold.engine.train_state import TrainState

MAX_IMPORTS = 15


class Recorder(Hook):
    """Notes each moment with the metrics that are known there."""

    def __init__(self, name: str, moments: list[str]) -> None:
        self.name, self.moments = name, moments

    @contextmanager
    def _around(self, moment: str) -> Iterator[None]:
        self.moments.append(f"{self.name} enters {moment}")
        yield
        self.moments.append(f"{self.name} leaves {moment}")

    def around_run(self) -> Any:
        return self._around("run")

    def around_step(self, number: int) -> Any:
        return self._around(f"step {number}")

    def around_compute(self, number: int) -> Any:
        return self._around("compute")

    def around_microbatches(self) -> Any:
        return self._around("microbatches")

    def after_compute(self, step: Step) -> None:
        self.moments.append(f"{self.name} after compute of {len(step.batches)} batches")

    def after_step(self, step: Step) -> None:
        self.moments.append(f"{self.name} after step of loss {step.metrics['loss'] == step.result.loss}")

    def between_steps(self, step: Step) -> None:
        self.moments.append(f"{self.name} between")

    def after_last_save(self) -> None:
        self.moments.append(f"{self.name} after the last save")

    def at_end(self) -> None:
        self.moments.append(f"{self.name} at the end")


def test_hooks_are_called_at_their_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts nest with the first hook outermost; the moments after the last save come in the reverse order."""
    moments: list[str] = []
    make = train_module.make_hooks

    def with_recorders(
        state: TrainState, progress: Any, tell: Any, ending: ExitStack, profile: str | None
    ) -> list[Hook]:
        return [Recorder("a", moments), *make(state, progress, tell, ending, profile), Recorder("b", moments)]

    monkeypatch.setattr(train_module, "make_hooks", with_recorders)
    plan = tiny_plan({"job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 1})
    train(plan, tmp_path / "run", lambda text: None)
    count = f"after compute of {plan.num_microbatches} batches"
    assert moments == [
        *("a enters run", "b enters run", "a enters step 1", "b enters step 1", "a enters compute", "b enters compute"),
        *("a enters microbatches", "b enters microbatches", "b leaves microbatches", "a leaves microbatches"),
        *("b leaves compute", "a leaves compute", f"a {count}", f"b {count}", "b leaves step 1", "a leaves step 1"),
        *("a after step of loss True", "b after step of loss True", "a between", "b between"),
        *("b after the last save", "a after the last save", "b leaves run", "a leaves run"),
        *("b at the end", "a at the end"),
    ]


def test_a_hook_can_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndAfterTwo(Hook):
        def __init__(self, state: TrainState) -> None:
            self.state = state

        def wants_to_stop(self) -> bool:
            return self.state.step >= 2

    make = train_module.make_hooks
    monkeypatch.setattr(train_module, "make_hooks", lambda state, *rest: [*make(state, *rest), EndAfterTwo(state)])
    plan = tiny_plan({"job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 5})
    state = train(plan, tmp_path / "run", lambda text: None)
    assert (state.step, state.stopping) == (2, True)


def test_the_loop_imports_few_modules() -> None:
    """What a run does besides its steps belongs into a hook, not into the loop."""
    tree = ast.parse((ROOT / "threefold" / "engine" / "train.py").read_text(encoding="utf-8"))
    modules = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(modules) <= MAX_IMPORTS
