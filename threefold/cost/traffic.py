"""A ledger of the collectives of one step: axis, operation, bytes a rank sends, count, link."""

from collections import Counter
from dataclasses import dataclass

from threefold.cost.exchange import dispatch_bytes
from threefold.cost.time import rank_params
from threefold.cost.work import BF16, case_of, layer_work
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective in a step, on an average pipeline rank."""

    axis: str
    operation: str
    bytes: float  # sent by a rank in one call
    count: float
    link: str

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.count


def traffic(plan: Plan) -> list[Transfer]:
    """Everything a rank sends in a step under balanced routing; forward and backward."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    entries: list[Transfer] = []
    layers = Counter(plan.model.layers)
    for layer in plan.model.mtp_depth * plan.mtp:
        layers[layer] += 1
    for layer, number in layers.items():
        calls = number / layout.pp * count
        entries += _layer_transfers(plan, layer, calls)
    entries += _pipeline(plan, count) + _data(plan, count)
    return _merged([entry for entry in entries if entry.bytes > 0 and entry.count > 0])


def _layer_transfers(plan: Plan, layer: Layer, calls: float) -> list[Transfer]:
    case = case_of(plan, layer)
    work, found = layer_work(case), []
    again = 1 if plan.full_recompute else 0
    if layer.ffn == "moe" and plan.layout.ep > 1:
        sent = dispatch_bytes(plan, work)
        extra = 1 if again or "moe" in plan.knobs.recompute else 0
        link = plan.link("ep").link
        for name in ("dispatch", "combine"):
            found.append(Transfer("ep", name, sent.domain + sent.network, (2 + extra) * calls, link))
    if plan.layout.tp > 1:
        parts = (layer.mixer != "none") + (layer.ffn == "dense") + (1 if _has_shared(plan, layer) else 0)
        share = work.sequence_bytes * (plan.layout.tp - 1) / plan.layout.tp
        link = plan.link("tp").link
        found.append(Transfer("tp", "all_gather", share, parts * (3 + again) * calls, link))
        found.append(Transfer("tp", "reduce_scatter", share, parts * (2 + again) * calls, link))
    if plan.layout.cp > 1 and layer.mixer in ("attention", "window"):
        payload = BF16 * _kv_width(plan) * case.tokens / plan.layout.tp
        steps = plan.layout.cp - 1
        found.append(Transfer("cp", "send_kv", payload, steps * (3 + again) * calls, plan.link("cp").link))
    return found


def _has_shared(plan: Plan, layer: Layer) -> bool:
    return bool(layer.ffn == "moe" and plan.model.moe and plan.model.moe.shared_width)


def _kv_width(plan: Plan) -> int:
    spec = plan.model.attention
    if isinstance(spec, MlaSpec):
        return spec.num_heads * (spec.qk_dim + spec.v_dim)
    return 2 * spec.kv_dim if isinstance(spec, GqaSpec) else 0


def _pipeline(plan: Plan, count: int) -> list[Transfer]:
    layout, job = plan.layout, plan.job
    if layout.pp == 1:
        return []
    payload = BF16 * plan.model.dim * job.micro_batch * job.seq_len / layout.cp / layout.tp
    sends = 2 * (layout.chunks - 1) / layout.pp * count
    return [Transfer("pp", "send", payload, sends, plan.link("pp").link)]


def _data(plan: Plan, count: int) -> list[Transfer]:
    layout, knobs = plan.layout, plan.knobs
    dense, experts = rank_params(plan)
    grads = 4 if knobs.grad_dtype == "fp32" and knobs.data_parallel != "zero1" else 2
    weights = 1 if knobs.fp8_params and plan.low_precision else 2
    sharded = knobs.data_parallel != "zero1"
    found = []
    for axis, ranks, params in (("dp", layout.dp * layout.cp, dense), ("edp", layout.edp, experts)):
        if ranks == 1 or not params:
            continue
        share = params * (ranks - 1) / ranks
        link = plan.link("cp" if axis == "dp" and layout.dp == 1 else axis).link
        found.append(Transfer(axis, "reduce_scatter", grads * share, count if sharded else 1, link))
        found.append(Transfer(axis, "all_gather", weights * share, 2 * count if sharded else 1, link))
    return found


def _merged(entries: list[Transfer]) -> list[Transfer]:
    """Equal kinds of transfers as one line, largest first."""
    found: dict[tuple[str, str, float, str], float] = {}
    for entry in entries:
        key = (entry.axis, entry.operation, entry.bytes, entry.link)
        found[key] = found.get(key, 0.0) + entry.count
    merged = [Transfer(axis, op, size, count, link) for (axis, op, size, link), count in found.items()]
    return sorted(merged, key=lambda entry: -entry.total_bytes)
