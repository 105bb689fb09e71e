"""Sampling from a trained model: continue a prompt, greedily or at a temperature. `threefold sample` calls it."""

import torch
from torch import Tensor

from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.models.decoder import Decoder
from threefold.findings import Finding, FindingsError


@torch.no_grad()
def continue_tokens(
    model: Decoder, prompt: list[int], count: int, temperature: float = 0.0, seed: int = 0, context: int = 2048
) -> list[int]:
    """`count` more tokens. Every token reads the whole context again; there is no KV cache."""
    device = next(model.parameters()).device
    draw = torch.Generator(device="cpu").manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    for _ in range(count):
        window_BS = torch.tensor([tokens[-context:]], device=device)
        logits_V = model(window_BS).logits[0, -1].float().cpu()
        tokens.append(_choose(logits_V, temperature, draw))
    model.train()
    return tokens[len(prompt) :]


def _choose(logits_V: Tensor, temperature: float, draw: torch.Generator) -> int:
    if temperature < torch.finfo(logits_V.dtype).tiny:
        return int(logits_V.argmax())
    below_V = logits_V - logits_V.max()  # keeps a low temperature from making infinities
    return int(torch.multinomial((below_V / temperature).softmax(dim=-1), 1, generator=draw))


def sample_text(model: Decoder, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, seed: int) -> str:
    """The continuation as text."""
    start = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end or 0]
    if max(start) >= model.spec.vocab:
        problem = f"token {max(start)} of the prompt is beyond the model's vocabulary of {model.spec.vocab}"
        advice = "give the tokenizer that the run's data was made with"
        raise FindingsError([Finding(rule="prompt-fits-vocab", at="--tokenizer", problem=problem, advice=advice)])
    return tokenizer.decode(continue_tokens(model, start, count, temperature, seed))
