"""No page, rule, finding or recipe states as current what upstream withdrew in August 2026.

Each row has what was withdrawn, when and where, words that would state it, and a sentence that they must find: a row
whose words find nothing would pass forever. A sentence that says itself that its statement is past may stand. Where
upstream contradicts itself, the rule says so.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from repository import ROOT

from threefold.interop.megatron.setting_facts import CONFLICTS
from threefold.interop.megatron.setting_notes import NOTES
from threefold.rules.all import explain

PAST = re.compile(
    r"withdr[ae]wn?|withdrew|no longer|until (?:it|20)|\b(?:was|were|did)\b|(?:took|take) the place|replace"
)
DEFAULT = r"(?:default|standard|recommended|right|best)"


@dataclass(frozen=True)
class Withdrawn:
    """A statement that no longer holds."""

    what: str
    words: str
    said: str


ROWS = (
    Withdrawn(
        "2026-08-01, workflow and dispatcher skills: a chip has no dispatcher of its own",
        rf"(?:deepep|hybridep) (?:is|as) the (?:strong )?{DEFAULT}\b"
        rf"|{DEFAULT} dispatcher (?:of|for|on) (?:the chip|h100|b200|b300|gb200|gb300|hopper|blackwell|nvl72)"
        r"|(?:use|choose|take|prefer) (?:deepep|hybridep) (?:on|for) (?:h100|g?b[23]00|hopper|blackwell|nvl72)"
        r"|dispatcher-default-for-chip",
        "HybridEP is the strong default of NVL72 systems.",
    ),
    Withdrawn(
        "2026-08-01, workflow skill: lower precisions are candidates behind BF16, no starting recipes",
        rf"(?:fp8-blockwise|blockwise fp8|mxfp8) is the (?:strong )?{DEFAULT}\b"
        rf"|{DEFAULT} precision (?:of|for|on) (?:the chip|hopper|blackwell|h100|b200|gb200)"
        r"|start (?:with|in|from) (?:fp8|mxfp8|fp8-blockwise)\b|precision-default-for-chip",
        "On Hopper start with FP8, on Blackwell with MXFP8.",
    ),
    Withdrawn(
        "2026-08-01, workflow and graph skills: graphs of dropless models start without attn",
        r"(?:graphs?|scopes?) (?:start|begin)s? (?:with|at) `?attn"
        r"|start (?:with|at) (?:`?attn`?|attention),? ?(?:and )?`?moe_router"
        r"|start (?:with|at) `?knobs\.graphs ?= ?\[?\"?attn",
        "Graphs start with attn, moe_router and moe_preprocess.",
    ),
    Withdrawn(
        "2026-08-01, graph skill: capture proves no gain",
        r"(?:graphs|capture) (?:always|certainly) (?:gain|pay|help|speed|save)s?"
        r"|captured,? (?:so|and therefore) faster",
        "CUDA graphs always speed up small launches.",
    ),
    Withdrawn(
        "2026-04-27, parallelism skill: the floor of GPUs is no product of all degrees",
        r"(?:floor|smallest number|minimum|fewest) (?:of |number of )?(?:gpus|ranks)[^.]{0,40}"
        r"(?:pp|tp) (?:x|times|\*) (?:tp|cp|pp) (?:x|times|\*) (?:cp|ep|tp)[^.]{0,12}(?:x|times|\*) ep",
        "The smallest number of GPUs is PP x TP x CP x EP.",
    ),
    Withdrawn(
        "2026-08-14, recompute skill: no ranking of modules, and core_attn is not first",
        r"(?:recompute|start with|begin with) `?core_attn`? first|core_attn`? (?:comes first|is the first)",
        "Recompute core_attn first, then the norms.",
    ),
    Withdrawn(
        "2026-08 guide on Megatron FSDP: a pipeline is meant to run with it",
        r"megatron(?:'s)? fsdp (?:excludes|refuses|forbids|has no|takes no) (?:a |any )?pipeline"
        r"|fsdp-excludes-pipeline",
        "Megatron's FSDP excludes a pipeline.",
    ),
    Withdrawn(
        "Megatron Core 0.18 (Bridge 0.5): whole iterations run dropless, by a paged stash",
        r"(?:full|whole)[- ]iterations?[^.]{0,60}(?:only|needs?|require[sd]?|want)[^.]{0,20}drop[- ]and[- ]pad"
        r"|a paged stash,? which no plan says",
        "Graphs of the whole iteration need drop-and-pad.",
    ),
    Withdrawn(
        "2026-08 skill on offload: the optimizer's offload has no limit by graphs in Megatron",
        r"megatron[^.]{0,40}(?:graph|iteration)[^.]{0,30}(?:excludes?|refuses?)[^.]{0,20}optimizer(?:'s)? offload"
        r"|a full-iteration graph also contains the optimizer",
        "Megatron's full-iteration graph excludes optimizer offload.",
    ),
    Withdrawn(
        "2026-08-01, card of Qwen3-235B on 256 H100: alltoall with overlap and no recompute",
        r"qwen3-235b[^.]{0,40}256 h100[^.]{0,30}(?:runs|with|by|uses) deepep",
        "Qwen3-235B on 256 H100 runs DeepEP.",
    ),
    Withdrawn(
        "2026-07-25, overlap skills: the first A/B has delayed weight gradients off",
        r"first a/b[^.]{0,60}with delayed weight gradients"
        r"|turn (?:both|overlap and delayed weight gradients) on together",
        "The first A/B compares overlap with delayed weight gradients.",
    ),
    Withdrawn(
        "2026-08 code: Bridge's checkpoints in the background also take fsdp_dtensor",
        r"(?:async_save|in the background)[^.]{0,40}torch_dist (?:only|alone)",
        "Checkpoints are written in the background in torch_dist only.",
    ),
)


def sentences(text: str) -> Iterator[str]:
    """The text of a page or a source file, in lower case, without marks of comments and line ends."""
    plain = " ".join(re.sub(r"^\s*#+ ?", "", line) for line in text.lower().splitlines())
    yield from re.split(r"(?<=[.;:|])\s+", " ".join(plain.split()))


def stated(row: Withdrawn, lines: list[str]) -> list[str]:
    return [one for one in lines if re.search(row.words, one) and not PAST.search(one)]


PAGES = [
    page
    for pattern in (
        "README.md",
        "docs/**/*.md",
        "skills/**/*.md",
        "recipes/*.toml",
        "threefold/**/*.py",
        "threefold/**/*.toml",
    )
    for page in sorted(ROOT.glob(pattern))
    if "log" not in page.relative_to(ROOT).parts[:-1]  # logs are dated
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nothing_withdrawn_is_stated(row: Withdrawn) -> None:
    assert stated(row, [row.said.lower()]), "the words find no statement"
    assert stated(row, [f"{row.said[:-1]}, until 2026-08.".lower()]) == []
    found = {str(page.relative_to(ROOT)): stated(row, lines) for page, lines in SENTENCES.items()}
    assert {page: lines for page, lines in found.items() if lines} == {}


SENTENCES = {page: list(sentences(page.read_text(encoding="utf-8"))) for page in PAGES}


# Where places of upstream contradict each other or the code (August 2026): the rule, and words of what it says of it.
AT_ODDS = {
    "graph-full-iteration-alone": "still say impl `local`",
    "graph-needs-static-experts": "still keep whole iterations for drop-and-pad",
    "graph-of-attention-by-ab": "its tables of recipes still do",
    "grids-divide-ranks": "only the least common multiple is right",
    "cp-from-shard-target": "upstream's guides differ",
    "tp-divides-model": "the code also takes a multiple",
    "delay-wgrad-fusion-te": "opposite conditions",
    "delay-wgrad-grad-reduce-te": "asks for 2.8, bridge for 2.7",
    "delay-wgrad-scoped-graph-te": "bridge asks for 2.12",
    "fsdp-needs-connections": "at odds with itself",
    "fsdp-excludes-full-graph": "has a recipe that does so",
    "router-in-fp32": "has bf16",
    "selective-before-full": "had core_attn first",
    "graph-excludes-offload": "which its skills still refuse",
    "layer-offload-leaves-a-layer": "one layer less than the code does",
    "hybridep-inside-rack": "says 16 for gb200, and the code takes ep",
    "packed-attention-in-no-scoped-graph": "the code that runs decides",
    "capacity-without-deepep": "names alltoall alone",
}
# What changed, and when: the rule, and the date that its explanation gives.
CHANGED = {
    "dispatcher-candidates-left": "until 2026-08-01",
    "low-precision-after-bf16": "until 2026-08-01",
    "graph-of-attention-by-ab": "until 2026-08-01",
    "small-launches-want-graphs": "since 2026-08-01",
    "host-wall": "until 2026-08-01",
    "selective-before-full": "until 2026-08-14",
    "overlap-switch-couples": "since 2026-07-25",
    "grids-divide-ranks": "(2026-04)",
    "fsdp-pipeline-is-untried": "until 2026-08",
    "fsdp-excludes-full-graph": "since megatron core 0.18",
    "graph-excludes-offload": "megatron core 0.18 and later",
    "graph-needs-static-experts": "bridge 0.5 and later",
    "dispatcher-supports-chip": "bridge 0.6; until then",
}
NOTES_AT_ODDS = {
    "comm_overlap.bucket_size": "once otherwise",
    "async-save-has-its-formats": "which its guides leave out",
}


@pytest.mark.parametrize(("slug", "words"), [*AT_ODDS.items(), *CHANGED.items()])
def test_explanations_say_what_changed_and_where_upstream_is_at_odds(slug: str, words: str) -> None:
    said = explain(slug)
    assert said is not None
    assert words in said.why.lower()


def test_settings_say_where_upstream_is_at_odds() -> None:
    known = NOTES | {one.name: one.advice for one in CONFLICTS}
    assert [name for name, words in NOTES_AT_ODDS.items() if words not in known[name]] == []


def test_pages_are_read() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/guide/megatron.md", "threefold/rules/knobs/graphs.py"} <= names
