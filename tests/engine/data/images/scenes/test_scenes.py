"""Drawn scenes: what is drawn is what is asked about, sets differ, and several processes make them once."""

import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from threefold.engine.data.images import scenes as scenes_module
from threefold.engine.data.images.scenes import COLOURS, COUNT_SHARES, KINDS, PLACES, make_scene, scene_shards
from threefold.engine.data.loader import Loader
from threefold.plan.parse import parse
from threefold.plan.plan import Job
from threefold.spec.models import MODELS

TINY = MODELS["tiny-qwen3-vl-moe"]


def test_shapes_have_the_colours_and_places_that_are_asked_for() -> None:
    """Found in the pixels again: where a quarter has colour at all, it is that of its shape."""
    for number in range(60):
        scene, picture, _ = make_scene(5, number)
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
        height, width, _ = pixels.shape
        assert (height, width) == (scene.height, scene.width)
        found = {}
        for number_of_place, place in enumerate(PLACES):
            top, left = divmod(number_of_place, 2)
            quarter = pixels[top * height // 2 :, left * width // 2 :][: height // 2, : width // 2].reshape(-1, 3)
            coloured = quarter[np.ptp(quarter, axis=1) > 80]  # backgrounds are nearly grey
            if len(coloured) > 0.02 * len(quarter):
                middle = np.median(coloured, axis=0)
                found[place] = min(COLOURS, key=lambda name, m=middle: float(np.abs(m - COLOURS[name]).sum()))
        assert found == {shape.place: shape.colour for shape in scene.shapes}


def test_every_question_has_one_answer() -> None:
    counts = Counter[int]()
    for number in range(400):
        scene, picture, record = make_scene(7, number)
        counts[len(scene.shapes)] += 1
        kinds = [shape.kind for shape in scene.shapes]
        assert len(set(kinds)) == len(kinds)
        assert set(kinds) <= set(KINDS)
        assert len({shape.place for shape in scene.shapes}) == len(kinds)
        answers = {question: answer for _, question, answer in scene.questions()}
        assert len(answers) == 1 + 3 * len(kinds)
        assert answers["How many shapes?"] == str(len(kinds))
        if "messages" in record:
            texts = [
                m["content"] if isinstance(m["content"], str) else m["content"][1]["text"] for m in record["messages"]
            ]
            assert all(answers[question] == answer for question, answer in zip(texts[::2], texts[1::2], strict=True))
            asked_of_each = [sum(one.text in texts for one in shape.questions()) for shape in scene.shapes]
            assert max(asked_of_each) == 1  # a second question about a shape could be answered from the first one
        else:
            assert record["caption"].count(",") + 1 == len(kinds)
        assert Image.open(io.BytesIO(picture)).format == scene.file_format
    for count, share in enumerate(COUNT_SHARES, 1):
        assert abs(counts[count] / 400 - share) < 0.08  # three deviations of 400 draws


def test_sets_differ_and_are_always_the_same() -> None:
    seeds = scenes_module.SEEDS.values()
    pictures = [{make_scene(seed, number)[1] for number in range(40)} for seed in seeds]
    assert not pictures[0] & pictures[1]
    assert make_scene(1, 3)[1:] == make_scene(1, 3)[1:]


_MAKE = """
import sys
from threefold.engine.data.images.scenes import scene_shards
print(scene_shards("scenes-held-out", sys.argv[1], 24)[0].stat().st_mtime_ns)
"""


def test_processes_make_the_shards_once(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _MAKE, str(tmp_path)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    times = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(times) == 1  # both found the same file
    assert not list(tmp_path.glob(".*.partial"))
    [path] = scene_shards("scenes-held-out", tmp_path, 24)
    assert {f"{path.stat().st_mtime_ns}\n"} == times
    with tarfile.open(path) as shard:
        names = shard.getnames()
        record = json.load(shard.extractfile("000007.json"))  # type: ignore[arg-type]
    assert len(names) == 48
    assert record == make_scene(scenes_module.SEEDS["scenes-held-out"], 7)[2]


def test_scenes_are_read_like_any_picture_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenes_module.NUM_SCENES, "scenes", 64)
    job = Job(data="scenes", seq_len=256, global_batch=4, micro_batch=2, task="sft", packing=True)
    loader = Loader(job, TINY.vocab, cache=tmp_path, prefetch=0, vision=TINY.vision)
    batch = loader.batch(0)
    assert batch.images is not None
    assert loader.skipped_images().num_records == 0
    grids = {tuple(grid) for step in range(8) for grid in loader.batch(step).images.grids_I2.tolist()}  # type: ignore[union-attr]
    assert len(grids) > 8  # many sizes and aspects
    assert batch.tokens_BS.max() < TINY.vocab


def test_scenes_count_as_images() -> None:
    def plan_with(data: str) -> bool:
        plan = parse({"model": "tiny-qwen3-vl-moe", "cluster.chip": "cpu", "job.data": data}).plan
        assert plan is not None
        return plan.is_image_free

    assert (plan_with("scenes"), plan_with("embedded"), plan_with("synthetic")) == (False, True, True)
