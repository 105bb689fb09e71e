"""`threefold eval`: loss, perplexity and bits per byte of a run on data, and its accuracy in multiple choice."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.cli.command_line.inputs import MODEL_FOLDER, add_newest, open_model, sequence_length
from threefold.cli.command_line.out import UsageError, print_json
from threefold.machine.finetune.checkpoint_facts import data_facts
from threefold.units import format_many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=MODEL_FOLDER)
    parser.add_argument(
        "--data", action="append", default=[], metavar="FILE", help="as job.data; may come several times"
    )
    parser.add_argument(
        "--choices", action="append", default=[], type=Path, metavar="FILE", help="questions with choices (JSONL)"
    )
    parser.add_argument(
        "--task",
        choices=("pretrain", "sft"),
        help="which tokens count (default: as it trains)",
    )
    parser.add_argument(
        "--seq-len", metavar="S", type=sequence_length, help="tokens of a sequence, such as 32K (default: the run's)"
    )
    parser.add_argument("--sequences", type=int, help="sequences of each --data at most (default: all)")
    parser.add_argument("--field", metavar="NAME", help="the field of a record that holds its text")
    parser.add_argument("--tokenizer", help="bytes, or a Hugging Face tokenizer file (default: the run's own)")
    add_newest(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if not args.data and not args.choices:
        raise UsageError("give --data FILE or --choices FILE")
    if any(value is not None and value < 1 for value in (args.seq_len, args.sequences)):
        raise UsageError("--seq-len and --sequences are 1 or more")
    return _print(args, _measure(args))


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    from threefold.engine.evaluate import answer_questions, data_loss, read_questions
    from threefold.engine.generate.sample import run_tokenizer

    plan, load, is_trained = open_model(args.run, args.newest)
    questions = {str(path): read_questions(path) for path in args.choices}
    tokenizer = run_tokenizer(args.run, plan, args.tokenizer)
    model = load()
    task = args.task or (plan.job.task if is_trained else _task_of(args.data))
    job = replace(plan.job, task=task, seq_len=args.seq_len or plan.job.seq_len)
    job = replace(job, text_field=args.field or job.text_field)
    found: list[dict[str, Any]] = []
    for data in args.data:
        one = data_loss(model, tokenizer, job, data, args.sequences)
        numbers = {"loss": one.loss, "perplexity": one.perplexity, "bits_per_byte": one.bits_per_byte}
        found.append({"data": data, "tokens": one.num_tokens, "bytes": one.num_bytes, **numbers})
    for name, asked in questions.items():
        accuracy = answer_questions(model, tokenizer, asked)
        found.append(
            {
                "choices": name,
                "questions": accuracy.num_questions,
                "accuracy": accuracy.accuracy,
                "normalized_accuracy": accuracy.normalized_accuracy,
                "by_chance": accuracy.num_by_chance / accuracy.num_questions,
            }
        )
    return found


def _task_of(data: list[str]) -> str:
    """What finetuning on the data would learn: the answers, where records have any."""
    return "sft" if data and data_facts(data).has_answers else "pretrain"


def _print(args: argparse.Namespace, found: list[dict[str, Any]]) -> int:
    if args.json:
        print_json({"run": str(args.run), "results": found})
        return 0
    for one in found:
        if "data" in one:
            bits = "" if one["bits_per_byte"] is None else f"  {one['bits_per_byte']:.4f} bits a byte"
            print(
                f"{one['data']}: loss {one['loss']:.4f}  perplexity {one['perplexity']:.4g}{bits}  "
                f"({one['tokens']:,} tokens)"
            )
        else:
            print(
                f"{one['choices']}: accuracy {one['accuracy']:.1%}, by byte {one['normalized_accuracy']:.1%}, "
                f"by chance {one['by_chance']:.1%}  ({format_many(one['questions'], 'question')})"
            )
    return 0
