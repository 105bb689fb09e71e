"""A rehearsal as text: peaks by stage and term beside the estimate, what was live, what was sent."""

from collections.abc import Sequence

from threefold.dryrun.ledger import Entry
from threefold.dryrun.measure import Measurement
from threefold.dryrun.rank import RankRehearsal
from threefold.dryrun.rehearse import Rehearsal
from threefold.dryrun.verdict import device_bytes
from threefold.plan.terms import MEMORY_TERMS
from threefold.report.terminal import table
from threefold.units import GIB, MIB, format_bytes, format_tokens

MAX_ENTRIES = 16


def rehearsal_text(found: Rehearsal) -> str:
    parts = [_head(found), _stages(found), _terms(found), _top(found.worst), _sent(found.collectives)]
    if found.left_out:
        parts.append("\n".join(["left out of the rehearsal:", *(f"  {text}" for text in found.left_out)]))
    parts += [str(finding) for finding in found.findings]
    return "\n\n".join(part for part in parts if part)


def measured_text(found: Measurement) -> str:
    """What one GPU showed; the step on the cluster is put together from it and the prediction."""
    rank = found.rehearsed
    off = rank.peak_bytes / found.peak_bytes - 1
    rows = [[name, f"{1e3 * ahead:.2f}", f"{1e3 * back:.2f}"] for name, (ahead, back) in found.module_seconds.items()]
    return "\n\n".join(
        [
            f"measured on one GPU, rank {rank.rank} of {found.plan.layout.gpus} with collectives that do nothing",
            f"peak {format_bytes(found.peak_bytes)} of tensors, {format_bytes(found.reserved_bytes)} reserved; "
            f"rehearsed {format_bytes(rank.peak_bytes)} ({off:+.1%}), {rank.at}",
            "a microbatch, all layers\n" + table(["module", "forward, ms", "backward, ms"], rows),
            f"a step on the cluster, estimated: {found.step_seconds:.4g} s = {found.compute_seconds:.4g} measured "
            f"compute + {found.communication_seconds:.4g} predicted communication + {found.bubble_seconds:.4g} bubble",
            _sent(rank.collectives),
            *found.left_out,
        ]
    )


def _head(found: Rehearsal) -> str:
    plan, job = found.plan, found.plan.job
    return (
        f"rehearsed in {found.seconds:.1f} s: {plan.model_name}, {plan.layout.gpus} x {plan.cluster.chip}, "
        f"{plan.knobs.precision}, {job.global_batch} x {format_tokens(job.seq_len)} tokens a step"
    )


def _stages(found: Rehearsal) -> str:
    have = found.plan.chip.memory_bytes
    rows = []
    for rank in found.ranks:
        need = device_bytes(found.plan, rank)
        guess = found.stage_estimate(rank).peak_bytes
        rows.append(
            [
                _run(rank.stages),
                str(rank.rank),
                _gib(rank.peak_bytes),
                _gib(guess),
                f"{guess / rank.peak_bytes - 1:+.1%}",
                _gib(need),
                _gib(have - need),
                rank.at,
            ]
        )
    header = ["stages", "rank", "peak, GiB", "estimated", "off by", "on the device", "headroom", "when and where"]
    return table(header, rows)


def _run(stages: Sequence[int]) -> str:
    if len(stages) > 2 and list(stages) == list(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}"
    return ",".join(map(str, stages))


def _terms(found: Rehearsal) -> str:
    """Of the fullest rank, beside the estimate of its stage."""
    rank, guess = found.worst, found.stage_estimate(found.worst).terms
    rows = []
    for name in MEMORY_TERMS:
        seen, expected = rank.terms.get(name, 0), guess.get(name, 0.0)
        if max(seen, expected) >= 0.005 * GIB:
            rows.append([name, _gib(seen), _gib(expected), f"{(expected - seen) / GIB:+.2f}"])
    rows.append(["= tensors", _gib(rank.peak_bytes), _gib(sum(guess.values())), ""])
    return f"rank {rank.rank} at its peak\n" + table(["term, GiB", "rehearsed", "estimated", "difference"], rows)


def _top(rank: RankRehearsal) -> str:
    rows = [
        [f"{live.bytes / MIB:,.1f}", live.term, f"{live.dtype} {list(live.shape)}", live.owner] for live in rank.top
    ]
    return f"largest tensors of rank {rank.rank} at its peak\n" + table(["MiB", "term", "what", "whose"], rows)


def _sent(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    rows = [
        [e.axis, e.operation, format_bytes(e.num_bytes), str(e.count), format_bytes(e.num_bytes * e.count), e.link]
        for e in entries[:MAX_ENTRIES]
    ]
    rest = len(entries) - len(rows)
    shown = table(["axis", "operation", "bytes a call", "calls", "bytes a step", "link"], rows)
    more = f"\nand {rest} smaller kinds (--json has all)" if rest > 0 else ""
    return f"collectives of a rank in a step\n{shown}{more}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
