"""The shape of a model that nothing here knows: its class of the installed transformers, made on the meta device.

`derive` starts this module as a process of its own with a limit of time and memory, because a config.json may ask for
anything. The process prints one JSON object: counts of parameters, the layers, and experts found by structure.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError, shown
from threefold.safe_files import read_json

SECONDS, BYTES = 120, 8 * 2**30
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "top_k")
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_STATED = {
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "qk_head_dim"),
    "dense_dim": ("intermediate_size", "ffn_hidden_size"),
    "expert_dim": ("moe_intermediate_size", "expert_ffn_hidden_size"),
}


def derive(path: Path) -> dict[str, Any]:
    """The shape of the model of a config.json; a finding where there is none."""
    command = [sys.executable, "-m", "threefold.dryrun.derive_shape", str(path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        ended = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise _refuse(f"transformers made no model of {path} within {SECONDS} seconds", "give a smaller one") from None
    lines = ended.stdout.decode(errors="replace").splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        end = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _refuse(f"no shape of {path} was derived: {end[:200]}", "correct the configuration") from None
    if "problem" in answer:
        raise _refuse(answer["problem"], answer["advice"])
    return answer


def _refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="model-config", at="model", problem=problem, advice=advice)])


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of the language model; a part that encodes images or sound is counted apart."""
    import torch
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))
    kinds = (whole.get_text_config(), whole)
    mappings = (
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    )
    pairs = (
        (getattr(modeling_auto, name), kind) for name in mappings for kind in kinds if hasattr(modeling_auto, name)
    )
    mapping, kind = next((mapping, kind) for mapping, kind in pairs if type(kind) in mapping)
    with torch.device("meta"):
        model = mapping[type(kind)]._from_config(kind)
    text = kinds[0]
    name, layers = _decoder_layers(model)
    holder = model.get_submodule(name.rpartition(".")[0])
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    own = {id(p): p.numel() for part in (holder, head) for p in part.parameters()}
    own[id(embedding)] = embedding.numel()
    stated = {what: _stated(text, keys)[0] for what, keys in _STATED.items()}
    stated["top_k"], stated["top_k_key"] = _stated(text, _TOP_K)
    num_experts = _stated(text, _NUM_EXPERTS)[0]
    return {
        "class": type(model).__name__,
        "transformers": transformers.__version__,
        "total": sum(own.values()),
        "apart": sum(p.numel() for p in model.parameters() if id(p) not in own),
        "head": 0 if head.weight is embedding or getattr(text, "tie_word_embeddings", False) else head.weight.numel(),
        "vocab": embedding.shape[0],
        "dim": embedding.shape[1],
        "layers": [_layer(layer, num_experts) for layer in layers],
        "parts": sorted({type(part).__name__ for layer in layers for part in layer.children()}),
        "stated": stated,
    }


def _decoder_layers(model: Any) -> tuple[str, list[Any]]:
    """The list of modules with most parameters that is in no other list."""
    from torch.nn import ModuleList

    lists = {name: module for name, module in model.named_modules() if isinstance(module, ModuleList) and len(module)}
    outer = {name: one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    name = max(outer, key=lambda one: sum(p.numel() for p in outer[one].parameters()))
    return name, list(outer[name])


def _layer(layer: Any, num_experts: int | None) -> dict[str, int]:
    experts = {id(p): (p.numel(), count) for p, count in _expert_parameters(layer, num_experts)}
    shared = {
        id(p): p.numel()
        for name, module in layer.named_modules()
        if name.rpartition(".")[2].startswith("shared_expert") and "gate" not in name.rpartition(".")[2]
        for p in module.parameters()
        if p.dim() == 2
    }
    return {
        "params": sum(p.numel() for p in layer.parameters()),
        "experts": sum(numel for numel, _ in experts.values()),
        "num_experts": max((count for _, count in experts.values()), default=0),
        "shared": sum(numel for one, numel in shared.items() if one not in experts),
    }


def _expert_parameters(layer: Any, num_experts: int | None) -> Iterator[tuple[Any, int]]:
    """Parameters of experts, by structure: modules with several matrices for each of as many experts, and lists of
    modules of one shape."""
    from torch.nn import ModuleList

    for module in layer.modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        counts = [p.shape[0] for p in stacked]
        counted = [count for count in counts if count == num_experts] or [c for c in counts if counts.count(c) > 1]
        if counted:  # LongCat's have rows for experts that compute nothing
            yield from ((p, counted[0]) for p in module.parameters(recurse=False) if p.dim() > 1)
        if isinstance(module, ModuleList) and len(module) > 1:
            shapes = {tuple(p.shape for p in expert.parameters()) for expert in module}
            if len(shapes) == 1 and shapes != {()} and num_experts in (None, len(module)):
                yield from ((p, len(module)) for p in module.parameters())


def _stated(config: Any, keys: tuple[str, ...]) -> tuple[Any, str]:
    """The first of these keys that the configuration has with a whole number, or with a list whose largest it is."""
    for key in keys:
        value = getattr(config, key, None)
        value = max(value) if isinstance(value, list) and value and all(type(v) is int for v in value) else value
        if type(value) is int and value > 0:
            return value, key
    return None, ""


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    try:
        config = read_json(Path(path))
        print(json.dumps(shape_of(config)))
    except ImportError:
        advice = "pip install torch transformers, or give a model_type that is known"
        print(
            json.dumps(
                {"problem": "a shape is derived with torch and transformers, which are missing", "advice": advice}
            )
        )
    except KeyError as error:
        problem = f"transformers knows no model_type {error}"
        print(json.dumps({"problem": problem, "advice": "update transformers, or correct model_type"}))
    except StopIteration:
        print(json.dumps({"problem": "transformers has no language model of this type", "advice": "give a decoder"}))
    except Exception as error:  # whatever a class says to values that it does not take
        problem = f"transformers makes no model of it: {type(error).__name__}: {shown(str(error))}"
        print(json.dumps({"problem": problem, "advice": "correct the configuration"}))


if __name__ == "__main__":
    main(sys.argv[1])
