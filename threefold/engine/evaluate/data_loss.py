"""The loss of a model over all of some data, as perplexity and bits per byte too. `threefold eval` calls it.

Bits per byte divide the loss by the bytes of the predicted text, so that models of different tokenizers compare.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from threefold.engine.data.open_sources import open_sources
from threefold.engine.data.packing import Sample
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.decoder import Decoder
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Job

MAX_PERPLEXITY_LOSS = 700.0  # exp of more is no number


@dataclass(frozen=True)
class DataLoss:
    """The loss over some data. A token counts where it is predicted: of a chat only the answers are."""

    name: str
    num_tokens: int
    num_bytes: int  # of the predicted tokens as text
    nats: float  # the sum of the losses of the tokens

    @property
    def loss(self) -> float:
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < MAX_PERPLEXITY_LOSS else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None where the predicted tokens have no text, as those of synthetic data."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


@torch.no_grad()
def data_loss(model: Decoder, tokenizer: Tokenizer, job: Job, data: str, max_sequences: int | None = None) -> DataLoss:
    """The loss over every sequence of one entry of `job.data`, or over the first ones."""
    (source,), _ = open_sources(replace(job, data=data, packing=True), model.spec.vocab, tokenizer=tokenizer)
    if source.benchmark_only and max_sequences is None:
        problem, advice = f"{data} never ends", "give --sequences N"
        raise FindingsError([Finding(rule="evaluation-ends", at="--data", problem=problem, advice=advice)])
    count = source.num_samples if max_sequences is None else min(max_sequences, source.num_samples)
    model.eval()
    num_tokens, num_bytes, nats = 0, 0, 0.0
    for number in range(count):
        sample = source.sample(number)
        loss, labels = sample_loss(model, sample)
        num_tokens, nats = num_tokens + len(labels), nats + loss
        num_bytes += sum(len(tokenizer.decode(part).encode("utf-8", "replace")) for part in _by_document(sample))
    if not num_tokens:
        problem, advice = f"{data} has no token to predict", "give more data"
        raise FindingsError([Finding(rule="data-empty", at="--data", problem=problem, advice=advice)])
    return DataLoss(data, num_tokens, num_bytes, nats)


def sample_loss(model: Decoder, sample: Sample) -> tuple[float, list[int]]:
    """The summed loss of a sequence, and its labels."""
    device = model.head_weight.device

    def row(values: object) -> Tensor | None:
        return None if values is None else torch.as_tensor(values, device=device)[None]

    tokens_BS, labels_BS = row(sample.tokens_S), row(sample.labels_S)
    assert tokens_BS is not None
    assert labels_BS is not None
    labels = [int(label) for label in labels_BS[0] if label != IGNORE]
    if not labels:
        return 0.0, labels
    output = model(tokens_BS, labels_BS, row(sample.documents_S), row(sample.positions_S))
    return float(output.aux["ce"]) * len(labels), labels


def _by_document(sample: Sample) -> Iterator[list[int]]:
    """The labels of each document, which decode to its text."""
    documents = [0] * len(sample.labels_S) if sample.documents_S is None else list(sample.documents_S)
    found: dict[int, list[int]] = {}
    for document, label in zip(documents, sample.labels_S, strict=True):
        if label != IGNORE:
            found.setdefault(int(document), []).append(int(label))
    return iter(found.values())
