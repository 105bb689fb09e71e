"""The data of `job.data = "scenes"`: drawn pictures with captions and questions, as tar shards in the cache folder.

They are made at first use and then read like any other picture data. `scenes` and `scenes-held-out` have pictures of
different seeds, so that none is in both. A record is a conversation about one picture, or its caption:

    000017.jpg   000017.json   {"messages": [...], "kinds": ["colour", "count"]}
"""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from threefold.engine.data.cache_folder import cache_folder
from threefold.engine.data.images.cache_files import locked, replaced
from threefold.engine.data.images.decode import require_pillow
from threefold.engine.data.images.scenes.draw_scene import Scene, draw_scene, invent_scene

RECIPE = 5  # version of the drawing and of the questions; part of the file names
NUM_SCENES = {"scenes": 6144, "scenes-held-out": 512}
SEEDS = {"scenes": 1, "scenes-held-out": 2}
SHARD_SCENES = 2048
MAX_QUESTIONS = 3  # so that a conversation with the largest picture fits into 256 tokens
COUNT_SHARE = 0.3  # of the conversations ask how many shapes there are
CAPTION_SHARE = 0.2  # of the records


def scene_shards(name: str, cache: str | Path | None = None, num_scenes: int | None = None) -> list[Path]:
    """The tar shards of the named set. They are made if they are missing; other processes wait meanwhile."""
    require_pillow()
    count = NUM_SCENES[name] if num_scenes is None else num_scenes
    folder = cache_folder(cache)
    starts = range(0, count, SHARD_SCENES)
    paths = [folder / f"{name}-{RECIPE}-{count}-{number}.tar" for number in range(len(starts))]
    if not all(path.is_file() for path in paths):
        with locked(folder / f"{name}-{RECIPE}-{count}"):
            for path, start in zip(paths, starts, strict=True):
                if not path.is_file():
                    numbers = range(start, min(start + SHARD_SCENES, count))
                    write_records(path, (make_scene(SEEDS[name], number) for number in numbers), start)
    return paths


def make_scene(seed: int, number: int) -> tuple[Scene, bytes, dict[str, Any]]:
    """Scene `number` of a seed: what is in it, its encoded picture, and its record."""
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    scene = invent_scene(rng)
    picture = draw_scene(scene, rng)
    if rng.random() < CAPTION_SHARE:
        return scene, picture, {"caption": scene.caption(), "kinds": ["caption"]}
    return scene, picture, _conversation(scene, rng)


def _conversation(scene: Scene, rng: np.random.Generator) -> dict[str, Any]:
    """One question about each shape, and at times how many there are, so that no question answers another one."""
    asked = [shape.questions()[rng.integers(3)] for shape in scene.shapes]
    if rng.random() < COUNT_SHARE:
        asked.append(scene.count_question())
    chosen = [asked[number] for number in rng.permutation(len(asked))[:MAX_QUESTIONS]]
    messages: list[dict[str, Any]] = []
    for number, question in enumerate(chosen):
        text = {"type": "text", "text": question.text}
        messages.append({"role": "user", "content": [{"type": "image"}, text] if number == 0 else question.text})
        messages.append({"role": "assistant", "content": question.answer})
    return {"messages": messages, "kinds": [question.kind for question in chosen]}


def write_records(path: Path, records: Iterable[tuple[Scene, bytes, dict[str, Any]]], first: int = 0) -> None:
    """Write a tar shard of scenes with their encoded pictures and records; keys are numbered from `first` on."""
    with replaced(path) as aside, tarfile.open(aside, "w", format=tarfile.USTAR_FORMAT) as shard:
        for number, (scene, picture, record) in enumerate(records, first):
            suffix = "jpg" if scene.file_format == "JPEG" else "png"
            for name, data in (
                (f"{number:06d}.{suffix}", picture),
                (f"{number:06d}.json", json.dumps(record).encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
