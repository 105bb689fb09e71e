"""Every shipped model is rehearsed, cut to a few layers at its full width: a peak, or the finding that says why not."""

from typing import Any

import pytest

from threefold.api.rehearsals import rehearse
from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.search.legal import untrained
from threefold.spec.models import MODELS

LAYERS = 4
TARGETS = ["threefold", pytest.param("megatron-bridge", marks=pytest.mark.slow)]


def fields_of(model: str, target: str) -> dict[str, Any]:
    """A few layers on eight GPUs, experts spread as far as they go; models that see get pictures."""
    spec = MODELS[model]
    ep = next((degree for degree in (8, 4, 2) if spec.num_experts and spec.num_experts % degree == 0), 1)
    fields = {"model": model, "target": target, "cluster.chip": "h100", "cluster.gpus": 8, "layout.ep": ep}
    fields |= {"job.seq_len": 1024, "job.global_batch": 8, "job.micro_batch": 1}
    fields |= {"model.num_layers": LAYERS} if spec.num_layers > LAYERS else {}
    return fields | ({"job.data": "scenes"} if spec.vision else {})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_a_shipped_model_is_rehearsed(model: str, target: str) -> None:
    plan = parse(fields_of(model, target)).plan
    assert plan is not None
    lacks = untrained(parse(fields_of(model, "threefold")).plan or plan)
    if lacks:
        with pytest.raises(FindingsError, match="stack-runs-family"):
            rehearse(plan, [0], jobs=1)
        return
    (rank,) = rehearse(plan, [0], jobs=1).ranks
    # Weights, gradients and states of the rank are there at the least: 2 bytes of each parameter.
    assert rank.peak_bytes > 2 * MODELS[model].dim * plan.model.vocab
