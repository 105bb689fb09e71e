"""The loss of a model over all of some data, as perplexity and bits per byte too. `threefold eval` calls it.

Bits per byte divide the loss by the bytes of the predicted text, so that models of different tokenizers compare.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.data.images.batch_images import BatchImages
from threefold.engine.data.images.decode import DecodePool
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.open_sources import open_sources
from threefold.engine.data.packing import Sample
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.decoder import Decoder
from threefold.engine.train import to_device
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
    vision = model.spec.vision
    (source,), _ = open_sources(
        replace(job, data=data, packing=True), model.spec.vocab, tokenizer=tokenizer, vision=vision
    )
    images = BatchImages(patch_rules(vision, job.max_pixels), vision.tokens, DecodePool(0)) if vision else None
    if source.benchmark_only and max_sequences is None:
        problem, advice = f"{data} never ends", "give --sequences N"
        raise FindingsError([Finding(rule="evaluation-ends", at="--data", problem=problem, advice=advice)])
    count = source.num_samples if max_sequences is None else min(max_sequences, source.num_samples)
    model.eval()
    num_tokens, num_bytes, nats = 0, 0, 0.0
    for number in range(count):
        batch = make_batch(source.sample(number), images)
        loss, num_labels = batch_loss(model, batch)
        num_tokens, nats = num_tokens + num_labels, nats + loss
        num_bytes += sum(len(tokenizer.decode(part).encode("utf-8", "replace")) for part in _by_document(batch))
    if not num_tokens:
        problem, advice = f"{data} has no token to predict", "give more data"
        raise FindingsError([Finding(rule="data-empty", at="--data", problem=problem, advice=advice)])
    return DataLoss(data, num_tokens, num_bytes, nats)


def make_batch(sample: Sample, images: BatchImages | None) -> Batch:
    """A microbatch of one sequence. `images` decodes the pictures of a vision-language model."""

    def row(values: object) -> Tensor | None:
        return None if values is None else torch.as_tensor(values)[None]

    tokens_BS, labels_BS = row(sample.tokens_S), row(sample.labels_S)
    assert tokens_BS is not None
    assert labels_BS is not None
    batch = Batch(tokens_BS, labels_BS.clone(), row(sample.documents_S), row(sample.positions_S))
    return batch if images is None else images.add(batch, [sample])


def batch_loss(model: Decoder, batch: Batch) -> tuple[float, int]:
    """The summed loss of a microbatch, and the number of its labels."""
    num_labels = int((batch.labels_BS != IGNORE).sum())
    if not num_labels:
        return 0.0, 0
    there = to_device(batch, model.head_weight.device)
    output = model(
        *(there.tokens_BS, there.labels_BS, there.documents_BS, there.positions_BS, there.images, there.positions_3BS)
    )
    return float(output.aux["ce"]) * num_labels, num_labels


def _by_document(batch: Batch) -> Iterator[list[int]]:
    """The labels of each document of a microbatch of one sequence, which decode to its text."""
    labels = batch.labels_BS[0].tolist()
    documents = [0] * len(labels) if batch.documents_BS is None else batch.documents_BS[0].tolist()
    found: dict[int, list[int]] = {}
    for document, label in zip(documents, labels, strict=True):
        if label != IGNORE:
            found.setdefault(document, []).append(label)
    return iter(found.values())
