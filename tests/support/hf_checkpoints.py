"""Checkpoints as a user has them: small models saved by transformers, with tokenizer and chat template; and data."""

import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from tiny_models import config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# In the style of ChatML, with the generation tag for the loss mask.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(folder: Path, vocab_size: int = 384) -> None:
    """A byte-level BPE tokenizer with a template and generation settings, as transformers writes them."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet)
    words = [f"what is {a} and {b}? the answer is {a} {b}. user assistant system" for a in range(9) for b in range(9)]
    inner.train_from_iterator(words, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    end = inner.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "temperature": 0.7}))


def save_checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a small model of a family, with a tokenizer; returns the model of transformers."""
    config = {**config_of(family), "vocab_size": 400, "max_position_embeddings": 128, **changes}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), **EAGER)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.02)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def load_checkpoint(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER).eval()


def write_chats(path: Path, numbers: list[tuple[int, int]]) -> Path:
    """Chats of a task that can be learned from examples: the answer joins two digits."""
    with path.open("w", encoding="utf-8") as file:
        for a, b in numbers:
            messages = [
                {"role": "user", "content": f"what is {a} and {b}?"},
                {"role": "assistant", "content": f"{a} {b}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def digit_pairs(seed: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of digits but some, and those that are held back."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    return pairs[:85], pairs[85:]
