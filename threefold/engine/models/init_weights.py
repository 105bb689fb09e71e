"""Memory and initial weights for a model built on `meta`, whole or sharded.

Every tensor is drawn from a seed of its own, made of its name, so that initial weights do not depend on the layout.
"""

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.dist.shard_placement import Placement, replicated
from threefold.engine.layers.norm import GatedRMSNorm, GroupedGatedRMSNorm, RMSNorm
from threefold.engine.lora import LORA_A, LORA_B
from threefold.engine.moe.router import Router


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give memory to a model built on `meta`. Unlike `to_empty` this also works on the fake tensors of a dry run."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # a tied parameter that another chunk has given memory already
                continue
            memory = torch.empty_like(parameter, device=device)
            module.register_parameter(name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int, placements: Mapping[str, Placement] | None = None) -> None:
    """Draw each parameter as one rank would, and keep this rank's shard of it. Stacked experts are drawn one by one."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            placement = placements[name] if placements else replicated(parameter.shape, ())
            leaf = name.rpartition(".")[2]
            if parameter.dim() == 3:
                experts = [n for start, stop in placement.ranges[0] for n in range(start, stop)]
                each = Placement(placement.shape[1:], placement.ranges[1:], ())
                for n, shard in zip(experts, parameter, strict=True):
                    _draw(module, leaf, shard, std, f"{seed}/{name}/{n}", each)
            else:
                _draw(module, leaf, parameter, std, f"{seed}/{name}", placement)
        if isinstance(module, Router) and module.balance_bias is not None:
            module.balance_bias.zero_()
        if isinstance(module, Router) and (table_VK := module.expert_of_token) is not None:
            # Experts in turn, so that tokens are spread evenly and none has one twice.
            turn_VK = torch.arange(table_VK.numel(), device=table_VK.device).view_as(table_VK)
            table_VK.copy_(turn_VK % module.spec.num_experts)
        if isinstance(scale := getattr(module, "output_scale", None), Tensor):
            scale.fill_(1.0)


def _draw(module: nn.Module, leaf: str, shard: Tensor, std: float, key: str, placement: Placement) -> None:
    generator = torch.Generator(shard.device).manual_seed(zlib.crc32(key.encode()))
    if placement.local_shape == placement.shape:
        _init(module, leaf, shard, std, generator)
    else:
        drawn = shard.new_empty(placement.shape)
        _init(module, leaf, drawn, std, generator)
        shard.copy_(placement.extract_shard(drawn))


def _init(module: nn.Module, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    if isinstance(module, nn.LayerNorm) and name == "weight":
        parameter.fill_(1.0)
    elif isinstance(module, RMSNorm | GatedRMSNorm | GroupedGatedRMSNorm):
        parameter.fill_(0.0 if isinstance(module, RMSNorm) and module.zero_centered else 1.0)
    elif isinstance(module, GatedDelta) and name == "a_log":
        # 0.01 to 16: transformers' Qwen3-Next; the lower end keeps the logarithm finite.
        parameter.uniform_(0.01, 16, generator=generator).log_()
    elif isinstance(module, GatedDelta) and name == "dt_bias":
        parameter.fill_(1.0)
    elif isinstance(module, Mamba) and name == "a_log":
        parameter.copy_(torch.arange(1, len(parameter) + 1, device=parameter.device).log())  # 1 to heads: Mamba-2
    elif isinstance(module, Mamba) and name == "conv":
        bound = parameter.shape[-1] ** -0.5  # as convolutions of torch begin, and those of mamba-ssm and Megatron
        parameter.uniform_(-bound, bound, generator=generator)
    elif isinstance(module, Mamba) and name == "dt_bias":
        _draw_steps(parameter, generator)
    elif (isinstance(module, Mamba) and name == "skip") or name.endswith("_scale"):
        parameter.fill_(1.0)
    elif name.endswith(LORA_A):
        bound = parameter.shape[-1] ** -0.5  # as linear layers of torch and adapters of PEFT begin
        parameter.uniform_(-bound, bound, generator=generator)
    elif name.endswith("bias") or (name.endswith(LORA_B) and not module.lora.draws_b):  # type: ignore[union-attr]
        parameter.zero_()
    elif parameter.is_cpu and parameter.itemsize == 2:
        # torch 2.11 draws other numbers in sixteen bits than in fp32 on a CPU: weights hung on their dtype.
        parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, std, generator=generator))
    else:
        parameter.normal_(0.0, std, generator=generator)


def _draw_steps(dt_bias_H: Tensor, generator: torch.Generator) -> None:
    """Mamba-2: the softplus of the bias is a step between 0.001 and 0.1, drawn evenly by its logarithm."""
    low, high = math.log(0.001), math.log(0.1)
    step_H = dt_bias_H.uniform_(low, high, generator=generator).exp()
    dt_bias_H.copy_(step_H + torch.log(-torch.expm1(-step_H)))
