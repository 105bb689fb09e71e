"""Initial weights. Every tensor draws from its own seed, so that they do not depend on how a model is split."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from threefold.engine.attention.delta import GatedDelta
from threefold.engine.moe.router import Router
from threefold.engine.norm import GatedRMSNorm, RMSNorm
from threefold.engine.shard.placement import Placement, whole


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Memory for a model built on `meta`. Unlike `to_empty`, also under a rehearsal's fake tensors."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # shared with a chunk that has it already
                continue
            module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int, placements: Mapping[str, Placement] | None = None) -> None:
    """A piece of a parameter is cut out of the whole as one rank would draw it; of stacked experts, one by one."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            placement = placements[name] if placements else whole(parameter.shape, ())
            leaf = name.rpartition(".")[2]
            if parameter.dim() == 3:
                experts = [n for start, stop in placement.ranges[0] for n in range(start, stop)]
                each = Placement(placement.shape[1:], placement.ranges[1:], ())
                for n, piece in zip(experts, parameter, strict=True):
                    _draw(module, leaf, piece, std, f"{seed}/{name}/{n}", each)
            else:
                _draw(module, leaf, parameter, std, f"{seed}/{name}", placement)
        if isinstance(module, Router) and module.balance_bias is not None:
            module.balance_bias.zero_()


def _draw(module: nn.Module, leaf: str, piece: Tensor, std: float, key: str, placement: Placement) -> None:
    generator = torch.Generator(piece.device).manual_seed(zlib.crc32(key.encode()))
    if placement.local_shape == placement.shape:
        _init(module, leaf, piece, std, generator)
    else:
        drawn = piece.new_empty(placement.shape)
        _init(module, leaf, drawn, std, generator)
        piece.copy_(placement.take(drawn))


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
