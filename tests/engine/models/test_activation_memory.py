"""Methods wrapped from outside: parameters keep their names, and a model is freed when it is let go."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, spec_of

from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model

WRAPPED: dict[str, dict[str, Any]] = {
    "modules": {
        "recompute": ("layernorm", "core_attn", "mla_up_proj", "gdn_norm_out", "moe_act", "shared_experts", "mlp")
    },
    "moe": {"recompute": ("moe", "mlp")},
    "full": {"recompute": ("full",)},
    "offload": {"activation_offload": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")},
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapped_model_is_freed_without_the_garbage_collector(family: str, kind: str) -> None:
    """Layers of other pipeline stages are dropped after the sharding; they must not wait for a collection."""
    gc.freeze()  # what other tests left need not be looked at
    build_model(spec_of(family))  # caches of torch that hold the first model of a process for a while
    gc.collect()
    gc.disable()
    try:
        model = build_model(spec_of(family), options=Options(**WRAPPED[kind]))
        modules = [weakref.ref(module) for module in model.modules()]
        del model
        assert not [module() for module in modules if module() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_their_names(family: str, kind: str) -> None:
    plain, wrapped = build_model(spec_of(family)), build_model(spec_of(family), options=Options(**WRAPPED[kind]))
    assert plain.state_dict().keys() == wrapped.state_dict().keys()
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in plain.state_dict().items())
