"""Finds the buffer class of the installed DeepEP or HybridEP package.

Releases are told apart by the signatures of their methods, not by version numbers. The signatures are those of
deepseek-ai/DeepEP: `deep_ep/buffer.py` (V1), `deep_ep/buffers/elastic.py` (V2), and of its branch hybrid-ep:
`deep_ep/hybrid_ep_buffer.py`. The dispatchers call `find_buffer_class` when they are made.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from threefold.findings import Finding, FindingsError

PACKAGE = "deep_ep"
_SOURCES = {
    "deepep": "https://github.com/deepseek-ai/DeepEP",
    "hybridep": "https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep",
}


@dataclass(frozen=True, slots=True)
class BufferApi:
    """One known buffer class, recognized by the arguments that its methods take."""

    name: str
    classes: tuple[str, ...]  # names that the class has had
    methods: dict[str, frozenset[str]]  # arguments that the dispatcher passes, by method

    def matches(self, buffer_class: type) -> bool:
        return all(
            hasattr(buffer_class, name) and wants <= argument_names(buffer_class, name)
            for name, wants in self.methods.items()
        )


_ELASTIC = BufferApi(
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
_CLASSIC = BufferApi(
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
_HYBRID = BufferApi(
    "hybrid",
    ("HybridEPBuffer", "HybridEpBuffer"),
    {
        "__init__": frozenset({"group", "hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts"}),
        "dispatch_with_permute": frozenset({"hidden", "routing_map", "probs", "handle", "num_permuted_tokens"}),
        "combine_with_unpermute": frozenset({"hidden", "probs", "handle"}),
    },
)
# The newer API comes first, because V2 still has V1's class.
BUFFER_APIS = {"deepep": (_ELASTIC, _CLASSIC), "hybridep": (_HYBRID,)}


def argument_names(buffer_class: type, method: str) -> frozenset[str]:
    """Names of the arguments that a method takes."""
    return frozenset(inspect.signature(getattr(buffer_class, method)).parameters)


def find_buffer_class(dispatcher: str, chip: str) -> tuple[str, Any, Any]:
    """(name of the API, buffer class, package); raises a finding where the chip or the package does not fit."""
    if chip == "cpu":
        raise _missing(dispatcher, f"{dispatcher} does not run on {chip}", "it runs on GPUs")
    advice = f"install it from {_SOURCES[dispatcher]}"
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise _missing(dispatcher, f"{dispatcher} needs the package {PACKAGE} ({error})", advice) from error
    for api in BUFFER_APIS[dispatcher]:
        for name in api.classes:
            buffer_class = getattr(package, name, None)
            if isinstance(buffer_class, type) and api.matches(buffer_class):
                return api.name, buffer_class, package
    wanted = " or ".join(name for api in BUFFER_APIS[dispatcher] for name in api.classes)
    problem = f"the package {PACKAGE} here has no {wanted} with the arguments that {dispatcher} is called with"
    raise _missing(dispatcher, problem, advice)


def _missing(dispatcher: str, problem: str, advice: str) -> FindingsError:
    fix = {"knobs.dispatcher": "alltoall"}
    return FindingsError(
        [Finding(rule="dispatcher-available", at="knobs.dispatcher", problem=problem, fix=fix, advice=f"or {advice}")]
    )
