"""The agent: it starts ranks, restarts all of them when one is lost, and passes signals on."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from tiny_runs import closed_pipe

from threefold.cli import train as train_verb
from threefold.cli.main import main
from threefold.engine.dist.join import open_store
from threefold.findings import FindingsError
from threefold.launch import agent
from threefold.launch.rank_process import FAULT, REFUSED
from threefold.plan.ranks import RankEnvironment

launch_ranks = partial(agent.launch_ranks, open_store=open_store)
RECIPE = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"

# A rank without torch: counts to `last` in a file of its own, so that it can go on where it died.
TOY = """
import os, signal, sys, time
from pathlib import Path
folder, fate, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the agent starts ranks with these signals blocked
saved = folder / f"step-{rank}"
step = int(saved.read_text()) if saved.exists() else 0
print(f"attempt {attempt} of rank {rank} begins at {step}", flush=True)
while step < last and not asked:
    step += 1
    saved.with_suffix(".new").write_text(str(step))
    saved.with_suffix(".new").replace(saved)  # a kill finds it as it was, or whole
    if rank == 2 and fate == "dies" and step in (3, 5):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and fate == "fails":
        sys.exit("no such luck")
    if fate == "refuses" and rank == 1 or fate == "all refuse" and step == (1 if rank else 20):
        print("a finding", flush=True)
        sys.exit(78)
    time.sleep(0.01)
if asked:
    (folder / f"stopped-{rank}").write_text(str(step))
"""
FOREVER = "1000000000"
HANG_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., list[str]]:
    file = tmp_path / "toy.py"
    file.write_text(TOY)
    return lambda *words: [sys.executable, str(file), str(tmp_path), *words]


def until(happens: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in folder.glob("pid-*")]


def test_a_killed_rank_takes_all_back_to_what_they_saved(
    tmp_path: Path, toy: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_ranks(toy("dies", "9"), 4, 3, tmp_path) == 0
    assert [(tmp_path / f"step-{rank}").read_text() for rank in range(4)] == ["9"] * 4
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rank")]
    assert said == [
        "rank 2 of 4 was killed by SIGKILL; starting all ranks again (1 of 3 restarts)",
        "rank 2 of 4 was killed by SIGKILL; starting all ranks again (2 of 3 restarts)",
    ]
    log = (tmp_path / "logs" / "rank-2.log").read_text().splitlines()
    assert log == [f"attempt {n} of rank 2 begins at {step}" for n, step in enumerate([0, 3, 5])]
    assert not (tmp_path / "logs" / "rank-0.log").exists()  # rank 0 speaks to the terminal


STORE_TOY = """
import os
from datetime import timedelta
from torch.distributed import TCPStore
attempt, port = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["MASTER_PORT"])
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
print(f"attempt {attempt}: {store.add('note', 1)}", flush=True)
os._exit(0 if attempt else 1)
"""


def test_a_restart_does_not_see_keys_of_the_attempt_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even those without a prefix: NCCL notes there that a collective timed out, and ranks that find the note of
    an earlier attempt hang on their way out."""
    file = tmp_path / "store.py"
    file.write_text(STORE_TOY)
    assert launch_ranks([sys.executable, str(file)], 1, 1, tmp_path) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line] == ["attempt 0: 1", "attempt 1: 1"]


def test_a_rank_that_keeps_failing_is_a_finding(tmp_path: Path, toy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FindingsError) as caught:
        launch_ranks(toy("fails", FOREVER), 2, 1, tmp_path)
    (found,) = caught.value.findings
    assert (found.rule, found.at) == ("ranks-survive", "rank 1")
    assert "exit code 1 on start 2 of 2" in found.problem
    assert capfd.readouterr().err.count("  | no such luck") == 2  # the tail of its log, each time
    assert not any(map(is_alive, pids(tmp_path)))


def test_a_finding_of_a_rank_is_not_tried_again(tmp_path: Path, toy: Any) -> None:
    assert launch_ranks(toy("refuses", FOREVER), 2, 3, tmp_path) == 1
    assert (tmp_path / "step-1").read_text() == "1"
    assert not any(map(is_alive, pids(tmp_path)))


def test_a_finding_of_all_ranks_is_told_by_rank_0_alone(
    tmp_path: Path, toy: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the others end before it."""
    assert launch_ranks(toy("all refuse", FOREVER), 3, 3, tmp_path) == 1
    said = capfd.readouterr()
    assert (said.out + said.err).count("a finding") == 1
    assert said.err == "rank 0 of 3 cannot run what it was given\n"


def test_an_agent_that_nobody_reads_goes_on(tmp_path: Path, toy: Any) -> None:
    with closed_pipe() as out:
        assert agent.Agent(toy("dies", "9"), 3, 2, tmp_path, open_store, out).run() == 0
    assert (tmp_path / "step-2").read_text() == "9"


def test_a_rank_that_nobody_reads_still_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its exit code: the agent would take 0 for a good end."""

    def fail(*given: Any) -> int:
        print("what stays in the buffer until the end")
        raise OSError("a fault of the run itself")

    codes: list[int] = []
    monkeypatch.setattr(train_verb, "_run", fail)
    monkeypatch.setattr(os, "_exit", codes.append)
    with closed_pipe() as out, closed_pipe() as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        train_verb._run_as_rank(Namespace(json=False), RankEnvironment(1, 2, 1, 2))
    assert codes == [FAULT]


def start_agent(tmp_path: Path, toy: Any, ignored: Sequence[signal.Signals] = ()) -> Any:
    """An agent of three ranks that count for ever, in a process of its own; they are under way on return."""

    def work() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # whatever the tests were started under
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        os._exit(launch_ranks(toy("counts", FOREVER), 3, 3, tmp_path))

    agent = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    agent.start()
    try:
        until(lambda: len(list(tmp_path.glob("step-?"))) == 3)
    except BaseException:
        agent.kill()  # its ranks end with it
        agent.join()
        raise
    return agent


def exit_code(agent: Any) -> int:
    agent.join(HANG_SECONDS)
    if agent.exitcode is None:
        agent.kill()
        pytest.fail("it still runs")
    return int(agent.exitcode)


def test_sigterm_lets_ranks_save(tmp_path: Path, toy: Any) -> None:
    agent = start_agent(tmp_path, toy)
    os.kill(agent.pid, signal.SIGTERM)
    assert exit_code(agent) == 0
    assert len(list(tmp_path.glob("stopped-*"))) == 3


def test_a_lost_terminal_lets_ranks_save(tmp_path: Path, toy: Any) -> None:
    agent = start_agent(tmp_path, toy)
    os.kill(agent.pid, signal.SIGHUP)
    assert exit_code(agent) == 0
    assert len(list(tmp_path.glob("stopped-*"))) == 3


def test_under_nohup_a_lost_terminal_is_nothing(tmp_path: Path, toy: Any) -> None:
    agent = start_agent(tmp_path, toy, ignored=[signal.SIGHUP])
    os.kill(agent.pid, signal.SIGHUP)
    before = int((tmp_path / "step-0").read_text())
    until(lambda: int((tmp_path / "step-0").read_text()) > before + 50 or not agent.is_alive())
    assert agent.is_alive()
    assert not list(tmp_path.glob("stopped-*"))
    os.kill(agent.pid, signal.SIGTERM)
    assert exit_code(agent) == 0
    assert len(list(tmp_path.glob("stopped-*"))) == 3


def test_interrupt_ends_ranks_without_another_start(tmp_path: Path, toy: Any) -> None:
    agent = start_agent(tmp_path, toy)
    os.kill(agent.pid, signal.SIGINT)
    assert exit_code(agent) == 130
    assert not any(map(is_alive, pids(tmp_path)))
    assert "attempt 1" not in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
def test_ranks_do_not_outlive_a_killed_agent(tmp_path: Path, toy: Any) -> None:
    agent = start_agent(tmp_path, toy)
    os.kill(agent.pid, signal.SIGKILL)
    assert exit_code(agent) == -signal.SIGKILL
    until(lambda: not any(map(is_alive, pids(tmp_path))))


# Ranks that meet, add up their numbers, and say what they know.
MEET = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from threefold.engine.dist.join import join, leave
from threefold.plan.parse import parse
folder = Path(sys.argv[1])
world = join(parse({"model": "tiny-qwen3-moe", "cluster.gpus": int(sys.argv[2])}).plan)
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
stale = world.store.check(["left here"])
dist.barrier()
world.store.set("left here", "by an earlier attempt")
if world.attempt == 0 and world.rank == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
facts = f"{world.attempt} {world.size} {world.device} {total.item():.0f} {stale}"
(folder / f"said-{world.rank}").write_text(facts)
leave()
"""


@pytest.mark.slow
def test_ranks_meet_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meet.py"
    file.write_text(MEET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert launch_ranks([sys.executable, str(file), str(tmp_path), "2"], 2, 1, tmp_path) == 0
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said == ["1 2 cpu 3 False"] * 2  # 1 + 2 = 3; nothing of the first attempt is seen in the second


# Four ranks that count together; rank 2 stands still once. The watchdog must end it, the agent start all again.
HANG = """
import os, sys, time, torch
from pathlib import Path
from threefold.engine.dist.join import join, leave
from threefold.engine.dist.mesh import Mesh
from threefold.engine.dist.collectives import all_reduce, observe_collectives
from threefold.launch.watchdog import Watchdog
from threefold.plan.parse import parse
saved = Path(sys.argv[1]) / "step"
plan = parse({"model": "tiny-qwen3-moe", "cluster.gpus": 4}).plan
world = join(plan)
group = Mesh(plan.layout, world.rank).world
step = int(saved.read_text()) if saved.exists() else 0
with Watchdog(6.0, world.store, world.rank, world.size) as watch, observe_collectives(watch.observe):
    while step < 6:
        watch.enter_phase(f"step {step}")
        all_reduce(torch.ones(1), group).wait()
        step += 1
        if world.is_leader:
            saved.write_text(str(step))
        all_reduce(torch.ones(1), group).wait()
        if world.attempt == 0 and world.rank == 2 and step == 4:
            time.sleep(100000)
leave()
os._exit(0)  # as `threefold train` ends a rank
"""


@pytest.mark.slow
def test_a_hang_is_named_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hang.py"
    file.write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert launch_ranks([sys.executable, str(file), str(tmp_path)], 4, 1, tmp_path) == 0
    assert (tmp_path / "step").read_text() == "6"
    said = capfd.readouterr().err
    # Two calls a step: the ninth is the one that rank 2 does not come to.
    assert re.search(r"all_reduce number 9 on world \(ranks 0 1 2 3\): rank 2 did not arrive within 6.0 s", said)
    assert re.search(r"rank [013] of 4 gave up on a collective .*; starting all ranks again", said)


def test_train_says_which_ranks_it_cannot_have(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    words = ["job.data=synthetic", "job.global_batch=8"]
    assert main(["train", str(RECIPE), *words, "--nproc", "3"]) == 1
    assert "ranks-match-plan" in capsys.readouterr().out
    assert main(["train", str(RECIPE), *words, "--nproc", "0"]) == 2
    assert main(["train", str(RECIPE), *words, "--max-restarts", "-1"]) == 2
    monkeypatch.setenv("RANK", "0")
    assert main(["train", str(RECIPE), *words]) == 1
    assert "ranks-meet" in capsys.readouterr().out


def test_a_rank_that_is_refused_says_so_by_its_exit_code(tmp_path: Path) -> None:
    """The plan's batch does not divide by three: a finding, and the code that no agent tries again."""
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "threefold", "train", str(RECIPE), "job.global_batch=8"]
    done = subprocess.run(
        command, env=os.environ | variables | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == REFUSED
    assert "error[ranks-match-plan]" in done.stdout
