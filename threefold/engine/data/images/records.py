"""Records of images and text: a line of JSONL, or the members of a tar shard with one key, as turns of parts.

A record is one of

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "A cat."}]}
    {"images": ["cat.jpg"], "question": "What is it?", "answer": "A cat."}
    {"images": ["cat.jpg"], "caption": "A cat."}          or "text"
    {"video": {"frames": ["0.jpg", "1.jpg"], "timestamps": [0.0, 0.5]}, "question": ..., "answer": ...}

In text, `<image>` and `<video>` stand for the next image of `images` or `videos`; where text has neither, images
come before it. `record_files.py` and `record_files.py` make `RawRecord`s; `encode_record.py` encodes their turns.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from threefold.engine.data.images.decode import ImageFile

ROLES = ("system", "user", "assistant", "tool")
TEXT_FIELDS = ("caption", "text")
MAX_FRAMES = 768  # transformers, models/qwen3_vl: frames of a video
_PLACEHOLDER = re.compile(r"(<image>|<video>)")


class RecordError(ValueError):
    """A record that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One image of a turn."""

    file: ImageFile


@dataclass(frozen=True, slots=True)
class VideoPart:
    """The frames of a video, in order, with the second at which each is seen."""

    files: tuple[ImageFile, ...]
    timestamps: tuple[float, ...]


Part = str | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation, or with the role None a whole document without turns."""

    role: str | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it was read."""

    at: str  # the file, with the line or key
    fields: Mapping[str, Any]
    find_file: Callable[[str], ImageFile]  # raises RecordError for a name that leads nowhere
    names: Sequence[str] = ()  # the images of a record that names none


def parse_turns(record: RawRecord) -> list[Turn]:
    """The turns of a record with their images; raises RecordError."""
    fields = record.fields
    queue = _ImageQueue(record)
    if "messages" in fields:
        turns = _parse_messages(fields["messages"], queue)
    elif isinstance(fields.get("question"), str) and isinstance(fields.get("answer"), str):
        question = _split_text(fields["question"], queue)
        turns = [Turn("user", (*queue.take_all(), *question)), Turn("assistant", (fields["answer"],))]
    else:
        name = next((name for name in TEXT_FIELDS if isinstance(fields.get(name), str)), None)
        if name is None:
            raise RecordError("it has no messages, no question with an answer, no caption and no text")
        text = _split_text(fields[name], queue)
        turns = [Turn(None, (*queue.take_all(), *text))]
    return turns


def _parse_messages(messages: Any, queue: "_ImageQueue") -> list[Turn]:
    if not isinstance(messages, list) or not messages:
        raise RecordError("messages is no list of turns")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RecordError(f"a turn has a role of {', '.join(ROLES)}")
        turns.append(Turn(str(message["role"]), tuple(_parse_content(message.get("content"), queue))))
    if not any(turn.role == "assistant" for turn in turns):
        raise RecordError("no turn of the assistant: nothing to learn")
    if left := queue.take_all():
        first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None or queue.num_taken_by_text:
            raise RecordError(f"{len(left)} images more than places for them")
        turns[first] = Turn("user", (*left, *turns[first].parts))
    return turns


def _parse_content(content: Any, queue: "_ImageQueue") -> list[Part]:
    if isinstance(content, str):
        return _split_text(content, queue)
    if not isinstance(content, list):
        raise RecordError(f"the content of a turn is text or a list of parts, not {type(content).__name__}")
    parts: list[Part] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind == "image":
            named = part.get("image", part.get("path"))
            parts.append(queue.next_image() if named is None else queue.image(named))
        elif kind == "video":
            named = part.get("video", part if "frames" in part else None)
            parts.append(queue.next_video() if named is None else queue.video(named))
        else:
            raise RecordError("a part of a turn is a text, an image or a video")
    return parts


def _split_text(text: str, queue: "_ImageQueue") -> list[Part]:
    """The text with images in place of `<image>` and `<video>`, where the record has images at all."""
    if not queue.has_any:
        return [text] if text else []
    parts: list[Part] = []
    for piece in _PLACEHOLDER.split(text):
        if piece == "<image>":
            parts.append(queue.next_image())
        elif piece == "<video>":
            parts.append(queue.next_video())
        elif piece:
            parts.append(piece)
    return parts


class _ImageQueue:
    """The images and videos that a record lists next to its text, which are taken one after another."""

    def __init__(self, record: RawRecord) -> None:
        fields, self._find = record.fields, record.find_file
        images = fields.get("images", fields.get("image"))
        videos = fields.get("videos", fields.get("video"))
        if images is None and videos is None and not _names_images(fields.get("messages")):
            images = list(record.names)
        self._images = _as_list(images)
        self._videos = _as_list(videos) if not isinstance(videos, dict) else [videos]
        self.has_any = bool(self._images or self._videos)
        self.num_taken_by_text = 0

    def next_image(self) -> ImagePart:
        if not self._images:
            raise RecordError("more places for images than images")
        self.num_taken_by_text += 1
        return self.image(self._images.pop(0))

    def next_video(self) -> VideoPart:
        if not self._videos:
            raise RecordError("more places for videos than videos")
        self.num_taken_by_text += 1
        return self.video(self._videos.pop(0))

    def take_all(self) -> list[Part]:
        """Take the images that are left."""
        images, videos = self._images, self._videos
        self._images, self._videos = [], []
        return [*map(self.image, images), *map(self.video, videos)]

    def image(self, name: Any) -> ImagePart:
        return ImagePart(self._file(name))

    def video(self, found: Any) -> VideoPart:
        table = {"frames": found} if isinstance(found, list) else found
        if not isinstance(table, dict) or not isinstance(table.get("frames"), list):
            raise RecordError("a video is a list of frames, or a table with frames and timestamps")
        files = tuple(self._file(name) for name in table["frames"])
        if not 1 <= len(files) <= MAX_FRAMES:
            raise RecordError(f"a video has from 1 to {MAX_FRAMES} frames, not {len(files)}")
        return VideoPart(files, _timestamps(table, len(files)))

    def _file(self, name: Any) -> ImageFile:
        if not isinstance(name, str) or not name:
            raise RecordError(f"an image is named by text, not by {type(name).__name__}")
        return self._find(name)


def _timestamps(video: Mapping[str, Any], num_frames: int) -> tuple[float, ...]:
    seconds, fps = video.get("timestamps"), video.get("fps")
    if seconds is None and fps is not None and _is_number(fps) and fps > 0:
        seconds = [number / fps for number in range(num_frames)]
    if not isinstance(seconds, list) or len(seconds) != num_frames or not all(map(_is_number, seconds)):
        raise RecordError("a video has one timestamp in seconds for each frame, or frames per second (fps)")
    if any(later < earlier for earlier, later in pairwise(seconds)) or seconds[0] < 0:
        raise RecordError("the timestamps of a video do not rise")
    return tuple(map(float, seconds))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _names_images(messages: Any) -> bool:
    """Return whether parts of turns name their images themselves."""
    turns = messages if isinstance(messages, list) else []
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any("image" in part or "path" in part or "video" in part or "frames" in part for part in parts)
