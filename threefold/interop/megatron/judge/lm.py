"""Runs the argument line of an export through Megatron-LM's own parser and validation.

arguments  the parser of Megatron-LM
validate   validate_args, and the transformer's configuration made from the arguments
groups     initialize_model_parallel, on a process group of the right size that only counts
model      the constructors of the rank's first or last chunk, where the release has a builder of GPT models
"""

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

from threefold.interop.megatron.judge.bridge import chunk_layers
from threefold.interop.megatron.judge.machine import join_counting_group
from threefold.interop.megatron.judge.values import model_values


class LmExport:
    """One export for Megatron-LM, as one rank sees it."""

    stages = ("arguments", "validate", "groups", "model")

    def __init__(self, job: dict[str, Any], folder: str, rank: int) -> None:
        self.job, self.rank, self.gpus = job, rank, job["gpus"]
        self.script = str(Path(folder) / "arguments.sh")
        self.layers: list[list[int]] | None = None

    @staticmethod
    def load() -> None:
        importlib.import_module("megatron.training.arguments")
        importlib.import_module("megatron.training.initialize")

    def arguments(self) -> None:
        from megatron.training.arguments import parse_args

        words = shlex.split(Path(self.script).read_text().replace("\\\n", " "))  # lines that a backslash joins
        saved, sys.argv = sys.argv, words[words.index("pretrain_gpt.py") :]
        try:
            self.args = parse_args()
        finally:
            sys.argv = saved

    def validate(self) -> None:
        from megatron.training.arguments import core_transformer_config_from_args, validate_args

        validate_args(self.args)
        self.cfg = core_transformer_config_from_args(self.args)
        self.cfg.finalize() if hasattr(self.cfg, "finalize") else None

    def groups(self) -> None:
        from megatron.training.global_vars import set_args
        from megatron.training.initialize import _initialize_distributed

        join_counting_group(self.gpus, self.rank)
        set_args(self.args)
        _initialize_distributed(None, None, None)

    def model(self) -> None:
        self.layers = chunk_layers(self.cfg)

    def values(self) -> dict[str, Any]:
        return model_values(self.cfg)
