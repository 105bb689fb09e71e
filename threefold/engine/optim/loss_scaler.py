"""Dynamic loss scaling for fp16, whose smallest number is 6e-8: the loss is multiplied so that gradients stay above it.

`build.py` makes a `LossScaler` for fp16 models. `step.py` multiplies the label shares of the microbatches by the scale,
so that every loss is scaled (of MTP depths and routers too, on every pipeline stage), and divides the gradients by it
in the factor that clips them. The rule is Megatron's `DynamicGradScaler`, with its constants.
"""

from typing import Any

from threefold.plan.plan import Plan

MIN_SCALE = 1.0
HYSTERESIS = 2  # overflows until the scale begins to halve, counted anew whenever it doubles
GROWTH, BACKOFF = 2.0, 0.5


def initial_scale(plan: Plan) -> float:
    """The scale to begin with: the plan's, or a power of two in proportion to the tokens of a step.

    The loss is a mean over tokens, so that the gradient of one token shrinks as a step grows. 256 a token is Megatron's
    2**32 for a step of 16M tokens; small steps would begin with many overflows at that scale.
    """
    if plan.job.initial_loss_scale is not None:
        return plan.job.initial_loss_scale
    return float(2 ** min(32, 8 + (plan.tokens_per_step - 1).bit_length()))


class LossScaler:
    """The scale, and the counts that decide when it changes. It is the same on all ranks, as they see one norm."""

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        self.scale, self.growth_interval = initial_scale, growth_interval
        self.num_good_steps = 0  # since the scale changed or gradients overflowed
        self.hysteresis = HYSTERESIS

    @property
    def can_shrink(self) -> bool:
        """Return whether a smaller scale is left to try: without one, gradients that are not finite are no overflow."""
        return self.scale > MIN_SCALE

    def update(self, overflowed: bool) -> None:
        """Count a step whose gradients overflowed, or did not, and set the scale of the next one."""
        if overflowed:
            self.num_good_steps = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(MIN_SCALE, self.scale * BACKOFF)
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.num_good_steps, self.hysteresis = 0, HYSTERESIS
            self.scale *= GROWTH

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps, "hysteresis": self.hysteresis}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.num_good_steps, self.hysteresis = int(state["num_good_steps"]), int(state["hysteresis"])
