"""Evaluation of a run: loss, perplexity and bits per byte against sums by hand, and multiple choice."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import spec_of
from tiny_runs import tiny_plan

from threefold.engine.data.text.tokenizer import ByteTokenizer
from threefold.engine.evaluate import answer_questions, choice_scores, data_loss, read_questions
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.run.folder import METRICS
from threefold.engine.train import train
from threefold.engine.train_state import load_run
from threefold.findings import FindingsError
from threefold.plan.plan import Job

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["a few words, é among them", "and a second document"]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build_model(spec_of("qwen3_moe", vocab_size=260), seed=1)


def log_probabilities(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The log probability of each token given the tokens before it, by the definition."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    assert logits is not None
    return F.log_softmax(logits[0].double(), dim=-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_loss_perplexity_and_bits_per_byte_by_hand(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = data_loss(model, ByteTokenizer(), Job(seq_len=64), str(path))
    documents = [[*text.encode(), ByteTokenizer.end] for text in TEXTS]
    nats = [float(-log_probabilities(model, [int(token or 0) for token in document]).sum()) for document in documents]
    assert found.num_tokens == sum(len(document) - 1 for document in documents)
    assert found.nats == pytest.approx(sum(nats), rel=1e-5)  # fp32 sums
    # The first byte of a document is not predicted, and its end is no byte.
    num_bytes = sum(len(text.encode()) - 1 for text in TEXTS)
    assert found.num_bytes == num_bytes
    assert found.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / num_bytes, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(nats) / found.num_tokens), rel=1e-5)


def test_a_run_evaluates_alike(tmp_path: Path) -> None:
    """The loss of `eval` is the one that the run itself has of its validation set, on one rank."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(20) for text in TEXTS))
    fields = {"job.data": str(path), "job.val_data": str(path), "job.packing": True, "job.steps": 2}
    fields |= {"job.micro_batch": 1, "run.eval_every": 1, "run.eval_batches": 1000}
    train(tiny_plan(fields), tmp_path / "run", lambda text: None)
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    model, job = load_run(tmp_path / "run", print), tiny_plan(fields).job
    found = data_loss(model, ByteTokenizer(), job, str(path))
    assert found.loss == pytest.approx(lines[-1]["eval_loss"], rel=1e-6)


def test_synthetic_data_needs_an_end(model: Decoder) -> None:
    with pytest.raises(FindingsError, match="evaluation-ends"):
        data_loss(model, ByteTokenizer(), Job(seq_len=16), "synthetic")
    assert data_loss(model, ByteTokenizer(), Job(seq_len=16), "synthetic", max_sequences=2).num_tokens > 0


def test_choices_are_scored_by_their_tokens(model: Decoder) -> None:
    prompt, choices = [1, 2, 3], [[4], [5, 6], [7, 8, 9]]
    expected = [float(log_probabilities(model, [*prompt, *choice])[len(prompt) - 1 :].sum()) for choice in choices]
    assert list(choice_scores(model, prompt, choices)) == pytest.approx(expected, rel=1e-5)


def test_accuracy_counts_the_likeliest_choices(model: Decoder, tmp_path: Path) -> None:
    """The right answers are those that the model finds likeliest, and then those that it does not."""
    texts = [["no", "yes indeed"], ["red", "green", "blue"], ["seven", "8"]]
    likeliest = []
    for choices in texts:
        scores = list(choice_scores(model, list(b"Which?"), [list(f" {choice}".encode()) for choice in choices]))
        likeliest.append(scores.index(max(scores)))
    answers = [likeliest[0], "ABC"[likeliest[1]], texts[2][1 - likeliest[2]]]  # number, letter, text; the last is wrong
    path = tmp_path / "questions.jsonl"
    rows = zip(texts, answers, strict=True)
    lines = [json.dumps({"question": "Which?", "choices": choices, "answer": answer}) for choices, answer in rows]
    path.write_text("\n".join(lines) + "\n")
    found = answer_questions(model, ByteTokenizer(), read_questions(path))
    assert (found.num_questions, found.num_right) == (3, 2)
    assert found.num_by_chance == pytest.approx(1 / 2 + 1 / 3 + 1 / 2)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"question": "?", "choices": ["a"], "answer": 0}',
        '{"question": "?", "choices": ["a", "b"], "answer": 2}',
        '{"question": "?", "choices": ["a", "b"]}',
        '{"choices": ["a", "b"], "answer": 0}',
    ],
)
def test_a_line_that_is_no_question_is_a_finding(line: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "?", "choices": ["a", "b"], "answer": "B"}\n' + line + "\n")
    with pytest.raises(FindingsError, match="questions-readable") as refused:
        read_questions(path)
    assert refused.value.findings[0].at == f"{path}:2"
