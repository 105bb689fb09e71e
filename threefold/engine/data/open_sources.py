"""Opens the sources that `job.data` names: a known name, a shard, Megatron's files, text, or a folder of these.

`Loader` calls `open_sources`. For example, ("web.tok:0.7", "chats.jsonl:0.3") gives two sources and the weights [0.7,
0.3]. Text, JSONL, Parquet and saved datasets become shards in the cache folder first (`text/tokenize_files.py`).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from threefold.engine.data.embedded_corpus import embedded_corpus
from threefold.engine.data.held_out import HeldOut, split_samples, split_stores
from threefold.engine.data.images.image_source import holds_images, open_images
from threefold.engine.data.megatron_dataset import MegatronDataset
from threefold.engine.data.packing import DocumentStore
from threefold.engine.data.sources import ConcatenatedSource, ShardSource, Source, SyntheticSource, split_held_out
from threefold.engine.data.text.read_documents import RECORD_SUFFIXES, TEXT_SUFFIXES
from threefold.engine.data.text.tokenize_files import cached_shard
from threefold.engine.data.text.tokenizer import Tokenizer, open_tokenizer
from threefold.engine.data.token_shard import SUFFIX, VERIFY_BYTES, TokenShard
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import EMBEDDED, SYNTHETIC, DataEntry, megatron_prefix, parse_entries
from threefold.plan.plan import Job
from threefold.spec.model import VisionSpec


@dataclass(slots=True)
class DataSettings:
    """Settings for opening the entries of a job, in addition to those of the job."""

    vocab: int
    seed: int = 0
    tokenizer: Tokenizer | None = None  # None: that of job.tokenizer
    cache: str | Path | None = None
    vision: VisionSpec | None = None  # the model's vision part, with which JSONL may have images
    held_out: HeldOut | None = None  # None: nothing is held out
    warnings: list[Finding] = field(default_factory=list)  # filled with what a run should say once
    labels: set[str] = field(default_factory=set)  # filled with the tokenizers of the shards that are opened
    texts: dict[Path, str] = field(default_factory=dict)  # filled with the text that a shard in the cache was made from

    def name(self, store: DocumentStore) -> str:
        """The file as the user knows it."""
        return self.texts.get(store.path, str(store.path))


def open_sources(
    job: Job,
    vocab: int,
    tokenizer: Tokenizer | None = None,
    cache: str | Path | None = None,
    vision: VisionSpec | None = None,
) -> tuple[list[Source], list[float]]:
    """The sources of a job and their weights, with nothing held out."""
    return open_job_data(job, DataSettings(vocab, 0, tokenizer, cache, vision))


def open_job_data(job: Job, settings: DataSettings) -> tuple[list[Source], list[float]]:
    """The sources of a job and their weights. Raises the findings of all entries at once.

    Where no entry states a weight, the weight of a source is its number of samples, times its epochs.
    """
    if settings.tokenizer is None:
        settings.tokenizer = open_tokenizer(job.tokenizer or "bytes")
    entries = parse_entries(job.data)
    findings = _check_weights(entries)
    opened: list[tuple[Source, list[DocumentStore]]] = []
    for entry in entries:
        try:
            opened.append(_open_source(entry.name, job, settings))
        except FindingsError as error:
            findings += error.findings
    stores = [store for _, members in opened for store in members]
    settings.labels |= {store.header.tokenizer for store in stores if isinstance(store, TokenShard)}
    findings += _check_stores(stores, job, settings)
    findings += [_empty(settings.texts.get(Path(s.name), s.name), job) for s, _ in opened if s.num_samples == 0]
    if findings:
        raise FindingsError(findings)
    sources = [source for source, _ in opened]
    return sources, [
        (entry.epochs or 1.0) * source.num_samples if entry.weight is None else entry.weight
        for source, entry in zip(sources, entries, strict=True)
    ]


def _open_source(name: str, job: Job, settings: DataSettings) -> tuple[Source, list[DocumentStore]]:
    """The source of one entry, and the stores that it was made of."""
    held_out = settings.held_out
    if name in SYNTHETIC:
        zipf = name != "synthetic"
        drawn = SyntheticSource(settings.vocab, job.seq_len, job.packing, zipf=zipf, seed=settings.seed)
        return (split_held_out(drawn, held_out.share, held_out.evaluation) if held_out else drawn), []
    if DataEntry(name).exists and holds_images(name, settings.vision):
        assert settings.tokenizer is not None
        images = open_images(name, job, settings.vision, settings.tokenizer, settings.cache)
        return (split_samples(images, held_out) if held_out else images), [images.index.shard]
    stores = _open_stores(name, job, settings)
    sft = job.task == "sft"
    # A store without a mask is accepted here; `_check_stores` reports all such stores at once.
    parts = stores if held_out is None else split_stores(stores, held_out, whole=sft)
    sources = [ShardSource(part, job.seq_len, job.packing, sft and part.masked) for part in parts]
    if held_out and not sum(source.num_samples for source in sources):
        kept = "left to train on" if not held_out.evaluation else "held out for evaluation"
        problem = f"{name} is too small: of {held_out.share:g} of it held out, nothing would be {kept}"
        raise _refusal("data-empty", problem, "give validation data (job.val_data), or more data")
    return (sources[0] if len(sources) == 1 else ConcatenatedSource(name, tuple(sources))), stores


def _open_stores(name: str, job: Job, settings: DataSettings) -> list[DocumentStore]:
    path = Path(name)
    if name == EMBEDDED:
        if job.task == "sft":
            problem = "the embedded corpus has no conversations to fine-tune on"
            raise _refusal("data-fits-task", problem, "give JSONL with messages", {"job.task": "pretrain"})
        return [embedded_corpus(settings.cache)]
    if prefix := megatron_prefix(name):
        return [MegatronDataset(prefix, settings.vocab)]
    if _is_folder(path) and (files := sorted(path.glob(f"*{SUFFIX}"))):
        shards = [TokenShard(file, verify=False, within=path) for file in files]
        if sum(shard.header.file_bytes for shard in shards) <= VERIFY_BYTES:
            for shard in shards:
                shard.verify()
        return list(shards)
    if _is_folder(path) or path.suffix in (*RECORD_SUFFIXES, *TEXT_SUFFIXES):
        assert settings.tokenizer is not None
        limits = (job.max_bad_records, job.text_field)
        shard, warnings = cached_shard(name, settings.tokenizer, settings.cache, *limits)
        settings.warnings += warnings
        settings.texts[shard.path] = name
        return [shard]
    return [TokenShard(name)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # no name of a file at all
        return False


def _check_weights(entries: list[DataEntry]) -> list[Finding]:
    weights = [entry.weight for entry in entries]
    if not entries:
        return [_finding("data-empty", "no data is named", "name some", {"job.data": "embedded"})]
    if any(number is not None and not (0 < number < math.inf) for e in entries for number in (e.weight, e.epochs)):
        return [_finding("data-weights", "a weight is a number above 0", "path:0.3, or path:2x for two epochs")]
    if None in weights and any(weight is not None for weight in weights):
        problem = "some entries have a weight and some have none"
        return [_finding("data-weights", problem, "give all a weight, or none: then sizes and epochs decide")]
    return []


def _check_stores(stores: list[DocumentStore], job: Job, settings: DataSettings) -> list[Finding]:
    findings = []
    shards = [store for store in stores if isinstance(store, TokenShard)]
    for shard in shards:
        if shard.header.vocab > settings.vocab:
            problem = (
                f"{settings.name(shard)} has a vocabulary of {shard.header.vocab}, the model one of {settings.vocab}"
            )
            findings.append(_finding("data-fits-vocab", problem, "tokenize with the model's own tokenizer"))
    if job.task == "sft":
        for store in stores:
            if not store.masked:
                problem = f"{settings.name(store)} has no loss mask: it was not made from conversations"
                advice = "tokenize JSONL with messages"
                findings.append(_finding("data-fits-task", problem, advice, {"job.task": "pretrain"}))
    return findings + _check_tokenizers(shards, job, settings)


def _check_tokenizers(shards: list[TokenShard], job: Job, settings: DataSettings) -> list[Finding]:
    assert settings.tokenizer is not None
    label = settings.tokenizer.label
    if job.tokenizer is not None:
        others = [shard for shard in shards if shard.header.tokenizer != label]
        advice = "tokenize the text with job.tokenizer, or name the tokenizer of the data"
        made = [f"{settings.name(shard)} was made with the tokenizer {shard.header.tokenizer}" for shard in others]
        return [_finding("data-fits-tokenizer", f"{names}, job.tokenizer is {label}", advice) for names in made]
    labels = sorted({shard.header.tokenizer for shard in shards})
    if len(labels) > 1:
        problem = f"shards of different tokenizers cannot be mixed: {', '.join(labels)}"
        return [_finding("data-one-tokenizer", problem, "tokenize all of them with one; job.tokenizer encodes text")]
    return []


def _empty(name: str, job: Job) -> Finding:
    advice = "at least two tokens are needed"
    if job.task == "sft":
        advice = f"at least one answer is needed that begins in the first {job.seq_len} tokens (job.seq_len)"
    return _finding("data-empty", f"{name} holds nothing to learn", advice)


def _finding(rule: str, problem: str, advice: str, fix: dict[str, str] | None = None) -> Finding:
    return Finding(rule=rule, at="job.data", problem=problem, advice=advice, fix=fix)


def _refusal(rule: str, problem: str, advice: str, fix: dict[str, str] | None = None) -> FindingsError:
    return FindingsError([_finding(rule, problem, advice, fix)])
