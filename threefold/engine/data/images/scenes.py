"""Draws scenes: shapes of different kinds and colors on a textured background, with captions and questions about them.

A scene follows from its seed and number alone. Every kind and every color of shape occurs at most once, and each shape
stands in another quarter of the image, so that each question has one answer.

The data of `job.data = "scenes"` are tar shards of them in the cache folder, made at first use and then read like any
other image data. `scenes` and `scenes-held-out` have images of different seeds, so that none is in both. A record is a
conversation about one image, or its caption:

    000017.jpg   000017.json   {"messages": [...], "kinds": ["colour", "count"]}
"""

import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.engine.data.cache_files import cache_folder, locked, replaced
from threefold.engine.data.images.decode import require_pillow

if TYPE_CHECKING:
    from PIL import Image

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 40),
    "purple": (140, 50, 170),
    "orange": (245, 130, 30),
}
KINDS = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
COUNT_SHARES = (0.4, 0.3, 0.2, 0.1)  # scenes with one, two, three and four shapes
SIDES = (56, 176)  # pixels; the smallest and largest side
MAX_ASPECT = 2.0
SUPERSAMPLING = 3  # shapes are drawn larger and reduced, so that their edges are smooth


class Question(NamedTuple):
    kind: str  # count, colour, position or kind
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape, with its center and radius relative to the sides of the image."""

    kind: str
    colour: str
    place: str
    center: tuple[float, float]  # x, y from 0 to 1
    radius: float  # of the shorter side

    def questions(self) -> list[Question]:
        return [
            Question("colour", f"What colour is {self.place}?", self.colour),
            Question("position", f"Where is {self.colour}?", self.place),
            Question("kind", f"Which shape is {self.colour}?", self.kind),
        ]


@dataclass(frozen=True, slots=True)
class Scene:
    """The shapes in an image."""

    width: int
    height: int
    shapes: tuple[Shape, ...]
    background: tuple[int, int, int]
    file_format: str  # JPEG or PNG

    def caption(self) -> str:
        """All shapes in the order of reading."""
        in_order = sorted(self.shapes, key=lambda shape: PLACES.index(shape.place))
        return ", ".join(f"{shape.place} a {shape.colour} {shape.kind}" for shape in in_order)

    def questions(self) -> list[Question]:
        """All that can be asked."""
        about_shapes = (shape.questions() for shape in self.shapes)
        return [self.count_question(), *(question for questions in about_shapes for question in questions)]

    def count_question(self) -> Question:
        return Question("count", "How many shapes?", str(len(self.shapes)))


def invent_scene(rng: np.random.Generator) -> Scene:
    """A random scene."""
    aspect = float(np.exp(rng.uniform(-np.log(MAX_ASPECT), np.log(MAX_ASPECT))))
    side = float(np.exp(rng.uniform(*np.log(SIDES))))
    width, height = (int(np.clip(side * factor, *SIDES)) for factor in (aspect**0.5, aspect**-0.5))
    count = 1 + int(np.searchsorted(np.cumsum(COUNT_SHARES), rng.random()))
    kinds, places, colours = (rng.permutation(n)[:count].tolist() for n in (len(KINDS), len(PLACES), len(COLOURS)))
    shapes = []
    for kind, place, colour in zip(kinds, places, colours, strict=True):
        x, y = (0.25 + 0.5 * half + rng.uniform(-0.04, 0.04) for half in (place % 2, place // 2))
        radius = float(rng.uniform(0.15, 0.21))
        shapes.append(Shape(KINDS[kind], tuple(COLOURS)[colour], PLACES[place], (x, y), radius))
    level = rng.integers(120, 236)  # a nearly gray background, so that no shape is lost in it
    background = tuple(int(value) for value in np.clip(level + rng.integers(-14, 15, 3), 0, 255))
    return Scene(
        width,
        height,
        tuple(shapes),
        (background[0], background[1], background[2]),
        "JPEG" if rng.random() < 0.5 else "PNG",
    )


def draw_scene(scene: Scene, rng: np.random.Generator) -> bytes:
    """The encoded image of a scene."""
    from PIL import Image

    image = Image.fromarray(_texture(scene, rng))
    jitter = rng.integers(-12, 13, (len(scene.shapes), 3))
    for shape, shift in zip(scene.shapes, jitter, strict=True):
        radius = shape.radius * min(scene.width, scene.height)
        left, top = (int(c * side - radius) for c, side in zip(shape.center, (scene.width, scene.height), strict=True))
        colour = np.clip(np.array(COLOURS[shape.colour]) + shift, 0, 255)
        image.paste(tuple(colour.tolist()), (left, top), _shape_mask(shape.kind, radius))
    return _encode(image, scene.file_format, rng)


def _texture(scene: Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A background that gets lighter or darker across the image, with patches of light noise."""
    from PIL import Image

    cells = rng.normal(0, 6, (8, 8, 1)) + np.linspace(-18, 18, 8)[:, None, None] * rng.uniform(-1, 1)
    coarse = np.clip(np.array(scene.background) + cells, 0, 255).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((scene.width, scene.height), Image.Resampling.BILINEAR)
    return np.asarray(smooth, np.uint8)


def _shape_mask(kind: str, radius: float) -> "Image.Image":
    """The part of the square around a shape that it covers."""
    from PIL import Image, ImageDraw

    side = (2 * int(radius) + 1) * SUPERSAMPLING
    mask = Image.new("L", (side, side), 0)
    draw, end, third = ImageDraw.Draw(mask), side - 1, side // 3
    if kind == "circle":
        draw.ellipse((0, 0, end, end), fill=255)
    elif kind == "square":
        draw.rectangle((0, 0, end, end), fill=255)
    elif kind == "triangle":
        draw.polygon(((end / 2, 0), (end, end), (0, end)), fill=255)
    else:
        draw.rectangle((0, third, end, end - third), fill=255)
        draw.rectangle((third, 0, end - third, end), fill=255)
    return mask.reduce(SUPERSAMPLING)


def _encode(image: "Image.Image", file_format: str, rng: np.random.Generator) -> bytes:
    out = io.BytesIO()
    if file_format == "JPEG":
        image.save(out, "JPEG", quality=int(rng.integers(80, 96)))
    else:
        image.save(out, "PNG", compress_level=1)
    return out.getvalue()


RECIPE = 5  # version of the drawing and of the questions; part of the file names
NUM_SCENES = {"scenes": 6144, "scenes-held-out": 512}
SEEDS = {"scenes": 1, "scenes-held-out": 2}
SHARD_SCENES = 2048
MAX_QUESTIONS = 3  # so that a conversation with the largest image fits into 256 tokens
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
    """Scene `number` of a seed: what is in it, its encoded image, and its record."""
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    scene = invent_scene(rng)
    image = draw_scene(scene, rng)
    if rng.random() < CAPTION_SHARE:
        return scene, image, {"caption": scene.caption(), "kinds": ["caption"]}
    return scene, image, _conversation(scene, rng)


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
    """Write a tar shard of scenes with their encoded images and records; keys are numbered from `first` on."""
    with replaced(path) as aside, tarfile.open(aside, "w", format=tarfile.USTAR_FORMAT) as shard:
        for number, (scene, image, record) in enumerate(records, first):
            suffix = "jpg" if scene.file_format == "JPEG" else "png"
            for name, data in (
                (f"{number:06d}.{suffix}", image),
                (f"{number:06d}.json", json.dumps(record).encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
