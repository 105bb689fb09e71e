"""The text of `threefold dry-run`: peaks by stage and term beside the estimate, largest tensors, collectives.

`rehearsal_text` is for a rehearsal without a GPU, `measured_text` for `--device cuda`.
"""

from collections.abc import Sequence

from threefold.cost.traffic.threefold.expert_parallel import expert_row_bytes
from threefold.dryrun.measured.measure import Measurement
from threefold.dryrun.memory_fit import device_bytes
from threefold.dryrun.rehearse_plan import Rehearsal
from threefold.dryrun.rehearse_rank import RankRehearsal
from threefold.dryrun.tracking.collective_ledger import LedgerEntry
from threefold.plan.terms import MEMORY_TERMS
from threefold.report.terminal import advice_text, table
from threefold.units import GIB, KIB, MIB, format_bytes, format_many, format_number, format_tokens

MAX_ENTRIES = 16


def rehearsal_text(found: Rehearsal) -> str:
    other_target, left_out = _split_left_out(found.left_out)
    parts = [*other_target, _headline(found)]
    if found.scaled:  # a smaller plan, so that its memory would only mislead
        parts.append("\n".join(["scaled down, so that every rank can be rehearsed:", *_indented(found.scaled)]))
    else:
        parts += [_stages(found), _terms(found), _largest_tensors(found.worst)]
        parts += [_row_bytes(found)]
    parts += [_collectives(found.collectives), _match(found)]
    if left_out:
        parts.append("\n".join(["left out of the rehearsal:", *_indented(left_out)]))
    parts += [str(finding) for finding in found.findings]
    if not any(finding.fix for finding in found.findings):
        parts.append(advice_text(found.advice))
    return "\n\n".join(part for part in parts if part)


def _split_left_out(left_out: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is said of another target, which comes first of all, and the rest."""
    first = [text for text in left_out if text.startswith("target:")]
    return first, [text for text in left_out if text not in first]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {text}" for text in lines]


def _match(found: Rehearsal) -> str:
    """Whether the collectives of all ranks match, where they were compared."""
    if found.mismatches is None:
        return ""
    compared = f"{found.num_calls:,} collectives and messages of {format_many(len(found.ranks), 'rank')} compared"
    return f"{compared}: {'they do not match' if found.mismatches else 'all of them match'}"


def measured_text(found: Measurement) -> str:
    """Peak and module times as measured on one GPU, and the step time on the cluster that they lead to."""
    rank = found.rehearsed
    error = rank.peak_bytes / found.peak_bytes - 1
    rows = [
        [name, f"{1e3 * forward:.2f}", f"{1e3 * backward:.2f}"]
        for name, (forward, backward) in found.module_seconds.items()
    ]
    other_target, left_out = _split_left_out(found.left_out)
    return "\n\n".join(
        [
            *other_target,
            f"measured on one GPU, rank {rank.rank} of {found.plan.layout.gpus} with collectives that do nothing",
            f"peak {format_bytes(found.peak_bytes)} of tensors, {format_bytes(found.reserved_bytes)} reserved; "
            f"rehearsed {format_bytes(rank.peak_bytes)} ({error:+.1%}), {rank.at}",
            "a microbatch, all layers\n" + table(["module", "forward, ms", "backward, ms"], rows),
            _step_on_cluster(found),
            _collectives(rank.collectives),
            *left_out,
        ]
    )


def _step_on_cluster(found: Measurement) -> str:
    step, compute = format_number(found.step_seconds), format_number(found.compute_seconds)
    communication, bubble = format_number(found.communication_seconds), format_number(found.bubble_seconds)
    return (
        f"a step on the cluster, estimated: {step} s = {compute} measured compute + {communication} predicted "
        f"communication + {bubble} bubble"
    )


def _headline(found: Rehearsal) -> str:
    plan, job = found.plan, found.plan.job
    return (
        f"rehearsed in {found.seconds:.1f} s: {plan.model_name}, {plan.layout.gpus} x {plan.chip.name}, "
        f"{plan.knobs.precision}, {job.global_batch} x {format_tokens(job.seq_len)} tokens a step"
    )


def _stages(found: Rehearsal) -> str:
    chip_bytes = found.plan.chip.memory_bytes
    rows = []
    for rank in found.ranks:
        needed = device_bytes(found.plan, rank)
        estimate = found.stage_estimate(rank).peak_bytes
        rows.append(
            [
                _stage_range(rank.stages),
                str(rank.rank),
                _gib(rank.peak_bytes),
                _gib(estimate),
                f"{estimate / rank.peak_bytes - 1:+.1%}",
                _gib(needed),
                _gib(chip_bytes - needed),
                *([] if rank.skew is None else [f"{rank.skew:.2f}"]),
                rank.at,
            ]
        )
    rows_over_mean = [] if all(rank.skew is None for rank in found.ranks) else ["rows over mean"]
    header = ["stages", "rank", "peak, GiB", "estimated", "off by", "on the device", "headroom"]
    header += [*rows_over_mean, "when and where"]
    return table(header, rows)


def _stage_range(stages: Sequence[int]) -> str:
    """The stages as text: 1-3 for three or more consecutive ones, otherwise a list such as 0,2."""
    if len(stages) > 2 and list(stages) == list(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}"
    return ",".join(map(str, stages))


def _terms(found: Rehearsal) -> str:
    """The memory terms of the rank with the highest peak, beside the estimate for its stage."""
    rank, estimate = found.worst, found.stage_estimate(found.worst).terms
    rows = []
    for name in MEMORY_TERMS:
        rehearsed, estimated = rank.terms.get(name, 0), estimate.get(name, 0.0)
        if max(rehearsed, estimated) >= 0.005 * GIB:
            rows.append([name, _gib(rehearsed), _gib(estimated), f"{(estimated - rehearsed) / GIB:+.2f}"])
    rows.append(["= tensors", _gib(rank.peak_bytes), _gib(sum(estimate.values())), ""])
    return f"rank {rank.rank} at its peak\n" + table(["term, GiB", "rehearsed", "estimated", "difference"], rows)


def _largest_tensors(rank: RankRehearsal) -> str:
    rows = [
        [f"{live.bytes / MIB:,.1f}", live.term, f"{live.dtype} {list(live.shape)}", live.owner] for live in rank.top
    ]
    return f"largest tensors of rank {rank.rank} at its peak\n" + table(["MiB", "term", "what", "whose"], rows)


def _row_bytes(rehearsal: Rehearsal) -> str:
    """Bytes that kernels around the experts' GEMMs move, the estimate, and the least that any could."""
    counted, expected = rehearsal.worst.row_bytes, expert_row_bytes(rehearsal.plan)
    rows = []
    for number, phase in enumerate(("forward", "backward")):
        kernels = counted.get(phase, {})
        if not kernels:
            return ""
        estimated, least = "", ""
        if expected is not None:
            estimated = f"{getattr(expected, phase) / KIB:,.1f}"
            least = f"{(expected.sums + expected.ends[number]) / KIB:,.1f}"
        most = ", ".join(f"{name} {count / KIB:,.1f}" for name, count in list(kernels.items())[:4])
        rows.append([phase, f"{sum(kernels.values()) / KIB:,.1f}", estimated, least, most])
    header = ["KiB a token and layer", "counted", "estimated", "least", "by kernel"]
    return "read and written around the GEMMs of experts\n" + table(header, rows)


def _collectives(entries: Sequence[LedgerEntry]) -> str:
    if not entries:
        return ""
    rows = [
        [e.axis, e.operation, format_bytes(e.num_bytes), f"{e.count:,}", format_bytes(e.num_bytes * e.count), e.link]
        for e in entries[:MAX_ENTRIES]
    ]
    rest = len(entries) - len(rows)
    shown = table(["axis", "operation", "bytes a call", "calls", "bytes a step", "link"], rows)
    more = f"\nand {rest} smaller kinds (--json has all)" if rest > 0 else ""
    return f"collectives of a rank in a step\n{shown}{more}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
