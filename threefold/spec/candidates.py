"""Candidates for dispatcher, precision and CUDA graphs: what a chip makes worth an A/B, and what speaks against it.

Hardware names candidates and chooses none of them: a plan starts with the first, and a matched A/B on the job at hand
decides about the others (Megatron Bridge's skills of 2026-08-01, which withdrew their table from chip to dispatcher and
their platform precisions). `search` starts from here, `rules` and `report` list what is left to compare.
"""

from dataclasses import dataclass

from threefold.spec.chips import NATIVE_FORMATS, ChipSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that an A/B may choose, with what was seen for it and against it, and when."""

    value: str
    since: str
    evidence: str
    counterexample: str = ""


_SKILLS = "2026-08-01"
FLEX = ("deepep", "hybridep")
ALLTOALL = Candidate("alltoall", _SKILLS, "the start: it needs no package, and every other one is compared with it")
_DEEPEP = Candidate(
    "deepep",
    _SKILLS,
    "upstream's DeepSeek-V3 recipe for H100",
    "Qwen3-235B on 256 H100 now runs alltoall with EP overlap; Qwen3-30B on 16 H100 runs HybridEP with it",
)
_HYBRIDEP_NODE = Candidate(
    "hybridep",
    _SKILLS,
    "won on 16 H100 with Qwen3-30B and EP overlap",
    "Qwen3-235B on 256 H100 runs alltoall with EP overlap",
)
_HYBRIDEP_RACK = Candidate(
    "hybridep",
    _SKILLS,
    "first to compare on NVL72: Qwen3-235B on GB200 was slightly faster and lighter with it",
    "Qwen3-Next in BF16 was equally fast with alltoall",
)
# Which flex backends Bridge activates: training/flex_dispatcher_backend.py checks compute capability 8 or 9, or the
# names B200 and B300, for DeepEP, and capability 8 to 10 for HybridEP.
_BY_CHIP: dict[str, tuple[Candidate, ...]] = {
    "a100": (_DEEPEP, _HYBRIDEP_NODE),
    "h100": (_DEEPEP, _HYBRIDEP_NODE),
    "h200": (_DEEPEP, _HYBRIDEP_NODE),
    "b200": (_DEEPEP, _HYBRIDEP_NODE),
    "b300": (_DEEPEP, Candidate("hybridep", "2026-08", "published B300 runs: 878 against 720 TFLOP/s with alltoall")),
    "gb200": (_HYBRIDEP_RACK,),
    "gb300": (_HYBRIDEP_RACK,),
}
# A chip from a user's file has the candidates of its generation. GPUs of Ada have no NVLink between them: Bridge would
# activate both backends there, and no run is known.
_LIKE = {"ampere": "a100", "hopper": "h100", "blackwell": "b200"}


def dispatcher_candidates(chip: ChipSpec) -> tuple[Candidate, ...]:
    """Dispatchers in the order in which to compare them; a plan starts with the first."""
    flex = _BY_CHIP.get(chip.name) or _BY_CHIP.get(_LIKE.get(chip.architecture, ""), ())
    return (ALLTOALL, *flex)


def runs_dispatcher(name: str, chip: ChipSpec) -> bool:
    """Whether Megatron Bridge activates a flex backend on a chip."""
    return chip.architecture == "ada" or any(one.value == name for one in dispatcher_candidates(chip))


_LEGAL = "legal on the chip and not ranked: kernels, sizes and the job decide"
_BF16 = Candidate("bf16", _SKILLS, "the start, and the run that lower precision is compared with")
_FP8 = tuple(Candidate(name, _SKILLS, _LEGAL) for name in ("fp8-blockwise", "fp8-cs", "fp8-tensor"))
_LOW: dict[str, tuple[Candidate, ...]] = {
    "hopper": _FP8,
    "blackwell": (
        Candidate("mxfp8", _SKILLS, _LEGAL),
        *_FP8[1:],
        Candidate("nvfp4", _SKILLS, "after a sound run in BF16 or FP8"),
    ),
}
_FP32 = Candidate("fp32", "2026-11", "BF16 GEMMs are emulated on most CPUs")


def precision_candidates(chip: ChipSpec) -> tuple[Candidate, ...]:
    """Formats of GEMMs in the order in which to compare them; a plan starts with the first."""
    start = _FP32 if chip.architecture == "cpu" else _BF16
    return (start, *_LOW.get(chip.architecture, ()))


def low_formats(chip: ChipSpec) -> tuple[str, ...]:
    """Formats below sixteen bits that the chip multiplies, in the order in which to compare them."""
    native = NATIVE_FORMATS[chip.architecture]
    return tuple(one.value for one in precision_candidates(chip)[1:] if one.value in native)


# Graphs of dropless models. Scopes are added from left to right, each by an A/B of its own.
GRAPH_CANDIDATES = (
    Candidate("", _SKILLS, "eager: capture is no gain by itself", "one run with alltoall replayed 1.5% slower"),
    Candidate("moe_router,moe_preprocess", _SKILLS, "first where a profile shows gaps between kernels"),
    Candidate("attn,moe_router,moe_preprocess", _SKILLS, "an A/B of its own, against the two before it"),
)
DENSE_GRAPHS = ("attn",)


def first_graphs(is_moe: bool) -> tuple[str, ...]:
    """The scopes to compare with an eager run first."""
    return tuple(GRAPH_CANDIDATES[1].value.split(",")) if is_moe else DENSE_GRAPHS


def dropless_graphs(is_moe: bool) -> tuple[str, ...]:
    """All scopes whose shapes stand still in a dropless model."""
    return tuple(GRAPH_CANDIDATES[-1].value.split(",")) if is_moe else DENSE_GRAPHS
