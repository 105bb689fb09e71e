"""Whether the recorded calls of all ranks let every rank get through its step, without a cluster.

`rehearse_plan` passes the `CallSequence` of every rank to `find_mismatch`. It plays the sequences against each other:
a rank goes on until it waits for a call; a collective completes when every rank of its group has started it and all
agree on it; a message completes when its sender and its receiver have started it. A communicator runs its calls one
after another, in the order in which a rank started them, as NCCL does. Two ranks whose calls differ are reported with
the first such call; ranks that wait for each other in different calls are reported as a deadlock.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from threefold.dryrun.tracking.call_recorder import CallSequence, Message, RecordedCall
from threefold.engine.dist.mesh import GROUPS, ranks_along
from threefold.findings import Finding
from threefold.layout.degrees import Layout

MAX_RANKS_NAMED = 8


@dataclass(frozen=True)
class CallState:
    """The state of a rank at a call: the call that it makes there, or None if it has ended its step."""

    rank: int
    call: RecordedCall | None

    def describe(self, group: str = "") -> str:
        if self.call is None:
            return f"rank {self.rank} has ended its step"
        return f"rank {self.rank} calls {describe(self.call)}{group} ({self.call.where})"


@dataclass(frozen=True)
class Mismatch:
    """Ranks that would wait for each other for ever."""

    ranks: tuple[int, ...]  # of the group
    number: int  # of the first call of the group that does not complete, from 1
    states: tuple[CallState, ...]  # two ranks that differ, or ranks each of which waits for the next
    is_deadlock: bool  # whether the ranks wait in different calls, each of which would match


def describe(call: RecordedCall) -> str:
    """A call in words: operation, bytes, dtype."""
    if call.operation in ("send", "recv"):
        (message,) = call.messages
        return f"{call.operation} of {_size(call)} {'to' if message.is_send else 'from'} rank {message.peer}"
    if call.operation == "all_to_all":
        return f"all_to_all of {sum(call.sent):,} bytes to and {sum(call.received):,} bytes from its ranks"
    return call.operation if call.num_bytes is None else f"{call.operation} of {_size(call)}"


def _size(call: RecordedCall) -> str:
    return f"{call.num_bytes:,} bytes ({call.dtype})"


def match_findings(layout: Layout, sequences: Mapping[int, CallSequence]) -> list[Finding]:
    """An error for the first call that does not complete; no finding if every rank gets through its step."""
    found = find_mismatch(sequences)
    if found is None:
        return []
    problem = "; ".join(
        state.describe(f" in {name_group(layout, state.call.ranks)}" if found.is_deadlock and state.call else "")
        for state in found.states
    )
    return [
        Finding(
            rule="collectives-match",
            at=f"call {found.number} of {name_group(layout, found.ranks)}",
            problem=problem + (": each waits for the next, the last for the first" if found.is_deadlock else ""),
            advice="the run would hang or mix tensors up; do without what the named modules share, or report the plan",
        )
    ]


def name_group(layout: Layout, ranks: Sequence[int]) -> str:
    """The axes along which the ranks of a group differ, and the ranks: "group dp x cp (ranks 0, 2)"."""
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED])) + (", ..." if len(ranks) > MAX_RANKS_NAMED else "")
    if len(ranks) == layout.gpus:
        return f"group world (ranks {named})"
    for axes in GROUPS:
        members = ranks_along(layout, tuple(axes.split()), ranks[0])
        if members == tuple(ranks) or (axes == "pp" and set(ranks) < set(members)):
            return f"group {axes.replace(' ', ' x ')} (ranks {named})"
    return f"a group (ranks {named})"


@dataclass
class _Rank:
    """A rank on its way through its sequence."""

    rank: int
    sequence: CallSequence
    position: int = 0  # in `sequence.events`
    queues: dict[str, deque[int]] = field(default_factory=dict)  # started calls by communicator, the oldest first
    completed: set[int] = field(default_factory=set)
    num_completed: dict[str, int] = field(default_factory=dict)  # by communicator
    messages: dict[int, list[Message]] = field(default_factory=dict)  # what is left of a batch

    def advance(self) -> bool:
        """Start calls until the rank waits for one that is not complete."""
        events, before = self.sequence.events, self.position
        while self.position < len(events):
            event = events[self.position]
            if event >= 0:
                call = self.sequence.calls[event]
                self.queues.setdefault(call.communicator, deque()).append(event)
                self.messages[event] = list(call.messages)
            elif ~event not in self.completed:
                break
            self.position += 1
        return self.position > before

    def oldest(self, communicator: str) -> RecordedCall | None:
        queue = self.queues.get(communicator)
        return self.sequence.calls[queue[0]] if queue else None

    def complete_oldest(self, communicator: str) -> None:
        self.completed.add(self.queues[communicator].popleft())
        self.num_completed[communicator] = self.num_completed.get(communicator, 0) + 1

    def pending(self, communicator: str) -> list[Message]:
        """Messages of the oldest call that are still on their way."""
        return self.messages[self.queues[communicator][0]] if self.queues.get(communicator) else []

    def blocked_in(self) -> RecordedCall | None:
        """The call that keeps this rank from going on: the oldest of the communicator on which it waits."""
        if self.position < len(self.sequence.events):
            waited_for = self.sequence.calls[~self.sequence.events[self.position]]
            return self.oldest(waited_for.communicator)
        return next((self.oldest(name) for name, queue in self.queues.items() if queue), None)


def find_mismatch(sequences: Mapping[int, CallSequence]) -> Mismatch | None:
    """The first call that does not complete; None if every rank gets through its sequence."""
    ranks = {rank: _Rank(rank, sequence) for rank, sequence in sequences.items()}
    groups = {call.communicator: call.ranks for one in ranks.values() for call in one.sequence.calls}
    moved = True
    while moved:
        moved = sum(one.advance() for one in ranks.values()) > 0  # every rank, also if the first one moves
        for communicator, members in groups.items():
            joined = [ranks[rank] for rank in members]
            outcome = _complete_calls(communicator, joined)
            if isinstance(outcome, Mismatch):
                return outcome
            moved |= outcome
    blocked = [one for one in ranks.values() if one.blocked_in() is not None]
    return _deadlock(ranks, blocked[0]) if blocked else None


def _complete_calls(communicator: str, members: Sequence[_Rank]) -> Mismatch | bool:
    """Complete what can be completed on one communicator; whether anything was, or the two ranks that differ."""
    moved = False
    while True:
        oldest = [(one, call) for one in members if (call := one.oldest(communicator)) is not None]
        collectives = [(one, call) for one, call in oldest if not call.messages]
        for one, call in collectives[1:]:
            if _differ(collectives[0], (one, call)):
                return _mismatch(communicator, collectives[0], (one, call))
        if collectives and len(collectives) == len(members):
            for one in members:
                one.complete_oldest(communicator)
            moved = True
            continue
        outcome = _pass_messages(communicator, [one for one, call in oldest if call.messages])
        if outcome is not True:
            return outcome or moved
        moved = True


Started = tuple[_Rank, RecordedCall]


def _differ(first: Started, second: Started) -> bool:
    """Whether two ranks disagree about a collective. Parts of an all-to-all have two sizes that must agree."""
    (one, a), (other, b) = first, second
    if (a.operation, a.num_bytes, a.dtype) != (b.operation, b.num_bytes, b.dtype):
        return True
    if not a.sent:
        return False
    i, j = a.ranks.index(one.rank), a.ranks.index(other.rank)
    return a.sent[j] != b.received[i] or b.sent[i] != a.received[j]


def _pass_messages(communicator: str, members: Sequence[_Rank]) -> Mismatch | bool:
    """Pass messages between ranks whose oldest calls send and receive; whether any was passed."""
    passed = False
    by_rank = {one.rank: one for one in members}
    for sender in members:
        for message in [message for message in sender.pending(communicator) if message.is_send]:
            receiver = by_rank.get(message.peer)
            wanted = [m for m in receiver.pending(communicator) if _receives(m, sender)] if receiver else []
            if receiver is None or not wanted:
                continue
            if (wanted[0].num_bytes, wanted[0].dtype) != (message.num_bytes, message.dtype):
                calls = [one.oldest(communicator) for one in (sender, receiver)]
                assert calls[0] is not None
                assert calls[1] is not None
                return _mismatch(communicator, (sender, calls[0]), (receiver, calls[1]))
            sender.pending(communicator).remove(message)
            receiver.pending(communicator).remove(wanted[0])
            passed = True
    for one in members:
        if not one.pending(communicator):
            one.complete_oldest(communicator)
    return passed


def _receives(message: Message, sender: _Rank) -> bool:
    return not message.is_send and message.peer == sender.rank


def _mismatch(communicator: str, first: Started, second: Started) -> Mismatch:
    states = tuple(CallState(one.rank, call) for one, call in (first, second))
    number = first[0].num_completed.get(communicator, 0) + 1
    return Mismatch(first[1].ranks, number, states, is_deadlock=False)


def _deadlock(ranks: Mapping[int, _Rank], start: _Rank) -> Mismatch:
    """Follow who waits for whom, from a blocked rank to one that has ended its step or that was met before."""
    chain: list[_Rank] = []
    one: _Rank | None = start
    while one is not None and one not in chain:
        chain.append(one)
        call = one.blocked_in()
        one = None if call is None else _rank_missing(ranks, one, call)
    if one is not None:
        chain = chain[chain.index(one) :]
    else:
        chain = chain[-2:]
    call = chain[0].blocked_in()
    assert call is not None
    states = tuple(CallState(each.rank, each.blocked_in()) for each in chain)
    number = chain[0].num_completed.get(call.communicator, 0) + 1
    return Mismatch(call.ranks, number, states, is_deadlock=one is not None)


def _rank_missing(ranks: Mapping[int, _Rank], one: _Rank, call: RecordedCall) -> _Rank | None:
    """A rank that a call waits for: of a collective one that has not started it, of messages the first peer."""
    if call.messages:
        pending = one.pending(call.communicator)
        return ranks[pending[0].peer]
    for rank in call.ranks:
        other = ranks[rank].oldest(call.communicator)
        if other is None or other.messages:
            return ranks[rank]
    return None
