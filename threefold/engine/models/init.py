"""Initial weights. Every tensor draws from its own seed, so that they do not depend on how a model is split."""

import zlib

import torch
from torch import Tensor, nn

from threefold.engine.attention.delta import GatedDelta
from threefold.engine.moe.router import Router
from threefold.engine.norm import GatedRMSNorm, RMSNorm


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Memory for a model built on `meta`. Unlike `to_empty`, also under a rehearsal's fake tensors."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int) -> None:
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            _init(module, name.rpartition(".")[2], parameter, std, generator)
        if isinstance(module, Router) and module.balance_bias is not None:
            module.balance_bias.zero_()


def _init(module: nn.Module, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    if isinstance(module, RMSNorm | GatedRMSNorm):
        parameter.fill_(0.0 if isinstance(module, RMSNorm) and module.zero_centered else 1.0)
    elif isinstance(module, GatedDelta) and name == "a_log":
        # 0.01 to 16: transformers' Qwen3-Next; the lower end keeps the logarithm finite.
        parameter.uniform_(0.01, 16, generator=generator).log_()
    elif isinstance(module, GatedDelta) and name == "dt_bias":
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        parameter.normal_(0.0, std, generator=generator)
