"""Runs layouts that were drawn at random, and says of each whether its ranks compute what one rank computes."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import fake_deepep
import torch
from drawn_layouts import Drawn, Resolved, resolve
from fake_cuda_graphs import StandIn

from threefold.engine.build import dtype_of, options_of
from threefold.engine.context import override
from threefold.engine.dispatch.packages.find_package import PACKAGE
from threefold.engine.models.compile import compile_parts
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.schedule import microbatch_runners
from threefold.engine.verify.compare import Comparison
from threefold.engine.verify.forked_ranks import LIMIT_SECONDS as RANKS_LIMIT
from threefold.engine.verify.forked_ranks import RankError, run_ranks
from threefold.engine.verify.oracle import compare_with_one_rank, run_rank
from threefold.plan.plan import Plan

STEPS = 2  # the second one shows weights, states and biases that the first one got wrong
# Sums in another order differ by 1e-15; AdamW divides by the gradient's size, which makes 1e-12 of it.
TOLERANCE = 1e-10
# Where the gradient of an element is nearly 0, it may make more: weights were seen 1.4e-10 apart after gradients within
# 3e-14, and with a larger epsilon 1.4e-12. A fault does not shrink so.
LARGE_EPSILON, ROUNDING, MOST_OF_ROUNDING = 1e-4, 1e-12, 1e-8
# As trained, in 16 bits and less: of cross entropies (seen: 6e-4, in nvfp4) and of gradient norms (seen: 0.02).
LOSS_TOLERANCE, NORM_TOLERANCE = 0.02, 0.1
LIMIT_SECONDS = 120.0  # on an idle machine, where a draw takes a second or two
FAULTS = ("DIFFERENT", "CRASH", "HANG")


@dataclass(frozen=True)
class Outcome:
    """What became of a draw: equal, near, tied, ran (where one rank routes otherwise), refused, or one of FAULTS."""

    drawn: Drawn
    resolved: Resolved
    kind: str
    said: str = ""  # differences, or the error

    def __str__(self) -> str:
        """One line, and for a fault all that it takes to repeat it."""
        plan, line = self.resolved.plan, f"{self.drawn.seed}: {self.kind}"
        if self.kind not in FAULTS or plan is None:
            return line
        fields = json.dumps({path: value for path, value in plan.written if path != "model"})
        return f"{line}\n  {json.dumps(self.drawn.config)}\n  {fields}\n  {self.said}"


def run_draw(drawn: Drawn, limit: float = RANKS_LIMIT, reads_data: bool = False) -> Outcome:
    """Train two steps in the layout and on one rank: in fp64, or as trained in 16 bits or less, which takes paths that
    fp64 does not (gradient sums in fp32, grouped GEMMs, loss scaling, quantization) and compares roughly. With
    `reads_data` they train and evaluate on the data of the job, and not on made-up samples.

    Forced balance gives out experts in the order in which ranks hold tokens, so that one rank cannot say what is right:
    there the ranks must only end, with one loss.
    """
    torch.set_num_threads(1)
    resolved = resolve(drawn)
    plan, as_trained = resolved.plan, drawn.as_trained
    if plan is None:
        return Outcome(drawn, resolved, "refused", ", ".join(resolved.refusals))
    try:
        with warnings.catch_warnings(), stand_ins(plan):
            warnings.simplefilter("ignore")
            if plan.model.is_moe and plan.job.routing == "forced-balance":
                return Outcome(drawn, resolved, *_run_alone(plan, limit))
            dtype = dtype_of(plan) if as_trained else torch.float64
            options = options_of(plan) if as_trained else None
            rates = [learning_rate(plan.job, step) for step in range(STEPS)]
            found = compare_with_one_rank(plan, STEPS, dtype, options, limit, rates, reads_data)
            if not as_trained and may_be_rounding(found):
                plan = replace(plan, job=replace(plan.job, adam_eps=LARGE_EPSILON))
                found = compare_with_one_rank(plan, STEPS, dtype, options, limit, rates, reads_data)
    except RankError as error:
        late = "still run after" in str(error) or "Timed out" in str(error)
        return Outcome(drawn, resolved, "HANG" if late else "CRASH", str(error))
    except AssertionError as error:  # of the comparison: ranks that report other losses than one rank
        return Outcome(drawn, resolved, "DIFFERENT", repr(error))
    if not as_trained:
        return Outcome(drawn, resolved, *judge_comparison(found))
    num_norms = STEPS
    if plan.low_precision:
        # What eight bits round moves the weights, and these the next norm: with weights moved by 1e-3 of themselves,
        # less than bf16 rounds, the second norm of one rank in nvfp4 was seen 0.41 from its own, and the first one
        # 0.03. Gradients of adapters alone are small next to it from the first step on: 0.24, where one rank was in
        # fp8-cs and in fp32, and the layout had the norm of one rank to six digits in fp32.
        num_norms = 0 if plan.job.lora_rank else 1
    kind, said = judge_roughly(found, num_norms)
    if (
        kind == "DIFFERENT"
        and judge_roughly(found, 0)[0] == "near"
        and _format_moves_norms(found, plan, num_norms, limit)
    ):
        kind, said = "near", ""
    return Outcome(drawn, resolved, kind, said)


def _format_moves_norms(found: Comparison, plan: Plan, num_norms: int, limit: float) -> bool:
    """Whether the format moves one rank's own gradient norms further than the layout does, which equals it in fp64.

    Seen of Gemma 4: one rank in fp8-cs has a norm of 13.3, in fp64 of 8.8, and a layout in fp8-cs of 16.7.
    """
    plain = {f"fp8_{part}": False for part in ("params", "attention", "output", "dispatch")}
    knobs = replace(plan.knobs, precision="bf16", **plain)
    rates = [learning_rate(plan.job, step) for step in range(STEPS)]
    with stand_ins(plan):
        exact = compare_with_one_rank(replace(plan, knobs=knobs), STEPS, torch.float64, limit=limit, rates=rates)
    pairs = zip(found.norms[:num_norms], exact.norms, strict=False)
    return (
        exact.largest <= TOLERANCE
        and not exact.problems
        and all(abs(one - other) <= max(NORM_TOLERANCE * one, abs(one - true)) for (one, other), (true, _) in pairs)
    )


@contextmanager
def stand_ins(plan: Plan) -> Iterator[None]:
    """What a CPU does not have: a recorder in place of CUDA graphs, packages of the flex dispatchers on torch's
    collectives, and a backend of torch.compile that needs no compiler. Ranks are forked, so that they find them too."""
    buffer = fake_deepep.HybridEPBuffer if plan.knobs.dispatcher == "hybridep" else fake_deepep.ElasticBuffer
    with (
        override("make_recorder", StandIn),
        patch.dict(sys.modules, {PACKAGE: fake_deepep.package(buffer)}),
        patch.object(microbatch_runners, "compile_parts", partial(compile_parts, backend=_run_traced)),
    ):
        yield


def _run_traced(traced: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """A backend of torch.compile that runs what was traced as it is. Looking one up by name would import them all."""
    return traced.forward


def may_be_rounding(found: Comparison) -> bool:
    """Whether only weights and states differ, by so little that AdamW may have made it of rounding."""
    is_small = TOLERANCE < found.largest <= MOST_OF_ROUNDING
    return is_small and max(found.gradient, found.loss, found.bias) <= ROUNDING and not found.problems


def judge_comparison(found: Comparison) -> tuple[str, str]:
    """The kind of outcome and the differences. Where choices of experts are nearly tied, rounding may turn them."""
    if found.largest <= TOLERANCE:
        return "equal", ""
    return "tied" if found.near_ties and not found.problems else "DIFFERENT", _differences(found)


def judge_roughly(found: Comparison, num_norms: int = STEPS) -> tuple[str, str]:
    """The same of a comparison that is as rough as the formats that the model is trained in.

    Only the cross entropy is compared: a few choices of experts turn, and with them what is dropped for capacity. And
    the gradient norms of the first steps (`num_norms`): the format itself may move those that follow too far.
    """
    gaps, norms = (
        [abs(one - other) / abs(one) for one, other in pairs] for pairs in (found.steps, found.norms[:num_norms])
    )
    # Every one by itself: `max` may pass over what is not a number.
    are_near = all(gap <= LOSS_TOLERANCE for gap in gaps) and all(norm <= NORM_TOLERANCE for norm in norms)
    if gaps and are_near and not found.problems:
        return "near", ""
    return "DIFFERENT", f"cross entropy {max(gaps, default=math.inf):.1e}, {_differences(found)}"


def _run_alone(plan: Plan, limit: float) -> tuple[str, str]:
    options = replace(options_of(plan), expert_backend="loop")
    ranks = run_ranks(plan.layout.gpus, run_rank, plan, STEPS, torch.float64, options, limit=limit)
    losses = [rank.losses for rank in ranks]
    is_one = all(each == losses[0] for each in losses) and all(math.isfinite(step["ce"]) for step in losses[0])
    return ("ran", "") if is_one else ("DIFFERENT", f"losses of the ranks {losses}")


def _differences(found: Comparison) -> str:
    names = ("loss", "norm", "gradient", "weight", "state", "bias")
    sizes = ", ".join(f"{name} {getattr(found, name):.1e}" for name in names)
    return "; ".join([f"{sizes}; largest of the gradients in {found.worst}", *found.problems])
