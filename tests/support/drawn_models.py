"""Configurations of tiny models, drawn at random for `drawn_layouts.py`: layers, experts, heads and sizes."""

import copy
import random
from typing import Any

import tiny_vision
from tiny_models import config_of

DENSE = ("llama", "qwen3")
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_GROUP_LIMITED = (*LATENT, "dots1", "glm4_moe", "nemotron_h")  # experts in groups, with the keys of DeepSeek-V3
SEEING = tuple(tiny_vision.CONFIGS)
_ODD_HIDDEN = (36, 40, 44, 52)  # sizes that no kernel likes, of families whose heads do not follow from them
_FIXED_HIDDEN = ("phimoe", "olmoe", "gemma4_text", "nemotron_h")

Fields = dict[str, Any]


def one_in(draw: random.Random, number: int) -> bool:
    """Whether this draw is the one of `number`."""
    return draw.randrange(number) == 0


def divisors(number: int) -> list[int]:
    """The numbers that divide `number`, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def draw_config(
    draw: random.Random, family: str, layout: Fields, in_blocks: bool = False
) -> tuple[dict[str, Any], int | None]:
    """A configuration, and the MTP depths that the job trains; None are those of the model.

    `in_blocks`: some are as wide as a block of 128 numbers, which formats of eight bits round together.
    """
    if family in SEEING:
        return _draw_seeing_config(draw, family, layout), None
    config = config_of(family, odd=one_in(draw, 3))
    chunks = layout["layout.pp"] * layout.get("layout.vpp", 1)
    more = draw.choice((1, 2, 2, 3)) if chunks == 1 else min(chunks, 8) + draw.choice((-2, -1, 0, 0, 1))
    config["num_hidden_layers"] = num_layers = max(2 if family == "ernie4_5_moe" else 1, more)
    config["tie_word_embeddings"] = one_in(draw, 3)
    if one_in(draw, 8):
        config["vocab_size"] = draw.choice((7, 20, 64))
    if layout["layout.tp"] > 4 or one_in(draw, 6):
        config["num_attention_heads"] = 8
        config["num_key_value_heads"] = 8 if family in LATENT else draw.choice((1, 2, 4, 8))
    if layout["layout.tp"] == 3:
        config |= {"num_attention_heads": 6, "num_key_value_heads": 6 if family in LATENT else 3}
    delta, windows = ("linear_attention", "full_attention"), ("sliding_attention", "full_attention")
    kinds = {"qwen3_next": delta, "qwen3_5_moe_text": delta, "gpt_oss": windows, "dots1": windows}
    kinds["gemma4_text"] = windows
    kinds["deepseek_v4"] = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    if family in kinds:
        config["layer_types"] = [draw.choice(kinds[family]) for _ in range(num_layers)]
    if family == "deepseek_v4":
        heads = config["num_attention_heads"]
        shared = [n for n in divisors(heads) if n % layout["layout.tp"] == 0]
        config |= {"mlp_layer_types": None, "num_hash_layers": draw.choice((0, 1, 1, 2))}
        config |= {"o_groups": draw.choice(shared)} if shared else {}
    if family == "nemotron_h":
        # Experts and a mixer at least, so that every axis has something to shard.
        config["num_hidden_layers"] = num_layers = max(2, num_layers)
        mixers, others = ("linear_attention", "linear_attention", "full_attention"), ("moe", "mlp")
        kept = [draw.choice((*mixers, *others)) for _ in range(num_layers - 2)]
        config["layers_block_type"] = ["moe", *kept, draw.choice(mixers)]
        config["tie_word_embeddings"] = False
    if family in _GROUP_LIMITED:
        config["first_k_dense_replace"] = min(draw.choice((0, 1, 1, 2)), num_layers - 1)
        config["num_nextn_predict_layers"] = draw.choice((0, 0, 1, 1, 2))
    if family not in _FIXED_HIDDEN and ("head_dim" in config or family in LATENT) and one_in(draw, 5):
        config["hidden_size"] = draw.choice(_ODD_HIDDEN)
    if family not in _FIXED_HIDDEN and in_blocks and not one_in(draw, 3):
        config |= {"hidden_size": 128, "vocab_size": 64}
    if family not in DENSE:
        _draw_experts(draw, family, layout["layout.ep"], config)
    if family == "phimoe":  # whose routers choose two, and whose tied head has no bias
        config |= {"num_experts_per_tok": 2, "lm_head_bias": not config["tie_word_embeddings"]}
    has_depths = family in (*LATENT, "glm4_moe", "nemotron_h")
    return config, draw.choice((None, None, None, 0, 0, 1, 2)) if has_depths or one_in(draw, 4) else None


def _draw_seeing_config(draw: random.Random, family: str, layout: Fields) -> dict[str, Any]:
    """A vision-language model: layers and experts of its decoder are drawn, its encoder is left as it is."""
    config = copy.deepcopy(tiny_vision.CONFIGS[family])
    text, chunks = config["text_config"], layout["layout.pp"] * layout.get("layout.vpp", 1)
    text["num_hidden_layers"] = num_layers = max(2, draw.choice((2, 3)) if chunks == 1 else min(chunks, 8))
    if family == "qwen3_5_moe":
        kinds = ("linear_attention", "full_attention")
        text["layer_types"] = [draw.choice(kinds) for _ in range(num_layers)]
    if layout["layout.tp"] > 4:
        text |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    _draw_experts(draw, family, layout["layout.ep"], text)
    return config


def _draw_experts(draw: random.Random, family: str, ep: int, config: dict[str, Any]) -> None:
    """Experts that mostly divide by EP, some of them so few that a rank has one."""
    name = dict.fromkeys(("mixtral", "gpt_oss", "granitemoe", "minimax_m2"), "num_local_experts")
    name |= {**dict.fromkeys((*_GROUP_LIMITED, "deepseek_v4"), "n_routed_experts"), "ernie4_5_moe": "moe_num_experts"}
    count = ep * draw.choice((1, 2, 2, 3)) if not one_in(draw, 10) else draw.choice((4, 6, 8))
    config[name.get(family, "num_experts")] = count = max(2, count)
    top_k = "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"
    config[top_k] = draw.randint(1, min(4, count))
    if family in _GROUP_LIMITED:
        config["n_group"] = groups = draw.choice([n for n in divisors(count) if count // n > 1])
        config["topk_group"] = top = draw.randint(1, groups)
        config["num_experts_per_tok"] = draw.randint(1, min(4, count // groups * top))
        config["n_shared_experts"] = draw.choice((1, 1, 2))
