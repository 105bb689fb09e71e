"""Memory terms and module timers know modules by their paths; the models have modules with these paths."""

from tiny_models import FAMILIES, spec_of

from threefold.dryrun.measured.timers import _TIMED_MODULES
from threefold.dryrun.tracking.memory_terms import _TERM_OF_PATH
from threefold.engine.models.build import build_model
from threefold.spec.models import MODELS


def test_every_path_is_that_of_a_module() -> None:
    specs = [*(spec_of(family) for family in FAMILIES), MODELS["tiny-qwen3-vl-moe"]]
    models = [build_model(spec, device="meta") for spec in specs]
    paths = {f".{path}" for model in models for path, _ in model.named_modules()}
    paths |= {".ffn.copies"}  # of layers whose plan copies experts (shard/expert_parallel.py)
    assert [part for part, _ in _TERM_OF_PATH if not any(part in path for path in paths)] == []
    assert set(_TIMED_MODULES) <= {path.rpartition(".")[2] for path in paths}
