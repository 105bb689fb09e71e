"""EP overlap in time: what each exchange of a layer has beside it, and how much of it still shows.

Exchanges and pieces of compute alternate, the forward of one microbatch and the backward of another:

    started by          exchange             beside it
    backward, sum       gradients, there     forward: mixer, router
    forward, router     rows, there          shared experts; backward: experts
    backward, experts   gradients, back      forward: experts; backward: shared experts
    forward, experts    rows, home           backward: shared experts, mixer

Weight gradients that are delayed leave the backward's pieces: those of experts run behind the start of the gradients'
way back, those of the mixer beside the next gradients' way there.
"""

from dataclasses import dataclass

from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of the mixer, the experts or the shared experts of a layer; `weights` are part of the backward."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    mixer: Part
    experts: Part
    shared: Part

    def waits(self, exchange: float, delay: bool) -> float:
        """Of four exchanges, one after the other on their way, each so many seconds: what compute waits for."""
        mixer, experts, shared = self.mixer, self.experts, self.shared
        of_mixer, of_experts = (mixer.weights, experts.weights) if delay else (0.0, 0.0)
        data, there = experts.backward - of_experts, experts.backward + shared.forward
        # An exchange leaves when it was started and the one before has arrived; times from where the forward's experts
        # begin, and from where they end.
        landed = max(there, exchange)
        back = max(data, exchange) + exchange - landed - experts.forward
        wait = max(0.0, back - shared.backward)
        home = max(0.0, back) + exchange - wait - shared.backward - (mixer.backward - of_mixer)
        return landed - there + wait + max(0.0, home) + max(0.0, exchange - mixer.forward - of_mixer)

    def waits_alone(self, exchange: float, delay: bool) -> float:
        """The same where a pass has no other beside it: what it can do itself before it needs the exchange."""
        late = self.experts.weights if delay else 0.0
        there, back = self.shared.forward, late + self.shared.backward
        return 2 * exchange + max(0.0, exchange - there) + max(0.0, exchange - back)


def unpaired(plan: Plan) -> float:
    """Of the passes of a step, those with no other beside them: before the first backward and behind the last
    forward."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.pp == 1:
        return 1 / count
    if layout.pipeline_schedule == "dualpipev":
        return min(1.0, (2 * layout.pp - 1) / (2 * count))  # the most that any rank holds before its first pair
    ahead = layout.pp - 1 + (layout.vpp - 1) * layout.pp + 1  # of an average rank
    return min(1.0, ahead / (count * layout.vpp))


def hidden_seconds(plan: Plan, exchange: float, parts: Parts, most: float) -> float:
    """Of the four exchanges of a layer, `exchange` seconds each, what is hidden on average; `most`: of each at best."""
    ours_cannot = plan.target == "threefold" and plan.knobs.data_parallel != "zero1"
    alone, delay, best = unpaired(plan), plan.knobs.delay_wgrad and not ours_cannot, exchange * most
    return 4 * best - (1 - alone) * parts.waits(best, delay) - alone * parts.waits_alone(best, delay)
