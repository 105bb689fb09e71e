"""Measures a trained model on data: loss, perplexity and bits per byte, and multiple choice. `threefold eval` calls it.

Bits per byte divide the loss by the bytes of the predicted text, so that models of different tokenizers compare.

Multiple choice asks which answer of a question a model finds likeliest. A line of its file is {"question": "...",
"choices": ["...", "..."], "answer": 1}. The answer is the number of a choice, from 0, a letter (A is the first choice),
or the text of a choice. `prompt`, `context` and `query` are read as `question`; `messages` is a chat, which the choices
answer.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.data.images.batch_images import BatchImages
from threefold.engine.data.images.decode import DecodePool
from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.open_sources import open_sources
from threefold.engine.data.packing import Sample
from threefold.engine.data.text.tokenizer import FileTokenizer, Tokenizer
from threefold.engine.generate.sample import encode_prompt
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.decoder import Decoder
from threefold.engine.step import to_device
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Job
from threefold.safe_files import open_regular

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
    """A microbatch of one sequence. `images` decodes the images of a vision-language model."""

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
    labels_by_document: dict[int, list[int]] = {}
    for document, label in zip(documents, labels, strict=True):
        if label != IGNORE:
            labels_by_document.setdefault(document, []).append(label)
    return iter(labels_by_document.values())


QUESTIONS = ("question", "prompt", "context", "query")
MAX_LINE_BYTES = 2**24
_ADVICE = '{"question": "...", "choices": ["...", "..."], "answer": 0}, one a line'


@dataclass(frozen=True)
class Question:
    prompt: Any  # text, or the messages of a chat
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Accuracy:
    """The number of questions that the model answers right."""

    num_questions: int
    num_right: int  # by the probability of the whole choice
    num_right_normalized: int  # by its probability over its bytes, so that long choices have no disadvantage
    num_by_chance: float  # that guessing reaches

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_questions

    @property
    def normalized_accuracy(self) -> float:
        return self.num_right_normalized / self.num_questions


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. A line that is none is a finding."""
    try:
        with open_regular(path) as file:
            lines = list(iter(lambda: file.readline(MAX_LINE_BYTES), b""))
    except OSError as error:
        raise _refuse(str(path), f"cannot be read: {error.strerror or error}") from None
    questions = [_question(f"{path}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise _refuse(str(path), "the file has no question")
    return questions


def _question(at: str, line: bytes) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refuse(at, f"this is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise _refuse(at, "a question is an object")
    prompt = record.get("messages", next((record[name] for name in QUESTIONS if name in record), None))
    choices = record.get("choices")
    if isinstance(choices, dict):  # as published ARC has it: {"text": [...], "label": [...]}
        choices = choices.get("text")
    if not isinstance(prompt, str | list) or not isinstance(choices, list):
        raise _refuse(at, "a question has a text and a list of choices")
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise _refuse(at, "choices are at least two texts")
    answer = _answer(record.get("answer", record.get("label", record.get("answerKey"))), choices)
    if answer is None:
        raise _refuse(at, "the answer is no number, letter or text of a choice")
    return Question(prompt, tuple(choices), answer)


def _answer(given: Any, choices: Sequence[str]) -> int | None:
    if isinstance(given, str):
        if given in choices:
            return choices.index(given)
        given = int(given) if given.isdecimal() else ord(given) - ord("A") if len(given) == 1 else None
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return given if is_number and 0 <= given < len(choices) else None


@torch.no_grad()
def answer_questions(model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question]) -> Accuracy:
    """Score every choice after its question by the probability of its tokens."""
    model.eval()
    right = normalized = 0
    by_chance = 0.0
    for question in questions:
        prompt = encode_prompt(tokenizer, question.prompt, model.spec.vocab)
        choices = [_choice_text(question.prompt, choice) for choice in question.choices]
        scores = list(choice_scores(model, prompt, [_encode(tokenizer, choice) for choice in choices]))
        per_byte = [score / len(choice.encode()) for score, choice in zip(scores, choices, strict=True)]
        right += scores.index(max(scores)) == question.answer
        normalized += per_byte.index(max(per_byte)) == question.answer
        by_chance += 1 / len(choices)
    return Accuracy(len(questions), right, normalized, by_chance)


@torch.no_grad()
def choice_scores(model: Decoder, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> Iterator[float]:
    """The log-probability of each choice after the prompt."""
    device = model.head_weight.device
    for choice in choices:
        tokens_BS = torch.tensor([[*prompt, *choice]], device=device)
        logits = model(tokens_BS).logits
        assert logits is not None
        log_CV = F.log_softmax(logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        chosen_C = torch.tensor(choice, device=device)
        yield float(log_CV.gather(1, chosen_C[:, None]).sum())


def _choice_text(prompt: Any, choice: str) -> str:
    """A choice after a text begins with a space, as a word does; an answer of a chat does not."""
    needs_space = isinstance(prompt, str) and prompt and not prompt[-1].isspace() and not choice[0].isspace()
    return f" {choice}" if needs_space else choice


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = tokenizer.encode_spelled(text)[0] if isinstance(tokenizer, FileTokenizer) else tokenizer.encode(text)
    return [int(token) for token in tokens]


def _refuse(at: str, problem: str) -> FindingsError:
    return FindingsError([Finding(rule="questions-readable", at=at, problem=problem, advice=_ADVICE)])
