"""Pipeline stages weighed by predicted seconds: heavy ends of a model get fewer layers."""

from dataclasses import replace

from threefold.layout.stages import balance, format_stages
from threefold.search.price import Priced, Pricer

GAIN = 0.005  # predicted, from which a written layout is worth its line


def weighed(pricer: Pricer, one: Priced) -> Priced:
    """The same plan with stages balanced by seconds, where that is clearly faster and fits."""
    plan = one.plan
    layout = plan.layout
    if layout.pp == 1 or layout.stages is not None or not pricer.space.free("layout.stages"):
        return one
    layers, mtp, loss = pricer.parts(plan)
    weights = [layers[kind] for kind in plan.model.layers]
    chunks = balance(len(weights), layout.chunks, plan.mtp, weights, 0.0, mtp, loss)
    if chunks == plan.chunks or any(not str(chunk) for chunk in chunks):
        return one
    other = pricer.priced(replace(plan, layout=replace(layout, stages=format_stages(chunks))))
    better = other.tokens_per_second > one.tokens_per_second * (1 + GAIN)
    return other if better and other.device_bytes <= pricer.limit else one
