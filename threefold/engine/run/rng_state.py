"""Torch's random state as tensors, so that a resumed run draws the numbers that an uninterrupted one would draw.

Stochastic rounding of low-precision gradients draws from it. `engine/build.py` seeds it; `engine/train_state.py` saves
and restores it.
"""

import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)


def random_state() -> dict[str, Tensor]:
    """The state of the CPU's generator and, with a GPU, of the GPU's. The names are part of checkpoints."""
    state = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["rng.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    if "rng.cpu" in state:
        torch.set_rng_state(state["rng.cpu"].cpu())
    if "rng.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["rng.cuda"].cpu())
