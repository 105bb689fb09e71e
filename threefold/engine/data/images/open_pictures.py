"""Opens the entries of `job.data` that have pictures: scenes, tar shards, folders of them, and JSONL with image files.

`open_sources.py` calls it. The data of a vision-language model that is JSONL is always read here, also where a line has
no picture.
"""

from pathlib import Path

from threefold.engine.data.images.patches import patch_rules
from threefold.engine.data.images.picture_index import open_picture_index
from threefold.engine.data.images.picture_source import PictureSource
from threefold.engine.data.images.scenes.scene_shards import scene_shards
from threefold.engine.data.text.tokenizer import Tokenizer
from threefold.findings import Finding, FindingsError
from threefold.plan.data_entries import SCENES
from threefold.plan.plan import Job
from threefold.spec.model import VisionSpec

SUFFIX = ".tar"


def holds_pictures(name: str, vision: VisionSpec | None) -> bool:
    """Whether this entry is read as picture data."""
    if name in SCENES or name.endswith(SUFFIX):
        return True
    path = Path(name)
    if path.is_dir():
        return next(path.glob(f"*{SUFFIX}"), None) is not None
    return vision is not None and name.endswith(".jsonl")


def open_pictures(
    name: str, job: Job, vision: VisionSpec | None, tokenizer: Tokenizer, cache: str | Path | None
) -> PictureSource:
    """The source of one entry."""
    if vision is None:
        problem, advice = f"{name} has pictures, and the model has no vision part", "train a vision-language model"
        raise FindingsError([Finding(rule="data-fits-model", at="job.data", problem=problem, advice=advice)])
    path = Path(name)
    if name in SCENES:
        paths = scene_shards(name, cache)
    else:
        paths = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    rules, within = patch_rules(vision, job.max_pixels), path if path.is_dir() else None
    index = open_picture_index(name, paths, tokenizer, vision.tokens, rules, cache, within)
    return PictureSource(index, job.seq_len, job.packing, sft=job.task == "sft")
