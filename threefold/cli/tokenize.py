"""`threefold tokenize`: text, chats, Parquet and saved datasets to a token shard, or to Megatron's two files."""

import argparse
import sys

from threefold.cli.command_line.inputs import share_of_one
from threefold.cli.command_line.out import print_json
from threefold.engine.data.text.read_documents import SUFFIXES
from threefold.engine.data.text.tokenize_files import MAX_BAD_RECORDS, Progress, Tokenized, tokenize_files
from threefold.engine.data.text.tokenizer import open_tokenizer
from threefold.units import format_count

_BAD_RECORDS_HELP = f"of the records of a file, how many may be unreadable and are skipped (default {MAX_BAD_RECORDS})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SRC", help="text files, JSONL, JSON, Parquet, saved datasets, or folders of them"
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the shard to write, such as corpus.tok; .bin: Megatron's files"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="bytes|PATH", help="bytes, or a tokenizer.json or its folder"
    )
    parser.add_argument("--end", metavar="TOKEN", help="the token that closes a document; absent: the tokenizer's own")
    parser.add_argument("--field", default="text", help="the field of a record that holds its text")
    parser.add_argument(
        "--max-bad-records", type=share_of_one, default=MAX_BAD_RECORDS, metavar="SHARE", help=_BAD_RECORDS_HELP
    )
    parser.add_argument("--suffix", action="append", help=f"taken from folders, can be repeated; {' '.join(SUFFIXES)}")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    progress: Progress | None = _progress if sys.stderr.isatty() else None
    try:
        tokenizer = open_tokenizer(args.tokenizer, args.end)
        suffixes = tuple(args.suffix or SUFFIXES)
        made = tokenize_files(args.sources, args.out, tokenizer, suffixes, args.field, progress, args.max_bad_records)
    finally:
        if progress:
            print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print_json({"ok": True, **made.to_json()})
    else:
        print(_text(made))
    return 0


def _text(made: Tokenized) -> str:
    lines = [f"skipped {skipped}" for skipped in made.skipped]
    lines += [str(finding) for finding in made.warnings()]
    mask = ", with a loss mask" if made.masked else ""
    lines.append(
        f"wrote {made.out}: {made.num_documents} documents, {format_count(made.num_tokens)} tokens{mask}, "
        f"vocabulary {made.vocab} ({made.tokenizer}), fingerprint {made.fingerprint[:12]}"
    )
    return "\n".join(lines)


def _progress(num_documents: int, num_tokens: int) -> None:
    print(f"\r{num_documents} documents, {format_count(num_tokens)} tokens", end="", file=sys.stderr, flush=True)
