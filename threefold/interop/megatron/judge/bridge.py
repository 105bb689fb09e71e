"""Runs an exported `train.py` up to the place where Megatron Bridge would touch a GPU.

Stages, in the order of Bridge's own `pretrain`:

recipe        train.py itself: imports, recipe function, overrides, dispatcher
config        runtime_config_update: mixed precision, overlap of communication, ConfigContainer.validate
microbatches  init_num_microbatches_calculator
groups        _initialize_distributed, on a process group of the right size that only counts
model         the constructors of the rank's first or last chunk, over stand-ins for TE's modules
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from threefold.interop.megatron.judge.machine import join_counting_group
from threefold.interop.megatron.judge.values import bridge_values
from threefold.interop.megatron.judge.verdict import NotJudgedError


class CapturedError(Exception):
    """Raised at the first line of Bridge's `pretrain` and `finetune`: the configuration is complete."""


class BridgeExport:
    """One export for Megatron Bridge, as one rank sees it. `job` is the head of `validate.py`."""

    stages = ("recipe", "config", "microbatches", "groups", "model")

    def __init__(self, job: dict[str, Any], folder: str, rank: int) -> None:
        self.job, self.folder, self.rank, self.gpus = job, folder, rank, job["gpus"]
        self.script = str(Path(folder) / "train.py")
        self.cfg: Any = None
        self.layers: list[list[int]] | None = None

    @staticmethod
    def load() -> None:
        """Import what every export needs, so that processes forked from this one need not."""
        for name in ("pretrain", "finetune", "initialize", "utils.omegaconf_utils"):
            importlib.import_module(f"megatron.bridge.training.{name}")
        with contextlib.suppress(ImportError):  # of a package that recipes of another model need
            importlib.import_module("megatron.bridge.recipes")

    def recipe(self) -> None:
        self._stop_before_training()
        self._read_models_from_the_job()
        saved, sys.argv = sys.argv, [self.script]
        try:
            runpy.run_path(self.script, run_name="__main__")
        except CapturedError:
            return
        finally:
            sys.argv = saved
        raise NotJudgedError("train.py came to its end without a call of pretrain or finetune")

    def _stop_before_training(self) -> None:
        def capture(config: Any = None, *args: Any, **kwargs: Any) -> None:
            self.cfg = config
            raise CapturedError

        for name in ("pretrain", "finetune"):
            setattr(importlib.import_module(f"megatron.bridge.training.{name}"), name, capture)

    def _read_models_from_the_job(self) -> None:
        """Recipes read config.json from the Hub, which may be out of reach: they get the job's instead."""
        from megatron.bridge import AutoBridge

        home = Path(tempfile.mkdtemp(prefix="models-"))
        configs = self.job["configs"]
        for name, config in configs.items():
            (home / name.replace("/", "--")).mkdir()
            (home / name.replace("/", "--") / "config.json").write_text(json.dumps(config))
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
        own = str(home / next(iter(configs)).replace("/", "--"))
        os.environ.setdefault("HF_MODEL", own)
        from_hub = AutoBridge.from_hf_pretrained.__func__

        def from_job(cls: Any, path: Any, **kwargs: Any) -> Any:
            if not Path(str(path)).is_dir():
                path = str(home / str(path).replace("/", "--")) if str(path) in configs else own
            bridge = from_hub(cls, path, **kwargs)
            _keep_keys(getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained), Path(path) / "config.json")
            return bridge

        AutoBridge.from_hf_pretrained = classmethod(from_job)  # type: ignore[arg-type]

    def config(self) -> None:
        from megatron.bridge.training.config import runtime_config_update

        runtime_config_update(self.cfg)

    def microbatches(self) -> None:
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

        train = self.cfg.train
        init_num_microbatches_calculator(
            self.rank,
            train.rampup_batch_size,
            train.global_batch_size,
            train.micro_batch_size,
            self.cfg.data_parallel_size,
            train.decrease_batch_size_if_needed,
        )

    def groups(self) -> None:
        from megatron.bridge.training import initialize

        join_counting_group(self.gpus, self.rank)
        model = self.cfg.model
        initialize._initialize_distributed(
            model_config=getattr(model, "transformer", model),
            dist_config=self.cfg.dist,
            num_distributed_optimizer_instances=self.cfg.ddp.num_distributed_optimizer_instances,
            get_embedding_ranks=None,
            get_position_embedding_ranks=None,
        )

    def model(self) -> None:
        """The first chunk of the first stage, the last chunk of the last: where embedding, loss and MTP are."""
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = self.cfg.model
        model.perform_initialization = False
        model.init_model_with_meta_device = True
        if model.vocab_size is None:  # Bridge takes it from the tokenizer, which may be out of reach
            model.vocab_size = self.job["expected"]["model.vocab"]
        stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
        self.layers = chunk_layers(model)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        with contextlib.suppress(AttributeError):  # releases before 0.4 ask parallel_state
            model._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        is_last = stage == stages - 1 and self.rank > 0
        chunk = None if not chunks else chunks - 1 if is_last else 0
        pre, post = (stage == 0 and not chunk), (is_last or (stages == 1 and not chunks))
        if chunks and stages > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        self.built = model.provide(pre_process=pre, post_process=post, vp_stage=chunk)

    def values(self) -> dict[str, Any]:
        return bridge_values(self.cfg, self.layers)


def _keep_keys(config: Any, file: Path) -> None:
    """Keys that this transformers took from config.json under other names, for releases that knew an older one."""
    for key, value in json.loads(file.read_text()).items():
        if not hasattr(config, key):
            setattr(config, key, value)


def chunk_layers(model: Any) -> list[list[int]]:
    """Decoder layers of every chunk, by stage then chunk, as Megatron counts them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if model.pipeline_model_parallel_layout is not None:  # by stage, then chunk, then the kind of each layer
        stages = model.pipeline_model_parallel_layout.layout
        return [[sum(kind.name == "decoder" for kind in chunk) for chunk in stage] for stage in stages]
    chunks = range(model.virtual_pipeline_model_parallel_size or 1)
    has_chunks = model.virtual_pipeline_model_parallel_size is not None
    return [
        [get_num_layers_to_build(model, chunk if has_chunks else None, stage) for chunk in chunks]
        for stage in range(model.pipeline_model_parallel_size)
    ]
