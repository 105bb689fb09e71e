"""The data of a plan's job for the oracle: the microbatches of its steps and its evaluations, as a run has them.

`oracle.run_rank` reads it where it is asked to compare on the job's own data.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, dynamic_grid, length_multiple, open_loader
from threefold.engine.data.dynamic_cp import DynamicSteps
from threefold.engine.data.loader import Loader
from threefold.engine.data.validation import open_validation
from threefold.engine.dist.mesh import Mesh
from threefold.engine.train import evaluate_set, to_device
from threefold.layout.degrees import Layout
from threefold.plan.plan import Job, Plan


class JobData:
    """The data of one rank of a plan; with `same_rows`, the data of all ranks of that plan, for one rank alone."""

    def __init__(self, plan: Plan, mesh: Mesh, training: Loader, validation: dict[str, Loader], same_rows: Plan | None):
        self.plan, self.mesh, self.training, self.validation = plan, mesh, training, validation
        self.rows: DynamicSteps | None = None
        if same_rows is not None and same_rows.shards_dynamically:
            job, grid = same_rows.job, dynamic_grid(same_rows, Mesh(Layout()))
            self.rows = DynamicSteps(grid, training.mixture.sample, job.global_batch, job.seq_len)

    def batches(self, step: int) -> list[Batch]:
        """The microbatches of a step, on the device."""
        if self.rows is not None:
            made = list(self.rows.all_rows(step * self.plan.job.global_batch))
        else:
            made = [self.training.batch(step, m) for m in range(self.training.num_batches(step))]
        return [to_device(batch, self.mesh.device) for batch in made]

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """The loss of each validation set by name."""
        return {name: evaluate_set(self.plan, parts, loader) for name, loader in self.validation.items()}


@contextmanager
def open_job_data(plan: Plan, mesh: Mesh, same_rows: Plan | None = None) -> Iterator[JobData]:
    """Open the data of the job. Microbatches of dynamic length are padded as those of `same_rows` are."""
    multiple = length_multiple((same_rows or plan).layout)

    def open_set(job: Job, evaluation: bool = True) -> Loader:
        return open_loader(plan, mesh, job, evaluation, multiple)

    training, validation = open_set(plan.job, evaluation=False), {}
    try:
        if plan.run.eval_every:
            validation = open_validation(plan.job, training, open_set)
        yield JobData(plan, mesh, training, validation, same_rows)
    finally:
        for loader in (training, *validation.values()):
            loader.close()
