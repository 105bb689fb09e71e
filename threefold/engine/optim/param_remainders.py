"""fp32 master weights in two parts: the model's bf16 weight, and the 16 bits that its rounding left over.

`AdamW` and `Muon` keep the second part alone (`knobs.store_param_remainders`), so that a master weight takes two bytes
next to the weight instead of four. The master weight is (bits of the weight << 16) + remainder, where the remainder is
a signed 16-bit number.

The weight is always the master weight rounded as torch rounds it, to the nearest and at a tie to the even one. A master
weight exactly in the middle between an even weight and the larger one after it has the remainder +32768, which is one
too many for 16 bits. It is stored as +32767: the master weight is then one fp32 unit in the last place smaller. One
update in 131,072 ends there. Everything else is bit for bit as with fp32 master weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from threefold.engine.optim.optimizer_targets import OptimizerParam

_MAX_REMAINDER = 2**15 - 1
_CHUNK_NUMEL = 2**24  # elements of master weights that exist in fp32 at a time


def can_store_remainder(param: OptimizerParam) -> bool:
    """Return whether the parameter is the upper half of its fp32 master weight. fp16 has other exponents than fp32, and
    FSDP's weights are fp32 themselves."""
    return param.dtype == torch.bfloat16 and param.value.dtype == torch.bfloat16


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master weight of a bf16 weight and its remainder."""
    bits = weight.detach().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def store_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Round a master weight into the bf16 weight, and keep what is left over in the remainder."""
    weight.detach().copy_(master)
    bits = weight.detach().to(master.device).view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    left = torch.sub(master.view(torch.int32), bits, out=bits)
    # A NaN may be rounded to another one: then the remainder means nothing, and the sum of both is a NaN all the same.
    remainder.copy_(left.clamp_(-_MAX_REMAINDER - 1, _MAX_REMAINDER))


def masters_in_turn(weight: Tensor, remainder: Tensor, update: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of the master weight with those of the update. Requesting the next chunk stores the one before."""
    for weight_part, remainder_part, update_part in _chunks(weight, remainder, update):
        master = join_master(weight_part, remainder_part)
        yield master, update_part
        store_master(master, weight_part, remainder_part)


def master_on_host(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master weight in host memory, for a checkpoint: on the device there may be no room for it."""
    made = torch.empty(weight.shape, dtype=torch.float32)
    for out, weight_part, remainder_part in _chunks(made, weight, remainder):
        out.copy_(join_master(weight_part.to(remainder_part.device), remainder_part))
    return made


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat chunks of tensors of one size, so that only a chunk of them exists in fp32 at a time."""
    return zip(*(x.detach().reshape(-1).split(_CHUNK_NUMEL) for x in tensors), strict=True)


def split_masters(kind: str, params: Iterable[OptimizerParam], remainders: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 master weights of all parameters with remainders, in host memory, as `{kind}.{name}`."""
    return {
        f"{kind}.{param.name}": master_on_host(param.value, remainders[param.name])
        for param in params
        if param.name in remainders
    }


def store_split_masters(
    kind: str, params: Iterable[OptimizerParam], remainders: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Split fp32 master weights that are named as `split_masters` names them into parameters and remainders."""
    for param in params:
        if param.name in remainders:
            remainder = remainders[param.name]
            for master, weight, part in _chunks(state[f"{kind}.{param.name}"], param.value, remainder):
                store_master(master.to(remainder.device), weight, part)
