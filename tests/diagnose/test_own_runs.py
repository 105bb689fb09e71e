"""Runs of ours on CPU ranks that are killed, stopped or filled: what died, and of what."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_runs import Run, plan_of

from threefold.diagnose.deaths.verdict import Verdict
from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.logs.job_logs import JobLogs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5000)]


@pytest.fixture
def started() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.agent.kill()
        run.agent.wait()
        run.said.close()


def start(folder: Path, started: list[Run], **fields: float) -> Run:
    run = Run(plan_of(2, 40, **fields), folder / "run", restarts=0)
    started.append(run)
    assert run.wait_for(2), run.text()
    return run


def verdict_on(run: Run) -> Verdict:
    """What the output of the run and its folder say together."""
    assert run.finish() != 0
    found = diagnose([run.folder.with_suffix(".txt"), run.folder])
    assert {part.kind for part in found.parts} == {"log", "run folder"}
    [logs] = [part for part in found.parts if isinstance(part, JobLogs)]
    return logs.verdict


def test_a_killed_rank(tmp_path: Path, started: list[Run]) -> None:
    run = start(tmp_path, started)
    os.kill(run.ranks()[1], signal.SIGKILL)
    found = verdict_on(run)
    assert found.evidence is not None
    assert (found.slug, found.evidence.rank) == ("rank-killed", 1)


def test_a_rank_that_stops(tmp_path: Path, started: list[Run]) -> None:
    """Rank 1 gets out of step: it is stopped, and rank 0 waits in a collective."""
    run = start(tmp_path, started, hang_seconds=20.0)
    os.kill(run.ranks()[1], signal.SIGSTOP)
    found = verdict_on(run)
    assert found.evidence is not None
    assert (found.slug, found.evidence.rank) == ("rank-did-not-arrive", 1)


def test_a_disk_that_is_full(tmp_path: Path, started: list[Run]) -> None:
    """The rank that writes may write no file of more than a kilobyte from now on."""
    run = start(tmp_path, started)
    resource.prlimit(run.ranks()[0], resource.RLIMIT_FSIZE, (1024, 1024))
    assert verdict_on(run).slug == "disk-full"
