"""Wrappers, optimizer and schedule of an export, after its validation: run by Megatron's interpreter.

    python wrap.py FOLDER WHEELS

For rank 0, on the meta device: Megatron's DDP around the first chunk, the optimizer that Bridge makes for it,
and the schedule up to its first forward step. Prints a line of JSON: for each stage "passed" or the error.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


class ReachedError(Exception):
    """Raised in place of the first forward step: the schedule's own assertions have passed."""


def main() -> None:
    folder, wheels = sys.argv[1:]
    judge = runpy.run_path(f"{folder}/validate.py", run_name="validate")
    job = judge["JOB"]
    judge["import_megatron"](job, wheels)
    export = judge["BridgeExport"](job, folder, 0)
    os.environ.update(judge["exported_variables"](Path(folder) / "environment.sh"))
    found: dict[str, str] = {}
    device = judge["Device"](**job["device"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), judge["simulated_machine"](device, job["gpus_per_node"], job["gpus"], 0):
        for stage in export.stages:
            getattr(export, stage)()
        for stage in (wrap, optimize, schedule):
            try:
                stage(export)
                found[stage.__name__] = "passed"
            except ReachedError:
                found[stage.__name__] = "passed"
            except Exception as error:
                verdict = judge["verdict_of"](error, stage.__name__, export.script)
                found[stage.__name__] = verdict.line()
                break
    print(json.dumps(found))


def wrap(export: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    export.wrapped = DistributedDataParallel(export.cfg.model, export.cfg.ddp, export.built)


def optimize(export: Any) -> None:
    """The optimizer asks each parameter whether it is on a GPU; it is told so of those on the meta device."""
    import torch
    from megatron.bridge.training.optim import setup_optimizer

    type_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: (
        type_of(self, *args) if args else type_of(self).replace("torch.meta.", "torch.cuda.")
    )
    cfg = export.cfg
    scheduler = cfg.scheduler
    setup_optimizer(cfg.optimizer, scheduler, [export.wrapped], pg_collection=cfg.model._pg_collection)


def schedule(export: Any) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(*args: Any, **kwargs: Any) -> None:
        raise ReachedError

    cfg, chunks = export.cfg, export.cfg.model.virtual_pipeline_model_parallel_size or 1
    models = [export.wrapped] * chunks
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(())] * chunks if chunks > 1 else iter(()),
        model=models if chunks > 1 else models[0],
        num_microbatches=get_num_microbatches(),
        seq_length=cfg.model.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        forward_only=False,
    )


if __name__ == "__main__":
    main()
