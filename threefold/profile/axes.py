"""Which axis of the layout a communication kernel serves: `ep`, `tp`, `dp`, ...

The process group's description says it (ours, Megatron's and torchtitan's names); else its ranks, compared with the
groups of the plan; else the range or operator around the launch; else the library: DeepEP and HybridEP carry experts'
tokens and nothing else. Where nothing says it, the axis is `unknown`. `measure.py` calls it.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from threefold.layout.degrees import DENSE_AXES, EXPERT_AXES, Layout
from threefold.profile.classify import Classified, distinct_rows
from threefold.profile.intervals import Enclosing
from threefold.profile.kernel_names import COMMUNICATION, collective_kind, operator_class
from threefold.profile.trace import HOST_OPERATOR, Collective, Floats, HostSpans, Ints, Trace

UNKNOWN_AXIS = "unknown"

# Descriptions of process groups, most special first. Megatron calls them EXPERT_MODEL_PARALLEL_GROUP and so on,
# torchtitan mesh_ep, torch default_pg.
_DESCRIPTIONS = (
    ("edp", r"expert_data|\bedp\b|dp_mod_ep|dp_shard_mod_ep"),
    ("ep", r"expert_tensor_and_model|\bep x etp\b"),
    ("etp", r"expert_tensor|\betp\b"),
    ("ep", r"expert_model|expert_parallel|\bep\b|moe_ep|deep_?ep|hybrid_?ep"),
    ("dp", r"data_parallel|\bd?dp\b|dp_shard|dp_replicate|fsdp|hsdp|zero"),
    ("cp", r"context_parallel|\bcp\b|ring_attention|ulysses"),
    ("tp", r"tensor_model|tensor_parallel|\btp\b"),
    ("pp", r"pipeline|\bpp\b"),
)
# Ranges, operators and autograd functions around a launch that tell the axis, of our engine, Megatron and torchtitan.
_HINTS = (
    ("ep", r"dispatch|combine|exchange|deep_?ep|hybrid_?ep|fused_?a2a|moe_?(all_?to_?all|a2a)"),
    ("cp", r"ring_?attention|context_parallel|ulysses|attn_?func_?with_?cp"),
    ("tp", r"(gather|reduce_?scatter)_?along|tensor_parallel|sequence_parallel|(column|row)_?parallel"),
    ("dp", r"optimizer|grad_?reduce|param_?gather|fsdp|zero_?1|bucket"),
    ("pp", r"pipeline|p2p_communication"),
)
_EXPERT_LIBRARIES = re.compile(
    r"deep_?ep|hybrid_?ep|(intranode|internode|internode_ll)\w*::|notify_(dispatch|combine)|(dispatch|combine)_kernel"
    r"|device_sync_kernel|update_expected_value_kernel|fused_?a2a|pplx",
    re.IGNORECASE,
)
# Axes in the order in which a kind of collective prefers them, where a group's ranks fit several.
_PREFERRED = (
    (re.compile(r"all_?to_?all|a2a", re.IGNORECASE), ("ep", "cp", "tp")),
    (re.compile(r"send|recv|p2p", re.IGNORECASE), ("pp", "cp", "ep")),
    (re.compile(r""), ("tp", "etp", "dp", "edp", "cp", "ep", "pp")),
)


def axes_of(trace: Trace, found: Classified, layout: Layout | None) -> tuple[list[str], Ints]:
    """The axes that occur, and for each device span the index of its axis, -1 where it is no communication."""
    spans = trace.device_spans
    chosen = np.flatnonzero(found.is_label(COMMUNICATION))
    hint = _hints(trace, found, chosen)
    collective = spans.collective[chosen].copy()
    if trace.operator_collectives:  # some releases say it of the operator alone
        links = found.operator_link[chosen].tolist()
        of_operator = np.array([trace.operator_collectives.get(link, -1) for link in links], np.int64)
        collective = np.where(collective < 0, of_operator, collective)
    rows, where = distinct_rows(collective, spans.name[chosen], found.operator[chosen], hint, found.annotation[chosen])
    axes: dict[str, int] = {}
    index = np.full(len(rows), -1, np.int64)
    for number, (said, name, op, around, note) in enumerate(rows):
        texts = [trace.names[i] if i >= 0 else "" for i in (name, op, around, note)]
        meta = trace.collectives[said] if said >= 0 else Collective()
        axis = _axis(completed(trace, meta), layout, trace.rank, *texts)
        index[number] = axes.setdefault(axis, len(axes))
    result = np.full(len(spans), -1, np.int64)
    if len(chosen):
        result[chosen] = index[where]
    return list(axes), result


def _axis(
    group: Collective, layout: Layout | None, rank: int | None, name: str, operator: str, around: str, annotation: str
) -> str:
    kind = group.operation or " ".join((name, operator, annotation))
    described = _described(group.group_description)
    if described:
        return described
    candidates = list(_same_ranks(group, layout, rank)) if layout else []
    if len(candidates) == 1:
        return candidates[0]
    hinted = _hinted(around) if around else ""
    if hinted and (not candidates or hinted in candidates):
        return hinted
    if candidates:
        preferred = next(order for pattern, order in _PREFERRED if pattern.search(kind))
        return next((axis for axis in preferred if axis in candidates), candidates[0])
    if any(_EXPERT_LIBRARIES.search(text) for text in (name, operator, annotation)):
        return "ep"
    if layout and layout.pp > 1 and re.search(r"^(gloo|mpi|ucc|c10d):+recv", name):
        return "pp"  # messages between ranks of another axis stand inside its operators
    if layout and not group.group_size:
        return _only_axis(layout, kind)
    return UNKNOWN_AXIS


@lru_cache(maxsize=4096)
def _described(description: str) -> str:
    """The axis that a group's description names, or nothing."""
    words = re.sub(r"[^a-z0-9]+", "_", description.lower())
    loose = words.replace("_", " ")
    for axis, pattern in _DESCRIPTIONS:
        if re.search(pattern, words) or re.search(pattern, loose):
            return axis
    return ""


def _same_ranks(group: Collective, layout: Layout, rank: int | None) -> Iterator[str]:
    """Axes, alone or joined as in `dp x cp`, whose group around the rank has the collective's ranks or its size."""
    if not group.ranks and not group.group_size:
        return
    for axes in _AXES_OF_GROUPS:
        if any(layout.degree(axis) < 2 for axis in axes):
            continue
        own = rank if rank is not None else (group.ranks[0] if group.ranks else 0)
        ranks = _ranks_along(layout, axes, own)
        if tuple(sorted(group.ranks)) == ranks or (not group.ranks and len(ranks) == group.group_size):
            yield axes[0]


# Groups that stacks make: single axes, and data parallel together with what shards the same weights.
_AXES_OF_GROUPS = (
    ("tp",), ("cp",), ("pp",), ("etp",), ("ep",), ("dp",), ("edp",), ("dp", "cp"), ("dp", "cp", "tp"), ("ep", "etp"),
    ("edp", "etp"),
)  # fmt: skip


def _ranks_along(layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` only along `axes`, which belong to one grid."""
    grid = EXPERT_AXES if any(axis not in DENSE_AXES for axis in axes) else DENSE_AXES
    assert all(axis in grid for axis in axes), axes
    base = rank - sum(layout.coordinate(axis, rank) * layout.stride(axis) for axis in axes)
    steps = [[i * layout.stride(axis) for i in range(layout.degree(axis))] for axis in axes]
    return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))


def _only_axis(layout: Layout, kind: str) -> str:
    """The axis of a collective without any group: clear where only one axis of the preferred ones is used."""
    preferred = next(order for pattern, order in _PREFERRED if pattern.search(kind))
    used = [axis for axis in preferred if layout.degree(axis) > 1]
    distinct = {axis.removeprefix("e") if axis in ("etp", "edp") else axis for axis in used}
    return used[0] if len(distinct) == 1 else UNKNOWN_AXIS


def completed(trace: Trace, group: Collective) -> Collective:
    """The collective with what the file's header knows of its process group."""
    known = trace.groups.get(group.group_name)
    if known is None:
        return group
    description = group.group_description
    if description in ("", "undefined", "default_pg"):
        description = known.group_description
    size = group.group_size or known.group_size
    return Collective(group.operation, group.group_name, description, group.ranks or known.ranks, size)


def _hints(trace: Trace, found: Classified, chosen: Ints) -> Ints:
    """The name of the innermost range or operator around each launch that tells an axis, -1 for none."""
    thread, moment = found.launch_thread[chosen].copy(), found.launch_start[chosen].copy()
    _find_askers(trace, chosen, thread, moment)
    tells = np.array([bool(_hinted(name)) for name in trace.names] or [False])
    parts = [one[tells[one.name]] for one in (trace.operators, trace.annotations)]
    start, end = (np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "end"))
    name, lane, link = (np.concatenate([getattr(part, name) for part in parts]) for name in ("name", "thread", "link"))
    around = HostSpans(start, end, name, lane, link)
    inside = Enclosing(around).innermost(thread, np.nan_to_num(moment, nan=-1.0))
    return np.where(inside >= 0, around.name[np.maximum(inside, 0)], -1) if len(around) else inside


def _find_askers(trace: Trace, chosen: Ints, thread: Ints, moment: Floats) -> None:
    """On CPUs a collective runs on a thread of the backend. Put thread and start of the operator that asked for it in
    place: of operators and records of the same kind, the first asked is the first begun."""
    spans = trace.device_spans
    is_host = spans.kind[chosen] == HOST_OPERATOR
    if not is_host.any():
        return
    is_asking = np.array([name.startswith("c10d::") for name in trace.names] or [False])
    kinds = np.array([_collective_kind(name) for name in trace.names] or [-1], np.int64)
    asking = trace.operators[is_asking[trace.operators.name]]
    for kind in np.unique(kinds[spans.name[chosen]]):
        mine = np.flatnonzero(is_host & (kinds[spans.name[chosen]] == kind))
        asked = asking[np.flatnonzero(kinds[asking.name] == kind)]
        if kind < 0 or not len(asked):
            continue
        mine = mine[np.argsort(spans.start[chosen[mine]], kind="stable")]
        order = np.argsort(asked.start, kind="stable")
        num_before = max(0, len(mine) - len(asked))  # asked for before the trace began
        mine, order = mine[num_before:], order[: len(mine) - num_before]
        thread[mine], moment[mine] = asked.thread[order], asked.start[order]


def _collective_kind(name: str) -> int:
    """The kind of a collective that a name of communication tells."""
    return collective_kind(name) if operator_class(name) == COMMUNICATION else -1


@lru_cache(maxsize=65_536)
def _hinted(name: str) -> str:
    """The axis that a range or an operator tells, or nothing. Collectives and kernels of torch tell none."""
    if name.startswith(("c10d::", "aten::", "gloo:", "nccl:")):
        return ""
    return next((axis for axis, words in _HINTS if re.search(words, name, re.IGNORECASE)), "")
