"""Opens the sources that `job.data` names: a known name, a shard, a folder of shards or JSONL, each with a weight.

`Loader` calls `open_sources`. For example, ("web.tok:0.7", "chats.jsonl:0.3") gives two sources and the weights [0.7,
0.3].
"""

import hashlib
import math
from pathlib import Path

from threefold.engine.data.cache_folder import cache_folder
from threefold.engine.data.embedded_corpus import embedded_corpus
from threefold.engine.data.shards.token_shard import SUFFIX, VERIFY_BYTES, TokenShard
from threefold.engine.data.sources import ConcatenatedSource, ShardSource, Source, SyntheticSource
from threefold.engine.data.text.tokenize_files import tokenize_files
from threefold.engine.data.text.tokenizer import ByteTokenizer, Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import EMBEDDED, SYNTHETIC, DataEntry, parse_entries
from threefold.plan.plan import Job
from threefold.safe_files import open_regular
from threefold.units import MIB


def open_sources(
    job: Job, vocab: int, seed: int = 0, tokenizer: Tokenizer | None = None, cache: str | Path | None = None
) -> tuple[list[Source], list[float]]:
    """The sources of a job and their weights. Raises the findings of all entries at once.

    Where no entry states a weight, the weight of a source is its number of samples.
    """
    entries = parse_entries(job.data)
    findings = _check_weights(entries)
    opened: list[tuple[Source, list[TokenShard]]] = []
    for entry in entries:
        try:
            opened.append(_open_source(entry.name, job, vocab, seed, tokenizer, cache))
        except FindingsError as error:
            findings += error.findings
    shards = [shard for _, members in opened for shard in members]
    findings += _check_shards(shards, job, vocab)
    findings += [_empty(source.name) for source, _ in opened if source.num_samples == 0]
    if findings:
        raise FindingsError(findings)
    sources = [source for source, _ in opened]
    return sources, [
        float(source.num_samples) if entry.weight is None else entry.weight
        for source, entry in zip(sources, entries, strict=True)
    ]


def _open_source(
    name: str, job: Job, vocab: int, seed: int, tokenizer: Tokenizer | None, cache: str | Path | None
) -> tuple[Source, list[TokenShard]]:
    """The source of one entry, and its shards."""
    if name in SYNTHETIC:
        zipf = name != "synthetic"
        return SyntheticSource(vocab, job.seq_len, job.packing, zipf=zipf, seed=seed), []
    sft = job.task == "sft"
    if name == EMBEDDED:
        if sft:
            problem = "the embedded corpus has no conversations to fine-tune on"
            raise _refusal("data-fits-task", problem, "give JSONL with messages", {"job.task": "pretrain"})
        shards = [embedded_corpus(cache)]
    elif Path(name).is_dir():
        shards = [TokenShard(file, verify=False, within=Path(name)) for file in sorted(Path(name).glob(f"*{SUFFIX}"))]
        if sum(shard.header.file_bytes for shard in shards) <= VERIFY_BYTES:
            for shard in shards:
                shard.verify()
        if not shards:
            raise _refusal("data-empty", f"no shards (*{SUFFIX}) in {name}", "threefold tokenize makes them")
    elif name.endswith(".jsonl"):
        shards = [jsonl_shard(name, tokenizer or ByteTokenizer(), cache)]
    else:
        shards = [TokenShard(name)]
    # A shard without a mask is accepted here; `_check_shards` reports all such shards at once.
    parts = [ShardSource(shard, job.seq_len, job.packing, sft and shard.header.masked) for shard in shards]
    return (parts[0] if len(parts) == 1 else ConcatenatedSource(name, tuple(parts))), shards


def jsonl_shard(path: str, tokenizer: Tokenizer, cache: str | Path | None = None) -> TokenShard:
    """The tokenized JSONL file as a shard in the cache folder, made once for its content and tokenizer."""
    digest = hashlib.sha256(f"{tokenizer.label} {tokenizer.end} 1 ".encode())  # 1: version of the chat template
    try:
        with open_regular(Path(path)) as file:
            while part := file.read(MIB):
                digest.update(part)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        found = Finding(rule="text-readable", at=path, problem=problem, advice="give the path of a JSONL file")
        raise FindingsError([found]) from error
    out = cache_folder(cache) / f"jsonl-{digest.hexdigest()[:24]}{SUFFIX}"
    try:
        return TokenShard(out, verify=True)
    except FindingsError:
        tokenize_files([path], out, tokenizer)
        return TokenShard(out, verify=True)


def _check_weights(entries: list[DataEntry]) -> list[Finding]:
    weights = [entry.weight for entry in entries]
    if not entries:
        return [_finding("data-empty", "no data is named", "name some", {"job.data": "embedded"})]
    if any(weight is not None and not (0 < weight < math.inf) for weight in weights):
        return [_finding("data-weights", "a weight is a number above 0", "path:0.3")]
    if None in weights and any(weight is not None for weight in weights):
        problem = "some entries have a weight and some have none"
        return [_finding("data-weights", problem, "give all a weight, or none: then sizes decide")]
    return []


def _check_shards(shards: list[TokenShard], job: Job, vocab: int) -> list[Finding]:
    findings = []
    for shard in shards:
        head = shard.header
        if head.vocab > vocab:
            problem = f"{shard.path} has a vocabulary of {head.vocab}, the model one of {vocab}"
            findings.append(_finding("data-fits-vocab", problem, "tokenize with the model's own tokenizer"))
        if job.task == "sft" and not head.masked:
            problem = f"{shard.path} has no loss mask: it was not made from conversations"
            advice = "tokenize JSONL with messages"
            findings.append(_finding("data-fits-task", problem, advice, {"job.task": "pretrain"}))
    labels = sorted({shard.header.tokenizer for shard in shards})
    if len(labels) > 1:
        problem = f"shards of different tokenizers cannot be mixed: {', '.join(labels)}"
        findings.append(_finding("data-one-tokenizer", problem, "tokenize all of them with one"))
    return findings


def _empty(name: str) -> Finding:
    return _finding("data-empty", f"{name} holds nothing to learn", "at least two tokens, or one answer, are needed")


def _finding(rule: str, problem: str, advice: str, fix: dict[str, str] | None = None) -> Finding:
    return Finding(rule=rule, at="job.data", problem=problem, advice=advice, fix=fix)


def _refusal(rule: str, problem: str, advice: str, fix: dict[str, str] | None = None) -> FindingsError:
    return FindingsError([_finding(rule, problem, advice, fix)])
