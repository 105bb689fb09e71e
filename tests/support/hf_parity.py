"""A model of transformers and the engine's with the same weights, and the comparison of their gradients."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from tiny_models import config_of

from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.hf_names import hf_layouts
from threefold.engine.weights.read_hf import read_hf
from threefold.spec.hf import model_from_config

# Hugging Face's plainest code; its grouped product refuses odd sizes.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
LOGITS, GRADIENTS = 1e-5, 1e-4  # relative, fp32: what parity means here; sums in another order differ by about 1e-6


def peer(family: str, odd: bool = False, **changes: Any) -> Any:
    """A Hugging Face model in which nothing is zero or one that could hide a wrong weight."""
    config = transformers.AutoConfig.for_model(**{**config_of(family, odd), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                draw_experts(tensor, config.n_routed_experts)
            elif not name.endswith(("inv_freq", "embed_scale")):  # what the code computes, and no checkpoint has
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()


def draw_experts(table: torch.Tensor, num_experts: int) -> None:
    """Fill the table of the experts of each token id with different ones."""
    table.copy_(torch.rand(len(table), num_experts).argsort()[:, : table.shape[1]])


def ours(model: Any, folder: Path) -> Decoder:
    """The engine's model, by way of a checkpoint that transformers wrote."""
    model.save_pretrained(folder, max_shard_size="20KB")
    spec = model_from_config(folder)
    engine = build_model(spec)
    assert not read_hf(folder, engine)
    return engine


def relative(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def compare_gradients(engine: Decoder, model: Any) -> None:
    """Each parameter that is trained has the gradient of its counterpart, and none is left over on either side."""
    theirs = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    seen = set()
    for name, parameter in engine.named_parameters():
        options = hf_layouts(name, engine.spec)
        option = next(option for option in options if all(piece.key in theirs for piece in option))
        for piece in option:
            expected = theirs[piece.key].grad
            seen.add(piece.key)
            if not parameter.requires_grad:  # an indexer's, whose choice has no gradient
                assert expected is None, name
                continue
            assert parameter.grad is not None, name
            found = piece.read(parameter.grad)
            assert found.shape == expected.shape
            assert relative(found, expected) < GRADIENTS, name
    assert seen == set(theirs)
