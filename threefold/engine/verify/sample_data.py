"""Data for the oracle: the microbatches of a plan's job as a run has them, and made-up images in synthetic samples.

`oracle.run_rank` reads `JobData` where it is asked to compare on the job's own data, and `oracle.synthetic_batch` calls
`add_images` for vision-language models. Samples have two images, none or one by turns, of several sizes and aspects,
so that some ranks and microbatches have none. An image lies in one document; its patches are random numbers.

Shapes: S sequence, B batch, P patches, C values of a patch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from threefold.engine.batch import Batch, Images
from threefold.engine.build import Parts, dynamic_grid, length_multiple, open_loader
from threefold.engine.data.dynamic_cp import DynamicSteps
from threefold.engine.data.loader import Loader
from threefold.engine.data.validation import open_validation
from threefold.engine.dist.mesh import Mesh
from threefold.engine.step import evaluate_set, to_device
from threefold.engine.vision import CHANNELS, multimodal_positions
from threefold.layout.degrees import Layout
from threefold.plan.plan import Job, Plan
from threefold.spec.model import VisionSpec


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


_SIZES = ((2, 2), (1, 3), (2, 1), (1, 1))  # of images, in merged patches


@dataclass(frozen=True)
class ImageSample:
    """One sample: its tokens and documents with room for images, and the images."""

    tokens_S: Tensor
    documents_S: Tensor
    grids: list[tuple[int, int]]  # in patches
    patches_PC: Tensor
    positions_3S: Tensor


def make_image_sample(
    vision: VisionSpec, tokens_S: Tensor, documents_S: Tensor, number: int, is_packed: bool
) -> ImageSample:
    """Sample `number` with as many images as are its turn and fit. Without packing a sample is one document."""
    draw = torch.Generator().manual_seed(5000 + number)
    tokens_S, documents_S = tokens_S.clone(), documents_S.clone()
    # Text that happens to be the id of an image would be one.
    tokens_S[torch.isin(tokens_S, torch.tensor([vision.tokens.image, vision.tokens.video]))] = vision.tokens.start
    grids, at = [], 1 + number % 2
    for turn in range((2, 0, 1)[number % 3]):
        rows, columns = _SIZES[(number + turn) % len(_SIZES)]
        end = at + rows * columns
        if end > len(tokens_S):
            break
        tokens_S[at:end] = vision.tokens.video if (number + turn) % 4 == 1 else vision.tokens.image
        documents_S[at:end] = documents_S[at]
        grids.append((rows * vision.merge, columns * vision.merge))
        at = end + 2
    documents_S = documents_S.cummax(dim=0).values
    width = CHANNELS * vision.temporal_patch * vision.patch**2
    patches_PC = torch.randn(sum(h * w for h, w in grids), width, generator=draw)
    lengths = documents_S.unique_consecutive(return_counts=True)[1].tolist() if is_packed else [len(tokens_S)]
    positions_3S = _positions(vision, tokens_S, grids, lengths)
    return ImageSample(tokens_S, documents_S, grids, patches_PC, positions_3S)


def _positions(
    vision: VisionSpec, tokens_S: Tensor, grids: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> Tensor:
    """Positions that start again with each document."""
    ids, rest, parts = (vision.tokens.image, vision.tokens.video), list(grids), []
    for document_S in tokens_S.split(list(lengths)):
        tokens_left, here = int(torch.isin(document_S, torch.tensor(ids)).sum()), []
        while tokens_left > 0:
            here.append(rest.pop(0))
            tokens_left -= here[-1][0] * here[-1][1] // vision.merge**2
        parts.append(multimodal_positions(document_S, here, ids, vision.merge))
    return torch.cat(parts, dim=1)


def add_images(vision: VisionSpec, batch: Batch, first: int) -> Batch:
    """The batch with images in its samples, the first of which has the number `first`."""
    packed = batch.documents_BS is not None
    documents_BS = torch.zeros_like(batch.tokens_BS) if batch.documents_BS is None else batch.documents_BS
    rows = [
        make_image_sample(vision, tokens_S, documents_S, first + n, packed)
        for n, (tokens_S, documents_S) in enumerate(zip(batch.tokens_BS, documents_BS, strict=True))
    ]
    tokens_BS = torch.stack([row.tokens_S for row in rows])
    grids = [grid for row in rows for grid in row.grids]
    is_image = torch.isin(tokens_BS.flatten(), torch.tensor([vision.tokens.image, vision.tokens.video]))
    patches_PC = torch.cat([row.patches_PC for row in rows])
    images = Images(patches_PC, torch.tensor(grids), is_image.nonzero().flatten()) if grids else None
    return replace(
        batch,
        tokens_BS=tokens_BS,
        documents_BS=torch.stack([row.documents_S for row in rows]) if packed else None,
        images=images,
        positions_3BS=torch.stack([row.positions_3S for row in rows], dim=1),
    )
