"""Maps each tensor of an adapter to the tensors that PEFT stores for it.

PEFT names an adapter by the module of transformers that it belongs to. Adapters of stacked experts are those of
`target_parameters`: one wrapper around the module of the experts for each parameter, that of gate and up inside.

    layers.0.mixer.q.lora_a              base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    layers.0.ffn.experts.gate_up_lora_a  base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight
    layers.0.ffn.experts.down_lora_a     base_model.model.model.layers.0.mlp.experts.lora_A.weight

The A of experts is stored with the rows of all experts one below the other, (E r, I), their B with the expert last,
(O, r E). `write_adapter.py` and `read_adapter.py` call `peft_tensors`.

Shapes: E experts, r rank, I and O dims in and out, H expert dim.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from threefold.engine.lora import LORA_A, LORA_B
from threefold.engine.weights.hf_names import layouts_in_memory, names_of
from threefold.engine.weights.hf_tensor import HfTensor
from threefold.spec.model import ModelSpec

PREFIX = "base_model.model."  # PEFT wraps the model twice
_LAYER = re.compile(r"(.*\.)?layers\.\d+\.")


@dataclass(frozen=True)
class PeftTensor:
    """One tensor of PEFT's file that holds values of an engine tensor."""

    key: str
    target: str  # the entry of `target_modules` or `target_parameters`
    is_parameter: bool  # whether it is one of `target_parameters`
    is_b: bool
    rows: HfTensor | None  # which rows of B it has; None for experts
    alternates: bool = False  # GPT-OSS: rows of gate and up take turns

    def read(self, engine: Tensor) -> Tensor:
        """The tensor as PEFT stores it, from the engine's."""
        if self.rows is not None:
            return (self.rows.read(engine) if self.is_b else engine).contiguous()
        if not self.is_b:
            return engine.flatten(0, 1).contiguous()
        if self.alternates:
            engine = engine.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return engine.permute(1, 2, 0).flatten(1).contiguous()

    def write(self, engine: Tensor, stored: Tensor) -> None:
        """Fill the engine's tensor with what PEFT stored."""
        if self.rows is not None:
            if self.is_b:
                self.rows.write(engine, stored)
            else:
                engine.copy_(stored)
        elif not self.is_b:
            engine.copy_(stored.view_as(engine))
        else:
            num_experts, rows, rank = engine.shape
            values_EOr = stored.view(rows, rank, num_experts).permute(2, 0, 1)
            if self.alternates:
                values_EOr = values_EOr.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            engine.copy_(values_EOr)

    def shape(self, engine: Tensor) -> tuple[int, ...]:
        """The shape that PEFT stores."""
        return tuple(self.read(engine).shape)


def weight_of(name: str) -> str:
    """The weight that an adapter belongs to: `layers.0.mixer.q.weight` of `layers.0.mixer.q.lora_a`."""
    base = name.removesuffix(LORA_A).removesuffix(LORA_B)
    return base.removesuffix("_") if base.endswith("_") else f"{base}weight"


def peft_tensors(name: str, spec: ModelSpec) -> list[PeftTensor]:
    """The tensors that PEFT stores for one of the engine's; several where transformers has several modules."""
    weight, is_b = weight_of(name), name.endswith(LORA_B)
    matrix = "lora_B.weight" if is_b else "lora_A.weight"
    layouts = layouts_in_memory(weight, spec)
    if ".experts." in weight:
        # The stacked parameter is how transformers holds experts in memory, whatever it writes: Granite's is stored
        # under another name.
        stacked = [layout[0] for layout in layouts if len(layout) == 1]
        in_memory = names_of(spec.family).stacked_experts
        part = next((part for part in stacked if part.key.endswith(in_memory)), stacked[0])
        module, _, parameter = part.key.rpartition(".")
        wrapper = f"{module}.base_layer" if parameter.startswith("gate_up") else module
        alternates = spec.family == "gpt_oss" and parameter.startswith("gate_up")
        return [PeftTensor(f"{PREFIX}{wrapper}.{matrix}", _within_layer(part.key), True, is_b, None, alternates)]
    # PEFT takes every module of an MoE model that is named like an expert's projection for an expert. Parameters, which
    # it finds by their whole name, are safe from that.
    is_parameter = spec.moe is not None and ".ffn." in weight
    found = []
    for part in layouts[0]:
        module = part.key.removesuffix(".weight")
        target = _within_layer(part.key if is_parameter else module)
        found.append(PeftTensor(f"{PREFIX}{module}.{matrix}", target, is_parameter, is_b, part))
    return found


def _within_layer(path: str) -> str:
    return _LAYER.sub("", path)
