"""Whether two sides did comparable work, and per what their times are compared.

A step of 8,192 sequences is not a step of 4,096: times are compared per step where both steps do the same work, per
useful token where a token costs the same on both sides, and per model FLOP where sequence lengths differ, because
attention makes tokens of longer sequences dearer, or where the images of a token do. FLOPs of encoding images are
counted. Where the work differs in kind (another model, forced routing, dropped tokens, frozen parts, no images), no
number makes it comparable: `work_findings` says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from threefold.compare.contract import model_fact_differences
from threefold.compare.sides import Side
from threefold.cost.vision import expected_patches
from threefold.findings import Finding, Severity, shown
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed
from threefold.profile.readers.run_record import Column
from threefold.spec.flops import flops_per_token, picture_training_flops

Unit = Literal["step", "useful token", "model FLOP"]

SAME_STEP = 0.001  # relative difference of tokens and FLOPs up to which two steps do the same work
SAME_TOKEN = 0.01  # and of FLOPs a token up to which a token costs the same
DROPPED = 0.001  # difference of the fractions of dropped tokens from which work was left out
# Facts of a model that change what it computes, but not how much.
_SAME_WORK = frozenset(
    {
        *("rope_theta", "rope_scaling", "rope_fraction", "rope_pairs", "norm_after_rope", "clip_qkv", "out_scale"),
        *("norm_eps", "norm_topk", "score", "scale", "jitter", "embed_scale", "logit_divisor"),
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """What a side does in a step: one value a step of the steady window, or one for all steps of a plan."""

    seconds: Column
    useful_tokens: Column
    flops: Column  # of the model for the useful tokens, without recompute; output layer as on one rank
    gpus: int
    images: Column | None = None  # of a vision-language model; None where they are not known

    def amount(self, unit: Unit) -> Column:
        """Units of work in each step."""
        return {"step": np.ones_like(self.seconds), "useful token": self.useful_tokens, "model FLOP": self.flops}[unit]

    @property
    def flops_per_token(self) -> float:
        return float(self.flops.sum() / self.useful_tokens.sum())

    @property
    def images_per_second(self) -> float | None:
        known = self.images is not None and bool(np.isfinite(self.images).all())
        return float(self.images.sum() / self.seconds.sum()) if known and self.images is not None else None


def work_of(side: Side, window: tuple[int, int] | None = None) -> Work | None:
    """The work of a plan or of a run's steady window; None for a trace, and for a run without a steady step."""
    plan = side.plan
    if plan is None:
        return None
    if side.run is None:
        assert side.guess is not None
        tokens = float(plan.tokens_per_step)
        one, sequences = np.ones(1), plan.job.global_batch
        images = None if plan.job.images is None or not plan.is_vlm else one * _pictures(plan)[0] * sequences
        step_seconds = side.guess.time.step_seconds
        return Work(one * step_seconds, one * tokens, one * tokens * _flops(plan), plan.layout.gpus, images)
    steady = side.run.is_steady(window)
    if not steady.any():
        return None
    seconds, tokens_a_step = side.run.columns["seconds"][steady], side.run.useful_tokens[steady]
    whole_head = _text_flops(plan) / _text_flops(plan, plan.layout.tp)
    counted = side.run.columns["tflops"][steady] * seconds * 1e12 * whole_head
    counted = counted + np.nan_to_num(side.run.columns["vision_tflops"][steady]) * seconds * 1e12
    flops = np.where(np.isfinite(counted), counted, tokens_a_step * _flops(plan))
    images = side.run.columns["images"][steady] if plan.is_vlm else None
    return Work(seconds, tokens_a_step, flops, plan.layout.gpus, images)


def unit_of(a: Work, b: Work) -> Unit:
    """Per what the times of the two are compared."""
    same_tokens = _is_near(a.useful_tokens.mean(), b.useful_tokens.mean(), SAME_STEP)
    if not _is_near(a.flops_per_token, b.flops_per_token, SAME_TOKEN):
        return "model FLOP"
    return "step" if same_tokens and _is_near(a.flops.mean(), b.flops.mean(), SAME_TOKEN) else "useful token"


def plan_unit(a: Plan, b: Plan) -> Unit:
    """Per what the times of two plans are compared."""
    if not _is_near(_flops(a), _flops(b), SAME_TOKEN):
        return "model FLOP"
    return "step" if a.tokens_per_step == b.tokens_per_step else "useful token"


def plan_work(plan: Plan, unit: Unit) -> float:
    """Units of work in a step of a plan."""
    tokens = float(plan.tokens_per_step)
    return {"step": 1.0, "useful token": tokens, "model FLOP": tokens * _flops(plan)}[unit]


def work_findings(a: Side, b: Side, severity: Severity = "error") -> list[Finding]:
    """Every reason why no unit makes the work of the two sides comparable."""
    if a.plan is None or b.plan is None:
        return []
    differences = dict(plan_differences(a.plan, b.plan))
    if a.run is not None and b.run is not None:
        differences.pop("job.capacity_factor", None)  # the runs say how many tokens were left out
        if all(np.isfinite(side.columns["images"]).all() for side in (a.run, b.run)):
            differences.pop("job.images", None)  # and how many images they saw
    differences.update(_measured_differences(a, b))
    differences.update(_image_free(a, b))
    advice = "make the two alike there; --anyway compares them as they are"
    return [
        Finding(rule="work-is-comparable", at=at, problem=problem, advice=advice, severity=severity)
        for at, problem in differences.items()
    ]


def _adapters(plan: Plan) -> str:
    job = plan.job
    return "no adapters" if job.lora_rank is None else f"rank {job.lora_rank} of {', '.join(sorted(job.lora_targets))}"


def plan_differences(a: Plan, b: Plan) -> Iterator[tuple[str, str]]:
    """Fields by which two plans differ in the kind of work they do, each with the reason."""
    others = [
        f"{path} {shown(old)} in A, {shown(new)} in B"
        for path, old, new in model_fact_differences(a, b)
        if not set(path.split(".")) & _SAME_WORK
    ]
    if others:
        yield "model", f"different models: {listed(others)}"
    pairs = {
        "job.mtp": (a.mtp, b.mtp, "each depth adds a layer and a loss"),
        "job.routing": (a.job.routing, b.job.routing, "forced balance has no busy experts"),
        "job.freeze": (sorted(a.job.freeze), sorted(b.job.freeze), "frozen parts have no weight gradients"),
        "job.lora_rank": (_adapters(a), _adapters(b), "beside adapters all weights are frozen"),
        "job.capacity_factor": (a.job.capacity_factor, b.job.capacity_factor, "a capacity leaves tokens out"),
        "job.images": (_images(a), _images(b), "images are encoded, and take time of their own"),
    }
    for path, (old, new, why) in pairs.items():
        if old != new:
            yield path, f"{shown(old)} in A, {shown(new)} in B: {why}"
    if a.is_synthetic != b.is_synthetic:
        made_up = "A" if a.is_synthetic else "B"
        yield "job.data", f"the data of {made_up} is synthetic: its tokens fall on experts as no text does"


def _images(plan: Plan) -> str | float | None:
    """Images in a sequence as far as they count for the work."""
    if not plan.is_vlm:
        return None
    return "none" if plan.is_image_free else "unknown" if plan.job.images is None else plan.job.images


def _measured_differences(a: Side, b: Side) -> Iterator[tuple[str, str]]:
    """Work that a run left out."""
    fractions = [_dropped(side) for side in (a, b)]
    if abs(fractions[0] - fractions[1]) > DROPPED:
        said = " and ".join(f"{fraction:.2%} in {name}" for fraction, name in zip(fractions, "AB", strict=True))
        yield "metrics.jsonl", f"tokens were dropped at the experts: {said}"


def _image_free(a: Side, b: Side) -> Iterator[tuple[str, str]]:
    """Sides of a vision-language model without images, also where neither has any: their speed is that of text."""
    found = [
        name
        for name, side in (("A", a), ("B", b))
        if side.plan is not None and (side.plan.is_image_free if side.run is None else side.run.is_image_free)
    ]
    if found:
        without = f"{' and '.join(found)} {'have' if len(found) > 1 else 'has'} no images"
        yield "job.images", f"{without}: a vision-language model without them is no evidence of its speed"


def _dropped(side: Side) -> float:
    if side.run is None:
        return 0.0
    column = side.run.columns["router/dropped"]
    known = column[np.isfinite(column)]
    return float(known.mean()) if len(known) else 0.0


def _flops(plan: Plan) -> float:
    """FLOPs of one token, with its share of the pictures that the plan expects in a sequence."""
    images, of_picture = _pictures(plan)
    return _text_flops(plan) + images * of_picture / plan.job.seq_len


def _text_flops(plan: Plan, tp: int = 1) -> float:
    return flops_per_token(plan.model, plan.job.seq_len, plan.mtp, tp, plan.stack.release)


def _pictures(plan: Plan) -> tuple[float, float]:
    """Images in a sequence that the plan expects, and the FLOPs of one; none for a text model."""
    patches, of_picture = (0.0, 0) if plan.is_image_free else expected_patches(plan)
    if not patches:
        return 0.0, 0.0
    images = patches / of_picture / plan.job.micro_batch
    return images, picture_training_flops(plan.model, of_picture, plan.job.freeze)


def _is_near(a: float, b: float, tolerance: float) -> bool:
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))
