"""Every layout of a vision-language model gives one rank's losses, gradients, weights and optimizer states, in fp64."""

from collections.abc import Iterable

import pytest
import torch
from vision_layouts import CASES, VisionCase

from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.shard.image_parallel import deal_out
from threefold.engine.verify.oracle import compare_with_one_rank, synthetic_batch
from threefold.engine.vision import ImageFeatures
from threefold.rules.all import check, errors
from threefold.rules.stacks import promoted
from threefold.spec.params import is_frozen

FP64 = 1e-10  # sums in another order differ by 1e-15; AdamW divides by the gradient's size, which makes 1e-12 of that


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def named(name: str) -> VisionCase:
    [found] = [case for case in CASES if case.name == name]
    return found


def marked(case: VisionCase) -> object:
    return pytest.param(case, id=case.name, marks=() if case.often else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_layout_is_one_rank(case: VisionCase) -> None:
    plan = case.plan
    assert [str(finding) for finding in errors(promoted(check(plan)))] == []
    found = compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.near_ties == 0
    assert (found.idle, found.vanishing) == ((), ())
    names = [name for name, _ in build_model(plan.model, plan.mtp, device="meta").named_parameters()]
    assert found.num_parameters == sum(not is_frozen(name, plan.job.freeze) for name in names)
    assert found.largest <= FP64, found


def test_pictures_are_dealt_out_by_size() -> None:
    """Each rank of CP x TP encodes about as many patches; every picture is on one of them."""
    owned = deal_out([16, 4, 64, 4, 16, 32], 3)
    assert owned == [[2], [1, 5], [0, 3, 4]]
    assert deal_out([8], 2) == [[0], []]


def test_some_ranks_have_no_picture_and_others_several() -> None:
    """Otherwise the layouts above would not show that ranks without one take part in collectives."""
    plan = named("fsdp ep, full recompute").plan
    first = [synthetic_batch(plan, step=0, microbatch=0, dp_rank=rank) for rank in range(plan.layout.dp)]
    counts = [0 if batch.images is None else len(batch.images.grids_I2) for batch in first]
    assert min(counts) == 0
    assert max(counts) > 1


def test_the_oracle_sees_features_at_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every tensor-parallel rank at the first rank's tokens, gradients differ."""

    def first_shard(self: Decoder, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD[:, : x_BSD.shape[1] // 2] if self.vocab_shard is not None else x_BSD

    monkeypatch.setattr(Decoder, "_shard_placed", first_shard)
    assert compare_with_one_rank(named("tp").plan, steps=1).gradient > FP64


def test_the_oracle_sees_pictures_ahead_that_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MTP depth on the last stage that gets zeros in place of the features of the pictures ahead."""

    def zeros_ahead(self: ImageFeatures, depths: Iterable[int]) -> list[torch.Tensor]:
        return [torch.zeros_like(self._place(self.main_VD, depth + 1)) for depth in depths]

    monkeypatch.setattr(ImageFeatures, "dense_ahead", zeros_ahead)
    assert compare_with_one_rank(named("mtp over pp").plan, steps=1).gradient > FP64


def test_the_oracle_sees_deepstack_features_that_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_chunk = Decoder.forward_chunk

    def without_features(self: Decoder, hidden: list[torch.Tensor], inputs: object) -> object:
        zeros = [torch.zeros_like(state) if n < self.num_features else state for n, state in enumerate(hidden)]
        return forward_chunk(self, zeros, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward_chunk", without_features)
    assert compare_with_one_rank(named("encoder on its own stage").plan, steps=1).gradient > FP64
