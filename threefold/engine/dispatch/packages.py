"""Which of the flex packages is installed: they are told apart by their signatures, not by version numbers.

Read in deepseek-ai/DeepEP: `deep_ep/buffer.py` (V1), `deep_ep/buffers/elastic.py` (V2), and its branch hybrid-ep:
`deep_ep/hybrid_ep_buffer.py`.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.spec.stacks import DISPATCHER_CHIPS

PACKAGE = "deep_ep"
_HOMES = {
    "deepep": "https://github.com/deepseek-ai/DeepEP",
    "hybridep": "https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A buffer class of the package, known by arguments its methods take."""

    name: str
    classes: tuple[str, ...]
    methods: dict[str, frozenset[str]]

    def fits(self, found: type) -> bool:
        return all(hasattr(found, name) and wants <= accepted(found, name) for name, wants in self.methods.items())


_ELASTIC = Kind(
    "elastic",
    ("ElasticBuffer",),
    {
        "__init__": frozenset({"group", "num_max_tokens_per_rank", "hidden", "num_topk"}),
        "dispatch": frozenset(
            {"x", "topk_idx", "topk_weights", "num_experts", "handle", "num_sms", "async_with_compute_stream"}
        ),
        "combine": frozenset({"x", "handle", "topk_weights", "num_sms", "async_with_compute_stream"}),
    },
)
_CLASSIC = Kind(
    "classic",
    ("Buffer",),
    {
        "get_dispatch_layout": frozenset({"topk_idx", "num_experts", "previous_event", "async_finish"}),
        "dispatch": frozenset(
            {"x", "handle", "num_tokens_per_rank", "is_token_in_rank", "topk_idx", "topk_weights", "async_finish"}
        ),
        "combine": frozenset({"x", "handle", "topk_weights", "async_finish"}),
    },
)
_HYBRID = Kind(
    "hybrid",
    ("HybridEPBuffer", "HybridEpBuffer"),
    {
        "__init__": frozenset({"group", "hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts"}),
        "dispatch_with_permute": frozenset({"hidden", "routing_map", "probs", "handle", "num_permuted_tokens"}),
        "combine_with_unpermute": frozenset({"hidden", "probs", "handle"}),
    },
)
# The newer first: V2 still has V1's class.
KINDS = {"deepep": (_ELASTIC, _CLASSIC), "hybridep": (_HYBRID,)}


def accepted(found: type, method: str) -> frozenset[str]:
    """Names of the arguments a method takes."""
    return frozenset(inspect.signature(getattr(found, method)).parameters)


def find(dispatcher: str, chip: str) -> tuple[str, Any, Any]:
    """The kind, the class and the package; a finding where the chip or the package is not there."""
    chips = DISPATCHER_CHIPS[dispatcher]
    if chip not in chips:
        raise _missing(dispatcher, f"{dispatcher} does not run on {chip}", f"it runs on {', '.join(sorted(chips))}")
    home = f"install it from {_HOMES[dispatcher]}"
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise _missing(dispatcher, f"{dispatcher} needs the package {PACKAGE} ({error})", home) from error
    for kind in KINDS[dispatcher]:
        for name in kind.classes:
            found = getattr(package, name, None)
            if isinstance(found, type) and kind.fits(found):
                return kind.name, found, package
    wanted = " or ".join(name for kind in KINDS[dispatcher] for name in kind.classes)
    problem = f"the package {PACKAGE} here has no {wanted} with the arguments that {dispatcher} is called with"
    raise _missing(dispatcher, problem, home)


def _missing(dispatcher: str, problem: str, advice: str) -> FindingsError:
    fix = {"knobs.dispatcher": "alltoall"}
    return FindingsError(
        [Finding(rule="dispatcher-available", at="knobs.dispatcher", problem=problem, fix=fix, advice=f"or {advice}")]
    )
