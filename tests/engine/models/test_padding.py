"""Tokens that pad a sequence count in no statistic and no balancing loss of a router.

The expected numbers are those of transformers' balancing loss with an attention mask, formulas over the useful tokens
alone, and the same model with other padding. On several ranks the oracle's cases "padded" compare with one rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import build
from tiny_models import spec_of
from torch import Tensor

from threefold.engine.batch import Batch, Padding
from threefold.engine.build import options_of
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.build import build_model
from threefold.engine.moe import balance
from threefold.engine.moe.router import Router
from threefold.engine.schedule.microbatch_runners import Overlapped, Sequential
from threefold.spec.model import MoeSpec

LENGTHS = (16, 9, 3)


def padding_of(lengths: tuple[int, ...], seq_len: int) -> Padding:
    count_B = torch.tensor(lengths)
    return Padding(torch.arange(seq_len) >= count_B[:, None], count_B)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_are_those_of_the_useful_tokens(score: str) -> None:
    torch.manual_seed(0)
    router = Router(MoeSpec(6, 2, 8, score=score), 8).double()
    torch.nn.init.normal_(router.weight)
    x_BSD = torch.randn(3, 16, 8, dtype=torch.float64)
    padding = padding_of(LENGTHS, 16)
    routing = router(x_BSD.flatten(0, 1), padding=padding)
    found = balance.compute_router_stats(routing, 3, balance.LOSSES, torch.zeros(()))
    losses = {name: float(loss.detach()) for name, loss in found.losses.items()}
    rows = [x_SD[:length] for x_SD, length in zip(x_BSD, LENGTHS, strict=True)]
    alone = [balance.compute_router_stats(router(row_SD), 1, balance.LOSSES, torch.zeros(())) for row_SD in rows]
    whole = balance.compute_router_stats(router(torch.cat(rows)), 1, balance.LOSSES, torch.zeros(()))
    assert losses["aux"] == pytest.approx(float(whole.losses["aux"].detach()), rel=1e-14)
    assert losses["z"] == pytest.approx(float(whole.losses["z"].detach()), rel=1e-14)
    assert losses["seq_aux"] == pytest.approx(sum(float(one.losses["aux"].detach()) for one in alone) / 3, rel=1e-14)
    assert found.load_E.tolist() == whole.load_E.tolist()
    assert float(found.entropy) == pytest.approx(float(whole.entropy), rel=1e-14)
    assert not routing.weight_TK[padding.is_padding_BS.flatten()].any()


def test_aux_loss_is_that_of_transformers_with_an_attention_mask() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(1)
    router = Router(MoeSpec(6, 2, 8), 8)
    torch.nn.init.normal_(router.weight)
    padding = padding_of(LENGTHS, 16)
    routing = router(torch.randn(48, 8), padding=padding)
    mask_BS = (~padding.is_padding_BS).long()
    theirs = load_balancing_loss_func((routing.logits_TE,), num_experts=6, top_k=2, attention_mask=mask_BS)
    # Theirs adds up the fractions of the K choices, each of which is one; ours is a fraction of all copies.
    assert float(balance.aux_loss(routing).detach()) == pytest.approx(float(theirs.detach()) / 2, rel=1e-5)


JOB = {
    "model": "tiny-qwen3-moe",
    "target": "threefold",
    "cluster.chip": "cpu",
    "job.seq_len": 16,
    "job.data": "synthetic",
    "job.task": "sft",
    "knobs.precision": "fp32",
}
KNOBS: dict[str, dict[str, Any]] = {
    "eager": {},
    "full recompute": {"knobs.recompute": ["full"]},
    "recompute of moe": {"knobs.recompute": ["moe", "layernorm"]},
    "capacity": {"job.capacity_factor": 0.7},
}


@pytest.mark.parametrize("runner", [Sequential, lambda model: Overlapped(model, delay_wgrad=False)])
@pytest.mark.parametrize("name", KNOBS)
def test_what_padding_holds_changes_nothing(name: str, runner: Callable[..., Any]) -> None:
    """Two microbatches, so that a recompute that asked for the padding of another one would be seen."""
    fields = JOB | {
        **{f"job.{loss}_loss": 0.1 for loss in ("aux", "seq_aux", "z")},
        **KNOBS[name],
    }
    options = replace(options_of(build(fields)), expert_backend="loop")

    def run(fill: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = build_model(spec_of("qwen3_moe"), 0, torch.float64, options=options, seed=0)
        draw = torch.Generator().manual_seed(2)
        batches = []
        for lengths in (LENGTHS, LENGTHS[::-1]):
            tokens_BS, is_padding_BS = torch.randint(20, (3, 16), generator=draw), padding_of(lengths, 16).is_padding_BS
            labels_BS = tokens_BS.roll(-1, 1).masked_fill(is_padding_BS, IGNORE)
            tokens_BS = torch.where(is_padding_BS, fill, tokens_BS)
            batches.append(Batch(tokens_BS, labels_BS, num_useful_B=torch.tensor(lengths)))
        sums = runner(model).run(batches, [0.4, 0.6])
        return sums, [p.grad for p in model.parameters() if p.grad is not None]

    zeros, others = (run(fill) for fill in (torch.zeros((), dtype=torch.long), torch.arange(16) + 3))
    assert set(zeros[0]) >= {"aux", "seq_aux", "z", "load_LE", "dropped_L"}
    for one, other in zip((*zeros[0].values(), *zeros[1]), (*others[0].values(), *others[1]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-10, atol=1e-13)
    assert int(zeros[0]["load_LE"][0].sum()) == 2 * sum(LENGTHS) * options_top_k()
    assert bool(zeros[0]["dropped_L"].any()) == (name == "capacity")


def options_top_k() -> int:
    moe = spec_of("qwen3_moe").moe
    assert moe is not None
    return moe.top_k
