"""Seconds of CPU that sampling takes: 1,000 and 2,000 tokens of the demo model. Time should grow with the length only.

python benchmarks/sample_speed.py
"""

import time

import torch

from threefold.engine.generate.generate import generate
from threefold.engine.models.build import build_model
from threefold.spec.models import MODELS

PROMPT = [1, 2, 3]


def cpu_seconds(model: torch.nn.Module, num_tokens: int) -> float:
    began = time.process_time()
    for _ in generate(model, [PROMPT], num_tokens):  # type: ignore[arg-type]
        pass
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    model = build_model(MODELS["demo-qwen3-moe"])
    cpu_seconds(model, 50)  # warms up
    short, long = (min(cpu_seconds(model, num_tokens) for _ in range(3)) for num_tokens in (1000, 2000))
    print(f"1,000 tokens {short:.2f} s, 2,000 tokens {long:.2f} s: {long / short:.2f} times as long")


if __name__ == "__main__":
    main()
