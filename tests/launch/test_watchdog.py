"""The watchdog: it names the ranks that did not come to a collective, and waits for ranks that may be late.

No test depends on how busy the machine is: ranks enter the watched part together, the limit of a collective is several
seconds, and a rank that may be late comes back when a key in the store shows that another rank has asked for it.
"""

import math
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_runs import closed_pipe

from threefold.engine.dist.collectives import CollectiveCall, all_gather, all_reduce, observe_collectives
from threefold.engine.dist.join import is_lost_peer_error
from threefold.engine.dist.mesh import Group
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.findings import Finding
from threefold.launch import watchdog as watchdog_module
from threefold.launch.hang_diagnosis import (
    OpenCollective,
    RankReport,
    describe_lagging_ranks,
    diagnose,
    format_ranks,
)
from threefold.launch.rank_process import HUNG
from threefold.launch.watchdog import Watchdog

LIMIT = 3.0  # seconds of one collective; ranks send five heartbeats in it
FOREVER = 10_000.0


def groups(rank: int) -> tuple[Group, Group]:
    """All four ranks, and the pair of this one: 0 1 and 2 3."""
    pair = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
    handle = dist.new_group(list(pair), use_local_synchronization=True)
    return Group("dp x cp", (0, 1, 2, 3), rank, dist.group.WORLD), Group("tp", pair, rank % 2, handle)


def watched(rank: int, fate: str) -> str:
    """Three rounds that go well, then `fate` on rank 2."""
    world, pair = groups(rank)
    store = dist.PrefixStore("attempt", dist.distributed_c10d._get_default_store())
    x = torch.ones(2)
    dist.barrier()  # or a rank that starts late would be late in the first round
    # A punctual rank may wait for a core of a busy machine.
    with (
        Watchdog(FOREVER if fate == "is punctual" else LIMIT, store, rank, 4) as watch,
        observe_collectives(watch.observe),
    ):
        # As training does: a rank that comes back from a phase of its own has the whole limit again.
        watch.enter_phase("step 7", LIMIT if fate == "writes long" else None)
        for _ in range(3):
            all_reduce(x, world).wait()
            all_gather(torch.empty(4), x, pair).wait()
        if rank == 2:
            late(watch, fate, store)
        if fate == "in a chain":
            all_gather(torch.empty(4), x, pair).wait()  # rank 3 waits here for rank 2, and 0 and 1 below for rank 3
        all_reduce(x, world).wait()
        return "done"


def late(watch: Watchdog, fate: str, store: Any) -> None:
    if fate in ("sleeps", "in a chain"):
        watch.enter_phase("data")
        time.sleep(FOREVER)
    elif fate == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fate == "dies":
        os._exit(0)  # without a word, as after a kill; its peers see a closed connection
    elif fate == "makes no progress":
        watch.enter_phase("loading", limit=0.5)
        time.sleep(FOREVER)
    elif fate == "writes long":
        with watch.phase("checkpoint"):
            store.wait([second_diagnosis(watch)], timedelta(seconds=FOREVER))


def second_diagnosis(watch: Watchdog) -> str:
    """The store key of the second time that a rank asks who is missing in the call that rank 2 has not come to."""
    [world] = [on for on in watch._known_communicators() if len(on.ranks) == 4]
    return f"watch/case/{world.key}/{world.num_calls + 1}/2"


def alarm_of(fate: str, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(AssertionError):
        run_ranks(4, watched, fate)
    return capfd.readouterr().err


WORLD_CALL = r"error\[collective-arrives\] all_reduce number 4 on dp x cp \(ranks 0 1 2 3\): "


def test_a_rank_that_sleeps_is_named_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    said = alarm_of("sleeps", capfd)
    assert re.search(
        WORLD_CALL + r"rank 2 did not arrive within 3.0 s; rank 2 is in data at test_watchdog.py:\d+ late", said
    )


def test_a_stopped_rank_is_named_by_its_silence(capfd: pytest.CaptureFixture[str]) -> None:
    said = alarm_of("is stopped", capfd)
    assert re.search(WORLD_CALL + r"rank 2 did not arrive within 3.0 s; rank 2 has not been heard of for \d", said)


def test_a_rank_that_died_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    said = alarm_of("dies", capfd)
    assert re.search(WORLD_CALL + r"rank 2 went away; rank 2 has not been heard of for \d", said)


def test_a_phase_past_its_limit_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    said = alarm_of("makes no progress", capfd)
    assert re.search(
        r"error\[phase-progresses\] loading on rank 2: no progress for 0.5 s, at test_watchdog.py:\d+ late", said
    )


@pytest.mark.slow
def test_the_end_of_a_chain_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever speaks first: rank 2 is late, not rank 3, which waits for it."""
    said = alarm_of("in a chain", capfd)
    first = next(line for line in said.splitlines() if line.startswith("error"))
    assert re.search(r"(dp x cp \(ranks 0 1 2 3\)|tp \(ranks 2 and 3\)): rank 2 did not arrive", first)
    if "dp x cp" in first:
        assert "rank 3 waits in all_gather number 4 on tp (ranks 2 and 3)" in first


@pytest.mark.parametrize("fate", ["writes long", "is punctual"])
def test_ranks_late_with_leave_are_waited_for(fate: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(4, watched, fate) == ["done"] * 4
    assert "error" not in capfd.readouterr().err


def other_program(rank: int) -> None:
    """Rank 1 enters another collective than the others. Nobody is silent, all are in call number 1."""
    world, _ = groups(rank)
    store = dist.PrefixStore("attempt", dist.distributed_c10d._get_default_store())
    dist.barrier()
    with Watchdog(LIMIT, store, rank, 4) as watch, observe_collectives(watch.observe):
        watch.observe(CollectiveCall(world, "all_gather" if rank == 1 else "all_reduce", 0))
        time.sleep(FOREVER)


def test_ranks_that_run_another_program_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        run_ranks(4, other_program)
    first = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("error"))
    assert "is in all_" in first
    assert "instead" in first


def test_an_alarm_that_nobody_reads_still_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with closed_pipe() as err:
        monkeypatch.setattr("sys.stderr", err)
        watchdog_module._end_process(Finding(at="step 1", problem="no progress"))
    assert codes == [HUNG]


class Guarded(dict[Any, Any]):
    """Refuses to be changed or gone through by whoever does not hold the lock: threads share it."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self.lock = lock

    def pop(self, *given: Any) -> Any:
        assert self.lock.locked()
        return super().pop(*given)

    def values(self) -> Any:
        assert self.lock.locked()
        return super().values()


def test_calls_that_begin_and_end_do_not_disturb_the_watching_thread() -> None:
    """It would die of a dict that changes while it looks through it, and nobody would watch any more."""
    alarms: list[Finding] = []
    watch = Watchdog(0.05, dist.HashStore(), 0, 2, alarms.append)
    watch._open, watch._communicators = Guarded(watch._lock), Guarded(watch._lock)
    watch.observe(CollectiveCall(Group("tp", (0, 1), 0, None), "all_reduce", 0))()
    watch._send_heartbeat()
    watch.enter_phase("step 3", limit=-1.0)
    watch._diagnose_phase()
    assert [finding.at for finding in alarms] == ["step 3 on rank 0"]
    assert watch._oldest_call() is None


def open_call(communicator: str, ranks: tuple[int, ...], number: int = 5) -> OpenCollective:
    return OpenCollective("all_reduce", number, communicator, communicator, ranks, 30.0)


def report(calls: dict[str, int], call: OpenCollective | None = None, **more: Any) -> RankReport:
    return RankReport(9, 0.0, "step 1", 31.0, open_call=call, calls=calls, **more)


def test_diagnosis_follows_ranks_that_wait() -> None:
    """0 waits on a for 1, 1 waits on b for 2, and 2 is in nothing: 2 is late."""
    mine, theirs = open_call("a", (0, 1)), open_call("b", (1, 2), number=3)
    reports = {0: report({"a": 5}, mine), 1: report({"a": 4, "b": 3}, theirs), 2: report({"b": 2})}
    diagnosis = diagnose(mine, "did not arrive", reports, {}, own=0)
    assert diagnosis.late_ranks == (2,)
    assert "rank 1 waits in all_reduce number 3 on b (ranks 1 and 2)" in diagnosis.problem


def test_a_circle_names_all_in_it() -> None:
    """0 and 1 entered a and b in opposite orders."""
    mine, theirs = open_call("a", (0, 1)), open_call("b", (0, 1))
    reports = {0: report({"a": 5, "b": 4}, mine), 1: report({"a": 4, "b": 5}, theirs)}
    assert diagnose(mine, "did not arrive", reports, {}, own=0).late_ranks == (1,)


def test_a_call_that_all_are_in_is_not_blamed_on_a_rank() -> None:
    mine = open_call("a", (0, 1))
    diagnosis = diagnose(mine, "did not arrive", {0: report({"a": 5}, mine), 1: report({"a": 5}, mine)}, {}, own=0)
    assert diagnosis.late_ranks == ()
    assert "every rank is in it" in diagnosis.problem


def test_leave_ends_with_silence() -> None:
    mine = open_call("a", (0, 1))
    saving = report({"a": 4}, phase_limit=math.inf)
    assert diagnose(mine, "did not arrive", {1: saving}, {}, own=0).is_excused
    assert not diagnose(mine, "did not arrive", {1: saving}, {1: 31.0}, own=0).is_excused
    assert not diagnose(
        mine, "did not arrive", {1: report({"a": 4}, phase_limit=30.0)}, {}, own=0
    ).is_excused  # idle for 31
    assert "rank 1 was never heard of" in diagnose(mine, "did not arrive", {1: None}, {}, own=0).problem


def test_reports_survive_the_store_and_tell_who_is_behind() -> None:
    one = report({"a": 4}, open_call("a", (0, 1)), phase_limit=math.inf)
    assert RankReport.from_json(one.to_json()) == one
    assert describe_lagging_ranks({"a": 5}, {1: one, 2: None}, {"a": "tp"}) == ["rank 1 has started 4 of 5 calls on tp"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((5, 3), "ranks 3 and 5"), (range(64), "ranks 0-63"), ((1, 2, 4), "ranks 1 2 4")],
)
def test_ranks_are_spelt_for_people(ranks: Any, words: str) -> None:
    assert format_ranks(ranks) == words


def test_gloo_says_when_a_peer_is_gone(tmp_path: Path) -> None:
    """The words are torch's own; should they change, ranks left alone would be blamed for it."""
    assert run_ranks(2, _left_alone, str(tmp_path)) == [True, None]


def _left_alone(rank: int, folder: str) -> bool | None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        dist.destroy_process_group(group)
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return is_lost_peer_error(error)
    return False
