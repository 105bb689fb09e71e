"""Starting ranks, losing them, starting them again; and what starts them on a cluster."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from tiny_runs import closed_pipe

from threefold.cli import train as train_verb
from threefold.cli.main import main
from threefold.engine.launch.agent import Agent, launch_ranks
from threefold.engine.launch.exit_codes import FAULT, REFUSED
from threefold.findings import FindingsError
from threefold.interop.slurm import Options, Shape, batch_script, faults, shape, time_limit, torchrun_commands
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.plan.ranks import RankEnvironment, on_ranks, rank_environment
from threefold.rules.all import check, errors

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
    if rank == 1 and fate == "refuses":
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


def test_an_agent_that_nobody_reads_goes_on(tmp_path: Path, toy: Any) -> None:
    with closed_pipe() as out:
        assert Agent(toy("dies", "9"), 3, 2, tmp_path, out).run() == 0
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
facts = f"{world.attempt} {world.size} {world.device} {total.item():.0f} {stale} {torch.get_num_threads()}"
(folder / f"said-{world.rank}").write_text(facts)
leave()
"""


def test_ranks_meet_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meet.py"
    file.write_text(MEET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert launch_ranks([sys.executable, str(file), str(tmp_path), "2"], 2, 1, tmp_path) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said == [f"1 2 cpu 3 False {threads}"] * 2  # 1 + 2 = 3; nothing of the first attempt is seen in the second


# Four ranks that count together; rank 2 stands still once. The watchdog must end it, the agent start all again.
HANG = """
import sys, time, torch
from pathlib import Path
from threefold.engine.dist.join import join, leave
from threefold.engine.dist.mesh import Mesh
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.launch.watchdog import Watchdog
from threefold.plan.parse import parse
saved = Path(sys.argv[1]) / "step"
plan = parse({"model": "tiny-qwen3-moe", "cluster.gpus": 4}).plan
world = join(plan)
group = Mesh(plan.layout, world.rank).world
step = int(saved.read_text()) if saved.exists() else 0
with Watchdog(6.0, world.store, world.rank, world.size) as watch:
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


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_TASKS_PER_NODE": "8(x2)",
}


def test_a_rank_from_the_environment() -> None:
    assert rank_environment({}) is None
    assert rank_environment(TORCHRUN) == RankEnvironment(3, 8, 1, 2)
    agent = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rank_environment(TORCHRUN | agent) == RankEnvironment(3, 8, 1, 2, attempt=2, agent_store=True)
    assert rank_environment(SLURM) == RankEnvironment(9, 16, 1, 8)
    batch_shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert rank_environment(batch_shell) is None
    assert rank_environment(SLURM | TORCHRUN) == rank_environment(TORCHRUN)  # torchrun inside a Slurm task


@pytest.mark.parametrize(
    "wrong", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {**TORCHRUN, "RANK": "8"}, {**TORCHRUN, "RANK": "first"}]
)
def test_half_an_environment_is_a_finding(wrong: dict[str, str]) -> None:
    with pytest.raises(FindingsError, match="ranks-meet"):
        rank_environment(wrong)


def plan_of(**fields: Any) -> Plan:
    written = {path.replace("__", "."): value for path, value in fields.items()}
    parsed = parse({"model": "tiny-qwen3-moe", **written})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def rule_errors(plan: Plan) -> list[Any]:
    return errors(check(plan))


def test_a_plan_goes_on_with_other_ranks_where_its_layout_allows() -> None:
    plan = plan_of(cluster__gpus=4, layout__tp=2, layout__ep=2, job__global_batch=8)
    assert on_ranks(plan, 4, rule_errors) is plan
    changed = on_ranks(plan, 8, rule_errors)
    assert (changed.cluster.gpus, changed.layout.dp, changed.layout.edp) == (8, 4, 4)
    with pytest.raises(FindingsError, match=r"multiples of 2.*\n.*start 2 or 4 ranks"):
        on_ranks(plan, 3, rule_errors)
    with pytest.raises(FindingsError, match="batch-divides-dp: 8 sequences do not divide by DP 3"):
        on_ranks(plan, 6, rule_errors)


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
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "threefold", "train", str(RECIPE), "job.global_batch=8"]
    done = subprocess.run(
        command, env=os.environ | place | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == REFUSED
    assert "error[ranks-match-plan]" in done.stdout


H100 = {"cluster__chip": "h100", "cluster__gpus": 32, "job__global_batch": 64}


def test_nodes_follow_from_the_plan() -> None:
    assert shape(plan_of(**H100)) == Shape(4, 8)  # 32 GPUs, eight a node
    assert shape(plan_of(**H100 | {"cluster__gpus": 4})) == Shape(1, 4)
    assert shape(plan_of(**H100 | {"cluster__gpus_per_node": 4})) == Shape(8, 4)
    assert shape(plan_of(**H100 | {"cluster__gpus": 12})) is None


def test_a_batch_script_holds_the_plan() -> None:
    plan = plan_of(**H100, knobs__max_connections=1)
    script = batch_script(plan, ["my plans/it's.toml", "layout.ep=4"], Options("1-12", "gpu", "team", "a b.sqsh"))
    directives = set(re.findall(r"^#SBATCH --(.*)$", script, flags=re.MULTILINE))
    assert directives >= {"nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "time=1-12", "partition=gpu"}
    assert directives >= {"account=team", "requeue", "signal=B:USR1@300", "job-name=it-s"}
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    assert "'my plans/it'\"'\"'s.toml' layout.ep=4" in script
    assert "'--container-image=a b.sqsh'" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_torchrun_commands_hold_the_plan() -> None:
    one = torchrun_commands(plan_of(**H100 | {"cluster__gpus": 8}), ["p.toml"], Options(max_restarts=5, run="r"))
    assert "torchrun --nnodes=1 --nproc-per-node=8 --max-restarts=5 --standalone" in one
    assert one.endswith("-m threefold train p.toml --run r\n")
    four = torchrun_commands(plan_of(**H100), ["p.toml"], Options())
    assert '--nnodes=4 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29400"' in four
    subprocess.run(["bash", "-n"], input=four, text=True, check=True)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("10:30", 10.5), ("2:00:00", 120), ("1-0", 1440), ("1-2:30", 1590), ("soon", None), ("0", None)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, minutes: float | None) -> None:
    assert time_limit(text) == minutes  # the formats of man sbatch, counted by hand


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (Options(time="soon"), "--time"),
        (Options(time="4"), "--time"),  # minutes: less than the notice
        (Options(partition="gpu\n#SBATCH --uid=0"), "--partition"),
        (Options(account=""), "--account"),
        (Options(container=" "), "--container"),
    ],
)
def test_nonsense_is_a_finding(options: Options, at: str) -> None:
    assert [finding.at for finding in faults(plan_of(**H100), options)] == [at]


def test_a_plan_that_no_script_can_run_is_a_finding() -> None:
    uneven = plan_of(**H100 | {"cluster__gpus": 12, "target": "megatron-bridge"})
    found = list(faults(uneven, Options()))
    assert [finding.at for finding in found] == ["target", "cluster.gpus"]
    assert found[0].advice == "set target to threefold, or start it by its own tools"


def test_launch_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", str(RECIPE), "cluster.chip=h100", "knobs.precision=bf16"]
    assert main([*words, "--slurm"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=tiny-qwen3-moe-256-1xcpu-fp32\n")
    assert main([*words, "--slurm", "--out", str(tmp_path / "job.sh")]) == 0
    assert (tmp_path / "job.sh").read_text() == printed
    assert main([*words, "--torchrun"]) == 0
    capsys.readouterr()
    for kind in ("--slurm", "--torchrun"):
        assert main([*words, "target=megatron-bridge", "--target", "threefold", kind]) == 0
        assert "target=megatron-bridge --target threefold" in capsys.readouterr().out  # as it was judged
    assert main([*words, "--slurm", "--time", "soon"]) == 1
    said = capsys.readouterr()
    assert (said.out, "error[script-options] --time" in said.err) == ("", True)
    assert main([*words, "--slurm", "--time", "soon", "--out", str(tmp_path / "not.sh")]) == 1
    assert "error[script-options] --time" in capsys.readouterr().out
    assert main(["launch", str(tmp_path / "no.toml"), "--slurm"]) == 1
    assert capsys.readouterr().out == ""
    assert main([*words, "--slurm", "--out", str(tmp_path / "no" / "job.sh")]) == 1
    assert main([*words, "--slurm", "--notice", "0"]) == 2
    with pytest.raises(SystemExit):
        main(words)


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> calls; fi',
    "scancel": 'echo "scancel $@" >> calls; kill -TERM $(cat rank)',
    "srun": 'echo "$MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RESTART_COUNT" >> calls; exec ./rank.sh',
}
FAILS_TWICE = "echo x >> tries; [ $(wc -l < tries) -gt 2 ] || exit 9"
REFUSES = "exit 78"
WAITS = "trap 'exit 0' TERM; echo $$ > rank.new; mv rank.new rank; while :; do sleep 0.05; done"
SLOW_SCANCEL = STUBS["scancel"] + "; while kill -0 $(cat rank); do sleep 0.02; done"


def batch_job(folder: Path, rank: str, **stubs: str) -> subprocess.Popen[bytes]:
    """The script under bash, with Slurm's commands replaced by ones that note their words."""
    for name, text in {**STUBS, **stubs, "rank.sh": rank}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = batch_script(plan_of(**H100), ["plan.toml"], Options())
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "-c", script], cwd=folder, env=os.environ | slurm)


def test_the_script_starts_again_after_a_failure(tmp_path: Path) -> None:
    assert batch_job(tmp_path, FAILS_TWICE).wait(HANG_SECONDS) == 0
    assert (tmp_path / "calls").read_text().split("\n") == ["node7:20041 0", "node7:20042 1", "node7:20043 2", ""]


def test_the_script_does_not_repeat_a_finding(tmp_path: Path) -> None:
    assert batch_job(tmp_path, REFUSES).wait(HANG_SECONDS) == 78
    assert (tmp_path / "calls").read_text() == "node7:20041 0\n"


@pytest.mark.parametrize(("sign", "more"), [(signal.SIGUSR1, ["requeue 41"]), (signal.SIGTERM, [])])
def test_the_script_saves_before_its_time_is_over(tmp_path: Path, sign: signal.Signals, more: list[str]) -> None:
    """Its notice brings it back into the queue; being cancelled does not."""
    job = batch_job(tmp_path, WAITS)
    until((tmp_path / "rank").exists)
    job.send_signal(sign)
    assert job.wait(HANG_SECONDS) == 0
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["scancel --signal=TERM 41", *more]


def test_the_script_has_the_code_of_ranks_that_end_while_it_tells_them(tmp_path: Path) -> None:
    job = batch_job(tmp_path, WAITS, scancel=SLOW_SCANCEL)
    until((tmp_path / "rank").exists)
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_SECONDS) == 0  # not 143, of the `wait` that the signal ended
