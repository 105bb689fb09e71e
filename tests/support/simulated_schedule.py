"""Pipeline schedules simulated step by step, against which formulas of memory and time are checked.

A rank's order is Megatron's: forwards to warm up, then one forward and one backward in turn, then the remaining
backwards. With several chunks a rank works on PP microbatches of one chunk before it goes to the next.
"""

Action = tuple[str, int, int]  # "F" or "B", chunk of the rank, microbatch


def order(pp: int, vpp: int, count: int, rank: int) -> list[Action]:
    total = count * vpp
    forwards = [("F", *_chunk_and_microbatch(i, pp, vpp, count)) for i in range(total)]
    backwards = [("B", vpp - 1 - chunk, mb) for _, chunk, mb in forwards]
    warm = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warm = min(warm, total)
    done = forwards[:warm]
    for i in range(total - warm):
        done += [forwards[warm + i], backwards[i]]
    return [*done, *backwards[total - warm :]]


def _chunk_and_microbatch(index: int, pp: int, vpp: int, count: int) -> tuple[int, int]:
    """Chunk and microbatch of the index-th forward; the last round may be short."""
    group, inside = divmod(index, pp * vpp)
    size = min(pp, count - group * pp)
    chunk, offset = divmod(inside, size)
    return chunk, group * pp + offset


def most_held(pp: int, vpp: int, count: int, rank: int) -> int:
    """Microbatches whose activations a rank holds at most, over all its chunks."""
    held = most = 0
    for kind, _, _ in order(pp, vpp, count, rank):
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def makespan(pp: int, vpp: int, count: int, forward: list[float], backward: list[float]) -> float:
    """Seconds until every rank is done; `forward[v]` is the time of virtual stage v for one microbatch."""
    orders = [order(pp, vpp, count, rank) for rank in range(pp)]
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * pp, [0] * pp
    last = pp * vpp - 1
    while any(position[rank] < len(orders[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            while position[rank] < len(orders[rank]):
                kind, chunk, mb = orders[rank][position[rank]]
                stage = chunk * pp + rank
                if kind == "F":
                    needs = [("F", stage - 1, mb)] if stage else []
                else:
                    needs = [("F", stage, mb)] + ([("B", stage + 1, mb)] if stage < last else [])
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + (forward if kind == "F" else backward)[stage]
                done[kind, stage, mb] = clock[rank]
                position[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return max(clock)
