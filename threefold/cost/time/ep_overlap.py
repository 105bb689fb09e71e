"""EP overlap in time: what runs beside each exchange of an MoE layer, and how much of the exchange still shows.

Exchanges and pieces of compute alternate between the forward of one microbatch and the backward of another. "To
experts" is the direction from the ranks of the tokens, "back" the opposite one:

    started by                 exchange                      runs beside it
    backward, combine          output gradients, to experts  forward: mixer, router
    forward, router            rows, to experts              forward: shared experts; backward: experts
    backward, experts          row gradients, back           forward: experts; backward: shared experts
    forward, experts           results, back                 backward: shared experts, mixer

With delayed wgrad the weight gradients move out of the backward's pieces: those of experts run while the row gradients
travel back, and those of the mixer run beside the next output gradients. `time/layer.py` asks for the hidden seconds of
a layer.
"""

from dataclasses import dataclass

from threefold.cost.stack_traits import STACK_TRAITS
from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PartSeconds:
    """Seconds of the mixer, the experts or the shared experts of a layer."""

    forward: float = 0.0
    backward: float = 0.0
    wgrad: float = 0.0  # the part of the backward that makes weight gradients


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer's compute, cut at its expert-parallel exchanges."""

    mixer: PartSeconds
    experts: PartSeconds
    shared: PartSeconds

    def paired_wait_seconds(self, exchange: float, delay: bool) -> float:
        """Seconds that a pair of passes waits for four exchanges of `exchange` seconds each, which share one link."""
        mixer, experts, shared = self.mixer, self.experts, self.shared
        mixer_wgrad, expert_wgrad = (mixer.wgrad, experts.wgrad) if delay else (0.0, 0.0)
        expert_dgrad, beside_rows = experts.backward - expert_wgrad, experts.backward + shared.forward
        # An exchange leaves when it was started and the one before it has arrived. Times count from where the forward's
        # experts begin, then from where they end.
        rows_arrive = max(beside_rows, exchange)
        grads_arrive = max(expert_dgrad, exchange) + exchange - rows_arrive - experts.forward
        wait = max(0.0, grads_arrive - shared.backward)
        mixer_dgrad = mixer.backward - mixer_wgrad
        results_arrive = max(0.0, grads_arrive) + exchange - wait - shared.backward - mixer_dgrad
        output_grads_arrive = exchange - mixer.forward - mixer_wgrad
        return rows_arrive - beside_rows + wait + max(0.0, results_arrive) + max(0.0, output_grads_arrive)

    def alone_wait_seconds(self, exchange: float, delay: bool) -> float:
        """The same for passes that run alone: each can do only its own compute before it needs the exchange."""
        expert_wgrad = self.experts.wgrad if delay else 0.0
        beside_rows, beside_grads = self.shared.forward, expert_wgrad + self.shared.backward
        return 2 * exchange + max(0.0, exchange - beside_rows) + max(0.0, exchange - beside_grads)


def unpaired_fraction(plan: Plan) -> float:
    """The fraction of a step's passes that run alone: before the first backward and after the last forward."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.pp == 1:
        return 1 / count
    if layout.pipeline_schedule == "dualpipev":
        return min(1.0, (2 * layout.pp - 1) / (2 * count))  # the most that any rank holds before its first pair
    num_warmup = layout.pp - 1 + (layout.vpp - 1) * layout.pp + 1  # of an average rank
    return min(1.0, num_warmup / (count * layout.vpp))


def hidden_seconds(plan: Plan, exchange: float, parts: LayerParts, max_fraction: float) -> float:
    """Seconds of a layer's four exchanges that are hidden on average, `max_fraction` of each at best."""
    can_delay = STACK_TRAITS[plan.target].delays_sharded_wgrad or plan.knobs.data_parallel == "zero1"
    alone, delay, best = unpaired_fraction(plan), plan.knobs.delay_wgrad and can_delay, exchange * max_fraction
    paired = parts.paired_wait_seconds(best, delay)
    return 4 * best - (1 - alone) * paired - alone * parts.alone_wait_seconds(best, delay)
