"""The models this project knows by name. Their families declare them; `threefold models` and the tests pick them up."""

from collections.abc import Iterator
from dataclasses import replace

from threefold.spec.families import FAMILIES
from threefold.spec.family import Family, Published
from threefold.spec.hf import read_config
from threefold.spec.model import ModelSpec


def _published(model: Published, family: Family) -> ModelSpec:
    kind = next(iter(family.types))
    whole = {"text_config": model.config} if family.composite_tied is not None else model.config
    spec = read_config({"model_type": kind, **whole}, family, model.name, model.source)
    return replace(
        spec,
        pattern=_repeated(spec.pattern),
        vocab_multiple=model.vocab_multiple,
        published_total=model.counts[0],
        published_active=model.counts[1],
        approximate=model.approximate,
    )


def _repeated(pattern: str) -> str:
    """The shortest pattern that gives this one when it is repeated."""
    lengths = (length for length in range(1, len(pattern) + 1) if len(pattern) % length == 0)
    return next(pattern[:n] for n in lengths if pattern[:n] * (len(pattern) // n) == pattern)


def _models() -> Iterator[ModelSpec]:
    for family in FAMILIES.values():
        yield from (_published(one, family) for one in family.models if isinstance(one, Published))
    for family in FAMILIES.values():
        yield from (one for one in family.models if isinstance(one, ModelSpec))


MODELS: dict[str, ModelSpec] = {model.name: model for model in _models()}
